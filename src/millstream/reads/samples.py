"""Samples to classify: reads from stdin as a file, and several samples with one table of all."""

import json
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from millstream.core.config import first_few
from millstream.core.engine import Engine
from millstream.core.files import already_exists, no_space, publish, spool_root
from millstream.core.outputs import STDOUT, check_new
from millstream.core.remote import to_path
from millstream.errors import BadSetting, BadSource
from millstream.reads.classify import Classified
from millstream.reads.files.in_order import STDIN, piped
from millstream.reads.open import READ_NAMES, check_readable, read_files
from millstream.reads.sample_reports import ABUNDANCE

PIECE = 1 << 20
BIOM = ".biom"
TAXON = ("class", "tax_id", "taxon", "rank")  # columns of the table before the samples


class ClassifyOne(Protocol):
    """`classify` of a run, with its settings."""

    def __call__(
        self, reads: Sequence[str], out: Path, *, mates: Sequence[str] | None, report: Sequence[Path]
    ) -> Classified: ...


@contextmanager
def stdin_as_file(reads: Sequence[str], engine: Engine) -> Generator[list[str]]:
    """These paths, with `-`, stdin, as a file in the spool folder that is removed in the end.

    Reads are fetched by number, and their file read twice, which a pipe cannot do. The same bytes resume an output.
    """
    if STDIN not in reads:
        yield list(reads)
        return
    if engine.name != "local":
        raise BadSetting("-: workers cannot read the stdin of this process. Save the reads first: cat > reads.fa")
    if len(reads) > 1:
        raise BadSetting(f"{' '.join(reads)}: stdin is one sample of its own. Give it alone, or files alone")
    source = piped("millstream classify RUN - -o sample.tsv")
    with tempfile.TemporaryDirectory(prefix="stdin-", dir=spool_root()) as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as file, no_space(path, "Set MILLSTREAM_SPOOL_DIR to a folder with more space"):
            shutil.copyfileobj(source, file, PIECE)
        try:
            yield [str(path)]
        except BadSource as error:
            reason = str(error).replace(f"{path}:", f"{STDIN}:")
            more = ", where FILE is stdin saved to a file" if str(path) in reason else ""
            raise BadSource(reason.replace(str(path), "FILE") + more) from None


def classify_samples(
    one: ClassifyOne, samples: Sequence[str], *, mates: Sequence[str], out: Path, table: Path, force: bool
) -> Classified:
    """Classify each sample into the folder `out`, and write the reads per class and sample, estimated by EM.

    A sample is a file, or all files of a folder or pattern. It gets `NAME.tsv.gz`, `NAME.kreport` and
    `NAME.abundance.tsv`. Samples that are finished are not classified again.
    """
    if str(out) == STDOUT:
        raise BadSetting("--out -: with --table, it is the folder for the files of each sample")
    if mates and len(mates) != len(samples):
        raise BadSetting(f"--mates: {len(mates)} for {len(samples)} samples; with --table, give one for each")
    names = [sample_name(sample) for sample in samples]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadSetting(f"{first_few(twice)}: several samples have this name. Rename files, or run them separately")
    for file in read_files([*samples, *mates]):
        check_readable(file)
    if not table.exists():
        check_new(table)
    out.mkdir(parents=True, exist_ok=True)
    done: list[Classified] = []
    for place, (sample, name) in enumerate(zip(samples, names, strict=True)):
        report = out / f"{name}.kreport"
        done.append(one([sample], out / f"{name}.tsv.gz", mates=[mates[place]] if mates else None, report=[report]))
        if done[-1].interrupted:
            return _total(done, out)
    counts = {name: _read_abundances(out / f"{name}{ABUNDANCE}") for name in names}
    text = _biom(counts) if table.suffix == BIOM else _tsv(counts)
    if not force and table.exists() and table.read_bytes() != text:
        raise already_exists(table)
    publish(table, text)
    return _total(done, out)


def sample_name(path: str) -> str:
    """The name of a file or folder without what it ends in."""
    name = to_path(path).name
    ending = max((ending for ending in READ_NAMES if name.lower().endswith(ending)), key=len, default="")
    return name[: len(name) - len(ending)] or name


def _total(done: Sequence[Classified], out: Path) -> Classified:
    names = ("num_reads", "num_rows", "num_classified", "num_unclassified", "num_resumed")
    sums = {name: sum(getattr(one, name) for one in done) for name in names}
    seconds = sum((one.num_rows - one.num_resumed) / max(one.reads_per_s, 1e-9) for one in done)
    speed = round((sums["num_rows"] - sums["num_resumed"]) / max(seconds, 1e-9), 1)
    return replace(done[-1], out=str(out), reads_per_s=speed, **sums)


def _read_abundances(path: Path) -> dict[tuple[str, ...], str]:
    """The estimated reads of each class, and those that are unclassified."""
    head, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    places = [head.index(name) for name in TAXON]
    return {tuple(row[place] for place in places): row[head.index("estimated_reads")] for row in rows}


def _taxa(counts: dict[str, dict[tuple[str, ...], str]]) -> list[tuple[str, ...]]:
    """The classes, in order of their ids, then the row of unclassified reads."""
    (first, *_) = counts.values()
    return sorted(first, key=lambda taxon: (taxon[0] == "", int(taxon[0] or 0)))


def _tsv(counts: dict[str, dict[tuple[str, ...], str]]) -> bytes:
    lines = ["\t".join([*TAXON, *counts])]
    lines += ["\t".join([*taxon, *(found[taxon] for found in counts.values())]) for taxon in _taxa(counts)]
    return ("\n".join(lines) + "\n").encode()


def _biom(counts: dict[str, dict[tuple[str, ...], str]]) -> bytes:
    """BIOM 1.0, which is JSON."""
    taxa = _taxa(counts)
    cells = [
        [row, column, float(found[taxon])]
        for row, taxon in enumerate(taxa)
        for column, found in enumerate(counts.values())
        if float(found[taxon])
    ]
    table: dict[str, Any] = {
        "id": None,
        "format": "Biological Observation Matrix 1.0.0",
        "format_url": "http://biom-format.org",
        "type": "Taxon table",
        "generated_by": "millstream",
        "date": "1970-01-01T00:00:00",  # the same reads give the same bytes
        "matrix_type": "sparse",
        "matrix_element_type": "float",
        "shape": [len(taxa), len(counts)],
        "rows": [
            {"id": taxon[0] or taxon[2], "metadata": dict(zip(TAXON[1:], taxon[1:], strict=True))} for taxon in taxa
        ],
        "columns": [{"id": name, "metadata": None} for name in counts],
        "data": cells,
    }
    return json.dumps(table).encode() + b"\n"
