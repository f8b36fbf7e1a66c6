"""`python -m millstream.classic.trace_extractor`: the old script's flags on `extract`, resuming for real."""

import argparse
import os
import sys
from pathlib import Path

from millstream.classic.batch_loader import TRACES_DIR
from millstream.config import read_settings
from millstream.console import say
from millstream.errors import BadSetting, MillstreamError
from millstream.process import run_script
from millstream.source.llm.settings import ExtractSettings
from millstream.store.extract import extract
from millstream.store.layout import list_shards, shard_name

BATCH_SIZE = 500
DATASETS = {
    "trivia_qa": "trivia_qa:rc.nocontext:train",
    "triviaqa": "trivia_qa:rc.nocontext:train",
    "truthful_qa": "truthful_qa:generation:validation",
    "truthfulqa": "truthful_qa:generation:validation",
}
# As the old script had it: the whole trace, 64 new tokens, 5 beams.
DEFAULTS = ["tier=full", "max_new_tokens=64", "num_beams=5", "prompt=plain"]


def main(arguments: list[str] | None = None) -> None:
    """Traces of every question, 500 a batch. Run again after an interruption: what is there is not done again."""
    parser = argparse.ArgumentParser(prog="trace_extractor", description=main.__doc__)
    parser.add_argument("--model-id", required=True, help="name on the Hugging Face hub, a folder, facts or smollm2")
    parser.add_argument(
        "--dataset", default="trivia_qa", help="trivia_qa, truthful_qa, a hub name, a file, facts, world"
    )
    parser.add_argument("--num-samples", type=int, default=None, help="questions to take; all by default")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="traces a batch file (default %(default)s)")
    parser.add_argument("--output-dir", default=TRACES_DIR, type=Path)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any setting of `millstream extract`")
    options = parser.parse_args(arguments)
    given = [f"model={options.model_id}", f"num_samples={options.num_samples}", f"shard_records={options.batch_size}"]
    try:
        settings = read_settings(ExtractSettings, [*DEFAULTS, *given, *options.settings])
        questions: str = DATASETS.get(options.dataset) or options.dataset
        done = extract(questions, options.output_dir, **vars(settings))
    except MillstreamError as error:
        print(f"trace_extractor: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadSetting) else 1)
    name_batches(options.output_dir, options.dataset)
    say(f"{done.path}: {done.records:,} traces in {len(list_shards(done.path)[0])} batches")
    if done.interrupted:
        say("interrupted; the same command goes on from here")
        sys.exit(130)
    say(f"Next: python -m millstream.classic.inspect_traces {done.path}")


def name_batches(path: Path, dataset: str) -> None:
    """The old names as links: `trivia_qa_traces_batch_0000.arrow` is the first shard."""
    stem = Path(dataset.split(":")[0]).name.split(".")[0]
    for number in list_shards(path)[0]:
        link = path / f"{stem}_traces_batch_{number:04d}.arrow"
        if not link.is_symlink():
            os.symlink(shard_name(number), link)


if __name__ == "__main__":
    run_script(main, "trace_extractor")
