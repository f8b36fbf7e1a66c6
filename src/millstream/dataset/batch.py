"""What a feature is given and what it gives. Knows shapes of data; knows nothing of where it comes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

from millstream.collection import Collection, Numbers
from millstream.records import Array
from millstream.store.read_batch import ReadBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TraceBatch:
    """Columns of traces: equal shapes stacked, others a list."""

    numbers: Numbers
    columns: "Mapping[str, Array | torch.Tensor | Sequence[object]]"

    def __len__(self) -> int:
        return len(self.numbers)


Batch = TraceBatch | ReadBatch


class Feature(Protocol):
    """What a model sees of records. Small, and picklable.

    Chance in it comes from (seed, epoch, `batch.numbers`) alone.
    """

    @property
    def fields(self) -> Sequence[str] | None:
        """What has to be fetched for it; None: everything."""
        ...

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        """Named arrays, tensors or lists, one row a record unless the feature says otherwise."""
        ...


def fetch_batch(collection: Collection, numbers: Numbers, fields: Sequence[str] | None) -> Batch:
    """Records of a collection as features take them; `numbers` are those of the collection it was taken from."""
    fetched = collection.fetch(numbers, fields)
    records = collection.record_numbers(numbers)
    if isinstance(fetched, ReadBatch):
        return replace(fetched, numbers=records)
    return TraceBatch(records, cast("Mapping[str, Array | torch.Tensor | Sequence[object]]", fetched))
