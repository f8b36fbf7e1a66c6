"""Simulate, index and pack reads: what the commands of these names do, as functions."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from millstream.core.arguments import checked
from millstream.core.config import Between, Count, Natural, NonNegative, Rate, SizeInBytes
from millstream.core.console import progress, say, silent
from millstream.core.engine import Engine
from millstream.core.outputs import STDOUT
from millstream.core.remote import to_path
from millstream.errors import BadSetting, BadSource
from millstream.reads.files.columns import OnMismatch
from millstream.reads.files.index import IndexSettings, check_memory
from millstream.reads.mapping import MappingSource
from millstream.reads.open import Paths, expand, open_reads, read_files, watch_index
from millstream.reads.pack.each import pack_each
from millstream.reads.pack.pack import pack as write_pack
from millstream.reads.pack.writer import PackSummary
from millstream.reads.reads import Reads
from millstream.reads.simulate import MEMORY, UNIFORM, Simulated, SimulateSettings
from millstream.reads.simulate import simulate as write_reads


@checked
def simulate(
    genomes: Paths,
    out: Paths,
    *,
    reads: Count = 100_000,
    profile: str = UNIFORM,
    length: Count | None = None,
    error: Rate | None = None,
    indel: Annotated[float, Between(0, 0.1)] | None = None,
    insert: Count | None = None,
    insert_sd: NonNegative = 30.0,
    abundance: Literal["length", "equal", "lognormal"] = "length",
    mapping: str | Path | None = None,
    memory: SizeInBytes = MEMORY,
    index_dir: str | Path | None = None,
    seed: Natural = 0,
) -> Simulated:
    """Write labelled reads of genomes, one per file, to a FASTA or FASTQ file, or read pairs to two.

    `profile` is uniform, illumina, hifi or ont; it has defaults for `length` and the rates `error` and `indel`. With
    `insert`, the mean fragment length, reads are pairs. Classes come from the `mapping`, by its column `file` or by the
    tax id at the start of a file's name; it is written if it does not exist.

    >>> done = ms.simulate("genomes/", "simulated.fa.gz", reads=200, mapping="species.tsv", seed=7)
    """
    settings = SimulateSettings(reads, length, error, indel, insert, insert_sd, abundance, seed, profile)
    settings.check()
    places = [to_path(path) for path in ([out] if isinstance(out, str | Path) else out)]
    files = read_files(genomes)
    is_stdout = any(str(path) == STDOUT for path in places)
    folder = None if index_dir is None else to_path(index_dir)
    with nullcontext(silent) if is_stdout else progress("simulate", reads, unit="reads") as update:
        return write_reads(
            files, places, settings=settings, mapping=None if mapping is None else to_path(mapping), index_dir=folder,
            memory=memory, progress=update,
        )  # fmt: skip


@checked
def index(
    reads: Paths,
    *,
    header_regex: str | None = None,
    columns: Sequence[str] | None = None,
    on_mismatch: OnMismatch = "error",
    names: bool = False,
    mapping: MappingSource | None = None,
    index_dir: str | Path | None = None,
    memory: SizeInBytes = "256MB",
    salvage: bool = False,
    unverified: bool = False,
    rebuild: bool = False,
    engine: Engine | str = "local",
) -> Reads:
    """Index FASTA or FASTQ files and open them; `ms.open` does it with fewer choices.

    `names` also makes a table to look up reads by name in files of over a million. With `rebuild`, indexes are replaced
    and keep the settings that are not given. With `engine="ray"`, workers index the files.

    >>> reads = ms.index("train.fa.gz", header_regex=r"lbl\\|(?P<class_id>\\d+)", names=True)
    """
    try:
        check_memory(memory)
    except ValueError as error:
        raise BadSetting(str(error)) from None
    given = _settings(header_regex, columns, on_mismatch, names=names, salvage=salvage, unverified=unverified)
    with redirect_stdout(sys.stderr):  # Ray reports dead workers on stdout, which is for data
        return open_reads(
            read_files(reads),
            settings=None if given == IndexSettings() else given,  # an index keeps its own
            mapping=mapping,
            memory=memory,
            index_dir=index_dir,
            rebuild=rebuild,
            engine=engine if isinstance(engine, Engine) else Engine(engine),
            watch=partial(watch_index, memory=memory),
        )


@checked
def pack(
    sources: Paths,
    out: str | Path,
    *,
    header_regex: str | None = None,
    columns: Sequence[str] | None = None,
    on_mismatch: OnMismatch = "error",
    names: bool = True,
    quality: bool = True,
    reference: str | Path | None = None,
    salvage: bool = False,
    unverified: bool = False,
    rebuild: bool = False,
    engine: Engine | str = "local",
) -> list[PackSummary]:
    """Pack FASTA, FASTQ (also bz2, xz), BAM or CRAM files, folders of them or stdin (`-`) into one file.

    If `out` is a folder, every file gets a pack of its own in it. Without `names` the header lines are left out,
    without `quality` the base qualities. `reference` is the FASTA that a CRAM was compressed with. The same call
    resumes an interrupted one; `rebuild` starts over and replaces `out`. Returns what each pack has.

    >>> (done,) = ms.pack("sample.fq.gz", "sample.pack")
    """
    place, text = to_path(out), str(out)
    if text == STDOUT:
        raise BadSetting("-: a packed file is not written from beginning to end. Choose a file, such as reads.pack")
    given = [sources] if isinstance(sources, str | Path) else sources
    files = [file for source in given for file in expand(source, in_order=True)]
    settings = _settings(header_regex, columns, on_mismatch, salvage=salvage, unverified=unverified)
    if reference is not None and not to_path(reference).is_file():
        raise BadSource(f"{reference}: no such file, which was given as the reference of a CRAM")
    size = sum(file.stat().st_size for file in files if file.exists())
    write = partial(
        write_pack, settings=settings, names=names, quality=quality, rebuild=rebuild,
        reference=None if reference is None else to_path(reference),
    )  # fmt: skip
    chosen = engine if isinstance(engine, Engine) else Engine(engine)
    with redirect_stdout(sys.stderr), progress("pack", size, unit="bytes") as update:
        if text.endswith("/") or place.is_dir():
            return pack_each(files, place, write=write, rebuild=rebuild, engine=chosen, progress=update)
        return [write(files, place, engine=chosen, progress=update, notify=say)]


def _settings(
    header_regex: str | None,
    columns: Sequence[str] | None,
    on_mismatch: OnMismatch,
    *,
    names: bool = False,
    salvage: bool = False,
    unverified: bool = False,
) -> IndexSettings:
    return IndexSettings(
        header_regex=header_regex,
        columns=None if columns is None else tuple(columns),
        on_mismatch=on_mismatch,
        names=names,
        salvage=salvage or unverified,
        unverified=unverified,
    )
