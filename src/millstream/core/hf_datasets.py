"""Folders that `save_to_disk` of Hugging Face `datasets` writes -> their rows. Needs no `datasets`; runs no code."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard, cast

import pyarrow as pa

from millstream.core.config import parse_json
from millstream.core.remote import mapped
from millstream.errors import BadSource

STATE, SPLITS = "state.json", "dataset_dict.json"
_BATCH_ROWS = 256  # converted to Python at once: they may have long texts


def is_datasets_folder(path: Path) -> bool:
    """Whether a folder is a dataset on disk, or has the splits of one."""
    return (path / STATE).is_file() or (path / SPLITS).is_file()


def data_files(path: Path) -> list[Path]:
    """The Arrow files of a dataset, in order. BadSource if it is damaged, or has several splits."""
    if not (path / STATE).is_file():
        names = _json(path / SPLITS).get("splits")
        splits = [str(name) for name in cast("list[object]", names)] if isinstance(names, list) else []
        raise BadSource(
            f"{path}: has the splits {', '.join(splits)}. Give one of them, such as {path}/{splits[0]}"
            if splits
            else f"{path / SPLITS}: damaged (no splits). Save the dataset again"
        )
    state = _json(path / STATE)
    if state.get("_indices_data_files"):
        raise BadSource(f"{path}: saved by datasets 1 with a list of rows. Save it again with datasets 2 or later")
    found: list[Path] = []
    entries = state.get("_data_files")
    for entry in cast("list[object]", entries) if isinstance(entries, list) else [None]:
        name = cast("dict[str, object]", entry).get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".arrow"):
            raise BadSource(
                f"{path / STATE}: damaged ({str(cast(object, entry))[:80]} is no Arrow file). Save the dataset again"
            )
        if not (path / name).is_file():
            raise BadSource(f"{path / name}: no such file, but {STATE} lists it. Copy all files of the dataset")
        found.append(path / name)
    if not found:
        raise BadSource(f"{path}: the dataset has no rows")
    return found


def batches_of(file: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file, mapped: only rows that are used are read. BadSource if it is damaged."""
    try:
        if file.stat().st_size == 0:
            raise pa.ArrowInvalid("it is empty")
        with pa.ipc.open_stream(pa.py_buffer(mapped(file))) as stream:
            names = stream.schema.names
            if len(set(names)) < len(names):
                raise pa.ArrowInvalid("two columns have the same name")
            for batch in stream:
                batch.validate(full=True)
                yield batch
    except (OSError, pa.ArrowException, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadSource(f"{file}: is not a valid Arrow file ({reason}). Save the dataset again") from None


def read_folder(path: Path) -> Iterator[Mapping[str, object]]:
    """The rows of a dataset, without columns of tensors."""
    for file in data_files(path):
        for batch in batches_of(file):
            kept = batch.select([field.name for field in batch.schema if depth_of(field.type) < 2])
            for start in range(0, kept.num_rows, _BATCH_ROWS):
                yield from kept.slice(start, _BATCH_ROWS).to_pylist()


def is_list(kind: pa.DataType) -> TypeGuard[pa.ListType | pa.FixedSizeListType]:
    """Of any length or of one."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def depth_of(kind: pa.DataType) -> int:
    """How many lists are around numbers: 2 for [[1.0]]; 0 if there are none, or if other values are in them."""
    depth = 0
    while is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth if pa.types.is_floating(kind) or pa.types.is_integer(kind) else 0


def _json(file: Path) -> Mapping[str, object]:
    try:
        found = parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise BadSource(f"{file}: damaged ({error}). Save the dataset again") from None
    return cast("Mapping[str, object]", found) if isinstance(found, dict) else {}
