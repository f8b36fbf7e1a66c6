"""What a model sees of a record, computed on the fly: `ms.features.layers`, `token_stats`, `graphs`, `tokens`, ..."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from millstream.dataset.augment import Augment
from millstream.dataset.field_feature import EachFeature, FieldFeature, Transform
from millstream.dataset.graph_feature import GraphFeature, Tokens, Wiring
from millstream.dataset.layer_feature import TOKENS, LayerFeature, Token
from millstream.dataset.token_feature import TokenFeature
from millstream.dataset.token_stats import STATS, TokenStats
from millstream.dataset.tokenizers import Tokenizer, tokenizer
from millstream.dataset.tokens import IdType, Pad

__all__ = ["each", "fields", "graphs", "layers", "token_stats", "tokens"]


def fields(*names: str, pad: bool = True) -> FieldFeature:
    """Fields as they are stored; all of them when none is named. `hidden[8,-1]` is two layers of a field.

    Tensors whose shapes differ are padded with zeros beside a `<name>_mask`, or with `pad=False` stay a list.

    >>> feature = ms.features.fields("question_id", "hidden[1,-1]")
    >>> batch = next(iter(ms.Loader(traces, batch_size=4, features=feature)))  # hidden, hidden_mask, question_id
    """
    return FieldFeature(names or None, pad)


def layers(
    token: Token = "last", *, field: str = "hidden", layers: Sequence[int] | None = None, dtype: str = "float32"
) -> LayerFeature:
    """`layers` [batch, layer, dim]: the hidden states of a trace at one token, or their mean over tokens.

    `token` is a place (0, -1, ...), "first", "last", "mean", or one that needs the field `prompt_len`: "last_prompt",
    "first_answer", "mean_answer" (of all tokens after the prompt), and "last_answer", which needs `answer_len` too.

    >>> loader = ms.Loader(traces, batch_size=4, features=ms.features.layers(token="last_prompt"))
    >>> [batch["layers"].shape[1:] for batch in loader][0]
    torch.Size([3, 16])
    """
    if isinstance(token, str) and token not in TOKENS:
        raise ValueError(f"token={token!r}: there is {', '.join(TOKENS)}, or a number")
    return LayerFeature(token, field, None if layers is None else tuple(layers), dtype)


def token_stats(*names: str) -> TokenStats:
    """`stats` [batch, statistic]: how sure the model was of its answer, in the numbers named, or in all of `STATS`.

    They are of the first `answer_len` tokens generated, so not of a stop token.

    >>> feature = ms.features.token_stats("mean_logprob", "min_logprob")
    """
    for name in names:
        if name not in STATS:
            raise ValueError(f"{name!r} is no token statistic; there is {', '.join(STATS)}")
    return TokenStats(names or STATS)


def graphs(
    k: int | None = 8,
    *,
    threshold: float = 0.0,
    hidden: str = "hidden",
    attention: str = "attention",
    self_loops: bool = False,
    tokens: Tokens = "all",
    wiring: Wiring = "attention",
    dtype: str = "float32",
) -> GraphFeature:
    """The token graph of every layer of every record, as one disjoint union (see GraphFeature for what is in it).

    A token has edges from the tokens before it that it attends to, in the mean over heads, by more than `threshold`;
    from the `k` strongest of them, or from all with `k=None`. `hidden="nodes", attention="edges"` takes what the tier
    `graph` keeps of a trace. With `tokens="answer"` only the tokens of the answer, and the last one of the prompt, have
    edges, and the others are left out. `wiring` makes graphs to compare with: "shuffled" lets each edge come from any
    token before, "none" has no edges.

    >>> loader = ms.Loader(traces, batch_size=4, features=ms.features.graphs(k=4))
    >>> batch = next(iter(loader))  # x, edge_index, edge_attr, batch, ...
    """
    if k is not None and k < 1:
        raise ValueError(f"k={k}: at least one edge a token; None keeps all above the threshold")
    for name, value, known in (("tokens", tokens, get_args(Tokens)), ("wiring", wiring, get_args(Wiring))):
        if value not in known:
            raise ValueError(f"{name}={value!r}: there is {', '.join(known)}")
    return GraphFeature(k, threshold, hidden, attention, self_loops, dtype, tokens, wiring)


def each(transform: Transform, *, fields: Sequence[str] | None = None, pad: bool = True) -> EachFeature:
    """What `transform(record, rng)` makes of each record: a dict of arrays, numbers or texts.

    `rng` is a numpy Generator that depends on (seed, epoch, record number) alone.

    >>> def noisy(record, rng):
    ...     return {"logprobs": record["logprobs"] + rng.normal(size=record["logprobs"].shape)}
    >>> loader = ms.Loader(traces, batch_size=4, features=ms.features.each(noisy, fields=["logprobs"]))
    """
    return EachFeature(transform, None if fields is None else tuple(fields), pad)


def tokens(
    spec: str | Tokenizer,
    *,
    columns: tuple[str, ...] | list[str] = (),
    max_length: int | None = None,
    pad: Pad = "longest",
    dtype: IdType = np.int64,
    crop_length: int | None = None,
    crop: Literal["random", "start"] = "random",
    reverse_complement: bool | float = 0.0,
    mask: float = 0.0,
    n: Literal["keep", "random", "drop"] = "keep",
    seed: int = 0,
) -> TokenFeature:
    """Token ids of reads by a tokenizer (`"base"`, `"kmer(6)"`, `"hf(folder)"`), and the columns named.

    `max_length` counts tokens. Before that a read longer than `crop_length` letters is cropped; `reverse_complement`,
    `mask` (a share of letters becomes N) and `n` (what becomes of an N) are drawn from (seed, epoch, record number);
    the seed of a loader is added to this one. Instead of a name, `spec` may be an object of one's own with what
    `millstream.dataset.tokens.Tokenizer` asks for.

    >>> feature = ms.features.tokens("kmer(6)", columns=["label"], max_length=128, reverse_complement=0.5)
    >>> batch = next(iter(ms.Loader(reads, batch_size=4, features=feature)))  # input_ids, attention_mask, label
    """
    augment = Augment(
        max_length=crop_length, crop=crop, reverse_complement=reverse_complement, mask=mask, n=n, seed=seed
    )
    chosen = tokenizer(spec) if isinstance(spec, str) else spec
    return TokenFeature(chosen, augment, tuple(columns), max_length, pad, dtype)
