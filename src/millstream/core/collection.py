"""What a collection is: records by number. A store, a subset, a concatenation and a mixture are collections.

This is all the engine knows about data. The imports inside methods avoid a cycle: what they return is a collection.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from millstream.core.features import Feature
    from millstream.core.subset import Subset
    from millstream.core.torch_data import RecordDataset, RecordStream

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Medium:
    """How records lie on disk, for choosing an order."""

    num_bytes: int
    """Total size of the records as they are read: decoded, if they are compressed."""
    run_bytes: int
    """How much has to be read, or is worth reading, for one record."""
    is_random: bool
    """Whether a record can be read without its neighbours."""


class Collection(ABC):
    """Records by number. Safe to use from threads, after fork, and pickled into other processes.

    This is all that the loader, splits and features need, so you can train on your own subclass.

    >>> [isinstance(records, ms.Collection) for records in (traces, reads, traces.subset([3, 1]))]
    [True, True, True]
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> object:
        """One record: a dict of fields, or the record type of its kind."""

    @abstractmethod
    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        """Columns of many records at once: a dict of columns, or the batch type of its kind.

        >>> columns = traces.fetch([3, 1, 4], ["question", "hidden"])
        """

    @property
    @abstractmethod
    def field_names(self) -> list[str]:
        """The fields that `fetch` takes."""

    @abstractmethod
    def column(self, name: str) -> pa.ChunkedArray:
        """One scalar field of every record, without reading its tensors or sequences."""

    @abstractmethod
    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        """Bytes that `fetch` needs for each record."""

    @property
    @abstractmethod
    def medium(self) -> Medium:
        """How the records lie on disk, which decides `order="auto"`."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the records, or their numbers, do."""

    @abstractmethod
    def within(self, memory: int) -> Self:
        """The same records, with at most `memory` bytes of their files mapped or decoded."""

    @property
    def default_key(self) -> str | None:
        """Records with equal values of this field belong together in a split; None: every record is independent."""
        return None

    @property
    def labels_file(self) -> Path | None:
        """The Parquet file of labels next to the records, if there is one; `ms.labelled` joins it."""
        return None

    @property
    def lineage(self) -> str:
        """Which splits this is a subset of, so that splitting it again is an independent draw."""
        return ""

    def in_epoch(self, epoch: int) -> Self:
        """The collection in this epoch; only mixtures change."""
        return self

    def record_numbers(self, numbers: Numbers) -> Numbers:
        """The numbers these records have in the collection this one was taken from."""
        return numbers

    def resolved(self, numbers: Numbers) -> "tuple[Collection, Numbers]":
        """The same records in the underlying collection, if this one only renumbers them: numbers are mapped once."""
        return self, numbers

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Start reading the records from `first[i]` to `last[i]`, for every i, from disk if that helps."""
        return

    def release(self, first: Numbers, last: Numbers) -> None:
        """The records passed to `will_need` are no longer needed."""
        return

    def subset(self, numbers: Sequence[int] | Numbers) -> "Subset":
        """Some of the records, in the order given.

        >>> few = traces.subset([3, 1, 4])
        """
        from millstream.core.subset import subset

        return subset(self, numbers)

    def dataset(
        self, features: "Feature | Sequence[Feature] | None" = None, *, seed: int = 0, memory: int | str = "2GB"
    ) -> "RecordDataset":
        """A map-style `torch.utils.data.Dataset` for the stock DataLoader, its samplers, Lightning and Accelerate.

        The DataLoader's default collation gives the same batches as `ms.Loader`, each fetched in one call.

        >>> dataset = traces.dataset(ms.features.layers(token="last"))
        >>> loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
        """
        from millstream.core.torch_data import RecordDataset

        return RecordDataset(self, features, seed=seed, memory=memory)

    def stream(
        self,
        features: "Feature | Sequence[Feature] | None" = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        order: Literal["auto", "exact", "window", "none"] = "auto",
        memory: int | str = "2GB",
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> "RecordStream":
        """A `torch.utils.data.IterableDataset` that shuffles and splits an epoch over ranks and workers.

        With `batch_size` it yields whole batches, for `DataLoader(stream, batch_size=None)`, in the same order for any
        number of workers. Without it, it yields records. `set_epoch` sets the order of the next epoch; Accelerate calls
        it, Lightning does not (call it in `on_train_epoch_end`). Accelerate distributes the batches of a stream to its
        processes itself: pass `rank=0, world=1` there.

        >>> stream = traces.stream(ms.features.layers(token="last"), batch_size=32, seed=7)
        >>> loader = DataLoader(stream, batch_size=None, num_workers=2)
        """
        from millstream.core.torch_data import RecordStream

        return RecordStream(
            self,
            features,
            batch_size=batch_size,
            seed=seed,
            order=order,
            memory=memory,
            rank=rank,
            world=world,
            drop_last=drop_last,
        )
