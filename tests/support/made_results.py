"""Synthetic results of a run of medium size, for tests of the page, figures and tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from millstream.report.measures import Curve, Difference, Interval
from millstream.traces.report.results import Mistake, ModelResult, Results
from millstream.training.log import Metrics

HOSTILE = (
    """<script>window.hacked = 1</script>'"><img src=x onerror="window.hacked = 2">{{ 7 * 7 }}{% raw %} 🎉 مرحبا \\"""
)
NUM_TEST, NUM_WRONG = 1500, 512

_TITLES: Mapping[str, tuple[str, str, float]] = {
    "lstm": ("trained", "LSTM over the layers of the last token", 0.853),
    "gnn": ("trained", "graph network over attention and hidden states", 0.871),
    "gvae": ("trained", "variational graph autoencoder, classifier on its code", 0.832),
    "charm": ("trained", "one graph over all layers, messages along attention", 0.846),
    "gnn_shuffled": ("null", "gnn with shuffled edges", 0.838),
    "gnn_unwired": ("null", "gnn without edges", 0.829),
    "gvae_shuffled": ("null", "gvae with shuffled edges", 0.815),
    "gvae_unwired": ("null", "gvae without edges", 0.811),
    "length": ("baseline", "tokens of the answer", 0.561),
    "words": ("baseline", "bag of words of the question", 0.642),
    "sequence_logprob": ("baseline", "minus the log-probability of the answer", 0.702),
    "mean_logprob": ("baseline", "minus the mean log-probability of its tokens", 0.731),
    "min_logprob": ("baseline", "minus the smallest log-probability", 0.744),
    "entropy": ("baseline", "mean entropy of the next token", 0.736),
    "margin": ("baseline", "mean gap of the two likeliest tokens", 0.719),
    "p_true": ("baseline", "the model asked whether its answer is true", 0.688),
    "token_stats": ("baseline", "logistic regression on token statistics", 0.772),
    "probe_last_prompt": ("baseline", "logistic regression, last token of the prompt", 0.801),
    "probe_first_answer": ("baseline", "logistic regression, first token of the answer", 0.818),
    "probe_last_answer": ("baseline", "logistic regression, last token of the answer", 0.849),
    "probe_mean_answer": ("baseline", "logistic regression, mean over the answer", 0.842),
    "lapeigvals": ("baseline", "eigenvalues of attention Laplacians", 0.763),
    "logdet": ("baseline", "log-determinant of attention", 0.655),
    "lookback": ("baseline", "attention on the prompt against attention on the answer", 0.711),
}


def made_results(*, run: Path = Path("runs/triviaqa")) -> Results:
    """24 detectors, 28 differences, four probes, and mistakes with hostile texts."""
    models = sorted((_model(name) for name in _TITLES), key=lambda model: -model.auroc.value)
    best = models[0]
    return Results(
        path=run,
        config={
            "data": "traces/triviaqa",
            "models": [model.name for model in models],
            "seeds": 3,
            "train": {"epochs": 12, "batch_size": 64, "lr": 0.001, "memory": "2GB"},
        },
        environment={
            "time": "2026-11-16 09:30 UTC",
            "millstream": "0.1.0",
            "python": "3.11.9",
            "torch": "2.13.0",
            "cores": 2,
        },
        data=data_card(),
        num_test=NUM_TEST,
        num_wrong=NUM_WRONG,
        prevalence=NUM_WRONG / NUM_TEST,
        models=models,
        differences=[_difference(a, b) for place, a in enumerate(models[:8]) for b in models[place + 1 : 8]],
        metrics=Metrics(
            epochs={
                (name, line["seed"], line["epoch"]): line
                for name, (kind, _, _) in _TITLES.items()
                if kind != "baseline"
                for line in _history(name, seeds=3)
            },
            memory=[(2.0 * s, 900_000_000 + int(1_300_000_000 * (1 - np.exp(-s / 40)))) for s in range(400)],
            budget=2_900_000_000,
        ),
        probe_layers={
            place: Curve(list(range(29)), [0.5 + height * np.exp(-(((x - 17) / 11) ** 2)) for x in range(29)])
            for place, height in (
                ("last prompt", 0.3),
                ("first answer", 0.32),
                ("last answer", 0.35),
                ("mean answer", 0.34),
            )
        },
        mistakes=mistakes(best.name),
        findings=[
            "The best detector, gnn, is not shown to be better than the best baseline, probe_last_answer: "
            "AUROC 0.871 against 0.849, difference +0.022 [-0.004, 0.047], p = 0.31 after Holm.",
            "The graph is used: gnn is above gnn_shuffled by 0.033 [0.008, 0.058].",
            "Answer length alone has an AUROC of 0.561; half of the wrong answers are found with 6 % false alarms.",
        ],
        missing={"semantic_entropy": "the store has one answer a question; it needs several: extract with samples=10"},
    )


def data_card() -> dict[str, object]:
    return {
        "store": "traces/triviaqa",
        "records": 10_240,
        "verdicts": {"right": 6512, "wrong": 3488, "ambiguous": 171, "refused": 58, "unlabelled": 9, "error": 2},
        "parts": {
            "train": {"records": 7000, "questions": 6890, "wrong": 2441},
            "val": {"records": 1500, "questions": 1481, "wrong": 535},
            "test": {"records": 1500, "questions": 1477, "wrong": 512},
        },
        "language_model": "meta-llama/Llama-3.2-3B-Instruct",
        "label_rule": "default",
        "trace_bytes": 742_000_000,
        "config": {"max_new_tokens": 32, "layers": None, "prompt": "Answer & be brief: 100 %"},
    }


def mistakes(detector: str) -> list[Mistake]:
    plain = [
        ("Which planet has the shortest day?", "Jupiter", ["Jupiter", "planet Jupiter"], "right", 0.984),
        ("Who wrote The Tin Drum?", "Heinrich Böll", ["Günter Grass", "Grass"], "wrong", 0.013),
        (HOSTILE, HOSTILE, [HOSTILE, "b"], "right", 0.971),
        ("מהי בירת אוסטרליה?", "סידני", ["קנברה", "Canberra"], "wrong", 0.022),
        ("What is " + "very " * 300 + "long?", "x" * 900, [], "right", 0.955),
    ]
    return [Mistake(detector, f"tq_{place}", *rest) for place, rest in enumerate(plain)]


def _model(name: str) -> ModelResult:
    kind, title, auroc = _TITLES[name]
    rng = np.random.default_rng(len(name) * 1000 + ord(name[0]))
    trained, scored = kind != "baseline", name.endswith(("logprob", "entropy", "margin", "length"))
    wrong, right = rng.normal(_gap(auroc), 1, NUM_WRONG), rng.normal(0, 1, NUM_TEST - NUM_WRONG)
    labels = np.r_[np.ones(NUM_WRONG), np.zeros(NUM_TEST - NUM_WRONG)]
    order = np.argsort(-np.r_[wrong, right])
    hits = np.cumsum(labels[order])
    ranks = np.arange(1, NUM_TEST + 1)
    kept = np.cumsum(labels[order[::-1]]) / ranks
    aupr, noise = float(np.mean(hits / ranks)), rng.normal(0, 0.03, 10)
    bins = np.linspace(0.05, 0.95, 10)
    return ModelResult(
        name=name,
        kind=kind,
        title=title,
        seeds=3 if trained else 1,
        parameters=None if scored else 184_321 if trained else 3073,
        auroc=Interval(auroc, auroc - 0.021, auroc + 0.019),
        auroc_sd=0.0042 if trained else None,
        auroc_val=auroc + 0.005,
        aupr=Interval(aupr, aupr - 0.03, aupr + 0.03),
        aupr_right=Interval(aupr - 0.2, aupr - 0.23, aupr - 0.17),
        threshold=0.41,
        f1=Interval(auroc - 0.12, auroc - 0.15, auroc - 0.09),
        precision=auroc - 0.15,
        recall=auroc - 0.08,
        fpr_at_95_tpr=1.25 - auroc,
        brier=None if scored else 0.32 - auroc / 5,
        brier_platt=0.31 - auroc / 5,
        ece=None if scored else 0.061,
        ece_platt=0.024,
        aurc=Interval(0.48 - auroc / 2.5, 0.46 - auroc / 2.5, 0.5 - auroc / 2.5),
        accuracy_kept=Interval(auroc - 0.3, auroc - 0.33, auroc - 0.27),
        prr=2 * auroc - 1,
        fit_s=184.2 if trained else 3.1,
        score_ms=1.73 if trained else 0.02,
        trace_kb=742.0 if trained else 0.4 if scored else 172.0,
        extra_forwards=1 if name == "p_true" else 0,
        extra_tokens=320.0 if name == "agreement" else 0.0,
        chosen={"layer": 17, "C": 0.01, "auroc_by_layer": [0.5, 0.6]} if name.startswith("probe") else {},
        roc=Curve(np.cumsum(1 - labels[order]) / (NUM_TEST - NUM_WRONG), hits / NUM_WRONG),
        pr=Curve(hits / NUM_WRONG, hits / ranks),
        risk_coverage=Curve(ranks[40:] / NUM_TEST, kept[40:]),
        calibration=Curve(bins, np.clip(bins + noise, 0, 1)),
        by_length=[
            (tokens, count, None if count < 20 else auroc - 0.02 * place)
            for place, (tokens, count) in enumerate(
                (("1-2", 402), ("3-4", 511), ("5-8", 388), ("9-16", 187), ("17-32", 12))
            )
        ],
        learning=[(count, Interval(auroc - 5 / count, auroc - 6 / count, auroc - 4 / count)) for count in (100, 300)]
        if trained
        else [],
    )


def _gap(auroc: float) -> float:
    """Distance of two normal distributions that are response apart this well."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(auroc) * 2**0.5


def _difference(a: ModelResult, b: ModelResult) -> Difference:
    gap = a.auroc.value - b.auroc.value
    p = float(np.exp(-150 * gap))
    return Difference(a.name, b.name, "test", Interval(gap, gap - 0.02, gap + 0.02), p, min(1.0, 20 * p), 20 * p < 0.05)


def _history(name: str, *, seeds: int) -> list[dict[str, Any]]:
    auroc = _TITLES[name][2]
    lines: list[dict[str, Any]] = []
    for seed in range(seeds):
        for epoch in range(12):
            rise = 1 - np.exp(-(epoch + 1 + seed / 2) / 3)
            line: dict[str, Any] = {"kind": "epoch", "model": name, "seed": seed, "epoch": epoch}
            line |= {"loss": 0.7 - 0.4 * rise * auroc, "val_auroc": 0.5 + (auroc - 0.49) * rise, "lr": 0.001}
            line |= (
                {"kl": 3.1 * rise * auroc + seed / 10, "active_units": 9 + epoch // 2 + seed}
                if name.startswith("gvae")
                else {}
            )
            lines.append(line)
    return lines
