"""Detectors on a real model: SmolLM2-135M on four question sets and a fictional world; writes docs/results.md.

    python benchmarks/detect.py DATA [sets=triviaqa,nq_open,popqa_1k,truthfulqa,world,facts] [num=10000] [out=FOLDER]
        [model=smollm2] [detectors=...] [folds=5] [seeds=3] [samples=0] [memory=2GB]

DATA has a folder per set with .jsonl files of questions (id, question, answer, aliases). Run it again to resume: it
calls the millstream commands extract, label, train with cross-validation, and evaluate for the transfer between sets.
`samples=5` also draws five answers to 2,000 questions, in a store of their own. `make demo-llm` installs the model.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import PAGE, update_page
from millstream.report.measures import Difference
from millstream.traces.report.evaluate import read_results
from millstream.traces.report.results import ModelResult, Results

MARK = "<!-- made by benchmarks/detect.py -->"
SETS = "triviaqa,nq_open,popqa_1k,truthfulqa,world,facts"
PROMPT = "Q: Which planet is known as the Red Planet?\nA: Mars\nQ: Who painted the Mona Lisa?\nA: Leonardo da Vinci\n"
PROMPT += "Q: {question}\nA:"
FIELDS = "heads,laplacian,topology,nodes,edges,edge_heads,states,answer_hidden[2,6,10,14,18,22,26,30]"
MODELS = "stack,lstm,gnn,gvae,baselines"
NUM_SAMPLED = 2000
WANTED = {  # of the goal
    "mean_logprob": "the mean log-probability",
    "probe": "the best single probe",
}
HALF = 0.02
RESAMPLES = 12_000  # with fewer, no p is below 0.01 after correcting for some fifty comparisons


def main(data: str, *settings: str) -> None:
    given = dict(setting.split("=", 1) for setting in settings)
    out = Path(given.get("out", "detect"))
    found: dict[str, Results] = {}
    for name in given.get("sets", SETS).split(","):
        found[name] = read_results(compare(name, Path(data), out, given), resamples=RESAMPLES)
        if int(given.get("samples", 0)) and name == "triviaqa":
            found[f"{name} with samples"] = read_results(
                compare(name, Path(data), out, given, is_sampled=True), resamples=RESAMPLES
            )
    update_page(MARK, lines_of(found, given))
    print(f"{PAGE}: table updated")


def compare(name: str, data: Path, out: Path, given: dict[str, str], *, is_sampled: bool = False) -> Path:
    """The run on a set: extracted, labelled, trained."""
    store = out / (f"{name}-sampled" if is_sampled else name)
    run = out / "runs" / store.name
    model = "facts" if name == "facts" else given.get("model", "smollm2")
    extract: list[object] = [questions_of(name, data, out), store, f"model={model}", f"fields={FIELDS}"]
    num = NUM_SAMPLED if is_sampled else given.get("num", 10_000)
    extract += ["max_new_tokens=12", "memory=1GB", f"num_samples={num}"]
    if name != "facts":
        extract.append(f"prompt={PROMPT}")
    if is_sampled:
        extract += [f"samples={given['samples']}", "temperature=1.0"]
    train = [f"data={store}", f"out={run}", f"model={given.get('detectors', MODELS)}", f"folds={given.get('folds', 5)}"]
    train += [f"seeds={given.get('seeds', 3)}", f"memory={given.get('memory', '2GB')}", "epochs=8", "patience=3"]
    for command in (["extract", *extract], ["label", store], ["train", *train]):
        millstream(*command)
    return run


def questions_of(name: str, data: Path, out: Path) -> str:
    """The questions of a set: all its files in one; two sets are built in."""
    if name in ("world", "facts"):
        return name
    file = out / f"{name}.jsonl"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        lines = [line for part in sorted((data / name).glob("*.jsonl")) for line in part.read_text().splitlines()]
        file.write_text("\n".join(lines) + "\n")
    return str(file)


def millstream(*command: object) -> None:
    words = [sys.executable, "-m", "millstream", *map(str, command)]
    print("$", shlex.join(["millstream", *words[3:]]), flush=True)
    subprocess.run(words, check=True)


# -- the page


def lines_of(found: dict[str, Results], given: dict[str, str]) -> list[str]:
    """Whether the goal is reached, then a table for each set."""
    lines = [goal_of(found[name], name) for name in list(found)[:1]]
    words = " ".join(f"{name}={value}" for name, value in given.items() if name not in ("out", "model"))
    lines += ["", f"Measured on {time.strftime('%Y-%m-%d')} with `python benchmarks/detect.py DATA {words}`.", ""]
    for name, results in found.items():
        lines += [f"### {name}", "", *table_of(results), ""]
    return lines[:-1]


def goal_of(results: Results, name: str) -> str:
    """The first sentence: is the best detector ahead of the best probe and of the mean log-probability?"""
    free = [model for model in results.models if not model.extra_tokens and not model.extra_forwards]
    best = max((model for model in free if model.kind != "null"), key=lambda model: model.auroc_val)
    probes = [model for model in free if model.name.startswith("probe_")]
    others = {"mean_logprob": "mean_logprob", "probe": max(probes, key=lambda model: model.auroc_val).name}
    clauses: list[str] = []
    reached = True
    for key, other in others.items():
        difference = between(results, best.name, other)
        if difference is None:
            clauses.append(f"it was not compared with {WANTED[key]}, {other}")
            reached = False
            continue
        reached = reached and difference.value.value > 0 and difference.p_holm < 0.01
        clauses.append(f"{difference.value:+.3f} to {WANTED[key]}, {other} (p = {difference.p_holm:.3f} after Holm)")
    half = (best.auroc.high - best.auroc.low) / 2
    reached = reached and half <= HALF
    start = "The goal is reached" if reached else "The goal is missed"
    return (
        f"{start} on {name}: the best detector without extra samples (on validation), {best.name}, has AUROC "
        f"{best.auroc} (half-width {half:.3f}, goal {HALF}): {'; '.join(clauses)}."
    )


def between(results: Results, a: str, b: str) -> Difference | None:
    return next((one for one in results.differences if (one.a, one.b) == (a, b)), None)


def table_of(results: Results) -> Sequence[str]:
    data = results.data
    verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in dict(data["verdicts"]).items() if count)
    right = 1 - results.prevalence
    rows = [
        f"{data['records']:,} questions ({verdicts}); {results.num_test:,} answers scored by models that did not see "
        f"their question, {right:.1%} of them right.",
        "",
        "| detector | AUROC [95 %] | sd over seeds | AUPR, wrong | AUPR, right | accuracy at 80 % coverage | AURC | "
        "ECE after Platt | fit, s | s per 1,000 | kB per answer | extra tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [row_of(model) for model in results.models]
    return [*rows, "", *(f"- {finding}" for finding in results.findings)]


def row_of(model: ModelResult) -> str:
    name = f"**{model.name}**" if model.kind == "trained" else model.name
    cells = [
        f"{name} ({model.kind})",
        f"{model.auroc}",
        "" if model.auroc_sd is None else f"{model.auroc_sd:.3f}",
        *(f"{one.value:.3f}" for one in (model.aupr, model.aupr_right, model.accuracy_kept, model.aurc)),
        f"{model.ece_platt:.3f}",
        f"{model.fit_s:.0f}",
        f"{model.score_ms:.1f}",
        f"{model.trace_kb:.1f}",
        "–" if model.extra_tokens is None else f"{model.extra_tokens:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(*sys.argv[1:])
