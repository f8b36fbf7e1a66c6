"""Part `lengths` of train.py: nets on reads of uneven lengths, with and without dealing them out by length."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import millstream as ms
from measuring import Result
from millstream.core.console import ignore_message
from millstream.core.loader import Loader
from millstream.reads.classifiers import classifier_kit
from millstream.reads.kind import ReadSettings

MEMORY, PART = 400_000_000, 32  # reads per pass through a net
NETS: Mapping[str, Mapping[str, Any]] = {"cnn": {"layers": 2}, "lstm": {}, "transformer": {"layers": 1}}
WAYS = ("in order", "by length")


@dataclass(frozen=True)
class LengthSizes:
    """Sizes of the measurements."""

    reads: int = 2048
    step: int = 1024
    turns: int = 3


def all_lengths(folder: Path, sizes: LengthSizes) -> Result:
    """The share of padding, and the CPU time of the passes of an epoch; the turns of both ways are interleaved."""
    reads = _reads(folder / "uneven.fa", sizes.reads)
    torch.set_num_threads(1)
    found: Result = {"reads": sizes.reads, "step": sizes.step, "part": PART}
    for name, settings in NETS.items():
        kit = classifier_kit(name, ReadSettings(memory=MEMORY, width=32, **settings), 2)
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        padding: dict[str, float] = {}
        for _ in range(sizes.turns):
            for way in WAYS:
                seconds[way].append(0.0)
                net, kept, all_tokens = None, 0, 0
                for batch in _batches(reads, kit.features, sizes.step // PART if way == WAYS[1] else 1):
                    net = net or kit.build(batch)
                    started = time.process_time()
                    loss, _ = net(batch, batch["numbers"] % 2, torch.ones(len(batch["numbers"])))
                    loss.backward()
                    seconds[way][-1] += time.process_time() - started
                    kept, all_tokens = (
                        kept + int(batch["attention_mask"].sum()),
                        all_tokens + batch["input_ids"].numel(),
                    )
                padding[way] = 1 - kept / all_tokens
        times = {way: median(some) for way, some in seconds.items()}
        found[name] = {"cpu_s": times, "padding": padding, "ratio": times[WAYS[0]] / times[WAYS[1]]}
    return found


def show_lengths(found: Result) -> None:
    for name in NETS:
        padding = ", ".join(f"{way} {share:.0%}" for way, share in found[name]["padding"].items())
        print(f"{name}: in order takes {found[name]['ratio']:.1f} times the CPU time; padding: {padding}")


def _reads(path: Path, count: int) -> Any:
    """Reads of log-normal length: 40 to 2,000 bases, median 150."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 0.7, count), 40, 2000).astype(int)
    bases = np.frombuffer(b"ACGT", np.uint8)
    text = (f">{n}\n{bases[rng.integers(0, 4, size)].tobytes().decode()}\n" for n, size in enumerate(lengths))
    path.write_text("".join(text))
    return ms.open(path)


def _batches(reads: Any, features: Any, buckets: int) -> Iterable[dict[str, Any]]:
    return Loader(
        reads,
        batch_size=PART,
        features=features,
        memory=MEMORY,
        length_buckets=buckets,
        notify=ignore_message,
        rank=0,
        world=1,
    )
