"""Forward passes of a model over padded sequences: in chunks over a cache, with what is captured, and their logits."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch

from millstream.traces.llm import transformers
from millstream.traces.llm.capture import Capture, Padded
from millstream.traces.llm.decoding import token_statistics
from millstream.traces.llm.model import LoadedModel

# B batch, T tokens with padding, M tokens of answers, D hidden, V vocabulary

LOGITS_BYTES = 64_000_000  # of one slice of the answer tokens: the logits of all would be the largest tensor
_PER_LOGIT = 16  # bytes: logits, log-probabilities and two temporaries


class Passes:
    """Runs a model from left to right. A cache that can be cut has every layer at full length.

    A sliding window is then in the mask only. `generate` would keep just the last tokens of such layers, which cannot
    be cut back; caches of other kinds, such as of linear attention, cannot either: their models do without.
    """

    def __init__(self, loaded: LoadedModel, capture: Capture) -> None:
        self.loaded = loaded
        self._capture = capture
        utils = transformers("cache_utils")
        config = loaded.model.config.get_text_config(decoder=True)
        kinds = (utils.DynamicLayer, utils.DynamicSlidingWindowLayer)
        self._output: Any = None  # the class of what the body of the model returns
        self.can_cut = all(type(layer) in kinds for layer in utils.DynamicCache(config=config).layers)

    def new_cache(self) -> Any:
        return transformers("cache_utils").DynamicCache() if self.can_cut else None

    def prefill(self, batch: Padded, end: int, *, cache: Any, chunk: int) -> None:
        """The first columns of the prompts; `generate` continues from there."""
        for _ in self._run(batch, 0, end, cache, chunk, captured=self._capture.fields.need_prompt):
            pass

    def replay(self, batch: Padded, *, cache: Any, done: int, chunk: int) -> torch.Tensor:
        """The rest of the sequences after the `done` tokens in the cache, captured. Returns the states [B, N, D].

        They are those after the last norm, of the tokens before each answer token.
        """
        total = batch.ids_BT.shape[1]
        if not done and chunk >= total:
            cache = None
        return torch.cat(list(self._run(batch, done, total, cache, chunk, captured=True)), dim=1)[:, :-1]

    def _run(
        self, batch: Padded, start: int, end: int, cache: Any, chunk: int, *, captured: bool
    ) -> Iterator[torch.Tensor]:
        """The states after the last norm from the last prompt token on, of each chunk."""
        position_BT = (batch.mask_BT.cumsum(1) - 1).clamp_min(0)
        for first in range(start, end, chunk):
            last = min(first + chunk, end)
            with self._capture.over(batch, first, last) if captured else nullcontext():
                output = self.loaded.base(
                    input_ids=batch.ids_BT[:, first:last],
                    attention_mask=batch.mask_BT[:, :last],
                    position_ids=position_BT[:, first:last],
                    past_key_values=cache,
                    use_cache=cache is not None,
                )
            self._output = type(output)
            if last >= batch.prompt:
                yield output.last_hidden_state[:, max(batch.prompt - 1 - first, 0) :]

    def statistics(self, states_BND: torch.Tensor, answers: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
        """The statistics of each token of the answers, from the states before them."""
        states_MD = torch.cat([rows[: len(ids)] for rows, ids in zip(states_BND, answers, strict=True)])
        ids_M = torch.tensor([token for ids in answers for token in ids], device=states_MD.device)
        at_once = max(1, LOGITS_BYTES // (_PER_LOGIT * self.loaded.card.size.vocab))
        parts = [
            token_statistics(self._logits(states_MD[first : first + at_once]), ids_M[first : first + at_once])
            for first in range(0, len(ids_M), at_once)
        ]
        found = {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}
        ends = list(accumulate(map(len, answers), initial=0))
        return [{name: values[a:b] for name, values in found.items()} for a, b in pairwise(ends)]

    def _logits(self, states_MD: torch.Tensor) -> torch.Tensor:
        """What the model makes of states after its last norm: the LM head, and a soft cap or scale where it has one."""
        with _returning(self.loaded.base, self._output(last_hidden_state=states_MD[None])):
            ids_1M = torch.zeros_like(states_MD[None, :, 0]).long()
            return self.loaded.model(input_ids=ids_1M, use_cache=False).logits[0]


@contextmanager
def _returning(base: Any, output: object) -> Generator[None]:
    """Makes the body of a model return this output."""

    def forward(*args: object, **options: object) -> object:
        return output

    before = base.__dict__.get("forward")
    base.forward = forward
    try:
        yield
    finally:
        del base.forward
        if before is not None:
            base.forward = before
