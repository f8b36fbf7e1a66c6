"""`python -m millstream.classic.trace_extractor`: the old script's flags on `millstream extract`; it resumes."""

import argparse
import os
import sys
from pathlib import Path

from millstream.classic.batch_loader import TRACES_DIR
from millstream.cli.process import run_script
from millstream.core.config import read_settings
from millstream.core.console import printable, say
from millstream.errors import BadSetting, MillstreamError
from millstream.traces.extract import extract
from millstream.traces.kind import ExtractSettings
from millstream.traces.store.manifest import list_shards, shard_name

BATCH_SIZE = 500
DATASETS = {
    "trivia_qa": "trivia_qa:rc.nocontext:train",
    "triviaqa": "trivia_qa:rc.nocontext:train",
    "truthful_qa": "truthful_qa:generation:validation",
    "truthfulqa": "truthful_qa:generation:validation",
}
# As in the old script: the whole trace, 64 new tokens, 5 beams.
DEFAULTS = ["tier=full", "max_new_tokens=64", "num_beams=5", "prompt=plain"]


def main(arguments: list[str] | None = None) -> None:
    """Extract traces of every question, 500 per batch. Run the same command again to resume."""
    parser = argparse.ArgumentParser(prog="trace_extractor", description=main.__doc__)
    parser.add_argument("--model-id", required=True, help="Hugging Face Hub name, a folder, facts or smollm2")
    parser.add_argument(
        "--dataset", default="trivia_qa", help="trivia_qa, truthful_qa, a Hub name, a file, facts or world"
    )
    parser.add_argument("--num-samples", type=int, default=None, help="number of questions (default: all)")
    parser.add_argument(
        "--batch-size", type=int, default=BATCH_SIZE, help="traces per batch file (default %(default)s)"
    )
    parser.add_argument("--output-dir", default=TRACES_DIR, type=Path)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any setting of `millstream extract`")
    options = parser.parse_args(arguments)
    given = [f"model={options.model_id}", f"num_samples={options.num_samples}", f"shard_records={options.batch_size}"]
    try:
        settings = read_settings(ExtractSettings, [*DEFAULTS, *given, *options.settings])
        questions: str = DATASETS.get(options.dataset) or options.dataset
        done = extract(questions, options.output_dir, **vars(settings))
    except MillstreamError as error:
        print(f"trace_extractor: {printable(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadSetting) else 1)
    name_batches(options.output_dir, options.dataset)
    say(f"{done.path}: {done.records:,} traces in {len(list_shards(done.path)[0])} batches")
    if done.interrupted:
        say("interrupted; progress saved. Run the same command to resume")
        sys.exit(130)
    say(f"Next: python -m millstream.classic.inspect_traces {done.path}")


def name_batches(path: Path, dataset: str) -> None:
    """Link the old names to the shards: `trivia_qa_traces_batch_0000.arrow` is the first shard."""
    stem = Path(dataset.split(":")[0]).name.split(".")[0]
    for number in list_shards(path)[0]:
        link = path / f"{stem}_traces_batch_{number:04d}.arrow"
        if not link.is_symlink():
            os.symlink(shard_name(number), link)


if __name__ == "__main__":
    run_script(main, "trace_extractor")
