"""`python -m millstream.classic.inspect_traces [DIR]`: the old summary of a folder of traces, from metadata."""

import argparse
import sys
from pathlib import Path

import numpy as np

from millstream.classic.batch_loader import TRACES_DIR, Trace, TraceBatchLoader
from millstream.cli.process import run_script
from millstream.core.console import printable, show
from millstream.errors import MillstreamError
from millstream.traces.store.inspect import compare, show_comparison, show_summary, summarise


def main(arguments: list[str] | None = None) -> None:
    """Print global statistics, examples from every batch and, with --compare, a comparison with an old file."""
    parser = argparse.ArgumentParser(prog="inspect_traces", description=main.__doc__)
    parser.add_argument("traces_dir", nargs="?", default=TRACES_DIR, type=Path)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an old .pkl, .pkl.gz or .pt file, or a store")
    options = parser.parse_args(arguments)
    try:
        inspect(options.traces_dir, options.compare)
    except MillstreamError as error:
        sys.exit(f"inspect_traces: {printable(str(error))}")


def inspect(traces_dir: Path, other: Path | None) -> None:
    loader = TraceBatchLoader(traces_dir)
    print(show_summary(summarise(traces_dir, examples=0)))
    for info in loader.get_batch_info():
        print(f"  batch {info['batch_idx']}: {info['filename']}, {info['num_traces']} traces, {info['size_mb']:.2f} MB")
    lengths = np.array(loader.answer_lengths(), np.int64)
    if len(lengths):
        print(
            f"  generated tokens: mean {lengths.mean():.2f}, median {np.median(lengths):.2f}, "
            f"min {lengths.min()}, max {lengths.max()}, std {lengths.std():.2f}"
        )
    for batch in loader.iter_batches():
        if len(batch):
            _show_example(batch[0])
    if other is not None:
        print(show_comparison(compare(other, traces_dir), str(other), str(traces_dir)))


def _show_example(trace: Trace) -> None:
    print(f"  trace {trace['global_example_id']} (batch {trace['batch_number']}, example {trace['example_id']})")
    for name in ("question", "generated_answer", "generated_answer_clean", "answer"):
        if name in trace:
            show(f"    {name}: {str(trace[name])[:80]}")


if __name__ == "__main__":
    run_script(main, "inspect_traces")
