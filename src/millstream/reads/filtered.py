"""The classified or the unclassified reads of a sample, as FASTA or FASTQ like the files they are from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from millstream.core.collection import Collection, Numbers
from millstream.core.files import check_replaceable
from millstream.core.outputs import TextOutput, partial_folder, remember_finished
from millstream.errors import BadSetting
from millstream.reads.files import QUALITY, SEQUENCE
from millstream.reads.open import read_lengths
from millstream.reads.pack import PackFile
from millstream.reads.pairs import by_part
from millstream.reads.reads import Part

FASTA, FASTQ = (".fa", ".fasta", ".fna"), (".fq", ".fastq")
SHARE = 16  # of the memory budget, for the bases of the reads that are written at once
MATES = "#"  # stands for _1 and _2 in the name of a file per mate


@dataclass(frozen=True)
class Sample:
    """The reads of a sample and their files; `num_mates` neighbouring reads are classified together."""

    collection: Collection
    parts: Sequence[Part]
    num_mates: int


class FilteredReads:
    """One file, or one per mate, of the reads that are classified (`wanted`), or that are not.

    It is saved before the rows are, so that after an interruption it may have more reads than there are rows; those are
    not written again. If all rows are written (`is_finished`), only files are left that do not have their name yet.
    """

    def __init__(
        self,
        out: Path,
        sample: Sample,
        *,
        wanted: bool,
        memory: int,
        terms: Mapping[str, object],
        is_finished: bool,
    ) -> None:
        self._wanted, self._sample, self._memory = wanted, sample, max(memory // SHARE, 1)
        self._is_fastq = _is_fastq(out, sample.parts)
        self._terms = {**terms, "wanted": wanted}
        paths = filtered_paths(out, sample.num_mates)
        self._files = [
            TextOutput(path, self._terms)
            for path in paths
            if not (is_finished and path.exists() and not partial_folder(path).exists())
        ]
        self._is_per_mate = len(paths) == sample.num_mates
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            for file in self._files:
                self._stack.enter_context(file)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, first: int, is_classified: NDArray[np.bool_]) -> None:
        """The reads of the rows from number `first` on."""
        rows = first + np.flatnonzero(is_classified == self._wanted)
        last = first + len(is_classified)
        mates = np.arange(self._sample.num_mates)
        for place, file in enumerate(self._files):
            if file.is_finished or last <= (before := _saved_rows(file)):
                continue
            wanted = mates[place : place + 1] if self._is_per_mate else mates
            positions = (rows[rows >= before][:, None] * len(mates) + wanted).reshape(-1)
            for text in self._texts(positions):
                file.write(text)

    def save(self, num_rows: int) -> None:
        for file in self._files:
            if not file.is_finished and num_rows > _saved_rows(file):
                file.save({"rows": num_rows})

    def finish(self, num_rows: int) -> None:
        for file in self._files:
            if not file.is_finished:
                file.finish({"rows": num_rows})

    def publish(self) -> None:
        for file in self._files:
            file.publish()
            remember_finished(file.out, self._terms)

    def _texts(self, positions: Numbers) -> Iterator[bytes]:
        """The records at these positions as text, some at a time."""
        numbers = self._sample.collection.record_numbers(positions)
        group = np.cumsum(read_lengths(self._sample.parts, numbers)) // self._memory
        for some in np.split(numbers, np.flatnonzero(np.diff(group)) + 1):
            found = np.empty(len(some), object)
            for part, rows, here in by_part(self._sample.parts, some):
                found[here] = list(_records(part, rows, fastq=self._is_fastq))
            yield b"".join(found.tolist())


def filtered_paths(out: Path, num_mates: int) -> list[Path]:
    """The files of `out`: as Kraken 2 has it, a # in the name stands for _1 and _2, the files of the mates."""
    if MATES not in out.name:
        return [out]
    if num_mates == 1:
        raise BadSetting(f"{out}: # stands for the number of the mate. Leave it out, or give read pairs")
    return [out.with_name(out.name.replace(MATES, f"_{mate + 1}")) for mate in range(num_mates)]


def check_outputs(files: Sequence[Path]) -> None:
    """Refuse files that cannot be written, before anything is read."""
    for place, path in enumerate(files):
        check_replaceable(path)
        if path.absolute() in [other.absolute() for other in files[:place]]:
            raise BadSetting(f"{path}: given for two outputs. Choose another name for one of them")


def _saved_rows(file: TextOutput) -> int:
    """How far it was written by an earlier process."""
    return 0 if file.saved is None else int(file.saved["rows"])


def _is_fastq(out: Path, parts: Sequence[Part]) -> bool:
    """As the name says; otherwise as the files are."""
    suffix = Path(out.name.removesuffix(".gz")).suffix.lower()
    without = [part.path for part in parts if not part.has_quality]
    if suffix in FASTQ and without:
        raise BadSetting(f"{out}: {without[0]} has no base qualities to write. Choose a name such as {out.stem}.fa")
    return suffix in FASTQ or (suffix not in FASTA and not without)


def _records(part: Part, rows: Numbers, *, fastq: bool) -> Iterator[bytes]:
    fetched = part.fetch(rows, [SEQUENCE, QUALITY] if fastq else [SEQUENCE])
    flat, starts, ends = part.headers(rows) if isinstance(part, PackFile) else part.headers(part.locate(rows))
    lines, bases = flat.tobytes(), fetched.flat.tobytes()
    quality = b"" if fetched.quality is None else fetched.quality.tobytes()
    spans = zip(starts.tolist(), ends.tolist(), pairwise(fetched.offsets.tolist()), strict=True)
    for start, end, (first, last) in spans:
        if fastq:
            yield b"@%b\n%b\n+\n%b\n" % (lines[start:end], bases[first:last], quality[first:last])
        else:
            yield b">%b\n%b\n" % (lines[start:end], bases[first:last])
