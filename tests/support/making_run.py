"""A run folder as `millstream train` writes it, with synthetic scores, and a small trace store."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
import pyarrow as pa
import yaml
from numpy.typing import NDArray

import millstream as ms
from millstream.core.tables import publish_table

PROBES = {"probe_last_prompt": 1.2, "probe_first_answer": 1.5, "probe_last_answer": 1.9, "probe_mean_answer": 1.7}


@dataclass(frozen=True)
class Made:
    """A detector whose scores of wrong answers are higher by `signal` standard deviations."""

    family: str
    title: str
    signal: float
    parameters: int | None = None
    probabilities: bool = True
    chosen: Mapping[str, object] = field(default_factory=dict[str, object])


def _probe(name: str, signal: float) -> Made:
    by_layer = [0.55, 0.7, 0.8 + signal / 100, 0.75]
    chosen = {"layer": 2, "C": 0.01, "auroc_by_layer": by_layer}
    return Made(
        "baseline", f"logistic regression, {name.removeprefix('probe_').replace('_', ' ')}", signal, 65, True, chosen
    )


MODELS = {
    "lstm": Made("trained", "LSTM over the layers of the last token", 2.0, 100_000),
    "gnn": Made("trained", "graph network over attention", 2.6, 90_000),
    "gvae": Made("trained", "graph autoencoder over attention", 1.6, 95_000),
    "gnn_shuffled": Made("null", "gnn with shuffled edges", 1.4, 90_000),
    "gnn_unwired": Made("null", "gnn without edges", 1.5, 90_000),
    "gvae_shuffled": Made("null", "gvae with shuffled edges", 1.5, 95_000),
    "gvae_unwired": Made("null", "gvae without edges", 1.6, 95_000),
    **{name: _probe(name, signal) for name, signal in PROBES.items()},
    "length": Made("baseline", "tokens of the answer", 0.4, probabilities=False),
    "mean_logprob": Made("baseline", "minus the mean log-probability", 1.3, probabilities=False),
    "token_stats": Made("baseline", "logistic regression on token statistics", 1.5, 21),
}


def make_run(
    folder: Path, *, models: Sequence[str] | Mapping[str, Made] = tuple(MODELS), num_test: int = 200, seeds: int = 2
) -> Path:
    """A run of these detectors in `folder/run`, its store in `folder/traces`; baselines have one seed.

    `num_test` is a multiple of ten: every tenth record has the question of the one before it.
    """
    wanted = dict(models) if isinstance(models, Mapping) else {name: MODELS[name] for name in models}
    run, store = folder / "run", folder / "traces"
    run.mkdir(parents=True)
    num_records = 4 * num_test
    rng = np.random.default_rng(7)
    labels = (rng.random(num_records) < 0.45).astype(np.int8)
    lengths = rng.integers(1, 9, num_records) + labels
    _write_store(store, labels, lengths)
    (run / "config.yaml").write_text(yaml.safe_dump({"data": str(store), "models": list(wanted), "seeds": seeds}))
    (run / "env.json").write_text(json.dumps({"millstream": "0.1.0", "python": "3.11.9", "cores": 2}))
    (run / "split.json").write_text(json.dumps({"millstream split": 1, "salt": ""}))
    (run / "data.json").write_text(json.dumps(data_card(store, labels)))
    tables: list[pa.Table] = []
    lines: list[dict[str, object]] = []
    shared = rng.normal(size=num_records)  # how hard a question is for all detectors
    for name, made in wanted.items():
        for seed in range(seeds if made.family != "baseline" else 1):
            own = np.random.default_rng([crc32(name.encode()), seed]).normal(size=num_records)
            scores = made.signal * (labels - 0.5) + 0.8 * shared + 0.6 * own
            scores = 1 / (1 + np.exp(-2 * scores)) if made.probabilities else scores
            scores = lengths.astype(np.float64) if name == "length" else scores
            tables.append(predictions(name, seed, scores=scores, labels=labels, num_test=num_test))
            lines += _lines(name, made, seed=seed, num_scored=2 * num_test)
    lines += [{"kind": "memory", "time_s": 1.0 * s, "bytes": 800_000_000 + s, "budget": 10**9} for s in range(9)]
    lines.append({"kind": "missing", "model": "p_true", "why": "the store has no field p_true"})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    publish_table(run / "predictions.parquet", pa.concat_tables(tables))
    return run


def question_of(number: int) -> str:
    return f"q{number - (number % 10 == 9)}"


def predictions(
    name: str, seed: int, *, scores: NDArray[np.float64], labels: NDArray[np.int8], num_test: int
) -> pa.Table:
    """The rows of one detector: the last quarter of the records is test, the one before it validation."""
    numbers = np.arange(2 * num_test, 4 * num_test)
    columns = {
        "part": pa.array(np.where(numbers < 3 * num_test, "val", "test").tolist()),
        "record": pa.array(numbers, pa.int64()),
        "question_id": pa.array([question_of(number) for number in numbers.tolist()]),
        "label": pa.array(labels[numbers], pa.int8()),
        "model": pa.array([name] * len(numbers)),
        "seed": pa.array([seed] * len(numbers), pa.int32()),
        "score": pa.array(scores[numbers], pa.float64()),
    }
    return pa.table(columns)


def data_card(store: Path, labels: NDArray[np.int8]) -> dict[str, object]:
    quarter = len(labels) // 4
    parts = {"train": slice(0, 2 * quarter), "val": slice(2 * quarter, 3 * quarter), "test": slice(3 * quarter, None)}
    wrong = int(labels.sum())
    verdicts = {
        "right": len(labels) - wrong,
        "wrong": wrong,
        "ambiguous": 11,
        "refused": 3,
        "unlabelled": 0,
        "error": 0,
    }
    return {
        "store": str(store),
        "fingerprint": "0123456789abcdef",
        "records": sum(verdicts.values()),
        "used": len(labels),
        "verdicts": verdicts,
        "parts": {
            name: {
                "records": len(labels[part]),
                "questions": len(labels[part]) * 9 // 10,
                "wrong": int(labels[part].sum()),
            }
            for name, part in parts.items()
        },
        "split": "by a hash of question_id, salt ''",
        "language_model": "tiny",
        "label_rule": "em",
        "label_version": "em-1-00000000",
        "trace_bytes": 32_000,
        "config": {"model": "tiny", "max_new_tokens": 16},
    }


def _write_store(store: Path, labels: NDArray[np.int8], lengths: NDArray[np.int64]) -> None:
    with ms.TraceWriter(store, config={"model": "tiny"}) as writer:
        for number, (label, length) in enumerate(zip(labels.tolist(), lengths.tolist(), strict=True)):
            writer.append(
                {
                    "question_id": question_of(number),
                    "question": f"What is <b>{number}</b> & why?",
                    "generated_answer": f"{'wrong' if label else 'right'} {number}",
                    "answer": f"right {number}",
                    "aliases": [f"right {number}", f"Right {number}"],
                    "answer_len": length,
                    "vector": np.full(2, number, np.float32),
                }
            )


def _lines(name: str, made: Made, *, seed: int, num_scored: int) -> list[dict[str, object]]:
    fit = {
        "kind": "fit",
        "model": name,
        "seed": seed,
        "family": made.family,
        "title": made.title,
        "parameters": made.parameters,
        "fit_s": 12.0 + seed,
        "score_s": 0.4,
        "num_scored": num_scored,
        "trace_bytes": 32_000,
        "extra_forwards": 0,
        "probabilities": made.probabilities,
        "chosen": dict(made.chosen),
    }
    return [*(_epoch(name, seed, epoch) for epoch in range(3 if made.family != "baseline" else 0)), fit]


def _epoch(name: str, seed: int, epoch: int) -> dict[str, object]:
    line: dict[str, object] = {
        "kind": "epoch",
        "model": name,
        "seed": seed,
        "epoch": epoch,
        "step": 12 * (epoch + 1),
        "loss": 0.7 / (epoch + 1),
        "val_auroc": 0.7 + 0.05 * epoch,
        "lr": 0.001,
        "records_per_s": 900.0,
        "waiting": 0.02,
        "memory": 812_000_000,
        "time_s": 4.0 * (epoch + 1),
    }
    parts = {"kl": 0.5 / (epoch + 1), "edge_loss": 0.4, "node_loss": 0.3, "active_units": 8 + epoch}
    return line | (parts if name.startswith("gvae") else {})
