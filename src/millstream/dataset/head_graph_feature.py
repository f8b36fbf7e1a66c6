"""One graph a record: the answer and what it attends to; an edge carries the attention of every layer or head."""

# L layers, H heads, T tokens, R rows (last token of the prompt, then the answer), N nodes, E edges, A = L or L * H

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.batch import Batch, TraceBatch
from millstream.dataset.graph_feature import SPAN
from millstream.dataset.layer_feature import as_floats
from millstream.records import Array

THRESHOLD = 0.05  # an edge is one that some layer or head has above it


@dataclass(frozen=True)
class HeadGraphFeature:
    """`x` [N, L * H + 1] (attention of a token to itself by head, and whether it is of the answer), `edge_index`,
    `edge_attr` [E, A], `batch` [N], `ptr` [B + 1], `answer` [N].

    From `attention`, with a value for each head; or where that is not kept from the stored edges, with one a layer.
    """

    from_attention: bool

    @property
    def fields(self) -> list[str]:
        return ["attention", *SPAN] if self.from_attention else ["edge_source", "edge_weight", "self_attention", *SPAN]

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, TraceBatch):
            raise ValueError("a graph over heads takes attention of traces; these records are reads")
        columns = {name: cast("Sequence[Array | None]", batch.columns[name]) for name in self.fields}
        x: list[NDArray[np.float32]] = []
        edges: list[NDArray[np.int64]] = [np.empty((2, 0), np.int64)]
        values: list[NDArray[np.float32]] = []
        counts: list[int] = []
        for row, number in enumerate(batch.numbers.tolist()):
            record = {name: column[row] for name, column in columns.items()}
            for name, value in record.items():
                if value is None:
                    raise ValueError(f"record {number} has no {name!r}")
            own_RA, attended_RTA, first = self._record(cast("Mapping[str, Array]", record))
            target, source = np.nonzero((attended_RTA > THRESHOLD).any(axis=2))
            kept = source != target + first
            target, source = target[kept], source[kept]
            used = np.zeros(attended_RTA.shape[1], np.bool_)
            used[first : first + len(own_RA)] = True
            used[source] = True
            place = np.cumsum(used) - 1
            nodes = np.zeros((int(used.sum()), own_RA.shape[1] + 1), np.float32)
            nodes[place[first : first + len(own_RA)], :-1] = own_RA
            nodes[place[first + 1 : first + len(own_RA)], -1] = 1
            edges.append(np.stack([place[source], place[target + first]]) + sum(counts))
            values.append(attended_RTA[target, source].astype(np.float32))
            x.append(nodes)
            counts.append(len(nodes))
        whole = np.concatenate(x)
        return {
            "x": whole,
            "edge_index": np.concatenate(edges, axis=1),
            "edge_attr": np.concatenate(values),
            "batch": np.repeat(np.arange(len(counts)), counts),
            "ptr": np.cumsum([0, *counts]),
            "answer": whole[:, -1] == 1,
        }

    def _record(self, record: Mapping[str, Array]) -> tuple[NDArray[np.floating], NDArray[np.floating], int]:
        """Attention to itself [R, L * H], attention [R, T, A], and the token of the first row."""
        prompt, answer = (int(cast("int", record[name])) for name in SPAN)
        name = "attention" if self.from_attention else "edge_source"
        num_tokens = record[name].shape[-1 if self.from_attention else 1]
        start = min(max(prompt, 1), num_tokens - 1)
        end = min(start + (answer or num_tokens), num_tokens)
        if self.from_attention:
            weights = as_floats(record["attention"])[:, :, start - 1 : end]
            attended = weights.reshape(-1, end - start + 1, num_tokens).transpose(1, 2, 0)
            rows = np.arange(end - start + 1)
            return attended[rows, rows + start - 1], attended, start - 1
        source = np.asarray(record["edge_source"][:, start - 1 : end], np.int64)
        layer, row, slot = np.nonzero(source >= 0)
        attended = np.zeros((end - start + 1, num_tokens, len(source)), np.float32)
        weights = as_floats(record["edge_weight"])[:, start - 1 : end]
        attended[row, source[layer, row, slot], layer] = weights[layer, row, slot]
        own = as_floats(record["self_attention"])[:, :, : end - start + 1]
        return own.reshape(-1, own.shape[2]).T, attended, start - 1
