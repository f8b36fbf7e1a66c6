"""A table from reads to classes, joined once by name: columns beside the index of a file. Sorted on disk.

The table is that of CAMI (`@@SEQUENCEID BINID TAXID`, or `#anonymous_read_id genome_id tax_id`), or any TSV with a line
of column names, one of which names reads and another has their class ids or tax ids.
"""

import re
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.core.collection import Numbers
from millstream.core.console import say
from millstream.core.files import spool_root
from millstream.core.fingerprint import Fingerprint, file_crc32c, fingerprint_of
from millstream.core.kernels import kernel
from millstream.core.record import Bytes
from millstream.core.remote import open_raw
from millstream.errors import BadIndex, BadSource
from millstream.reads.files import ReadFile
from millstream.reads.files.columns import ColumnWriter, HeaderColumns
from millstream.reads.files.containers import open_stream, sniff
from millstream.reads.files.encodings import LIMIT, TextDictionary
from millstream.reads.files.headers import HeaderColumn, Headers, Integers, Texts
from millstream.reads.files.index import find_index, write_index
from millstream.reads.files.names import hash_names
from millstream.reads.files.sections import Sections
from millstream.reads.files.sections_writer import SectionsWriter
from millstream.reads.mapping import KEY, TAX_ID
from millstream.reads.pack import PackFile

Part = ReadFile | PackFile
GENOME = "genome_id"
NAMES = ("sequenceid", "anonymous_read_id", "sequence_id", "read", "name", "read_id")  # columns with names of reads
GENOMES = (GENOME, "binid", "genome")
WHAT = "labels of reads"
PARTS = 64  # files that 100 million reads are sorted in, each of some tens of megabytes
ROWS = 1 << 16
READ_BYTES = 4 << 20
MISSING = np.iinfo(np.int64).min


def joined_columns(parts: Sequence[Part], table: Path, *, key: str, index_dir: Path | None) -> list["TableColumns"]:
    """The columns that a table has for the reads of each file; joined now if they are not stored beside its index."""
    if not table.is_file():
        raise BadSource(
            f"{table}: no such file; expected a table of reads and their tax ids, such as reads_mapping.tsv"
        )
    known = [_load(part, table, key, index_dir) for part in parts]
    if any(one is None for one in known):
        with ExitStack() as stack:
            found = _ReadTable(table, key, Path(stack.enter_context(tempfile.TemporaryDirectory(dir=spool_root()))))
            for place, part in enumerate(parts):
                if known[place] is None:
                    _join(part, found, index_dir)
                    known[place] = _load(part, table, key, index_dir)
    return [one for one in known if one is not None]


@dataclass(frozen=True)
class TableColumns:
    """The columns of a file's reads, from a table: `class_id` or `tax_id`, and perhaps `genome_id`."""

    columns: HeaderColumns
    identity: object

    @property
    def names(self) -> list[str]:
        return self.columns.names


def _labels_path(part: Part) -> Path:
    return part.path.with_name(f"{part.path.name}.labels")


def _load(part: Part, table: Path, key: str, index_dir: Path | None) -> TableColumns | None:
    """The stored columns, if they are of this file and table."""
    place = find_index(_labels_path(part), index_dir)
    if place is None:
        return None
    try:
        sections = Sections(place)
    except BadIndex:
        return None
    meta = sections.meta
    if meta.get("what") != WHAT or meta["of"] != _identity(part) or key not in (meta["key"], KEY, *TAX_ID):
        return None
    made = Fingerprint.of_json(meta["table"])
    return None if made.difference(table) else TableColumns(HeaderColumns(sections), made.crc32c)


def _identity(part: Part) -> list[object]:
    return [str(part.identity), part.records]


def _join(part: Part, table: "_ReadTable", index_dir: Path | None) -> None:
    """Look up the reads of a file, and write their columns beside its index."""

    def write(place: Path) -> None:
        with SectionsWriter(place) as sections:
            values = ColumnWriter(HeaderColumn(table.value, "integer"), sections, LIMIT)
            genomes = ColumnWriter(HeaderColumn(GENOME, "text"), sections, LIMIT) if table.genomes else None
            num_found = 0
            for found in table.rows_of(part):
                known = found[:, 0] != MISSING
                num_found += int(known.sum())
                no_length = np.full(len(found), -1, np.int64)
                values.add(Integers(np.where(known, found[:, 0], 0), known))
                values.emit(no_length, None)
                if genomes is not None:
                    genomes.add(table.genome_texts(found[:, 1], known))
                    genomes.emit(no_length, None)
            if part.records and not num_found:
                name = part.names_of(np.zeros(1, np.int64))[0]
                raise BadSource(
                    f"{table.path}: has none of the {part.records} reads of {part.path}, whose first is {name!r}; the "
                    f"first in the table is {table.first!r}"
                )
            stored = [column.finish() for column in (values, genomes) if column is not None]
            fingerprint = fingerprint_of(table.path, table.path.stat(), file_crc32c(table.path))
            sections.publish(
                {
                    "what": WHAT,
                    "of": _identity(part),
                    "key": table.key,
                    "table": fingerprint.to_json(),
                    "columns": [asdict(column) for column in stored],
                }
            )
        say(f"{part.path}: {num_found:,} of its {part.records:,} reads are in {table.path}")

    write_index(_labels_path(part), write, index_dir=index_dir)


class _Layout(NamedTuple):
    """The columns of a table, by number: names of reads, their classes, perhaps their genomes."""

    names: int
    values: int
    genomes: int | None
    value: str  # the name of the column with classes

    def regex(self) -> str:
        """Matches a line; its groups are the columns."""
        groups = {self.names: "(?P<name>[^\t]*)", self.values: "(?P<value>\\d+)?"}
        if self.genomes is not None:
            groups[self.genomes] = "(?P<genome>[^\t]*)"
        return "^" + "\t".join(groups.get(place, "[^\t]*") for place in range(max(groups) + 1))


class _ReadTable:
    """A table whose rows are sorted by the hash of the name of their read, into parts on disk."""

    def __init__(self, path: Path, key: str, folder: Path) -> None:
        self.path, self.key = path, key
        self.first = ""
        self._folder = folder
        self._sorted = _Spill(folder / "table", 3)
        self._genomes = TextDictionary()
        layout: _Layout | None = None
        headers: Headers | None = None
        for buffer, starts, ends in _lines(path):
            if headers is None:
                layout, skipped = _find_layout(path, buffer, starts, ends, key)
                headers, starts, ends = Headers(layout.regex()), starts[skipped:], ends[skipped:]
            if len(starts):
                self._add(headers, buffer, starts, ends)
        if layout is None:
            raise BadSource(f"{path}: empty; expected a table of reads and their tax ids")
        self.value = layout.value
        self.genomes = self._genomes.values if layout.genomes is not None else []
        lengths = np.array([0, *map(len, self.genomes)], np.int64)
        self._genome_ends = np.cumsum(lengths)
        self._genome_pool = np.frombuffer(bytearray(b"".join(self.genomes)), np.uint8)

    def _add(self, headers: Headers, buffer: Bytes, starts: Numbers, ends: Numbers) -> None:
        parsed = headers.parse(buffer, starts, ends)
        names, values, genomes = (parsed.columns.get(name) for name in ("name", "value", "genome"))
        assert isinstance(names, Texts) and isinstance(values, Integers)
        if not self.first and len(starts):
            self.first = names.flat[names.starts[0] : names.ends[0]].tobytes().decode(errors="replace")
        codes = None
        if isinstance(genomes, Texts):
            codes = self._genomes.encode(genomes.flat, genomes.starts, genomes.ends, genomes.valid)
        hashes = _hash_reads(names.flat, names.starts, names.ends)
        kept = values.valid & names.valid
        codes = np.zeros(len(hashes), np.int64) if codes is None else codes
        self._sorted.add(hashes[kept] >> _SHIFT, np.stack([hashes, values.values, codes], axis=1)[kept])

    def rows_of(self, part: Part) -> Generator[Numbers]:
        """[rows, 2]: the class, or `MISSING`, and the genome of all reads of a file in order, in pieces."""
        asked, answers = _Spill(self._folder / "reads", 2), _Spill(self._folder / "found", 3)
        each = max(-(-part.records // PARTS), 1)
        for first in range(0, part.records, ROWS):
            rows = np.arange(first, min(first + ROWS, part.records), dtype=np.int64)
            text, starts, ends = part.headers(part.locate(rows)) if isinstance(part, ReadFile) else part.headers(rows)
            hashes = _hash_reads(text, starts, ends)
            asked.add(hashes >> _SHIFT, np.stack([hashes, rows], axis=1))
        for place in range(PARTS):
            wanted, known = asked.take(place), self._part(place)
            if not len(wanted) or not len(known):
                continue
            at = np.minimum(np.searchsorted(known[:, 0], wanted[:, 0]), len(known) - 1)
            hit = known[at, 0] == wanted[:, 0]
            found = np.concatenate([wanted[hit, 1:], known[at[hit], 1:]], axis=1)
            answers.add(found[:, 0] // each, found)
        asked.close()
        for place in range(-(-part.records // each)):
            out = np.full((min(each, part.records - place * each), 2), MISSING)
            found = answers.take(place)
            out[found[:, 0] - place * each] = found[:, 1:]
            yield out
        answers.close()

    def genome_texts(self, codes: Numbers, known: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Texts:
        places = np.where(known, codes, 0)
        return Texts(self._genome_pool, self._genome_ends[places], self._genome_ends[places + 1], known)

    def _part(self, place: int) -> Numbers:
        """The rows of a part in order of their hashes, each hash once."""
        rows = self._sorted.take(place)
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        same = rows[1:, 0] == rows[:-1, 0]
        if (same & (rows[1:, 1] != rows[:-1, 1])).any():
            row = rows[1:][same & (rows[1:, 1] != rows[:-1, 1])][0]
            raise BadSource(
                f"{self.path}: one of its reads is in two classes, one of them {row[1]}. Each read must have one class"
            )
        return rows[np.append(True, ~same)] if len(rows) else rows


_SHIFT = 63 - (PARTS - 1).bit_length()


class _Spill:
    """Rows of integers in parts, files of a folder."""

    def __init__(self, folder: Path, width: int) -> None:
        self._folder, self._width = folder, width
        folder.mkdir(exist_ok=True)

    def add(self, parts: Numbers, rows: Numbers) -> None:
        order = np.argsort(parts, kind="stable")
        edges = np.searchsorted(parts[order], np.arange(PARTS + 1))
        for part in np.flatnonzero(np.diff(edges)).tolist():
            with (self._folder / str(part)).open("ab") as file:
                file.write(rows[order[edges[part] : edges[part + 1]]].tobytes())

    def take(self, part: int) -> Numbers:
        """All rows of a part."""
        file = self._folder / str(part)
        data = file.read_bytes() if file.exists() else b""
        return np.frombuffer(data, np.int64).reshape(-1, self._width)

    def close(self) -> None:
        shutil.rmtree(self._folder)


def _lines(path: Path) -> Generator[tuple[Bytes, Numbers, Numbers]]:
    """The lines of a text file, which may be compressed: a buffer, and where they start and end in it."""
    with open_raw(path) as raw:
        stream = open_stream(path, sniff(path), raw, points=False)
        try:
            rest, buffer = b"", np.empty(READ_BYTES, np.uint8)
            while True:
                count = stream.readinto(buffer)
                text = rest + buffer[:count].tobytes()
                whole = len(text) if not count else text.rfind(b"\n") + 1
                if not count and text and not text.endswith(b"\n"):
                    text, whole = text + b"\n", whole + 1
                flat = np.frombuffer(bytearray(text[:whole]), np.uint8)
                ends = np.flatnonzero(flat == ord("\n"))
                if len(ends):
                    yield flat, np.append(0, ends[:-1] + 1), ends - (flat[np.maximum(ends - 1, 0)] == ord("\r"))
                if not count:
                    break
                rest = text[whole:]
            if stream.damage:
                raise BadSource(f"{path}: {stream.damage.reason}")
        finally:
            stream.close()


def _find_layout(path: Path, buffer: Bytes, starts: Numbers, ends: Numbers, key: str) -> tuple[_Layout, int]:
    """The columns of a table, and how many lines are before its first row."""
    found: list[str] = []
    for place, (start, end) in enumerate(zip(starts.tolist()[:100], ends.tolist(), strict=False)):
        line = buffer[start:end].tobytes().decode(errors="replace")
        names = [re.sub(r"^[@#_\s]+", "", name).strip().lower() for name in line.split("\t")]
        found = found or (names if len(names) > 1 else [])
        name = next((name for name in NAMES if name in names), None)
        value = next((name for name in (key.lower(), KEY, *TAX_ID) if name in names), None)
        if name is not None and value is not None:
            genome = next((names.index(one) for one in GENOMES if one in names), None)
            kept = key if value == key.lower() else KEY if value == KEY else TAX_ID[0]
            return _Layout(names.index(name), names.index(value), genome, kept), place + 1
        if not line.startswith(("@", "#")) and line.strip():
            break
    raise BadSource(
        f"{path}: expected a line of column names separated by tabs, with one for the names of reads (such as "
        f"{NAMES[0]} or {NAMES[-1]}) and {KEY} or {TAX_ID[0]}; found {', '.join(found) or 'none'}"
    )


def _hash_reads(text: Bytes, starts: Numbers, ends: Numbers) -> Numbers:
    """Hashes of the first words, without /1 and /2: mates are of one class."""
    bare = np.empty_like(ends)
    _bare_ends(text, starts, ends, bare)
    return hash_names(text, starts, bare)


@kernel
def _bare_ends(text: Bytes, starts: Numbers, ends: Numbers, out: Numbers) -> None:
    for index in range(len(starts)):
        at = starts[index]
        while at < ends[index] and text[at] > 32:
            at += 1
        if at - starts[index] > 2 and text[at - 2] == 47 and (text[at - 1] == 49 or text[at - 1] == 50):
            at -= 2
        out[index] = at
