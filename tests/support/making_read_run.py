"""A run folder of read classifiers as `millstream train` writes it, made without training."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa
import yaml
from numpy.typing import NDArray

from millstream.core.tables import publish_table

EVIL = "<b>x</b>"


@dataclass(frozen=True)
class Made:
    """A classifier: its accuracy on each split; most errors are in the other class of the genus."""

    title: str
    right: Mapping[str, float] = field(default_factory=lambda: {"val": 0.9, "known": 0.9, "heldout": 0.6})
    never: Sequence[int] = ()  # labels it never predicts
    parameters: int = 10_000


MODELS = {
    "kmer-linear": Made("a linear model of hashed k-mers", {"val": 0.85, "known": 0.85, "heldout": 0.62}),
    "cnn": Made("convolutions over bases", {"val": 0.92, "known": 0.93, "heldout": 0.55}),
}


def make_read_run(
    folder: Path,
    *,
    models: Mapping[str, Made] | None = None,
    configured: str = "",
    num_classes: int = 6,
    num_reads: int = 600,
    parts: Sequence[str] = ("val", "known", "heldout"),
    ranks: Sequence[str] = ("species", "genus"),
    unknown: int = 20,
    seeds: int = 1,
    held_out: str = "files",
    empty: Sequence[int] = (),
    absent: Sequence[int] = (),
    mates: int = 1,
) -> Path:
    """Labels are uniform; the last `unknown` reads of test splits have no class. Classes 2n and 2n + 1 share a genus.

    `empty` classes have no training reads, `absent` ones none in any split.
    """
    wanted = MODELS if models is None else models
    run = folder / "run"
    run.mkdir(parents=True)
    rng = np.random.default_rng(3)
    present = [label for label in range(num_classes) if label not in absent]
    labels = {part: rng.choice(present, num_reads).astype(np.int32) for part in parts}
    for part in parts:
        if part != "val" and unknown:
            labels[part][-unknown:] = -1
    config = {
        "data": {"train": "train.fa"},
        "model": configured or ",".join(wanted),
        "seeds": seeds,
        "balance": "weights",
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "env.json").write_text(json.dumps({"time": "2026-11-16 14:00 UTC", "millstream": "0.1.0", "cores": 2}))
    card = data_card(labels, num_classes=num_classes, ranks=ranks, empty=empty)
    (run / "data.json").write_text(json.dumps(card | {"held_out": held_out, "mates": mates}))
    tables: list[pa.Table] = []
    lines: list[dict[str, object]] = []
    for name, made in wanted.items():
        for seed in range(seeds):
            own = np.random.default_rng([crc32(name.encode()), seed])
            for part in parts:
                tables.append(_predictions(own, made, name, seed, part, labels[part], num_classes, ranks))
            lines += _lines(name, made, seed=seed, num_scored=num_reads * len(parts))
    lines += [{"kind": "memory", "time_s": 1.0 * s, "bytes": 500_000_000 + s, "budget": 10**9} for s in range(9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    publish_table(run / "predictions.parquet", pa.concat_tables(tables))
    return run


def class_name(label: int) -> str:
    return EVIL if label == 1 else f"Genus{label // 2} species{label}"


def data_card(
    labels: Mapping[str, NDArray[np.int32]], *, num_classes: int, ranks: Sequence[str], empty: Sequence[int]
) -> dict[str, object]:
    train = np.array([0 if label in empty else 400 * (label + 1) for label in range(num_classes)])
    counts = {"train": train} | {
        part: np.bincount(some[some >= 0], minlength=num_classes) for part, some in labels.items()
    }
    taxa = {"species": list(range(num_classes)), "genus": [label // 2 for label in range(num_classes)]}
    names = {
        "species": [class_name(label) for label in range(num_classes)],
        "genus": [f"Genus{number}" for number in range((num_classes + 1) // 2)],
    }
    no_class = {"train": 0} | {part: int(np.sum(some < 0)) for part, some in labels.items()}
    return {
        "kind": "reads",
        "fingerprint": "0123456789abcdef",
        "mapping": "/data/species.tsv",
        "files": {part: [f"/data/{part}.fa"] for part in counts},
        "formats": {part: ["fasta"] for part in counts},
        "bases": {part: 150 * int(some.sum()) for part, some in counts.items()},
        "bytes": {part: 200 * int(some.sum()) for part, some in counts.items()},
        "reads": {part: int(some.sum()) + no_class[part] for part, some in counts.items()},
        "no_class": no_class,
        "chosen_by": len(labels["val"]),
        "classes": [
            {"class_id": 100 + label, "name": class_name(label), "tax_id": 1000 + label}
            | {rank: taxa[rank][label] for rank in ranks}
            | {"reads": {part: int(some[label]) for part, some in counts.items()}}
            for label in range(num_classes)
        ],
        "ranks": {rank: [{"name": name, "tax_id": 0} for name in names[rank]] for rank in ranks},
    }


def _predictions(
    rng: np.random.Generator,
    made: Made,
    name: str,
    seed: int,
    part: str,
    labels: NDArray[np.int32],
    num_classes: int,
    ranks: Sequence[str],
) -> pa.Table:
    size = len(labels)
    right = (rng.random(size) < made.right.get(part, 0.7)) & (labels >= 0)
    near = np.where(rng.random(size) < 0.7, labels ^ 1, rng.integers(num_classes, size=size)) % num_classes
    found = np.where(right, labels, np.where(labels < 0, rng.integers(num_classes, size=size), near))
    for label in made.never:
        found[found == label] = (label + 2) % num_classes
    probability = np.clip(np.where(found == labels, 1 - rng.random(size) ** 2 / 2, 0.3 + 0.65 * rng.random(size)), 0, 1)
    taxa = {"species": found, "genus": found // 2}
    columns = {
        "part": pa.array([part] * size),
        "record": pa.array(np.arange(size)),
        "label": pa.array(labels),
        "class": pa.array(found.astype(np.int32)),
        "probability": pa.array(probability.astype(np.float32)),
    }
    for rank in ranks:
        columns[rank] = pa.array(taxa[rank].astype(np.int32))
        columns[f"{rank}_probability"] = columns["probability"]
    columns |= {"model": pa.array([name] * size), "seed": pa.array(np.full(size, seed, np.int32))}
    return pa.table(columns)


def _lines(name: str, made: Made, *, seed: int, num_scored: int) -> list[dict[str, object]]:
    about = {"model": name, "seed": seed}
    epochs = [
        {"kind": "epoch", "time_s": 9.0 * epoch, **about, "epoch": epoch, "step": 10 * (epoch + 1)}
        | {"loss": 1.0 / (epoch + 1), "cross_entropy": 1.0 / (epoch + 1), "val_macro_f1": 0.7 + 0.1 * epoch}
        | {"lr": 0.001, "records_per_s": 4000.0 + 100 * epoch, "waiting": 0.02, "memory": 480_000_000}
        for epoch in range(2)
    ]
    fit = {
        "kind": "fit",
        **about,
        "family": "trained",
        "title": made.title,
        "parameters": made.parameters,
        "fit_s": 30.0 + seed,
        "score_s": 0.5,
        "num_scored": num_scored,
        "trace_bytes": 150,
        "extra_forwards": 0,
        "probabilities": False,
        "chosen": {"epoch": 1, "width": 64},
    }
    return [*epochs, fit]
