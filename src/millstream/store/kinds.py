"""What lies at a path: a trace store, or reads."""

from pathlib import Path

from millstream.store.read_paths import READ_NAMES


def are_reads(path: Path) -> bool:
    """Whether a path holds reads: FASTA or FASTQ, packed or not."""
    if path.is_dir() or not path.exists():
        return not is_store(path)
    from millstream.store.index import looks_like_reads
    from millstream.store.pack_file import is_pack

    return path.name.lower().endswith(READ_NAMES) or is_pack(path) or looks_like_reads(path)


def is_store(path: Path) -> bool:
    """Whether this is for `Traces`, which also says best what is wrong with what is nothing."""
    if not path.is_dir():
        if path.exists():
            return path.name.endswith((".pkl", ".pkl.gz", ".pt"))
        return not path.name.lower().endswith(READ_NAMES) and not any(mark in str(path) for mark in "*?[")
    if (path / "manifest.json").exists() or any(path.glob("shard-*.arrow*")):
        return True
    from millstream.store.index import looks_like_reads

    return not any(file.is_file() and looks_like_reads(file) for file in path.iterdir())
