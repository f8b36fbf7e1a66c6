"""A trace store -> the dataset card (README.md) that it has on the Hugging Face hub.

The card tells the hub and `datasets.load_dataset` that the sidecars are the rows of the dataset, and the types of the
columns: in a shard, a field that is None in all its records has none.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import yaml

from millstream.core.console import format_bytes, plural, printable
from millstream.traces.store.manifest import LABELS, Manifest, read_manifest
from millstream.traces.store.sidecar import parquet_schema

_SHOWN = 300  # characters of a setting
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64", "date32[day]": "date32"}
_TEMPLATE = """---
{settings_of_hub}---
# {title}

{counts}. Written with millstream.

## Read it

All fields, tensors included, any record by number:

```python
import millstream as ms

traces = ms.open("{url}")
```

Numbers and texts only, from the Parquet file beside each shard:

```python
from datasets import load_dataset

rows = load_dataset("{name}", split="train")
```

There, a tensor is its place in the shard (offset, shape and checksums), and columns that begin with `_` are the places
of the records.

## Fields

| field | type |
|---|---|
{fields}
"""
_SETTINGS = """
## Settings

| setting | value |
|---|---|
{settings}
"""


def make_card(path: Path, *, url: Path, folder: str) -> str:
    """The card of a store that is copied to `url`, in a folder of a dataset; empty: the dataset itself."""
    manifest = read_manifest(path)
    root = f"{folder}/" if folder else ""
    name = "/".join(url.parts[2:4])
    configs = {"default": "shard-*.parquet"} | ({"labels": LABELS} if (path / LABELS).is_file() else {})
    about = {
        "configs": [{"config_name": key, "data_files": root + files} for key, files in configs.items()],
        "dataset_info": [{"config_name": "default", "features": features_of(manifest)}],
        "tags": ["millstream", "traces"],
    }
    return _TEMPLATE.format(
        settings_of_hub=yaml.safe_dump(about, sort_keys=False, allow_unicode=True),
        title=_cell(url.name.partition("@")[0]),
        counts=_counts(manifest),
        url=url,
        name=name.partition("@")[0],
        fields=_rows(manifest.fields),
    ) + (_SETTINGS.format(settings=_rows(manifest.config)) if manifest.config else "")


def features_of(manifest: Manifest) -> list[dict[str, object]]:
    """The columns of the sidecars as `datasets` names them."""
    return _features(parquet_schema(manifest.fields, manifest.compression))


def _features(fields: Iterable[pa.Field]) -> list[dict[str, object]]:
    return [{"name": field.name, **_feature(field.type)} for field in fields]


def _feature(kind: pa.DataType) -> dict[str, object]:
    if isinstance(kind, pa.StructType):
        return {"struct": _features(kind)}
    if isinstance(kind, pa.ListType):
        inner = _feature(kind.value_type)
        return {"list": inner.get("dtype") or inner.get("struct") or inner}
    return {"dtype": _DTYPES.get(str(kind), str(kind))}


def _counts(manifest: Manifest) -> str:
    records = sum(shard.records for shard in manifest.shards)
    size = format_bytes(sum(shard.bytes for shard in manifest.shards))
    model = manifest.config.get("model")
    of = f" of {_cell(model)}" if model else ""
    return f"{plural(records, 'trace')}{of} in {plural(len(manifest.shards), 'shard')}, {size}"


def _rows(values: Mapping[str, object]) -> str:
    return "\n".join(f"| `{_cell(name)}` | {_cell(value)} |" for name, value in values.items())


def _cell(value: object) -> str:
    """A value as one cell of a Markdown table."""
    text = printable(" ".join(str(value).split()))
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return text.replace("|", "\\|").replace("<", "&lt;")
