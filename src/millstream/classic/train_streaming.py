"""`python -m millstream.classic.train_streaming`: the old read training script's flags on `millstream train`."""

import argparse
import sys
from pathlib import Path
from typing import Any, cast

from millstream.cli.process import run_script
from millstream.core.config import setting_pairs
from millstream.core.console import format_bytes, printable, say, show
from millstream.errors import BadSetting, MillstreamError
from millstream.training.run import Run, train

READ_BYTES = 100_000  # per cached sequence, according to the old guide
LEAST_MEMORY = 300_000_000
MODEL = "kmer-linear,cnn"
BY_TOKENS = ("lstm", "transformer", "hf")  # models that see the tokens of a tokenizer

# Keys of the old YAML files -> settings of `millstream train`.
KEYS = {
    "data.header_regex": "data.header_regex",
    "tokenizer.max_length": "max_length",
    "tokenizer.tokenizer_path": "tokenizer",
    "training.batch_size": "batch_size",
    "training.max_epochs": "epochs",
    "training.epochs": "epochs",
    "training.learning_rate": "lr",
    "training.lr": "lr",
    "training.weight_decay": "weight_decay",
    "training.seed": "seed",
}


def main(arguments: list[str] | None = None) -> None:
    """Train read classifiers, and write metrics, checkpoints, predictions and a report to the output folder.

    After an interruption, run the same command to resume. Files may be gzipped.
    """
    options = _parser().parse_args(arguments)
    try:
        run = work(options)
        if run.is_first and not run.interrupted:
            from millstream.report import report_of

            found = report_of(run.path)
            show(found.lines())
            say(f"{run.path}: {found.compared} compared. Open {found.write(run.path / 'report.html')}")
    except (MillstreamError, OSError) as error:
        print(f"train_streaming: {printable(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadSetting) else 1)
    if run.interrupted:
        say("interrupted; progress saved. Run the same command to resume")
        sys.exit(130)


def work(options: argparse.Namespace) -> Run:
    """Train with the settings of the flags and the YAML file."""
    settings = _from_config(options.config)
    given = {
        "data.train": options.train_fasta,
        "data.val": options.val_fasta,
        "mapping": options.mapping_tsv,
        "out": options.output_dir,
        "batch_size": options.batch_size,
        "epochs": options.max_epochs,
        "model": options.model,
    }
    settings |= {name: value for name, value in given.items() if value is not None}
    _check_tokens(settings)
    memory = max(options.cache_size * READ_BYTES, LEAST_MEMORY)
    say(f"--cache_size {options.cache_size}: memory={format_bytes(memory)}, the memory limit for data and models")
    return train(**cast("dict[str, Any]", settings), memory=memory)


def _from_config(path: Path | None) -> dict[str, object]:
    if path is None:
        return {}
    settings: dict[str, object] = {}
    unused: list[str] = []
    for key, value in setting_pairs([str(path)]):
        if key not in KEYS:
            unused.append(key)
        elif key == "tokenizer.tokenizer_path":
            settings["tokenizer"] = f"hf({value})"
        else:
            settings[KEYS[key]] = value
    if unused:
        say(f"{path}: {', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect here")
    return settings


def _check_tokens(settings: dict[str, object]) -> None:
    """Remove settings of the tokenizer if no model has one: `cnn` would take 128 tokens for 128 bases."""
    models = [name.strip() for name in str(settings["model"]).split(",")]
    others = ", ".join(name for name in models if name not in BY_TOKENS)
    for name, key in (("max_length", "tokenizer.max_length"), ("tokenizer", "tokenizer.tokenizer_path")):
        if name not in settings:
            continue
        if not set(models) & set(BY_TOKENS):
            say(f"{key}={settings.pop(name)} has no effect on {others}; it is for {', '.join(BY_TOKENS)}")
        elif name == "max_length" and "cnn" in models:
            raise BadSetting(
                f"{key}={settings[name]} counts tokens, but cnn would be trained on as many bases. Train it alone: "
                "--model cnn"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m millstream.classic.train_streaming", description=main.__doc__)
    parser.add_argument("--config", type=_yaml, help="YAML with data.header_regex, tokenizer.max_length, ...")
    parser.add_argument("--train_fasta", required=True)
    parser.add_argument("--val_fasta", required=True)
    parser.add_argument("--mapping_tsv", required=True)
    parser.add_argument("--output_dir", default="outputs")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--max_epochs", type=int)
    parser.add_argument(
        "--cache_size", type=int, default=10_000, help="Sequences; sets the memory limit, at 100 kB of memory each."
    )
    parser.add_argument("--model", default=MODEL, help=f"Classifiers to train (default {MODEL}).")
    return parser


def _yaml(text: str) -> Path:
    if not text.endswith((".yaml", ".yml")):
        raise argparse.ArgumentTypeError(f"{text}: expected a .yaml file")
    return Path(text)


if __name__ == "__main__":
    run_script(main, "train_streaming")
