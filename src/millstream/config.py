"""Settings as people write them -> plain values: byte sizes and the fingerprint of a configuration."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(size: int | str) -> int:
    """Number of bytes in `"512MB"`, `"1.5GiB"` or `4096`.

    >>> parse_bytes("512MB")
    512000000
    """
    if isinstance(size, int):
        value = size
    else:
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]i?)?b?\s*", size.lower())
        if not match:
            raise ValueError(f"{size!r} is not a size in bytes; write for example '512MB', '2GiB' or 4096")
        value = int(float(match[1]) * _UNITS[match[2] or ""])
    if value <= 0:
        raise ValueError(f"a size in bytes must be positive, got {size!r}")
    return value


def config_hash(config: Mapping[str, object]) -> str:
    """Sixteen hex digits that change when any setting does."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=8).hexdigest()


def config_diff(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """`model: 'a' -> 'b', seed: 1 -> 2`: every setting that differs, on one line."""
    keys = [key for key in {**old, **new} if (key in old, old.get(key)) != (key in new, new.get(key))]
    return ", ".join(f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys)


def available_bytes() -> int:
    """Memory that programs can still have, if the system says; 2 GB otherwise."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):
        return 2 << 30


def cache_folder() -> Path:
    """Where models that are built or converted once are kept: `$XDG_CACHE_HOME/millstream`, or `~/.cache/millstream`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millstream"
