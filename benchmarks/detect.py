"""Detectors on a real model: SmolLM2-135M on four question sets and two fictional ones; writes docs/results.

    python benchmarks/detect.py DATA [sets=triviaqa,nq_open,popqa_1k,truthfulqa,world,facts] [num=10000] [out=FOLDER]
        [model=smollm2] [detectors=...] [folds=5] [seeds=3] [samples=0] [graph_sets=...] [graph_seeds=1] [memory=2GB]

DATA has a folder per set with .jsonl files of questions (id, question, answer, aliases). Run it again to resume: it
calls the millstream commands extract, label and train with cross-validation, then evaluate for the transfer between
sets. `samples=5` also draws five answers to 2,000 questions of the first set, in a store of their own. `graph_sets=`
names the sets on which the nets over graphs are compared with their null models; they train for hours. `make demo-llm`
installs the model. On the first set, all detectors are first trained with one seed, which is measured; the learning
curves of four detectors come last.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import PAGES, peak_pss, update_page
from millstream.report.measures import Difference
from millstream.traces.report.evaluate import read_results
from millstream.traces.report.results import ModelResult, Results
from millstream.traces.report.transfer import Matrix, transfer_of

MARK = "<!-- made by benchmarks/detect.py -->"
SETS = "triviaqa,nq_open,popqa_1k,truthfulqa,world,facts"
PROMPT = "Q: Which planet is known as the Red Planet?\nA: Mars\nQ: Who painted the Mona Lisa?\nA: Leonardo da Vinci\n"
PROMPT += "Q: {question}\nA:"
FIELDS = "heads,laplacian,topology,nodes,edges,edge_heads,states,answer_hidden"
LAYERS = "[2,6,10,14,18,22,26,30]"  # of answer_hidden; all of the tiny model
MODELS = "stack,attention_pool,lstm,token_transformer,mil,saplma,baselines"
SAMPLED_MODELS = "stack,stack_samples,baselines"  # by the states of all answers, which EigenScore reads
MOVED = ("stack", "mean_logprob")  # tested on the other sets
LEARNING = "stack,lstm,probe_mean_answer,mean_logprob"
CURVE = "100,300,1000,3000"
GRAPHS = "gnn,gnn_shuffled,gnn_unwired,gvae,gvae_shuffled,gvae_unwired"
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
    names = given.get("sets", SETS).split(",")
    stores = {name: extracted(name, Path(data), out, given) for name in names}
    every = f"{given.get('detectors', MODELS)},gnn,gvae"
    cost = measured(stores[names[0]], out / "runs" / names[0], given | {"detectors": every, "seeds": "1"})
    runs = {name: trained(store, out / "runs" / name, given) for name, store in stores.items()}
    curves = trained(stores[names[0]], out / "runs" / "curves", given | {"detectors": LEARNING, "seeds": "1"}, CURVE)
    if int(given.get("samples", 0)):
        name = f"{names[0]}-sampled"
        stores[name] = extracted(names[0], Path(data), out, given, is_sampled=True)
        runs[name] = trained(stores[name], out / "runs" / name, given | {"detectors": SAMPLED_MODELS})
    for name in filter(None, given.get("graph_sets", "").split(",")):  # more models, in the same run
        trained(stores[name], runs[name], given | {"detectors": GRAPHS, "seeds": given.get("graph_seeds", "1")})
    alike = [name for name in names if name != "facts"]  # of one language model
    if len(alike) > 1:
        folders = [runs[name] for name in alike] + [stores[name] for name in alike]
        millstream("evaluate", *folders, f"model={','.join(MOVED)}")
    found = {name: read_results(run, resamples=RESAMPLES if name == names[0] else 6000) for name, run in runs.items()}
    lines = [*lines_of(found, given), *learning(read_results(curves)), cost_of(cost)]
    if len(alike) > 1:
        lines += transfer({name: transfer_of(found[name]) for name in alike})
    update_page("detectors", MARK, lines[:-1])
    others = [line for name in list(found)[1:] for line in section_of(name, found[name])]
    update_page("more-sets", MARK, others[:-1])
    print(f"{PAGES}: tables updated")


def measured(store: Path, run: Path, given: dict[str, str]) -> dict[str, Any]:
    """What it costs to train and score these detectors, which is kept for when this script is resumed."""
    file, is_new = run / "cost.json", not run.exists()
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with peak_pss() as memory:
        trained(store, run, given)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    if is_new:
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cost = {"seconds": seconds, "cpu_s": cpu_s, "peak_bytes": memory.peak_bytes, "models": given["detectors"]}
        file.write_text(json.dumps({**cost, "memory": given.get("memory", "2GB"), "load": os.getloadavg()[2]}))
    return json.loads(file.read_text()) if file.exists() else {}


def trained(store: Path, run: Path, given: dict[str, str], curve: str = "") -> Path:
    """The run on a store."""
    train = [f"data={store}", f"out={run}", f"model={given.get('detectors', MODELS)}", f"folds={given.get('folds', 5)}"]
    train += [f"curve={curve}"] if curve else []
    train += [f"seeds={given.get('seeds', 3)}", f"memory={given.get('memory', '2GB')}", "epochs=8", "patience=3"]
    millstream("train", *train)
    return run


def extracted(name: str, data: Path, out: Path, given: dict[str, str], *, is_sampled: bool = False) -> Path:
    """The labelled store of a set."""
    store = out / (f"{name}-sampled" if is_sampled else name)
    model = "facts" if name == "facts" else given.get("model", "smollm2")
    kept = "states" if is_sampled else FIELDS if name == "facts" else FIELDS + LAYERS
    extract: list[object] = [questions_of(name, data, out), store, f"model={model}", f"fields={kept}"]
    num = NUM_SAMPLED if is_sampled else given.get("num", 10_000)
    extract += ["max_new_tokens=12", "memory=1GB", f"num_samples={num}"]
    if name != "facts":
        extract.append(f"prompt={PROMPT}")
    if is_sampled:
        extract += [f"samples={given['samples']}", "temperature=0.5", "sample_fields=all"]
    millstream("extract", *extract)
    millstream("label", store)
    return store


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
    """Whether the goal is reached, then the table of the first set."""
    lines = [goal_of(found[name], name) for name in list(found)[:1]]
    lines += [with_samples(results) for name, results in found.items() if name.endswith("-sampled")]
    words = " ".join(f"{name}={value}" for name, value in given.items() if name not in ("out", "model"))
    lines += ["", f"Measured on {time.strftime('%Y-%m-%d')} with `python benchmarks/detect.py DATA {words}`.", ""]
    return lines + section_of(*next(iter(found.items())))


def section_of(name: str, results: Results) -> list[str]:
    return [f"## {name}", "", *table_of(results), ""]


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


def with_samples(results: Results) -> str:
    """What samples add to the best detector."""
    by_name = {model.name: model for model in results.models}
    more, less = by_name["stack_samples"], by_name["stack"]
    found = between(results, more.name, less.name) or between(results, less.name, more.name)
    text = "they were not compared"
    if found:
        sign = 1 if found.a == more.name else -1
        text = f"a difference of {sign * found.value.value:+.3f} (p = {found.p_holm:.3f} after Holm)"
    return f"With samples, {more.name} has {more.auroc}; {less.name} on the same questions {less.auroc}: {text}."


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


def learning(results: Results) -> list[str]:
    """The AUROC of some detectors by the number of labelled questions."""
    sizes = sorted({labels for model in results.models for labels, _ in model.learning})
    lines = ["## Labels", "", "AUROC on the first set by labelled questions, train and val together.", ""]
    lines += [f"| detector |{''.join(f' {labels:,} |' for labels in sizes)}", f"|---|{'---|' * len(sizes)}"]
    for model in results.models:
        areas = {labels: f"{area}" for labels, area in model.learning}
        lines += [f"| {' | '.join([model.name, *(areas.get(labels, '') for labels in sizes)])} |"]
    return [*lines, ""]


def cost_of(cost: dict[str, Any]) -> str:
    if not cost:
        return "The cost of the whole comparison was not measured: its run had begun before.\n"
    minutes, cpu_minutes, peak = cost["seconds"] / 60, cost["cpu_s"] / 60, cost["peak_bytes"] / 1e9
    return (
        f"The whole comparison of {cost['models'].replace(',', ', ')}, five folds, one seed: {minutes:.0f} minutes, "
        f"{cpu_minutes:.0f} minutes of CPU time (two cores, load {cost['load']:.0f}), at most {peak:.2f} GB over all "
        f"processes with memory={cost['memory']}.\n"
    )


def transfer(matrices: dict[str, Matrix]) -> list[str]:
    """The lines on other sets."""
    paths = {name: store.path for name, matrix in matrices.items() for store in matrix.stores[:1]}
    lines = ["## Transfer", "", "Trained on (rows), tested on (columns); a run's own set is scored out of fold.", ""]
    lines += [f"| detector |{''.join(f' {name} |' for name in paths)}", f"|---|{'---|' * len(paths)}"]
    for detector in MOVED:
        for name, matrix in matrices.items():
            row = next(row for row in matrix.rows if row.detector == detector)
            cells = {store.path: f"{cell.auroc}" for store, cell in row.cells.items()}
            words = [f"{detector}, trained on {name}", *(cells.get(path, "") for path in paths.values())]
            lines += [f"| {' | '.join(words)} |"]
    return [*lines, ""]


if __name__ == "__main__":
    main(*sys.argv[1:])
