"""Traces as a kind of record: how they are recognised and opened, and which models train on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from millstream.errors import BadSetting
from millstream.traces.convert import importers

if TYPE_CHECKING:
    from millstream.traces.store.traces import Traces

MODELS = "detectors"  # what a run on traces compares
MODEL_GROUPS = ("baselines",)  # names that stand for several models


def is_at(path: Path) -> bool:
    """Whether a path is a trace store, or a file that can be imported into one."""
    if path.is_dir():
        return (path / "manifest.json").exists() or any(path.glob("shard-*.arrow*"))
    return path.is_file() and any(importer.recognises(path) for importer in importers())


def open(
    path: str | Path | Sequence[str | Path],
    *,
    verify: Literal["always", "never"],
    open_shards: int,
    **_others: object,
) -> Traces:
    """`ms.open` for a trace store; ignores the options of other kinds."""
    from millstream.traces.store.traces import Traces

    if not isinstance(path, str | Path):
        raise BadSetting(f"{len(path)} paths given, but a trace store is one folder; join several with ms.concat")
    return Traces(path, verify=verify, open_shards=open_shards)


def expand_models(names: Sequence[str]) -> list[str]:
    """Each name once, with groups replaced by their models."""
    from millstream.traces.detectors.zoo import expanded

    return expanded(names)
