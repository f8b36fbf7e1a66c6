"""The folder that README and docs talk about, small: a model, questions, traces, genomes, reads, and two runs.

It is made by the commands of the README themselves, so a page that runs one of them again goes on where it ended.
"""

import gzip
import json
import shutil
from contextlib import chdir
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

import millstream as ms
from support.commands import run_here
from support.docs_old import make_old

ROOT = Path(__file__).parents[2]
MODEL = "Qwen/Qwen3-4B"
WORDS = "Answer the question concisely . Q : A ? Which river flows through town Danube Rhine Thames Volga Nile and by"
SPECIES = ("562_Escherichia_coli", "1280_Staphylococcus_aureus", "210_Helicobacter_pylori")
# The defaults of a run, but for what makes it long.
SHORT = {"epochs": 1, "seeds": 1, "parameters": 2_000}
SHORT_READS = {"epochs": 1, "width": 8, "layers": 1, "val_reads": 200, "bits": 12}


def make_world(folder: Path, num_questions: int = 60) -> Path:
    """Make all of it; what there is stands in the rules at the top of test_pages.py."""
    import torch

    torch.set_num_threads(1)  # on models this small, threads only wait for each other
    folder.mkdir(parents=True)
    _make_model(folder / MODEL, num_questions)
    _make_configs(folder / "configs")
    _make_genomes(folder / "genomes")
    with chdir(folder):
        _make_traces(num_questions)
        _make_reads()
        make_old()
        shutil.copytree("traces", "demo/traces")
    return folder


def copy_world(world: Path, folder: Path) -> Path:
    """A page's own: what it changes, no other page sees."""
    return Path(shutil.copytree(world, folder, dirs_exist_ok=True))


def _make_model(folder: Path, num_questions: int) -> None:
    """A Qwen of two layers whose tokens are words, so that whatever it says can be compared."""
    import torch
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
    """configs/ of the repository with `SHORT` in it: what a page says is run as it stands, and takes a second."""
    folder.mkdir()
    for name, short in (("detector.yaml", SHORT), ("reads.yaml", SHORT_READS)):
        lines = (ROOT / "configs" / name).read_text().splitlines()
        kept = [line for line in lines if line.split(":")[0] not in short]
        (folder / name).write_text("\n".join([*kept, *(f"{key}: {value}" for key, value in short.items())]) + "\n")


def _make_genomes(folder: Path) -> None:
    """A small random genome of each species, and of another strain of it that differs in one letter of fifty."""
    rng = np.random.default_rng(0)
    (folder / "strains").mkdir(parents=True)
    for name in SPECIES:
        letters = rng.integers(0, 4, 4_000)
        changed = np.where(rng.random(letters.size) < 0.02, rng.integers(0, 4, letters.size), letters)
        for place, strain in ((folder, letters), (folder / "strains", changed)):
            text = "".join("ACGT"[letter] for letter in strain)
            lines = [f">{name}", *(text[start : start + 80] for start in range(0, len(text), 80))]
            with gzip.open(place / f"{name}.fna.gz", "wt") as file:
                file.write("\n".join(lines) + "\n")


def _make_traces(num_questions: int) -> None:
    """Questions of which the model gets every other one right: the answer to those is what it says anyway."""
    rows = [
        {"question_id": f"q{number}", "question": f"Which river flows through town {number}?", "answer": "Aare"}
        for number in range(num_questions)
    ]
    command = ("extract", "triviaqa.jsonl", "traces/", f"model={MODEL}", "tier=probe", "max_new_tokens=64")
    _write_rows(rows)
    run(*command)
    said = ms.open("traces/").column("generated_answer").to_pylist()
    shutil.rmtree("traces")
    _write_rows([{**row, "answer": said[place] if place % 4 < 2 else "Aare"} for place, row in enumerate(rows)])
    run(*command)
    run("label", "traces/")
    shutil.copytree("traces", "other_traces")
    run("extract", "triviaqa.jsonl", "full/", f"model={MODEL}", "tier=full", "max_new_tokens=8", "num_samples=12")
    run("label", "full/")
    models = "model=lstm,gnn,gvae,baselines"
    run("train", "configs/detector.yaml", "data=traces/", models, "out=runs/first", "memory=500MB")


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
    code, _, said = run_here(*command)
    assert code == 0, f"millstream {' '.join(map(str, command))}: {said}"


def _write_rows(rows: list[dict[str, str]]) -> None:
    Path("triviaqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
