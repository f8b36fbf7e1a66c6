"""`ms.open`: one way to open whatever lies at a path."""

from pathlib import Path
from typing import Literal

from millstream.store.traces import Traces


def open(path: str | Path, *, verify: Literal["always", "never"] = "always", open_shards: int = 256) -> Traces:
    """Open a trace store for reading.

    `verify="never"` skips the checksums; `open_shards` is how many shards stay mapped at once.
    """
    return Traces(path, verify=verify, open_shards=open_shards)
