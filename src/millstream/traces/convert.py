"""Old files -> a store, one trace at a time. Run again after an interruption, it goes on where it stopped."""

import glob
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal

from millstream.console import Progress, silent, unsaid
from millstream.errors import BadSource, SchemaMismatch, SourceError
from millstream.records import RawTensor, as_tensor
from millstream.source.pickles import normalise, read_traces
from millstream.source.preprocessed import AXES, is_preprocessed, read_preprocessed
from millstream.store.layout import MANIFEST, publish
from millstream.store.recover import ID_FIELD
from millstream.store.rewrite import Written
from millstream.store.traces import Traces
from millstream.store.writer import TraceWriter

PROGRESS = "converted.json"  # how many records each finished file gave
_AXES = {
    ("hidden_states", 3): "layer, token, dim",
    ("attentions", 4): "layer, head, query, key",
    ("hidden_states", 2): "layer, value",  # the steps of each layer one after the other
    ("attentions", 2): "layer, value",
    **AXES,
}
_KINDS = {None: "traces", "lstm": "preprocessed sequences (lstm)", "gnn": "preprocessed graphs (gnn)"}


def expand(patterns: Sequence[str]) -> list[Path]:
    """The files behind paths, folders and glob patterns, sorted, each once."""
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found = [p for p in sorted(path.iterdir()) if p.name.endswith((".pkl", ".pkl.gz", ".pt"))]
        else:
            found = [path] if path.exists() else sorted(map(Path, glob.glob(pattern, recursive=True)))
        if not found:
            raise BadSource(f"{pattern}: no such file. Give the old .pkl, .pkl.gz or .pt files, or a pattern in quotes")
        files += [p for p in found if p not in files]
    return files


def convert(
    files: Sequence[Path],
    out: Path,
    *,
    compression: Literal["none", "lz4", "zstd"] | None = None,
    notify: Callable[[str], None] = unsaid,
    progress: Progress = silent,
) -> Written:
    """Import old files, of traces or preprocessed, into a store; each file's last record ends a shard."""
    _check_kinds(files)
    config = {"converted": [{"name": file.name, "bytes": file.stat().st_size} for file in files]}
    writer: TraceWriter | None = TraceWriter(out, config=config) if (out / MANIFEST).exists() else None
    finished: dict[str, int] = json.loads((out / PROGRESS).read_text()) if (out / PROGRESS).exists() else {}
    partial = (len(writer) if writer else 0) - sum(finished.values())
    keyed = list(zip(files, _keys(files), strict=True))
    done = sum(file.stat().st_size for file, key in keyed if key in finished)
    progress(done, "")
    try:
        for file, key in [pair for pair in keyed if pair[1] not in finished]:
            count = 0
            for record in islice(old_records(file, notify), partial, None):
                if writer is None:
                    schema = _axes(record)
                    writer = TraceWriter(out, config=config, compression=compression, schema=schema)
                writer.append(_complete(record, writer))
                del record  # before the next one is read
                count += 1
                progress(done, f"{file.name}: trace {partial + count}")
            if writer is not None:
                writer.seal()
                finished[key] = partial + count
                publish(out / PROGRESS, (json.dumps(finished, indent=1) + "\n").encode())
            partial = 0
            done += file.stat().st_size
            progress(done, file.name)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise BadSource(f"{', '.join(map(str, files))}: no traces in it")
    traces = Traces(out)
    return Written(out, len(traces), traces.num_bytes)


def old_records(file: Path, notify: Callable[[str], None] = unsaid) -> Iterator[dict[str, object]]:
    """The records of one old file, one in memory at a time."""
    stem = file.name.split(".")[0]
    if is_preprocessed(file):
        records = read_preprocessed(file, notify=notify)
    else:
        records = map(normalise, read_traces(file, notify=notify))
    position = 0  # enumerate() would hold a record while the next one is read
    for record in records:
        if record.get(ID_FIELD) is None:
            record[ID_FIELD] = f"{stem}:{position}"
        yield record
        del record
        position += 1  # noqa: SIM113


def _check_kinds(files: Sequence[Path]) -> None:
    first: dict[str | None, Path] = {}
    for file in files:
        with suppress(SourceError):  # which comes again when it is this file's turn
            first.setdefault(is_preprocessed(file), file)
    if len(first) > 1:
        found = ", ".join(f"{file} holds {_KINDS[kind]}" for kind, file in first.items())
        raise SchemaMismatch(f"files of different kinds: {found}. Convert each kind into a store of its own")


def _keys(files: Sequence[Path]) -> list[str]:
    """What a file is called among the finished ones: its name, and a number where folders have files of one name."""
    seen: Counter[str] = Counter()
    keys: list[str] = []
    for file in files:
        seen[file.name] += 1
        keys.append(file.name if seen[file.name] == 1 else f"{file.name} ({seen[file.name]})")
    return keys


def _axes(record: dict[str, object]) -> dict[str, str]:
    tensors = {name: as_tensor(name, value) for name, value in record.items()}
    known = {name: raw for name, raw in tensors.items() if isinstance(raw, RawTensor)}
    named = {name: _AXES.get((name, len(raw.shape))) for name, raw in known.items()}
    return {name: f"{known[name].kind.dtype}[{axes}]" for name, axes in named.items() if axes}


def _complete(record: dict[str, object], writer: TraceWriter) -> dict[str, object]:
    """Fields that some traces lack are None."""
    fields = writer.fields or list(record)
    extra = next((name for name in record if name not in fields), None)
    if extra is not None:
        raise SchemaMismatch(
            f"field {extra!r}: in trace {record[ID_FIELD]!r} but not in the first trace. "
            "Convert files with different fields into different stores"
        )
    return {name: record.get(name) for name in fields}
