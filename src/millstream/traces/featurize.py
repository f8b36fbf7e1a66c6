"""`featurize`: compute features of a store once and keep them in another store. Run again to resume."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from millstream.core.batches import ColumnBatch, fetch_batch
from millstream.core.config import parse_bytes, read_settings
from millstream.core.console import Progress, silent
from millstream.core.engine import Engine
from millstream.core.features import Feature, fields
from millstream.core.records import Array, Tensor
from millstream.errors import BadSetting, SchemaMismatch
from millstream.traces.features import Token, layers
from millstream.traces.graphs import GraphFeature, graphs
from millstream.traces.settings import FeaturizeSettings
from millstream.traces.store.rewrite import Written
from millstream.traces.store.shard import ID_FIELD
from millstream.traces.store.traces import Traces
from millstream.traces.store.writer import TraceWriter, done_records, prepare_store

_CHUNK_RECORDS = 256  # records per job


@dataclass(frozen=True)
class Featurized(Written):
    """A store of features; `left_out` records lack the tensors (their extraction failed)."""

    left_out: int


def featurize(
    source: str | Path,
    out: str | Path,
    *,
    engine: Engine | str = "local",
    progress: Progress = silent,
    **settings: object,
) -> Featurized:
    """Compute a feature of every record of a store; write it with the record's scalars to the store `out`.

    >>> done = ms.featurize("full/", "layers/", feature="layers", token="last")
    """
    chosen = read_settings(FeaturizeSettings, settings)
    traces = Traces(source)
    _check(chosen, traces)
    if ID_FIELD not in traces.fields:
        raise SchemaMismatch(f"{source}: its records have no {ID_FIELD!r}, which is needed to resume")
    path = Path(out)
    prepare_store(path, _store_config(chosen, traces))
    ids: list[object] = traces.column(ID_FIELD).to_pylist()
    chunks = [list(range(start, min(start + _CHUNK_RECORDS, len(ids)))) for start in range(0, len(ids), _CHUNK_RECORDS)]

    def left(chunk: Sequence[int]) -> list[int] | None:
        known = {name for (name,) in done_records(path, [ID_FIELD])}
        return [number for number in chunk if ids[number] not in known] or None

    missing = set(left(range(len(ids))) or ())
    jobs = [rest for chunk in chunks if (rest := [number for number in chunk if number in missing])]
    done, left_out = len(ids) - len(missing), 0
    chosen_engine = engine if isinstance(engine, Engine) else Engine(engine)
    progress(done)
    for written, without in chosen_engine.run(partial(FeaturizeWorker, Path(source), path, chosen), jobs, redo=left):
        done, left_out = done + written + without, left_out + without
        progress(done)
    result = Traces(path)
    return Featurized(path, len(result), result.num_bytes, left_out)


class FeaturizeWorker:
    """Computes the feature of some records and appends it to the output store."""

    def __init__(self, source: Path, out: Path, settings: FeaturizeSettings) -> None:
        self._traces = Traces(source)
        self._feature = make_feature(settings)
        self._memory = parse_bytes(settings.memory)
        self._scalars = [name for name, kind in self._traces.fields.items() if not isinstance(kind, Tensor)]
        self._writer = TraceWriter(out, config=_store_config(settings, self._traces), shard_bytes=settings.shard_bytes)

    def do(self, numbers: list[int]) -> tuple[int, int]:
        """How many records were written, and how many lack the tensors."""
        wanted = self._feature.fields or self._traces.field_names
        tensors = [name for name in wanted if isinstance(self._traces.fields.get(name.split("[")[0]), Tensor)]
        whole = [number for number in numbers if self._has(number, tensors)]
        sizes = np.maximum(self._traces.sizes(np.array(whole, np.int64), list(wanted)), 1)
        groups = np.cumsum(sizes) // max(1, self._memory // 4)
        for group in np.unique(groups):
            self._write([number for number, own in zip(whole, groups, strict=True) if own == group])
        return len(whole), len(numbers) - len(whole)

    def close(self) -> None:
        self._writer.close()

    def _has(self, number: int, tensors: Sequence[str]) -> bool:
        row = self._traces.row(number)
        return all(row.tensors.get(name.split("[")[0]) is not None for name in tensors)

    def _write(self, numbers: list[int]) -> None:
        scalars = self._traces.fetch(numbers, self._scalars)
        single = isinstance(self._feature, GraphFeature)  # its output is one graph for the whole batch
        for places in [[place] for place in range(len(numbers))] if single else [list(range(len(numbers)))]:
            some = np.array([numbers[place] for place in places], np.int64)
            with _bad_setting():
                batch = fetch_batch(self._traces, some, self._feature.fields)
                assert isinstance(batch, ColumnBatch)
                made = cast("Mapping[str, Array]", self._feature(batch))
            for row, place in enumerate(places):
                tensors = made if single else {name: values[row] for name, values in made.items()}
                about = {name: scalars[name][place] for name in self._scalars if name not in tensors}
                self._writer.append({**about, **tensors})


def make_feature(settings: FeaturizeSettings) -> Feature:
    """The feature that the settings describe."""
    if settings.feature == "layers":
        place = int(settings.token) if settings.token.lstrip("-").isdigit() else settings.token
        return layers(cast("Token", place), field=settings.field, dtype=settings.dtype)
    if settings.feature == "graphs":
        return graphs(settings.k, threshold=settings.threshold, dtype=settings.dtype)
    if settings.feature == "fields" and settings.fields:
        names = re.split(r",(?![^\[]*\])", settings.fields)  # not at the comma in hidden[8,16]
        return fields(*(name.strip() for name in names), pad=False)
    raise BadSetting(f"feature={settings.feature}: must be one of layers, graphs, or fields with fields=NAME,NAME")


def _check(settings: FeaturizeSettings, source: Traces) -> None:
    """Raise BadSetting before a store is created."""
    with _bad_setting():
        for size in (settings.memory, settings.shard_bytes or 1):
            parse_bytes(size)
        np.dtype(settings.dtype)
        source.sizes(np.empty(0, np.int64), list(make_feature(settings).fields or ()))


def _store_config(settings: FeaturizeSettings, source: Traces) -> dict[str, object]:
    """What determines the content of the store; it must not change on resume."""
    ignored = ("shard_bytes", "memory")
    own: dict[str, object] = {key: value for key, value in asdict(settings).items() if key not in ignored}
    return {"source": source.fingerprint, **own}


@contextmanager
def _bad_setting() -> Generator[None]:
    """Report what a feature cannot be computed from as a bad setting."""
    try:
        yield
    except (ValueError, TypeError, IndexError) as error:
        raise BadSetting(str(error)) from None
