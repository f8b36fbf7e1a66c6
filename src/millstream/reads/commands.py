"""The commands for read files: index, pack, unpack, and what inspect and verify do for reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli_common import Json, finish, print_json

if TYPE_CHECKING:
    from millstream.store.index import IndexSettings

Regex = Annotated[
    str | None,
    typer.Option("--header-regex", help="Named groups become columns: 'lbl\\|(?P<class_id>\\d+)'.", metavar="REGEX"),
]
Columns = Annotated[
    str | None, typer.Option(help="Which groups to keep, as in class_id,tax_id.", show_default="all", metavar="NAMES")
]
Mismatch = Annotated[
    str, typer.Option(help="What to do with a header that does not fit: error, skip or null.", metavar="WHAT")
]
Salvage = Annotated[bool, typer.Option("--salvage", help="Use a damaged file up to the damage.")]


def index(
    paths: Annotated[list[str], typer.Argument(help="FASTA or FASTQ files, folders or patterns.", metavar="FILE")],
    header_regex: Regex = None,
    columns: Columns = None,
    on_mismatch: Mismatch = "error",
    names: Annotated[
        bool, typer.Option("--names", help="Also for files of over a million reads, find by name.")
    ] = False,
    mapping: Annotated[
        Path | None, typer.Option(help="TSV or Parquet of class ids; unknown ids are refused.", metavar="FILE")
    ] = None,
    fai: Annotated[bool, typer.Option("--fai", help="Also write samtools' .fai (and .gzi).")] = False,
    index_dir: Annotated[
        Path | None, typer.Option(help="Put indexes there, not beside the files.", metavar="FOLDER")
    ] = None,
    memory: Annotated[str, typer.Option(help="The most that indexing may take.", metavar="SIZE")] = "256MB",
    salvage: Salvage = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build again what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Index FASTA or FASTQ files, plain, gzip, BGZF or zstd, so that any read can be fetched by number."""
    from functools import partial

    from millstream.console import format_bytes, say
    from millstream.store.fai import write_fai
    from millstream.store.index import check_memory
    from millstream.store.open_reads import open_reads
    from millstream.store.read_file import ReadFile
    from millstream.store.read_paths import expand, watch_index

    try:
        check_memory(memory)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    settings = read_settings(header_regex, columns, on_mismatch, names=names, salvage=salvage)
    files = [file for path in paths for file in expand(path)]
    reads = open_reads(
        files, settings=settings, mapping=mapping, memory=memory, index_dir=index_dir, rebuild=rebuild,
        watch=partial(watch_index, memory=memory), notify=say,
    )  # fmt: skip
    written = [str(out) for part in reads.parts if fai and isinstance(part, ReadFile) for out in write_fai(part)]
    if as_json:
        print_json(
            {
                "files": [str(path) for path in reads.paths],
                "indexes": [str(path) for path in reads.index_paths],
                "records": len(reads),
                "bases": reads.num_bases,
                "bytes": reads.num_bytes,
                "index_bytes": reads.index_bytes,
                "columns": reads.column_names,
                "written": written,
            }
        )
    size = f"{len(reads):,} reads, {reads.num_bases:,} bases; index {format_bytes(reads.index_bytes)}"
    finish(f"{reads.index_paths[0]}: {size}", "inspect", paths[0])


def pack(
    paths: Annotated[list[str], typer.Argument(help="FASTA or FASTQ files, then OUT.", metavar="SOURCE... OUT")],
    header_regex: Regex = None,
    columns: Columns = None,
    on_mismatch: Mismatch = "error",
    names: Annotated[bool, typer.Option(help="Keep the header lines.")] = True,
    quality: Annotated[bool, typer.Option(help="Keep the qualities of FASTQ.")] = True,
    salvage: Salvage = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Start anew, and replace OUT.")] = False,
    as_json: Json = False,
) -> None:
    """Pack reads into one file: 2 bits a base, any read at memory speed. Run again to go on after an interruption."""
    from millstream.console import format_bytes, progress, say
    from millstream.store.pack import pack as put
    from millstream.store.read_paths import expand

    if len(paths) < 2:
        raise typer.BadParameter("give the sources and then the file to write: millstream pack reads.fa.gz reads.pack")
    *sources, out = paths
    files = [file for source in sources for file in expand(source)]
    settings = read_settings(header_regex, columns, on_mismatch, salvage=salvage)
    size = sum(file.stat().st_size for file in files if file.exists())
    with progress("pack", size, unit="bytes") as update:
        done = put(
            files, Path(out), settings=settings, names=names, quality=quality, rebuild=rebuild, progress=update,
            notify=say,
        )  # fmt: skip
    if as_json:
        print_json({"path": out, "records": done.records, "bases": done.bases, "bytes": done.bytes})
    finish(f"{out}: {done.records:,} reads, {done.bases:,} bases, {format_bytes(done.bytes)}", "inspect", out)


def unpack(
    path: Annotated[Path, typer.Argument(help="A packed file.", metavar="PACKED")],
    out: Annotated[
        Path, typer.Argument(help="FASTA or FASTQ to write, gzipped if it ends in .gz; - is stdout.", metavar="OUT")
    ],
) -> None:
    """Write a packed file as FASTA or FASTQ again, bit for bit as it was."""
    import sys

    from millstream.console import progress, silent
    from millstream.store.pack_file import open_pack
    from millstream.store.unpack import unpack as restore

    file = open_pack(path, memory=256 << 20)
    if str(out) == "-":  # a bar among letters on the same terminal would spoil both
        restore(path, sys.stdout.buffer, progress=silent)
        return
    with progress("unpack", file.records, unit="reads") as update:
        restore(path, out, progress=update)
    finish(f"{out}: {file.records:,} reads", "index", out)


def simulate(
    genomes: Annotated[list[str], typer.Argument(help="FASTA files, each a genome; or a folder.", metavar="GENOMES")],
    out: Annotated[
        list[Path],
        typer.Option(
            "--out", "-o", help="FASTA or FASTQ, gzipped if it ends in .gz; twice: mates apart.", metavar="FILE"
        ),
    ],
    reads: Annotated[int, typer.Option(help="How many; the two of a pair count as two.", metavar="N")] = 100_000,
    length: Annotated[int, typer.Option(help="Letters of a read.", metavar="N")] = 150,
    error: Annotated[float, typer.Option(help="Share of letters that are replaced.", metavar="SHARE")] = 0.01,
    indel: Annotated[float, typer.Option(help="Share of letters left out or put in.", metavar="SHARE")] = 0.0,
    insert: Annotated[
        int | None, typer.Option(help="Make pairs, of fragments of this mean length.", metavar="N")
    ] = None,
    abundance: Annotated[
        str, typer.Option(help="length (same coverage), equal (reads a class), or lognormal.", metavar="HOW")
    ] = "length",
    mapping: Annotated[
        Path | None, typer.Option(help="Class ids by tax_id; written if it is not there.", metavar="FILE")
    ] = None,
    index_dir: Annotated[Path | None, typer.Option(help="Put indexes of the genomes there.", metavar="FOLDER")] = None,
    seed: Annotated[int, typer.Option(help="The same one gives the same reads.", metavar="N")] = 0,
    as_json: Json = False,
) -> None:
    """Draw labelled reads from genomes, of both strands and with errors; headers are lbl|class|tax|len|name/mate."""
    from dataclasses import asdict

    from millstream.console import progress
    from millstream.dataset.simulate import SimulateSettings
    from millstream.dataset.simulate import simulate as draw
    from millstream.store.read_paths import expand

    settings = SimulateSettings(reads, length, error, indel, insert, abundance=abundance, seed=seed)
    settings.check()
    files = [file for place in genomes for file in expand(place)]
    with progress("simulate", reads, unit="reads") as update:
        done = draw(files, out, settings=settings, mapping=mapping, index_dir=index_dir, progress=update)
    if as_json:
        print_json({**asdict(done), "paths": [str(path) for path in out]})
    depths = sorted(done.coverage.values())
    size = f"{done.reads:,} reads of {len(depths)} genomes, {done.bases:,} bases, coverage {depths[0]:.3g}x"
    more = f" to {depths[-1]:.3g}x" if f"{depths[0]:.3g}" != f"{depths[-1]:.3g}" else ""
    following: list[object] = ["index", *out]
    if mapping is not None and len(out) == 1:
        following = ["train", f"data.train={out[0]}", f"mapping={mapping}", *(["paired=true"] if insert else [])]
    finish(f"{' and '.join(map(str, out))}: {size}{more}", *following)


def inspect_reads(path: Path, *, examples: int, as_json: bool) -> None:
    from dataclasses import asdict

    from millstream.door import open_as_reads
    from millstream.store.read_summary import show_reads, summarise_reads

    summary = summarise_reads(open_as_reads(path), examples=examples)
    if as_json:
        print_json(asdict(summary))
    else:
        print(show_reads(summary))


def verify_reads(path: Path, *, as_json: bool) -> None:
    from millstream.console import format_bytes, progress
    from millstream.door import open_as_reads
    from millstream.store.pack_file import is_pack
    from millstream.store.read_summary import verify_reads as find_damage

    reads = open_as_reads(path)
    again = () if is_pack(path) else ("index", path, "--rebuild")
    with progress("verify", reads.num_bytes, unit="bytes") as update:
        damages = list(find_damage(reads, progress=update))
    if as_json:
        print_json({"records": len(reads), "bytes": reads.num_bytes, "damages": damages})
    for damage in damages if not as_json else ():
        print(damage)
    if damages:
        finish(
            f"{path}: {len(damages)} damage(s) in {len(reads):,} reads. If the file is whole, index it again", *again
        )
        raise typer.Exit(1)
    finish(f"{path}: {len(reads):,} reads, {format_bytes(reads.num_bytes)}: every checksum holds", "inspect", path)


def read_settings(
    header_regex: str | None, columns: str | None, on_mismatch: str, *, names: bool = False, salvage: bool = False
) -> "IndexSettings":
    from millstream.store.index import IndexSettings

    if on_mismatch not in ("error", "skip", "null"):
        raise typer.BadParameter(f"--on-mismatch {on_mismatch}: it is error, skip or null")
    return IndexSettings(
        header_regex=header_regex,
        columns=tuple(columns.split(",")) if columns else None,
        on_mismatch=on_mismatch,
        names=names,
        salvage=salvage,
    )
