"""Trace files of other programs -> a store, one trace at a time, by importers. Run again to resume."""

import glob
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from millstream.core.config import parse_bytes, parse_json
from millstream.core.console import Progress, ignore_message, quoted, silent
from millstream.core.files import publish_json
from millstream.core.hf_datasets import data_files, is_datasets_folder
from millstream.core.record import RawTensor, as_tensor
from millstream.core.registry import extensions
from millstream.core.remote import spool_folder, to_path
from millstream.errors import BadSource, SchemaMismatch, SourceError, StoreError
from millstream.traces.store.format import id_field
from millstream.traces.store.locks import only_job
from millstream.traces.store.manifest import IDS, MANIFEST
from millstream.traces.store.repair import wait_for_writers
from millstream.traces.store.rewrite import Written
from millstream.traces.store.traces import Traces
from millstream.traces.store.writer import TraceWriter

if TYPE_CHECKING:
    from millstream.core.features import Feature
    from millstream.traces.graphs import Wiring

PROGRESS = "converted.json"  # number of records from each finished file
_COPIES = 2  # of a trace in memory: as it was decoded, and as it is written
RESTART = ""  # a key of it while the records are being removed, so that an interrupted removal is completed


class Importer(Protocol):
    """A module that converts the files of another program into trace records.

    Importing it must be quick: `ms.open` tries every importer on a file.
    """

    SUFFIXES: tuple[str, ...]
    AXES: Mapping[tuple[str, int], str]  # (field, number of axes) -> names of the axes

    def recognises(self, path: Path) -> bool: ...

    def has_one_record(self, path: Path) -> bool:
        """Whether files such as this have one record each; they share shards."""
        ...

    def describe(self, path: Path, *, memory: int | None = None) -> str:
        """The content of a file, in a few words; files with different contents cannot share a store."""
        ...

    def records(
        self, path: Path, *, notify: Callable[[str], None], memory: int | None = None
    ) -> Iterator[dict[str, object]]:
        """The records of a file, one in memory at a time; decoding one takes up to `memory` bytes."""
        ...


class ImportedFields(Protocol):
    """A module that knows stores whose fields have names or shapes of another program."""

    NAMES: Mapping[str, str]  # our name of a field -> its name in such a store

    def layer_feature(self, field_names: Sequence[str]) -> "Feature | None":
        """The input of a net over layers from a store with these fields; None for stores of other importers."""
        ...

    def graph_feature(
        self, field_names: Sequence[str], *, k: int | None, threshold: float, wiring: "Wiring"
    ) -> "Feature | None":
        """The input of a net over token graphs; None for stores of other importers."""
        ...

    def shapes_field(self, field: str) -> str:
        """The field with the shapes of the pieces of `field`, if it is stored in pieces."""
        ...

    def join(self, field: str, number: int, values: Any, shapes: Sequence[Sequence[int]]) -> Any:
        """The pieces [layer, value] of a record's field as one tensor [layer, ...]."""
        ...


def importers() -> list[Importer]:
    """All installed importers."""
    return [cast(Importer, module) for module in extensions("importers")]


def imported_fields() -> list[ImportedFields]:
    """The modules for stores with fields of other programs."""
    return [cast(ImportedFields, module) for module in extensions("imported_fields")]


def names_of(field: str) -> list[str]:
    """The names of a field in stores: ours first, then those of other programs."""
    return [field, *(fields.NAMES[field] for fields in imported_fields() if field in fields.NAMES)]


def importer_of(path: Path) -> Importer:
    """The importer that recognises a file."""
    for importer in importers():
        if importer.recognises(path):
            return importer
    known = ", ".join(suffix for importer in importers() for suffix in importer.SUFFIXES)
    raise BadSource(f"{path}: cannot be imported; must be one of {known}, or a folder that datasets saved")


def expand(patterns: Sequence[str]) -> list[Path]:
    """The files behind paths, folders and glob patterns, sorted, each once."""
    suffixes = tuple(suffix for importer in importers() for suffix in importer.SUFFIXES)
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found = sorted((p for p in path.iterdir() if p.name.lower().endswith(suffixes)), key=_natural)
            if is_datasets_folder(path):
                if found:
                    raise BadSource(
                        f"{path}: a dataset of Hugging Face, but {found[0].name} is in it too. Move it away"
                    )
                found = data_files(path)
        else:
            found = [path] if path.exists() else sorted(map(Path, glob.glob(pattern, recursive=True)), key=_natural)
        if not found:
            raise BadSource(
                f"{pattern}: no such file. Give {', '.join(suffixes)} files, a folder that datasets saved, or a quoted "
                "pattern"
            )
        files += found
    return list(dict.fromkeys(files))


def _natural(path: Path) -> list[int | str]:
    """Sorts hs_2 before hs_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def convert(
    files: Sequence[Path],
    out: Path,
    *,
    compression: Literal["none", "lz4", "zstd"] | None = None,
    memory: int | str | None = None,
    notify: Callable[[str], None] = ignore_message,
    progress: Progress = silent,
) -> Written:
    """Import files into a store within `memory`, by default the free memory.

    A shard ends with the last record of its file, unless files have one record each.
    """
    share = None if memory is None else parse_bytes(memory) // _COPIES
    _check_contents(files, share)
    out = to_path(out)
    with only_job(out):
        if RESTART in _finished(out):
            _remove_records(out)
        try:
            return _convert(files, out, compression, notify, progress, {}, share)
        except NewField as error:
            notify(f"{error}; starting over with the fields of all traces")
            fields = _fields_of_all(files, share)
            _remove_records(out)
            return _convert(files, out, compression, notify, progress, fields, share)


class NewField(SchemaMismatch):
    """A trace has a field that the first one lacks."""


def _convert(
    files: Sequence[Path],
    out: Path,
    compression: Literal["none", "lz4", "zstd"] | None,
    notify: Callable[[str], None],
    progress: Progress,
    fields: dict[str, None],
    share: int | None,
) -> Written:
    if (out / MANIFEST).exists():
        wait_for_writers(spool_folder(out))  # they recover records of an interrupted conversion
    groups = _groups(files)
    config = {"converted": list(map(_described, groups))}
    writer: TraceWriter | None = TraceWriter(out, config=config) if (out / MANIFEST).exists() else None
    finished = _finished(out)
    keyed = list(zip(groups, _keys([group[0] for group in groups]), strict=True))
    left = [(group, key) for group, key in keyed if key not in finished]
    partial = _partial_ids(out, sum(finished.values())) if writer and left else []
    done = sum(_num_bytes(group) for group, key in keyed if key in finished)
    progress(done, "")
    try:
        for group, key in left:
            count = 0
            found = (record for file in group for record in imported_records(file, notify, memory=share))
            for record in _after(partial, found, out):
                if writer is None:
                    schema = _axes(record, importer_of(group[0]).AXES)
                    writer = TraceWriter(out, config=config, compression=compression, schema=schema)
                whole = _complete(record, writer.fields or list({**record, **fields}), group[0])
                try:
                    writer.append(whole)
                except SchemaMismatch as error:
                    raise SchemaMismatch(f"{group[0].name}: trace {_id_of(record)!r}: {error}") from None
                del record, whole  # before the next one is read
                count += 1
                progress(done, f"{group[0].name}: trace {len(partial) + count}")
            if writer is not None:
                writer.seal()
                finished[key] = len(partial) + count
                publish_json(out / PROGRESS, finished)
            partial = []
            done += _num_bytes(group)
            progress(done, group[0].name)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise BadSource(f"{', '.join(map(str, files))}: contain no traces")
    traces = Traces(out)
    return Written(out, len(traces), traces.num_bytes)


def _partial_ids(out: Path, num_finished: int) -> list[str]:
    """Ids of the records after those of finished files: the first ones of the file that was interrupted."""
    traces = Traces(out)
    if len(traces) < num_finished:
        raise StoreError(f"{out}: has {len(traces)} of the {num_finished} records that were converted. {_again(out)}")
    return [str(name) for name in traces.ids[num_finished:]] if len(traces) else []


def _after(partial: Sequence[str], records: Iterator[dict[str, object]], out: Path) -> Iterator[dict[str, object]]:
    """The records after the first ones, which are already in the store; StoreError if other ones are."""
    for found in partial:
        if str(_id_of(next(records, dict[str, object]()))) != found:
            raise StoreError(f"{out}: record {found!r} is not of the files to convert in their order. {_again(out)}")
    yield from records


def _again(out: Path) -> str:
    return f"Remove {quoted(out)}, or choose another folder, and convert the files again"


def imported_records(
    file: Path, notify: Callable[[str], None] = ignore_message, *, memory: int | None = None
) -> Iterator[dict[str, object]]:
    """The records of one file, each with an id, one in memory at a time."""
    stem, importer = file.name.split(".")[0], importer_of(file)
    position = 0  # enumerate() would keep a record in memory while the next one is read
    for record in importer.records(file, notify=notify, memory=memory):
        if _id_of(record) is None:
            record[id_field(record)] = stem if importer.has_one_record(file) else f"{stem}:{position}"
        yield record
        del record
        position += 1  # noqa: SIM113


def _id_of(record: Mapping[str, object]) -> object:
    return record.get(id_field(record))


def _groups(files: Sequence[Path]) -> list[list[Path]]:
    """The files of each part of a conversion that ends with a shard: one, or neighbours with one record each."""
    groups: list[list[Path]] = []
    for file in files:
        if groups and all(importer_of(one).has_one_record(one) for one in (groups[-1][0], file)):
            groups[-1].append(file)
        else:
            groups.append([file])
    return groups


def _described(group: Sequence[Path]) -> dict[str, object]:
    """A group in the configuration of the store."""
    found: dict[str, object] = {"name": group[0].name, "bytes": _num_bytes(group)}
    return found | ({"files": len(group)} if len(group) > 1 else {})


def _num_bytes(group: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in group)


def _check_contents(files: Sequence[Path], memory: int | None) -> None:
    every = set(files)
    for file in files:
        if (packed := file.with_name(f"{file.name}.gz")) in every:
            raise BadSource(
                f"{file} and {packed}: probably the same traces, which would be stored twice. Give one of them"
            )
    first: dict[str, Path] = {}
    for file in files:
        with suppress(SourceError):  # raised again when the file is imported
            first.setdefault(importer_of(file).describe(file, memory=memory), file)
    if len(first) > 1:
        found = ", ".join(f"{file} contains {content}" for content, file in first.items())
        raise SchemaMismatch(f"files of different kinds: {found}. Convert each kind into its own store")


def _keys(files: Sequence[Path]) -> list[str]:
    """Keys of files in `converted.json`: their names, with a number if a name repeats."""
    seen: Counter[str] = Counter()
    keys: list[str] = []
    for file in files:
        seen[file.name] += 1
        keys.append(file.name if seen[file.name] == 1 else f"{file.name} ({seen[file.name]})")
    return keys


def _axes(record: dict[str, object], names: Mapping[tuple[str, int], str]) -> dict[str, str]:
    tensors = {name: as_tensor(name, value) for name, value in record.items()}
    known = {name: raw for name, raw in tensors.items() if isinstance(raw, RawTensor)}
    named = {name: names.get((name, len(raw.shape))) for name, raw in known.items()}
    return {name: f"{known[name].kind.dtype}[{axes}]" for name, axes in named.items() if axes}


def _complete(record: dict[str, object], fields: Sequence[str], file: Path) -> dict[str, object]:
    """The record with None for fields it lacks."""
    extra = next((name for name in record if name not in fields), None)
    if extra is not None:
        raise NewField(f"{file}: trace {_id_of(record)!r} has a field {extra!r}, which the first trace lacks")
    return {name: record.get(name) for name in fields}


def _fields_of_all(files: Sequence[Path], memory: int | None) -> dict[str, None]:
    """The fields of every record, in order of appearance."""
    fields: dict[str, None] = {}
    for file in files:
        with suppress(SourceError):  # raised again when the file is imported
            for record in imported_records(file, memory=memory):
                fields.update(dict.fromkeys(record))
                del record
    return fields


def _remove_records(store: Path) -> None:
    """Remove what an unfinished conversion has written; it is written again from the same files."""
    publish_json(store / PROGRESS, {RESTART: 0})
    shards = [file for folder in (spool_folder(store), store) for file in folder.glob("shard-*")]
    for file in dict.fromkeys([*shards, store / IDS, store / MANIFEST, store / PROGRESS]):
        file.unlink(missing_ok=True)


def _finished(store: Path) -> dict[str, int]:
    return finished_files(store) if (store / PROGRESS).exists() else {}


def finished_files(store: Path) -> dict[str, int]:
    """The number of records from each file that was converted completely. FileNotFoundError if none was."""
    try:
        found = parse_json((store / PROGRESS).read_text())
    except ValueError as error:
        found = f"it is not JSON: {error}"
    if isinstance(found, dict):
        counts = cast("dict[str, object]", found)
        if all(type(count) is int and count >= 0 for count in counts.values()):
            return cast("dict[str, int]", counts)
        found = f"{str(counts)[:80]}: must be numbers of records"
    raise StoreError(
        f"{store / PROGRESS}: damaged ({str(found)[:200]}). Remove {quoted(store)} and convert the files again"
    )
