"""What a collection is: records by number. Traces, reads, subsets, concatenations and mixtures are collections.

The part to the right of `store` in the flow only knows this much of the data.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from millstream.dataset.batch import Feature
    from millstream.dataset.subset import Subset
    from millstream.loader.datasets import RecordDataset, RecordStream

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Medium:
    """How records lie on disk, for choosing an order."""

    num_bytes: int
    """Of all records, as they are read: decoded, if they are compressed."""
    run_bytes: int
    """How much has to be read, or is worth reading, to get at one record."""
    is_random: bool
    """Whether a record can be had without its neighbours."""


class Collection(ABC):
    """Records by number. Safe to use from threads, after fork, and pickled into other processes.

    What the loader, splits and features need of data is here, so a class of one's own that has it can be trained on.

    >>> [isinstance(records, ms.Collection) for records in (traces, reads, traces.subset([3, 1]))]
    [True, True, True]
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> object:
        """One record: a dict for traces, a Read for reads."""

    @abstractmethod
    def fetch(self, numbers: Sequence[int] | Numbers, fields: Sequence[str] | None = None) -> object:
        """Columns of many records at once: a dict for traces, a ReadBatch for reads.

        >>> columns = traces.fetch([3, 1, 4], ["question", "hidden"])
        """

    @property
    @abstractmethod
    def field_names(self) -> list[str]:
        """What `fetch` can be asked for."""

    @abstractmethod
    def column(self, name: str) -> pa.ChunkedArray:
        """One scalar field of every record, without touching tensors or letters."""

    @abstractmethod
    def sizes(self, numbers: Numbers, fields: Sequence[str]) -> Numbers:
        """How many bytes `fetch` takes for each record."""

    @property
    @abstractmethod
    def medium(self) -> Medium:
        """How the records lie on disk; `order="auto"` goes by it."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when the records, or their numbers, do."""

    @abstractmethod
    def within(self, memory: int) -> Self:
        """The same records, of whose files no more than so many bytes are mapped or kept decoded."""

    @property
    def default_key(self) -> str | None:
        """The field whose equal values belong together in a split; None: every record is on its own."""
        return None

    @property
    def lineage(self) -> str:
        """Which splits this is a part of, so that splitting it again draws anew."""
        return ""

    def in_epoch(self, epoch: int) -> Self:
        """The collection as it is in an epoch; only mixtures change."""
        return self

    def record_numbers(self, numbers: Numbers) -> Numbers:
        """The numbers these records have in the collection this one was taken from."""
        return numbers

    def will_need(self, first: Numbers, last: Numbers) -> None:
        """Start reading the records from `first[i]` to `last[i]`, for every i, from disk, where that helps."""
        return

    def release(self, first: Numbers, last: Numbers) -> None:
        """These were asked for by `will_need` and are not needed any more."""
        return

    def subset(self, numbers: Sequence[int] | Numbers) -> "Subset":
        """Some of the records, in the order given.

        >>> few = traces.subset([3, 1, 4])
        """
        import millstream as ms

        return ms.subset(self, numbers)

    def dataset(
        self, features: "Feature | Sequence[Feature] | None" = None, *, seed: int = 0, memory: int | str = "2GB"
    ) -> "RecordDataset":
        """A map-style `torch.utils.data.Dataset` for the stock DataLoader, its samplers, Lightning and Accelerate.

        The DataLoader's default collation gives the same batches as `ms.Loader`, fetched at once.

        >>> dataset = traces.dataset(ms.features.layers(token="last"))
        >>> loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
        """
        import millstream as ms

        return ms.RecordDataset(self, features, seed=seed, memory=memory)

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
        """A `torch.utils.data.IterableDataset` that shuffles by itself and splits an epoch over ranks and workers.

        With `batch_size` it gives whole batches, for `DataLoader(stream, batch_size=None)`: they come in the same order
        for any number of workers. Without, it gives records. `set_epoch` decides the order of the next epoch;
        Accelerate calls it, Lightning does not (do it in `on_train_epoch_end`). Accelerate deals out batches of a
        stream to its processes by itself: give `rank=0, world=1` there.

        >>> stream = traces.stream(ms.features.layers(token="last"), batch_size=32, seed=7)
        >>> loader = DataLoader(stream, batch_size=None, num_workers=2)
        """
        import millstream as ms

        return ms.RecordStream(
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
