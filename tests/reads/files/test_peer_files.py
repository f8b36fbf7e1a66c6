"""The FASTA and FASTQ files that Biopython, pysam, pyfastx and pyfaidx are tested with are read, or rightly refused.

They are in the source distributions, which pip fetches from the index that it is configured for, once, into the cache
folder; without a connection these tests are skipped. No code of the peers runs.
"""

import gzip
import hashlib
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millstream.core.files import cache_folder, make_once
from support.effort import THOROUGH
from support.read_files import Record, error_of, opened, parse

# Source distributions: version, SHA-256. That of pysam leaves its read files out; they are here if it adds them again.
PEERS = {
    "biopython": ("1.88", "9aaa31c0bda4d059f7b2ee00bfdb5cbb73ade3057aa4b737a7cc0187091d071a"),
    "pysam": ("0.24.1", "90f612afccdb454d2447ecb5229266c6e7f991093deed4ed0a791db01f7fc994"),
    "pyfastx": ("2.3.1", "19d802cc13ee7774a3068bae3e4d4f419cc69aa237f2dd6366ce220a08b03dca"),
    "pyfaidx": ("0.9.2.2", "6ad50a5ac00b396dc117b7322adcbbac945aa60ac05a345a7628422d7852f038"),
}
MAX_BYTES = 5_000_000  # of a file: larger ones are no examples
CONNECT_S, FETCH_S = 5, 60
# `pip download` runs the setup.py of what it downloads; this only asks pip where a file is, and fetches it.
FETCH = """
import sys
from pathlib import Path
from pip._internal.commands import create_command
from pip._vendor.packaging.specifiers import SpecifierSet

folder, timeout, *names = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-binary", ":all:", "--quiet", "--retries", "0", "--timeout", timeout])
session = command._build_session(options, retries=0, timeout=int(timeout))
finder = command._build_package_finder(options, session)
for name, version in zip(names[::2], names[1::2]):
    best = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
    if best is None:
        sys.exit(f"the package index has no source distribution of {name} {version}")
    answer = session.get(best.link.url_without_fragment, timeout=int(timeout))
    answer.raise_for_status()
    (Path(folder) / f"{name}.tar.gz").write_bytes(answer.content)
"""


@pytest.fixture(scope="module")
def peer_files() -> list[tuple[str, bytes]]:
    """Name and bytes of every file of every peer."""
    versions = [word for name, (version, _) in PEERS.items() for word in (name, version)]
    label = hashlib.sha256(repr(PEERS).encode()).hexdigest()[:12]
    try:
        folder = make_once(cache_folder() / f"peers-{label}", lambda folder: _fetch(folder, versions), notify=print)
    except (subprocess.SubprocessError, OSError) as error:
        output = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"pip cannot fetch the peers: {output.strip().splitlines()[-1][:200]}")
    return [found for name in PEERS for found in _members(folder / f"{name}.tar.gz")]


def _fetch(folder: Path, versions: list[str]) -> None:
    command = [sys.executable, "-c", FETCH, folder, str(CONNECT_S), *versions]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_S)
    for name, (_, digest) in PEERS.items():
        assert hashlib.sha256((folder / f"{name}.tar.gz").read_bytes()).hexdigest() == digest, name


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Regular files, read in memory: nothing is extracted to a path of the archive's choice."""
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() and member.size <= MAX_BYTES else None
            if content is not None:
                yield member.name, content.read()


def test_every_file_of_the_peers_is_read_as_a_plain_parser_reads_it_or_refused_in_one_line(
    peer_files: list[tuple[str, bytes]], tmp_path: Path
):
    read: set[str] = set()
    refused: set[str] = set()
    for number, (name, data) in enumerate(peer_files):
        text = _text(data)
        if not (THOROUGH or text.lstrip()[:1] in (b">", b"@", b";")):
            continue  # a program, a picture, ...: refused as thousands of others are
        file = tmp_path / f"{number}-{Path(name).name}"
        file.write_bytes(data)
        message = error_of(
            lambda file=file, text=text: _is_read_right(file, parse(text)) if _is_valid(text) else opened(file)
        )
        if message is None:
            assert _is_valid(text), f"{name}: broken, but read"
            read.add(Path(name).name)
        else:
            assert not _is_valid(text), f"{name}: valid, but refused: {message}"
            assert str(file) in message and "\n" not in message, name
            refused.add(Path(name).name)
        for made in tmp_path.iterdir():
            made.unlink()
    assert len(read) >= 140
    assert read >= {"tricky.fastq", "zero_length.fastq", "dups.fasta", "test.fq.gz", "issue_83.fasta"}
    broken = {Path(name).name for name, _ in peer_files if Path(name).name.startswith("error_")}
    assert len(broken) >= 20 and broken - refused == {"error_diff_ids.fastq"}  # only the name after + differs


def _is_read_right(file: Path, wanted: list[Record]) -> bool:
    """Whether all records are as wanted, in a loop and in any order."""
    reads = opened(file)
    found = [
        (read.name.encode(), read.sequence.encode(), None if read.quality is None else read.quality.encode())
        for read in reads
    ]
    order = np.random.default_rng(0).permutation(len(wanted))
    return found == [(_name(each), each.sequence, each.quality) for each in wanted] and reads.fetch(
        order
    ).sequences() == [wanted[at].sequence.decode() for at in order]


def _text(data: bytes) -> bytes:
    try:
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error):
        return data


def _is_valid(text: bytes) -> bool:
    """Whether this is FASTA or FASTQ with printable sequences and qualities."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(b";")]
    if not lines or not lines[0].startswith((b">", b"@")):
        return False
    try:
        records = parse(text)
    except (AssertionError, IndexError):
        return False
    return all(32 < byte < 127 for each in records for byte in each.sequence + (each.quality or b""))


def _name(record: Record) -> bytes:
    return next(iter(record.header.replace(b"\1", b" ").split()), b"").decode(errors="replace").encode()
