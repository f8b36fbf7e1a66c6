"""A model of natural language inference: whether two answers to a question entail each other. Needs transformers."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from millstream.errors import BadSource
from millstream.traces.llm import transformers

_BATCH, _MOST_TOKENS = 32, 512


class Entailment:
    """A sequence classifier with a label such as ENTAILMENT, by its name on the Hugging Face hub or its folder."""

    def __init__(self, model: str) -> None:
        hf = transformers()
        transformers("utils.logging").disable_progress_bar()
        try:
            config = hf.AutoConfig.from_pretrained(model, trust_remote_code=False)
            self._tokenizer: Any = hf.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            self._model: Any = hf.AutoModelForSequenceClassification.from_pretrained(model, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise BadSource(
                f"nli={model}: cannot be loaded ({reason}). Give the folder of a sequence classifier, or its name on "
                "the Hugging Face hub when online"
            ) from None
        labels = {str(name).lower(): int(place) for place, name in config.id2label.items()}
        entails = [place for name, place in labels.items() if name.startswith("entail")]
        if not entails:
            raise BadSource(f"nli={model}: has no label ENTAILMENT, only {', '.join(labels)}; it is no NLI model")
        self._entails = entails[0]
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model.to(self._device).eval()
        context = min(getattr(config, "max_position_embeddings", None) or _MOST_TOKENS, _MOST_TOKENS)
        self._max_length = min(context, int(self._tokenizer.model_max_length))
        self.name = f"{Path(model).name}@{self._fingerprint(config.to_json_string())}"

    def same(self, pairs: Sequence[tuple[str, str, str]]) -> list[bool]:
        """Whether each of two answers entails the other, both read after the question."""
        both = [(f"{question} {one}", f"{question} {other}") for question, one, other in pairs]
        found = self._entail([*both, *((second, first) for first, second in both)])
        return [one and other for one, other in zip(found[: len(both)], found[len(both) :], strict=True)]

    def _fingerprint(self, config: str) -> str:
        """Changes with the configuration and the classifier, which is the last to be trained."""
        head: torch.Tensor = list(self._model.parameters())[-1]
        return hashlib.blake2b(
            config.encode() + head.detach().float().cpu().numpy().tobytes(), digest_size=4
        ).hexdigest()

    @torch.inference_mode()
    def _entail(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        found = [False] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda place: len(pairs[place][0]) + len(pairs[place][1]))
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            first, second = zip(*(pairs[place] for place in batch), strict=True)
            inputs = self._tokenizer(
                list(first),
                list(second),
                padding=True,
                truncation=True,
                max_length=self._max_length,
                return_tensors="pt",
            )
            logits_BC: torch.Tensor = self._model(**inputs.to(self._device)).logits
            for place, chosen in zip(batch, logits_BC.argmax(dim=1).cpu().numpy().tolist(), strict=True):
                found[place] = chosen == self._entails
        return found
