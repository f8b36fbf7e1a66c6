"""Summary of a store or of a file to import (counts, fields, lengths, examples), and comparison of two."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.core.console import Progress, format_bytes, plural, printable, quoted, silent
from millstream.core.record import Tensor, as_tensor, crc32c, plain
from millstream.errors import BadSource, StoreError
from millstream.traces.convert import imported_records
from millstream.traces.store.format import TensorRow, id_field
from millstream.traces.store.manifest import list_shards, shard_name
from millstream.traces.store.sidecar import load_sidecar
from millstream.traces.store.traces import Traces

TIMINGS = ("generate_s", "replay_s")


@dataclass
class FieldSummary:
    """One field over all records: mean shape of tensors; mean, minimum and maximum of `measure` of others."""

    kind: str
    nulls: int = 0
    count: int = 0
    mean_shape: list[float] | None = None
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    measure: str = ""


@dataclass
class Summary:
    """Summary of a store or of a file to import."""

    path: str
    records: int
    shards: int
    bytes: int
    compression: str
    seconds: float
    open_shards: int
    fields: dict[str, FieldSummary] = field(default_factory=dict[str, FieldSummary])
    examples: list[dict[str, object]] = field(default_factory=list[dict[str, object]])


@dataclass
class Comparison:
    """Two sets of records matched by id."""

    same: int = 0
    different: int = 0
    only_a: int = 0
    only_b: int = 0
    differing_fields: dict[str, int] = field(default_factory=dict[str, int])
    first_different: list[object] = field(default_factory=list[object])


def summarise(path: Path, *, examples: int = 3, progress: Progress = silent) -> Summary:
    """Statistics from the sidecars alone; a file to import is read once, one trace at a time."""
    if path.is_file():
        return _summarise_file(path, examples)
    traces = Traces(path)
    summary = Summary(
        str(path),
        len(traces),
        len(traces.shards),
        traces.num_bytes,
        traces.compression,
        sum(shard.seconds for shard in traces.shards),
        len(list_shards(path)[1]),
    )
    tallies = {name: _Tally(str(kind)) for name, kind in traces.fields.items()}
    picks = np.linspace(0, len(traces) - 1, min(examples, len(traces))).astype(int).tolist()
    done = 0
    for shard in traces.shards:
        sidecar = load_sidecar(path, shard, traces.fields)
        for name, tally in tallies.items():
            tensors = sidecar.tensor(name)
            if tensors is not None:
                tally.add_shapes(tensors.all_shapes(), nulls=int((tensors.offsets < 0).sum()))
            elif isinstance(traces.fields[name], Tensor):
                tally.nulls += shard.records
            else:
                tally.add_column(sidecar.column(name))
        done += shard.records
        progress(done, shard_name(shard.number))
    for number in picks:
        row, shard = traces.row(number), traces.shards[traces.locate(number)[0]]
        summary.examples.append(_example(number, shard_name(shard.number), row.values, row.tensors))
    summary.fields = {name: tally.summary() for name, tally in tallies.items()}
    return summary


def compare(a: Path, b: Path, *, tolerance: float = 0.0, progress: Progress = silent) -> Comparison:
    """Match records of two stores, or of a store and a file to import, by id and compare the fields of each pair.

    Timings differ between any two extractions and are left out. Numbers x and y are the same if |x - y| is at most
    `tolerance * (1 + |y|)`.
    """
    if a.is_file() and b.is_file():
        raise StoreError(f"{a} and {b}: neither is a store. Convert one first: millstream convert {quoted(b)} traces/")
    if b.is_file():  # look up the records of the file in the store
        result = compare(b, a, tolerance=tolerance, progress=progress)
        return replace(result, only_a=result.only_b, only_b=result.only_a)
    other = Traces(b)
    if a.is_file():
        alike, records = False, _file_fingerprints(a, keep=bool(tolerance))
    else:
        mine = Traces(a)
        alike = _are_stored_alike(mine, other)
        records = _store_fingerprints(mine, alike, keep=bool(tolerance))
    result = Comparison()
    for seen, (key, fingerprints, values) in enumerate(records, start=1):
        progress(seen)
        try:
            number = other.find(key)
        except KeyError:
            result.only_a += 1
            continue
        theirs = dict(_fingerprints(other, number, alike))
        names = [name for name in dict.fromkeys([*fingerprints, *theirs]) if name not in TIMINGS]
        differing = [name for name in names if repr(fingerprints.get(name)) != repr(theirs.get(name))]
        if differing and tolerance:
            second = other[number]
            differing = [name for name in differing if not _is_close(values.get(name), second.get(name), tolerance)]
        for name in differing:
            result.differing_fields[name] = result.differing_fields.get(name, 0) + 1
        if differing:
            result.different += 1
            result.first_different = [*result.first_different, key][:5]
        else:
            result.same += 1
    result.only_b = max(0, len(other) - result.same - result.different)
    return result


def show_summary(summary: Summary) -> str:
    """The summary as text for a terminal."""
    mean = summary.bytes / summary.records if summary.records else 0
    lines = [
        summary.path,
        f"  {summary.records} records, {summary.shards} shards, {format_bytes(summary.bytes)}"
        f" ({format_bytes(mean)} per record), compression {summary.compression}",
    ]
    if summary.seconds:
        lines.append(f"  written in {summary.seconds:.1f} s")
    if summary.open_shards:
        lines.append(
            f"  {plural(summary.open_shards, 'shard')} not sealed: a writer is running, or was interrupted; then run: "
            f"millstream repair {quoted(summary.path)}"
        )
    width = max(map(len, summary.fields), default=0)
    lines += ["  fields", *(f"    {name:<{width}}  {_field(field)}" for name, field in summary.fields.items())]
    for example in summary.examples:
        lines.append(f"  record {example['number']} ({example['shard']})")
        shown = {name: value for name, value in example.items() if name not in ("number", "shard")}
        lines += [f"    {name:<{width}}  {_value(value)}" for name, value in shown.items()]
    return "\n".join(map(printable, lines))


def show_comparison(comparison: Comparison, a: str, b: str) -> str:
    """The comparison as text for a terminal."""
    lines = [
        f"{a} against {b}, by id",
        f"  identical  {comparison.same}",
        f"  different  {comparison.different}",
        f"  only in {a}  {comparison.only_a}",
        f"  only in {b}  {comparison.only_b}",
    ]
    if comparison.different:
        fields = ", ".join(f"{name} ({count})" for name, count in comparison.differing_fields.items())
        lines.append(f"  differing fields: {fields}; first: {', '.join(map(str, comparison.first_different))}")
    return "\n".join(map(printable, lines))


class _Tally:
    """Running statistics of one field."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.nulls = self.count = 0
        self.shape_sum: NDArray[np.int64] | None = None
        self.total, self.low, self.high = 0.0, np.inf, -np.inf
        self.measure = ""

    def add_shapes(self, shapes: NDArray[np.int64], nulls: int = 0) -> None:
        """Add the shapes of many tensors, one per row."""
        self.nulls += nulls
        self.count += len(shapes)
        if len(shapes):
            self.shape_sum = shapes.sum(axis=0) + (0 if self.shape_sum is None else self.shape_sum)

    def add_column(self, column: pa.Array) -> None:
        """Add many scalars: characters of texts, items of lists, values of numbers."""
        self.nulls += column.null_count
        values = column.drop_null()
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            self.measure = "characters" if pa.types.is_string(kind) else "bytes"
            values = pc.utf8_length(values) if pa.types.is_string(kind) else pc.binary_length(values)
        elif pa.types.is_list(kind):
            self.measure, values = "items", pc.list_value_length(values)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            self.measure = "value"
        else:
            self.count += len(values)
            return
        numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
        numbers = numbers[~np.isnan(numbers)]
        self.count += len(numbers)
        if len(numbers):
            self.total += float(numbers.sum())
            self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))

    def summary(self) -> FieldSummary:
        result = FieldSummary(self.kind, self.nulls, self.count)
        if self.shape_sum is not None:
            result.mean_shape = (self.shape_sum / self.count).round(1).tolist()
        if self.count and self.low <= self.high:
            result.mean, result.min, result.max = self.total / self.count, self.low, self.high
            result.measure = self.measure
        return result


def _summarise_file(path: Path, examples: int) -> Summary:
    tallies: dict[str, _Tally] = {}
    count = 0
    shown: list[dict[str, object]] = []
    for record in imported_records(path):
        for name, value in record.items():
            raw = as_tensor(name, value)
            tally = tallies.setdefault(name, _Tally(str(raw.kind) if raw else type(value).__name__))
            if raw is None:
                try:
                    tally.add_column(pa.array([plain(value)]))
                except pa.ArrowException as error:
                    raise BadSource(f"{path}: record {count}: field {name!r}: cannot be stored: {error}") from None
            else:
                tally.add_shapes(np.array([raw.shape]))
        if len(shown) < examples:
            tensors = {n: TensorRow(0, raw.shape, (), None) for n, v in record.items() if (raw := as_tensor(n, v))}
            values = {name: value for name, value in record.items() if name not in tensors}
            shown.append(_example(count, path.name, values, tensors))
        count += 1
    summary = Summary(str(path), count, 1, path.stat().st_size, "unknown", 0.0, 0)
    summary.fields = {name: tally.summary() for name, tally in tallies.items()}
    summary.examples = shown
    return summary


def _example(
    number: int, file: str, values: Mapping[str, object], tensors: Mapping[str, TensorRow | None]
) -> dict[str, object]:
    shapes = {name: list(tensor.shape) if tensor else None for name, tensor in tensors.items()}
    return {**values, **shapes, "number": number, "shard": file}


def _are_stored_alike(one: Traces, other: Traces) -> bool:
    """Whether equal tensors have equal checksums: compressed and cut into slices in the same way."""
    sidecars = [load_sidecar(traces.path, shard, traces.fields) for traces in (one, other) for shard in traces.shards]
    sliced = {(name, k.sliced) for sidecar in sidecars for name, k in sidecar.schema.items() if isinstance(k, Tensor)}
    return len({sidecar.compression for sidecar in sidecars}) < 2 and len(sliced) == len({name for name, _ in sliced})


Fingerprinted = tuple[object, dict[str, object], Mapping[str, object]]  # id, fingerprints, values if they are kept


def _store_fingerprints(traces: Traces, stored: bool, *, keep: bool) -> Iterable[Fingerprinted]:
    for number in range(len(traces)):
        fingerprints = dict(_fingerprints(traces, number, stored))
        yield fingerprints.get(id_field(fingerprints)), fingerprints, traces[number] if keep else {}


def _fingerprints(traces: Traces, number: int, stored: bool) -> Iterable[tuple[str, object]]:
    """Each field of a record as a small value to compare; `stored`: of the stored bytes, without reading tensors."""
    if stored:
        row = traces.row(number)
        for name, place in row.tensors.items():
            yield name, place and (str(traces.fields[name]), place.shape, place.crc32c)
        yield from row.values.items()
        return
    for name, value in traces[number].items():
        yield name, _fingerprint(name, value)


def _file_fingerprints(path: Path, *, keep: bool) -> Iterable[Fingerprinted]:
    for record in imported_records(path):
        fingerprints = {name: _fingerprint(name, value) for name, value in record.items()}
        yield record[id_field(record)], fingerprints, record if keep else {}


def _is_close(a: object, b: object, tolerance: float) -> bool:
    """Whether two values are numbers, or tensors of numbers of one shape, that are the same within the tolerance."""
    try:
        first, second = (np.asarray(_numbers(value), np.float64) for value in (a, b))
    except (TypeError, ValueError):  # texts, None, lists of different lengths
        return False
    return first.shape == second.shape and np.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True)


def _numbers(value: Any) -> Any:
    if isinstance(value, str | bytes | None):
        raise TypeError(f"{type(value).__name__}: not numbers")
    return value.double() if hasattr(value, "double") else value  # bfloat16 tensors are of torch


def _fingerprint(name: str, value: object) -> object:
    raw = as_tensor(name, value)
    return (raw.kind.dtype, raw.shape, crc32c(raw.data)) if raw else value


def _field(field: FieldSummary) -> str:
    parts = [field.kind]
    if field.mean_shape is not None:
        parts.append(f"mean shape [{', '.join(f'{n:g}' for n in field.mean_shape)}]")
    if field.mean is not None:
        parts.append(f"{field.measure} {field.mean:.4g} ({field.min:g} to {field.max:g})")
    if field.nulls:
        parts.append(f"{field.nulls} None")
    return ", ".join(parts)


def _value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 90 else text[:87] + "..."
