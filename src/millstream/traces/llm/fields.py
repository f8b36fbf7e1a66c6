"""What is kept of a trace: named fields, tiers of them, and how many bytes that is."""

import re
from dataclasses import dataclass

from millstream.errors import BadSetting
from millstream.records import Tensor

TOP_K = 20  # most likely tokens kept of every step
NUM_EDGES = 8  # strongest tokens attended to that are kept of every token and layer
NODE_DIM = 64  # width of the random projection of hidden states
NUM_EIGENVALUES = 10
POSITIONS = ("last_prompt", "first_answer", "last_answer", "mean_answer")  # of the field `states`

TIERS = {
    "stats": ("heads", "laplacian"),
    "graph": ("heads", "laplacian", "nodes", "edges"),
    "probe": ("heads", "laplacian", "nodes", "edges", "states"),
    "full": ("heads", "laplacian", "hidden", "post_norm", "attention"),
}
_LAYERED = ("hidden", "attention")  # of which some layers may be named
_NAMES = (*_LAYERED, "post_norm", "states", "nodes", "edges", "heads", "laplacian")
_OF_ATTENTION = {"attention", "edges", "heads", "laplacian"}
_OF_PROMPT = {"hidden", "post_norm", "attention", "nodes", "edges", "laplacian"}


@dataclass(frozen=True)
class Size:
    """The sizes of a model that decide how large a trace is."""

    layers: int
    heads: int
    hidden: int
    vocab: int
    kv_width: int  # of the keys of one token in one layer
    intermediate: int
    item: int  # bytes of a number


@dataclass(frozen=True)
class Fields:
    """Which fields are kept; `layers` says of which layers, where that was said."""

    names: tuple[str, ...]
    layers: dict[str, tuple[int, ...]]
    stored: str = "float16"

    @property
    def need_attention(self) -> bool:
        return not _OF_ATTENTION.isdisjoint(self.names)

    @property
    def need_prompt(self) -> bool:
        """Whether the pass over the prompt is looked at too, not only the one over the answer."""
        return not _OF_PROMPT.isdisjoint(self.names)

    def layers_of(self, name: str, size: Size) -> tuple[int, ...]:
        """Places on the first axis that are kept of `hidden` (the embedding is 0) or `attention`."""
        count = size.layers + (name == "hidden")
        wanted = self.layers.get(name, tuple(range(count)))
        for layer in wanted:
            if not -count <= layer < count:
                raise BadSetting(f"fields={name}[{layer}]: this model has {count} of them, 0 to {count - 1}")
        return tuple(sorted({layer % count for layer in wanted}))

    def schema(self) -> dict[str, Tensor]:
        """The tensors of a trace: type and names of axes."""
        kept = self.stored
        found = {
            "tokens": Tensor("int32", ("token",)),
            "logprobs": Tensor("float32", ("step",)),
            "entropy": Tensor("float32", ("step",)),
            "rank": Tensor("int32", ("step",)),
            "topk_ids": Tensor("int32", ("step", "k")),
            "topk_logprobs": Tensor("float32", ("step", "k")),
        }
        more = {
            "hidden": {"hidden": Tensor(kept, ("layer", "token", "dim"))},
            "post_norm": {"post_norm": Tensor(kept, ("token", "dim"))},
            "nodes": {"nodes": Tensor(kept, ("layer", "token", "dim"))},
            "states": {"states": Tensor(kept, ("layer", "position", "dim"))},
            "attention": {"attention": Tensor(kept, ("layer", "head", "query", "key"))},
            "edges": {
                "edge_source": Tensor("int16", ("layer", "token", "edge")),
                "edge_weight": Tensor(kept, ("layer", "token", "edge")),
                "edge_rest": Tensor(kept, ("layer", "token")),
            },
            "heads": {
                "self_attention": Tensor(kept, ("layer", "head", "row")),
                "attention_entropy": Tensor(kept, ("layer", "head", "row")),
                "prompt_attention": Tensor(kept, ("layer", "head", "row")),
            },
            "laplacian": {
                "laplacian": Tensor(kept, ("layer", "head", "eigenvalue")),
                "attention_logdet": Tensor("float32", ("layer", "head")),
            },
        }
        for name in self.names:
            found |= more[name]
        return found

    def trace_bytes(self, size: Size, *, prompt: int, answer: int) -> int:
        """Bytes of the tensors of a trace with this many prompt and generated tokens."""
        tokens, rows, layers, heads = prompt + answer, answer + 1, size.layers, size.heads
        item = 4 if self.stored == "float32" else 2
        numbers = {
            "hidden": len(self.layers_of("hidden", size)) * tokens * size.hidden,
            "post_norm": tokens * size.hidden,
            "nodes": (layers + 1) * tokens * NODE_DIM,
            "states": (layers + 1) * len(POSITIONS) * size.hidden,
            "attention": len(self.layers_of("attention", size)) * heads * tokens * tokens,
            "edges": layers * tokens * (NUM_EDGES + 1),
            "heads": 3 * layers * heads * rows,
            "laplacian": layers * heads * NUM_EIGENVALUES,
        }
        extra = {"edges": layers * tokens * NUM_EDGES * 2, "laplacian": layers * heads * 4}
        steps = 4 * tokens + answer * (12 + TOP_K * 8)
        return steps + sum(numbers[name] * item + extra.get(name, 0) for name in self.names)


def parse_fields(tier: str, fields: str | None, *, stored: str) -> Fields:
    """The fields of a tier, or those named in a text such as `hidden[8,16,24],edges`."""
    if stored not in ("float16", "bfloat16", "float32"):
        raise BadSetting(f"stored={stored}: there is float16, bfloat16 and float32")
    if fields is None:
        if tier not in TIERS:
            raise BadSetting(f"tier={tier}: there is {', '.join(TIERS)}")
        return Fields(TIERS[tier], {}, stored)
    layers: dict[str, tuple[int, ...]] = {}
    names: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?|[\[\]]", fields.replace(" ", "")):
        match = re.fullmatch(r"(\w+)(?:\[(-?\d+(?:,-?\d+)*)\])?", part)
        if not match or match[1] not in _NAMES or (match[2] and match[1] not in _LAYERED):
            raise BadSetting(
                f"fields={fields}: {part!r} is none; there is {', '.join(_NAMES)}, and layers as in hidden[8,16,-1]"
            )
        names.append(match[1])
        if match[2]:
            layers[match[1]] = tuple(map(int, match[2].split(",")))
    if not names or len(set(names)) < len(names):
        raise BadSetting(f"fields={fields}: name each field once, as in hidden[8,16,24],edges")
    return Fields(tuple(names), layers, stored)
