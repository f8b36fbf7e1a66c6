"""The folder that README and docs refer to, small: a model, questions, traces, genomes, reads, two runs, old files.

It is made with the commands of the README, so a page that runs one of them again resumes.
"""

import csv
import gzip
import json
import pickle
import shutil
from contextlib import chdir
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millstream as ms
from support.commands import run_here

ROOT = Path(__file__).parents[2]
MODEL = "Qwen/Qwen3-4B"
WORDS = "Answer the question concisely . Q : A ? Which river flows through town Danube Rhine Thames Volga Nile and by"
L, T, H, D = 3, 12, 2, 8  # layers, tokens, heads and dimensions of old traces
SPECIES = ("562_Escherichia_coli", "1280_Staphylococcus_aureus", "210_Helicobacter_pylori")
# Settings that shorten a run; all others keep their defaults.
SHORT = {"epochs": 1, "seeds": 1, "parameters": 2_000, "model": "stack,lstm,probe_last_answer,mean_logprob"}
SHORT_READS = {"epochs": 1, "width": 8, "layers": 1, "val_reads": 200, "bits": 12}


def make_world(folder: Path, num_questions: int = 60) -> Path:
    """Make everything that the rules at the top of test_pages.py list."""
    torch.set_num_threads(1)  # more threads do not help models this small
    folder.mkdir(parents=True)
    make_model(folder / MODEL, num_questions)
    _make_configs(folder / "configs")
    make_genomes(folder / "genomes")
    with chdir(folder):
        _make_traces(num_questions)
        _make_reads()
        _make_old()
        shutil.copytree("traces", "demo/traces")
    return folder


def copy_world(world: Path, folder: Path) -> Path:
    """A copy for one page, so that its changes do not affect other pages."""
    return Path(shutil.copytree(world, folder, dirs_exist_ok=True))


def make_model(folder: Path, num_questions: int) -> None:
    """A Qwen with two layers and words as tokens, so that its answers can be compared with references."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<eos>", "<pad>", "<unk>", *WORDS.split(), *map(str, range(num_questions))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=0,
        pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(config)
        for values in model.parameters():
            values.add_(torch.randn(values.shape), alpha=0.3)
        model.lm_head.weight[0] *= 3  # answers end
        model.lm_head.weight[1:3] = 0  # neither padding nor an unknown word
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


def _make_configs(folder: Path) -> None:
    """configs/ of the repository with the settings of `SHORT`: a page's commands run unchanged, in a second."""
    folder.mkdir()
    for name, short in (("detector.yaml", SHORT), ("reads.yaml", SHORT_READS)):
        lines = (ROOT / "configs" / name).read_text().splitlines()
        kept = [line for line in lines if line.split(":")[0] not in short]
        (folder / name).write_text("\n".join([*kept, *(f"{key}: {value}" for key, value in short.items())]) + "\n")


def make_genomes(folder: Path) -> None:
    """A small random genome of each species, and of another strain with a substitution rate of 2 %."""
    rng = np.random.default_rng(0)
    (folder / "strains").mkdir(parents=True)
    for name in SPECIES:
        bases = rng.integers(0, 4, 24_000)
        changed = np.where(rng.random(bases.size) < 0.02, rng.integers(0, 4, bases.size), bases)
        for place, strain in ((folder, bases), (folder / "strains", changed)):
            text = "".join("ACGT"[base] for base in strain)
            lines = [f">{name}", *(text[start : start + 80] for start in range(0, len(text), 80))]
            with gzip.open(place / f"{name}.fna.gz", "wt") as file:
                file.write("\n".join(lines) + "\n")


def _make_traces(num_questions: int) -> None:
    """Half of the reference answers are the model's own, so that it gets every other question right."""
    rows = [
        {"question_id": f"q{number}", "question": f"Which river flows through town {number}?", "answer": "Aare"}
        for number in range(num_questions)
    ]
    command = ("extract", "triviaqa.jsonl", "traces/", f"model={MODEL}", "tier=probe", "max_new_tokens=64")
    _write_rows(rows)
    run(*command)
    answers = ms.open("traces/").column("generated_answer").to_pylist()
    shutil.rmtree("traces")
    _write_rows([{**row, "answer": answers[place] if place % 4 < 2 else "Aare"} for place, row in enumerate(rows)])
    run(*command)
    run("label", "traces/")
    for name in ("other", "more"):
        _copy_with_other_questions(Path("traces"), Path(f"{name}_traces"), name)
    run("extract", "triviaqa.jsonl", "full/", f"model={MODEL}", "tier=full", "max_new_tokens=8", "num_samples=12")
    run("label", "full/")
    models = "model=lstm,gnn,gvae,baselines"
    run("train", "configs/detector.yaml", "data=traces/", models, "out=runs/first", "memory=500MB")


def _copy_with_other_questions(store: Path, copy: Path, name: str) -> None:
    traces = ms.open(store)
    with ms.TraceWriter(copy, schema=traces.fields, config=dict(traces.config)) as writer:
        for record in traces:
            writer.append({**record, "question": f"{record['question']} ({name})"})
    shutil.copy(store / "labels.parquet", copy)


def _make_reads() -> None:
    known, strains = sorted(glob("genomes/*.fna.gz")), sorted(glob("genomes/strains/*.fna.gz"))
    wanted = [
        ("train.fa.gz", known, 3_000), ("val.fa", known, 300), ("known.fa", known, 300), ("strains.fa", strains, 300),
        ("reads.fa.gz", known, 1_000), ("sample.fq.gz", strains, 500),
    ]  # fmt: skip
    for seed, (name, genomes, count) in enumerate(wanted):
        run("simulate", *genomes, "-o", name, "--reads", count, "--mapping", "species.tsv", "--seed", seed)
    pairs = ("-o", "reads_1.fq.gz", "-o", "reads_2.fq.gz")
    run("simulate", *known, *pairs, "--reads", 400, "--insert", 350, "--mapping", "species.tsv")
    files = ("data.train=train.fa.gz", "data.val=val.fa", "mapping=species.tsv")
    run("train", "configs/reads.yaml", *files, "out=runs/reads", "memory=1GB")


def run(*command: object) -> None:
    code, _, messages = run_here(*command)
    assert code == 0, f"millstream {' '.join(map(str, command))}: {messages}"


def _write_rows(rows: list[dict[str, str]]) -> None:
    Path("triviaqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_old(num_traces: int = 40) -> None:
    """`old/trivia_qa_traces_batch_*.pkl`, `preprocessed_data/lstm_solo/*.pt` and `ground_truth_scores.csv`."""
    rng = np.random.default_rng(0)
    Path("old").mkdir()
    Path("preprocessed_data/lstm_solo").mkdir(parents=True)
    traces = [_trace(number, rng) for number in range(num_traces)]
    half = num_traces // 2
    for batch in range(2):
        some = traces[batch * half : (batch + 1) * half]
        Path(f"old/trivia_qa_traces_batch_{batch:04d}.pkl").write_bytes(pickle.dumps(some))
        last_tokens = [[layer[-1] for layer in trace["hidden_states"]] for trace in some]
        content = {
            "sequences": torch.tensor(np.array(last_tokens)),
            "labels": torch.tensor([float(trace["example_id"] % 2) for trace in some]),
            "question_ids": [trace["question_id"] for trace in some],
        }
        torch.save(content, f"preprocessed_data/lstm_solo/preprocessed_{batch:04d}.pt")
    with open("ground_truth_scores.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question_id", "bleurt_score"])
        table.writerows([trace["question_id"], 1 - trace["example_id"] % 2] for trace in traces)
    Path("reads.fa.gz.index.pkl").write_bytes(pickle.dumps([0, 1]))


def _trace(number: int, rng: np.random.Generator) -> dict[str, object]:
    attention = np.tril(rng.random((L, H, T, T))) + 1e-3
    return {
        "question_id": f"tc_{number}",
        "question": f"Which river flows through town {number}?",
        "generated_answer_clean": f"river {number % 4}",
        "ground_truth_answers": [f"river {number % 2}"],
        "tokens": np.arange(T),
        "prompt_length": 8,
        "example_id": number % 20,
        "global_example_id": number,
        "batch_number": number // 20,
        "hidden_states": list(rng.standard_normal((L, T, D)).astype(np.float16)),
        "attentions": list((attention / attention.sum(-1, keepdims=True)).astype(np.float16)),
    }
