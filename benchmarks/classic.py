"""The old scripts' dataset of reads with torch's DataLoader: millstream against a hand-written one, in the same run.

    python benchmarks/classic.py [reads=200000] [seconds=4] [rounds=3]

Both are a map-style dataset of one FASTA file, shuffled, 6-mers of 128 tokens, with the guide's header regex. The peer
is what one writes in 20 lines: a list of offsets, seek, a regex, a dict of k-mers. Each row is records/s at one batch
size and number of workers: the best of some rounds, ours and the peer's in turn. `Empty` reads nothing: what is left is
the cost of DataLoader itself.
"""

import itertools
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from measuring import save
from millstream.classic import CachedStreamingDataset, SequenceDataset, StreamingSequenceDataset

K, MAX_LENGTH, LENGTH, CLASSES = 6, 128, 150, 500
REGEX = r"^lbl\|(?P<class_id>\d+)\|(?P<tax_id>\d+)?\|(?P<readlen>\d+)?\|(?P<name>[^/\s]+)(?:/(?P<mate>\d+))?$"
FIRST = 64  # batches before the clock starts


class HandWritten(Dataset[dict[str, Any]]):
    """The peer."""

    def __init__(self, path: Path) -> None:
        self.path, self.regex, self.file = path, re.compile(REGEX), None
        self.vocab = {"".join(kmer): number for number, kmer in enumerate(itertools.product("ACGT", repeat=K), 1)}
        with path.open("rb") as file:
            lines, at, self.offsets = iter(file), 0, []
            for line in lines:
                if line.startswith(b">"):
                    self.offsets.append(at)
                at += len(line)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.file = self.file or self.path.open("rb")
        self.file.seek(self.offsets[index])
        header, sequence = self.file.readline().decode()[1:].rstrip(), self.file.readline().decode().rstrip()
        found = self.regex.match(header)
        ids = [self.vocab.get(sequence[i : i + K], 4097) for i in range(min(len(sequence) - K + 1, MAX_LENGTH))]
        mask = [1] * len(ids) + [0] * (MAX_LENGTH - len(ids))
        ids += [0] * (MAX_LENGTH - len(ids))
        class_id, tax_id = int(found["class_id"]), int(found["tax_id"] or -1)
        tensors = {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "labels": torch.tensor(class_id),
        }
        return {**tensors, "class_id": class_id, "tax_id": tax_id}


class Empty(Dataset[int]):
    """A dataset whose items are their index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    num_reads, seconds, rounds = (
        int(given.get("reads", 200_000)),
        float(given.get("seconds", 4)),
        int(given.get("rounds", 3)),
    )
    warnings.filterwarnings("ignore", "This DataLoader will create")
    with tempfile.TemporaryDirectory(prefix="millstream-classic-") as folder:
        path = Path(folder) / "reads.fa"
        make_reads(path, num_reads)
        peer = HandWritten(path)
        ours = {
            kind.__name__: kind(path, None, f"kmer({K})", REGEX, MAX_LENGTH)
            for kind in (StreamingSequenceDataset, CachedStreamingDataset, SequenceDataset)
        }
        for dataset in ours.values():
            check_same(dataset, peer)
        result = []
        print(f"{'dataset':<26}{'batch':>6}{'workers':>8}{'records/s':>12}{'peer':>10}{'ratio':>8}")
        for batch_size, workers in itertools.product((1, 32), (0, 2, 4)):
            best = dict.fromkeys(["peer", "Empty", *ours], 0.0)
            for _ in range(rounds):
                for name, dataset in [("peer", peer), ("Empty", Empty(num_reads)), *ours.items()]:
                    best[name] = max(best[name], speed(dataset, batch_size, workers, seconds))
            for name in ("Empty", *ours):
                ratio = best[name] / best["peer"]
                print(
                    f"{name:<26}{batch_size:>6}{workers:>8}{best[name]:>12,.0f}{best['peer']:>10,.0f}{ratio:>7.1f}x",
                    flush=True,
                )
            result.append({"batch_size": batch_size, "workers": workers, **best})
        save("classic", result)


def make_reads(path: Path, num_reads: int) -> None:
    rng = np.random.default_rng(0)
    bases = np.frombuffer(b"ACGT", np.uint8)[rng.integers(0, 4, (num_reads, LENGTH), np.uint8)]
    classes = rng.integers(0, CLASSES, num_reads)
    with path.open("wb") as file:
        for number in range(num_reads):
            class_id = classes[number]
            file.write(
                b">lbl|%d|%d|%d|r%d/1\n%b\n" % (class_id, 1000 + class_id, LENGTH, number, bases[number].tobytes())
            )


def check_same(ours: Dataset[Any], peer: HandWritten) -> None:
    for mine, other in ((ours[index], peer[index]) for index in (0, 77, 5)):
        assert mine.keys() == other.keys()
        assert all(bool((torch.as_tensor(mine[key]) == torch.as_tensor(other[key])).all()) for key in mine)


def speed(dataset: Dataset[Any], batch_size: int, workers: int, seconds: float) -> float:
    """Records per second of a shuffled pass, once it is running.

    Without workers, per second of CPU time: all work is in this process, and that of others does not count.
    """
    now = time.perf_counter if workers else time.process_time
    if isinstance(dataset, HandWritten):
        dataset.file = None  # forked workers would share its position
    batches = iter(DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=workers))
    for _ in itertools.islice(batches, FIRST):
        pass
    count, start = 0, now()
    for batch in batches:
        count += len(batch if isinstance(batch, torch.Tensor) else batch["labels"])
        if now() - start > seconds:
            break
    return count / (now() - start)


if __name__ == "__main__":
    main()
