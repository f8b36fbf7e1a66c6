"""Paths that people give -> files of reads."""

import glob
from contextlib import AbstractContextManager
from pathlib import Path

from millstream.console import Progress, progress, within
from millstream.errors import BadSource

# Named like reads: an error if they are not. Anything else in a folder is taken if it looks like reads.
_SUFFIXES = (".fa", ".fasta", ".fna", ".fq", ".fastq")
READ_NAMES = tuple(suffix + wrap for suffix in _SUFFIXES for wrap in ("", ".gz", ".bgz", ".zst"))


def watch_index(path: Path, memory: int | str | None = None) -> AbstractContextManager[Progress]:
    """Progress of indexing a file, in so much memory."""
    held = None if memory is None else within(memory)
    return progress(f"index {path.name}", path.stat().st_size, unit="bytes", memory=held)


def expand(path: str | Path) -> list[Path]:
    """The read files at a path: itself, those in a folder, or those a pattern fits. Told by content, not by name."""
    from millstream.store.index import looks_like_reads

    place = Path(path)
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.is_file())
    elif not place.exists() and any(mark in str(path) for mark in "*?["):
        files = [Path(file) for file in sorted(glob.glob(str(path)))]
    else:
        return [place]
    found = [file for file in files if file.name.lower().endswith(READ_NAMES) or looks_like_reads(file)]
    if not found:
        raise BadSource(f"{path}: no FASTA or FASTQ files there")
    return found
