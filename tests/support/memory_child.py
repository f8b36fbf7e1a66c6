"""A process that loads data when told to, and is measured from outside: `python memory_child.py STORE MEMORY`.

It reads the name of a way to load from stdin, gets everything ready, says so, waits for a line, loads, and says so.
"""

import sys
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import millstream as ms

PAUSE_S = 0.02
ENOUGH = 32  # batches of reads: half a dozen windows


class Nothing(Dataset[int]):
    """For workers that do nothing."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def main(path: str, memory: str) -> None:
    collection = ms.open(path)
    are_traces = isinstance(collection, ms.Traces)
    batch_size = 8 if are_traces else 4096
    feature = ms.features.fields("hidden" if are_traces else "sequence")
    torch.ones(1 << 20).sum()  # its threads
    for _ in ms.Loader(collection.subset(range(8)), batch_size=1, features=feature, order="none", threads=2):
        pass  # what is imported and compiled when first used
    some = collection.subset(range(len(collection) // 8)) if are_traces else collection.subset(range(batch_size * 40))

    def loader(of: Any, **options: Any) -> Iterable[object]:
        return ms.Loader(of, batch_size=batch_size, features=feature, memory=memory, **options)

    def workers() -> Iterable[object]:
        stream = collection.stream(feature, batch_size=batch_size, memory=memory)
        return DataLoader(stream, batch_size=None, num_workers=2)

    ways: dict[str, Any] = {
        "loader": lambda: loader(collection),
        "loader, 4 threads": lambda: loader(collection, threads=4),
        "loader, slow": lambda: loader(some),
        "DataLoader, 2 workers": workers,
        "DataLoader, 2 idle workers": lambda: DataLoader(Nothing(), num_workers=2),
    }
    for line in sys.stdin:
        batches = ways[line.strip()]()
        print("ready", flush=True)
        sys.stdin.readline()
        count = 0
        for _ in islice(batches, None if are_traces else ENOUGH):
            count += 1
            if "slow" in line:
                time.sleep(PAUSE_S)
        print(count, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
