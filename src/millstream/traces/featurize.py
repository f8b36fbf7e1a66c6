"""`featurize`: features of a store, computed once and kept in another store. Run again, it goes on."""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from millstream.config import parse_bytes, read_settings
from millstream.console import Progress, silent
from millstream.dataset import features
from millstream.dataset.batch import Feature, TraceBatch, fetch_batch
from millstream.dataset.graph_feature import GraphFeature
from millstream.engine import Engine
from millstream.errors import BadSetting, SchemaMismatch
from millstream.records import Array, Tensor
from millstream.store.layout import read_manifest
from millstream.store.recover import ID_FIELD, recover_all
from millstream.store.rewrite import Written
from millstream.store.table import read_column
from millstream.store.traces import Traces
from millstream.store.writer import TraceWriter

_CHUNK_RECORDS = 256  # of one job


@dataclass(frozen=True)
class FeaturizeSettings:
    """What `millstream featurize` takes as `key=value`."""

    feature: str = "layers"  # layers, graphs, fields
    token: str = "last"  # of layers: first, last, mean, last_prompt, first_answer, mean_answer, or a number
    field: str = "hidden"  # of layers: the field with the states
    fields: str | None = None  # of fields: names with commas between them
    k: int | None = 8  # of graphs: edges a token
    threshold: float = 0.0  # of graphs: attention an edge has at least
    dtype: str = "float16"  # of what is kept
    shard_bytes: int | str | None = None  # of a shard, about; 512MB if not given
    memory: int | str = "1GB"  # of traces that are worked on at once

    def make(self) -> Feature:
        if self.feature == "layers":
            place = int(self.token) if self.token.lstrip("-").isdigit() else self.token
            return features.layers(cast("features.Token", place), field=self.field, dtype=self.dtype)
        if self.feature == "graphs":
            return features.graphs(self.k, threshold=self.threshold, dtype=self.dtype)
        if self.feature == "fields" and self.fields:
            names = re.split(r",(?![^\[]*\])", self.fields)  # not at the comma of hidden[8,16]
            return features.fields(*(name.strip() for name in names), pad=False)
        raise BadSetting(f"feature={self.feature}: there is layers, graphs, and fields with fields=NAME,NAME")

    def check(self, source: Traces) -> None:
        """A wrong setting is said before a store is made."""
        with _bad_setting():
            for size in (self.memory, self.shard_bytes or 1):
                parse_bytes(size)
            np.dtype(self.dtype)
            source.sizes(np.empty(0, np.int64), list(self.make().fields or ()))

    def remembered(self, source: Traces) -> dict[str, object]:
        ignored = ("shard_bytes", "memory")
        own: dict[str, object] = {key: value for key, value in asdict(self).items() if key not in ignored}
        return {"source": source.fingerprint, **own}


@dataclass(frozen=True)
class Featurized(Written):
    """A store of features; `left_out` records had no such tensors (they failed when they were extracted)."""

    left_out: int


def featurize(
    source: str | Path,
    out: str | Path,
    *,
    engine: Engine | str = "local",
    progress: Progress = silent,
    **settings: object,
) -> Featurized:
    """Keep a feature of every record of a store, with the record's scalars, in the store `out`.

    >>> done = ms.featurize("full/", "layers/", feature="layers", token="last")
    """
    chosen = read_settings(FeaturizeSettings, settings)
    traces = Traces(source)
    chosen.check(traces)
    if ID_FIELD not in traces.fields:
        raise SchemaMismatch(f"{source}: its records have no {ID_FIELD!r}, by which a second run knows what is done")
    path = Path(out)
    with TraceWriter(path, config=chosen.remembered(traces)):
        pass
    ids: list[object] = traces.column(ID_FIELD).to_pylist()
    chunks = [list(range(start, min(start + _CHUNK_RECORDS, len(ids)))) for start in range(0, len(ids), _CHUNK_RECORDS)]

    def left(chunk: Sequence[int]) -> list[int] | None:
        recover_all(path)
        manifest = read_manifest(path)
        known = set(read_column(path, manifest, ID_FIELD).to_pylist()) if manifest.shards else set[object]()
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
    """Computes the feature of some records and appends it to the other store."""

    def __init__(self, source: Path, out: Path, settings: FeaturizeSettings) -> None:
        self._traces = Traces(source)
        self._feature = settings.make()
        self._memory = parse_bytes(settings.memory)
        self._scalars = [name for name, kind in self._traces.fields.items() if not isinstance(kind, Tensor)]
        self._writer = TraceWriter(out, config=settings.remembered(self._traces), shard_bytes=settings.shard_bytes)

    def do(self, numbers: list[int]) -> tuple[int, int]:
        """How many were written, and how many have no such tensors."""
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
        single = isinstance(self._feature, GraphFeature)  # whose output is one graph of the whole batch
        for places in [[place] for place in range(len(numbers))] if single else [list(range(len(numbers)))]:
            some = np.array([numbers[place] for place in places], np.int64)
            with _bad_setting():
                batch = fetch_batch(self._traces, some, self._feature.fields)
                assert isinstance(batch, TraceBatch)
                made = cast("Mapping[str, Array]", self._feature(batch))
            for row, place in enumerate(places):
                tensors = made if single else {name: values[row] for name, values in made.items()}
                about = {name: scalars[name][place] for name in self._scalars if name not in tensors}
                self._writer.append({**about, **tensors})


@contextmanager
def _bad_setting() -> Generator[None]:
    """What a feature cannot be computed for was asked for by a setting."""
    try:
        yield
    except (ValueError, TypeError, IndexError) as error:
        raise BadSetting(str(error)) from None
