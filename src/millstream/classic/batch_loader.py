"""TraceBatchLoader and its helpers, as the old scripts knew them. A batch is a shard; nothing is loaded whole."""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypedDict, cast, overload

from millstream.classic.records import NAMES, restore_steps
from millstream.cli.process import run_script
from millstream.errors import MillstreamError
from millstream.traces.store.manifest import check_store, shard_name
from millstream.traces.store.rewrite import subset_records, subset_shards
from millstream.traces.store.traces import Traces

TRACES_DIR = "./traces_data"
ONE_SHARD = "1000TB"
INDEX_FIELD = "dataset_index"

Trace = dict[str, object]


class BatchInfo(TypedDict):
    """One batch, from metadata only."""

    batch_idx: int
    filename: str
    size_mb: float
    num_traces: int


class TraceBatchLoader:
    """Batches and traces of a store. `len` is the number of batches; traces are read lazily.

    >>> loader = TraceBatchLoader("./traces_data")
    >>> loader.get_trace_by_global_id(1234)["question"]
    """

    def __init__(self, traces_dir: str | Path = TRACES_DIR) -> None:
        self.traces_dir = Path(traces_dir)
        self._traces = Traces(traces_dir)
        self._starts = [0]
        for shard in self._traces.shards:
            self._starts.append(self._starts[-1] + shard.records)

    def __len__(self) -> int:
        return len(self._traces.shards)

    def get_batch_info(self) -> list[BatchInfo]:
        """Name, size and number of traces of each batch; no trace is read."""
        return [
            BatchInfo(
                batch_idx=index,
                filename=shard_name(shard.number),
                size_mb=shard.bytes / (1024 * 1024),
                num_traces=shard.records,
            )
            for index, shard in enumerate(self._traces.shards)
        ]

    def get_total_traces(self) -> int:
        return len(self._traces)

    def get_batch(self, batch_idx: int) -> "Batch":
        """One batch as a sequence of traces, each read when it is accessed."""
        if not 0 <= batch_idx < len(self):
            raise IndexError(f"batch {batch_idx} of {len(self)} in {self.traces_dir}")
        return Batch(self, batch_idx, range(self._starts[batch_idx], self._starts[batch_idx + 1]))

    def iter_batches(self) -> Iterator["Batch"]:
        return map(self.get_batch, range(len(self)))

    def iter_traces(self) -> Iterator[Trace]:
        for batch in self.iter_batches():
            yield from batch

    def get_trace_by_global_id(self, global_id: int) -> Trace | None:
        """The trace with this `global_example_id`, found in O(1); None if there is none.

        That is the row in the question set; in a store that does not record it, the record number.
        """
        number = self._global_ids.get(global_id) if self._global_ids is not None else global_id
        return self.trace(number) if number is not None and 0 <= number < len(self._traces) else None

    def trace(self, number: int) -> Trace:
        """The trace with this record number, with the old keys where the store lacks them."""
        batch, row = self._traces.locate(number)
        record = restore_steps(self._traces[number])
        index = record.get(INDEX_FIELD)
        place = {"example_id": row, "global_example_id": number if index is None else index, "batch_number": batch}
        renamed = {theirs: record[ours] for ours, theirs in NAMES.items() if ours in record}
        return {**place, **renamed, **record}

    def answer_lengths(self) -> list[int]:
        """Generated tokens per trace, from shapes alone: all tokens minus the prompt."""
        fields = self._traces.fields
        prompt = next((name for name in (NAMES["prompt_len"], "prompt_len") if name in fields), "")
        if not {"tokens", prompt} <= fields.keys():
            return []
        rows = map(self._traces.row, range(len(self._traces)))
        found = [(row.tensors.get("tokens"), row.values[prompt]) for row in rows]
        return [tokens.shape[-1] - int(str(prompt)) for tokens, prompt in found if tokens and prompt is not None]

    @cached_property
    def _global_ids(self) -> dict[int, int] | None:
        """Record numbers by `global_example_id`, if the traces have that field or their row in the question set."""
        field = next((name for name in ("global_example_id", INDEX_FIELD) if name in self._traces.fields), None)
        if field is None:
            return None
        ids = cast(list[int | None], self._traces.column(field).to_pylist())
        return {number if key is None else key: number for number, key in reversed(list(enumerate(ids)))}


class Batch(Sequence[Trace]):
    """The traces of one batch; keeps none of them in memory."""

    def __init__(self, loader: TraceBatchLoader, batch_idx: int, numbers: range) -> None:
        self.batch_idx = batch_idx
        self._loader = loader
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Trace: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trace]: ...
    def __getitem__(self, index: int | slice) -> Trace | list[Trace]:
        if isinstance(index, slice):
            return [self._loader.trace(number) for number in self._numbers[index]]
        return self._loader.trace(self._numbers[index])

    def __repr__(self) -> str:
        return f"Batch({self.batch_idx}: {len(self)} traces)"


def merge_batches(
    output_file: str | Path = f"{TRACES_DIR}/all_traces_merged.pkl", traces_dir: str | Path = TRACES_DIR
) -> None:
    """Write all batches as one batch to the store `output_file` (a folder, whatever its suffix), streaming."""
    traces = Traces(traces_dir)
    _replace_store(Path(output_file))
    subset_records(traces, Path(output_file), range(len(traces)), shard_bytes=ONE_SHARD)


def extract_batch_subset(
    batch_numbers: Sequence[int], output_file: str | Path, traces_dir: str | Path = TRACES_DIR
) -> None:
    """Copy some batches to the store `output_file` (a folder, whatever its suffix)."""
    shards = Traces(traces_dir).shards
    for number in batch_numbers:
        if not 0 <= number < len(shards):
            raise IndexError(f"batch {number} of {len(shards)} in {traces_dir}")
    _replace_store(Path(output_file))
    subset_shards(Path(traces_dir), Path(output_file), [shards[number].number for number in batch_numbers])


def _replace_store(path: Path) -> None:
    """Replace the output of an earlier run, as the old script did; refuse anything that is not a store."""
    if path.exists():
        check_store(path)
        shutil.rmtree(path)


def main(arguments: list[str] | None = None) -> None:
    """List the batches of a folder."""
    parser = argparse.ArgumentParser(prog="batch_loader", description=main.__doc__)
    parser.add_argument("traces_dir", nargs="?", default=TRACES_DIR, type=Path)
    try:
        loader = TraceBatchLoader(parser.parse_args(arguments).traces_dir)
    except MillstreamError as error:
        sys.exit(f"batch_loader: {error}")
    for info in loader.get_batch_info():
        print(f"Batch {info['batch_idx']}: {info['filename']}, {info['num_traces']} traces, {info['size_mb']:.2f} MB")
    print(f"Total: {loader.get_total_traces()} traces in {len(loader)} batches")


if __name__ == "__main__":
    run_script(main, "batch_loader")
