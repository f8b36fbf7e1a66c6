"""The commands for reads, and how reads are inspected and verified."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from millstream.cli.app import TRAIN, Address, EngineName, Json, Workers, finish, parse_path, print_json
from millstream.errors import BadSetting
from millstream.reads.classify_command import IndexDir, classify

PANEL = "Sequencing: from genomes and FASTA/FASTQ to reads"

Regex = Annotated[
    str | None,
    typer.Option("--header-regex", help="Named groups become columns: 'lbl\\|(?P<class_id>\\d+)'.", metavar="REGEX"),
]
Columns = Annotated[
    str | None, typer.Option(help="Groups to keep, such as class_id,tax_id.", show_default="all", metavar="NAMES")
]
OnMismatch = Literal["error", "skip", "null"]
Mismatch = Annotated[
    OnMismatch, typer.Option(help="For headers that do not match: error, skip or null.", metavar="ACTION")
]
Salvage = Annotated[bool, typer.Option("--salvage", help="Use what checksums verify before the damage in a file.")]
Unverified = Annotated[bool, typer.Option("--unverified", help="Use all text before the damage, verified or not.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands for reads to the command line."""
    for command in (simulate, index, pack, unpack, fetch):
        app.command(rich_help_panel=PANEL)(command)
    app.command(rich_help_panel=TRAIN)(classify)


def inspect(path: Path, other: Path | None, *, examples: int, tolerance: float, as_json: bool) -> None:
    """Print a summary of reads."""
    from dataclasses import asdict

    from millstream.reads.inspect import show_reads, summarise_reads
    from millstream.reads.kind import open as open_reads

    if other is not None:
        raise BadSetting(f"{path} {other}: only trace stores can be compared; inspect reads one at a time")
    summary = summarise_reads(open_reads(path, memory="1GB"), examples=examples)
    if as_json:
        print_json(asdict(summary))
    else:
        print(show_reads(summary))


def verify(path: Path, *, fast: bool, as_json: bool) -> None:
    """Print all damage found in reads and their index; exit code 1 if there is any."""
    from millstream.core.console import format_bytes, progress, show
    from millstream.reads.inspect import verify_reads
    from millstream.reads.kind import open as open_reads
    from millstream.reads.pack import is_pack

    reads = open_reads(path)
    with progress("verify", reads.num_bytes, unit="bytes") as update:
        damages = list(verify_reads(reads, progress=update))
    if as_json:
        print_json({"records": len(reads), "bytes": reads.num_bytes, "damages": damages})
    elif damages:
        show("\n".join(damages))
    if damages:
        found = f"{path}: {len(damages)} damage(s) in {len(reads):,} reads"
        if is_pack(path):
            finish(found)
        else:
            finish(f"{found}. If the file itself is intact, rebuild its index", "index", path, "--rebuild")
        raise typer.Exit(1)
    finish(f"{path}: {len(reads):,} reads, {format_bytes(reads.num_bytes)}: all checksums match", "inspect", path)


def simulate(
    genomes: Annotated[
        list[str], typer.Argument(help="FASTA files, one genome per file; or a folder.", metavar="GENOMES")
    ],
    out: Annotated[
        list[Path],
        typer.Option(
            "--out",
            "-o",
            help="FASTA or FASTQ, gzipped if it ends in .gz; twice for one file per mate; - is stdout (FASTA).",
            metavar="FILE",
        ),
    ],
    reads: Annotated[int, typer.Option(help="Number of reads; a read pair counts as two.", metavar="N")] = 100_000,
    profile: Annotated[
        Literal["uniform", "illumina", "hifi", "ont"],
        typer.Option(
            help="Lengths, errors and base qualities: uniform (no qualities), illumina, hifi, or ont.", metavar="NAME"
        ),
    ] = "uniform",
    length: Annotated[
        int | None,
        typer.Option(help="Mean read length, in bases.", show_default="150; hifi 15000, ont 10000", metavar="N"),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(
            help="Per-base substitution rate.",
            show_default="0.01; illumina 0.003, hifi 0.0005, ont 0.03",
            metavar="RATE",
        ),
    ] = None,
    indel: Annotated[
        float | None,
        typer.Option(
            help="Per-base insertion and deletion rate.",
            show_default="0; illumina 0.0001, hifi 0.0015, ont 0.04",
            metavar="RATE",
        ),
    ] = None,
    insert: Annotated[
        int | None, typer.Option(help="Simulate read pairs, with this mean fragment length.", metavar="N")
    ] = None,
    abundance: Annotated[
        Literal["length", "equal", "lognormal"],
        typer.Option(help="length (equal coverage), equal (reads per class), or lognormal.", metavar="NAME"),
    ] = "length",
    mapping: Annotated[
        Path | None,
        typer.Option(
            help="Table of class ids by tax_id; written if it does not exist.", metavar="FILE", parser=parse_path
        ),
    ] = None,
    memory: Annotated[str, typer.Option(help="Memory budget of the genomes, a byte per base.", metavar="SIZE")] = "4GB",
    index_dir: IndexDir = None,
    seed: Annotated[int, typer.Option(help="Random seed.", metavar="N")] = 0,
    as_json: Json = False,
) -> None:
    """Simulate labelled reads from genomes.

    Reads come from both strands, with sequencing errors.
    Their headers are lbl|class|tax|len|name/mate.
    """
    from dataclasses import asdict

    from millstream.core.remote import to_path
    from millstream.reads.prepare import simulate as sample

    out = [to_path(path) for path in out]
    to_stdout = any(str(path) == "-" for path in out)
    if to_stdout and as_json:
        raise BadSetting("--json: stdout is for the reads. Choose a file: --out reads.fa")
    done = sample(
        genomes, out, reads=reads, profile=profile, length=length, error=error, indel=indel, insert=insert,
        abundance=abundance, mapping=mapping, memory=memory, index_dir=index_dir, seed=seed,
    )  # fmt: skip
    if as_json:
        print_json({**asdict(done), "paths": [str(path) for path in out]})
    depths = sorted(done.coverage.values())
    size = f"{done.reads:,} reads from {len(depths)} genomes, {done.bases:,} bases, coverage {depths[0]:.3g}x"
    more = f" to {depths[-1]:.3g}x" if f"{depths[0]:.3g}" != f"{depths[-1]:.3g}" else ""
    following: list[object] = [] if to_stdout else ["index", *out]
    if not to_stdout and mapping is not None:
        paired = ["paired=true"] if insert else []
        following = ["train", f"data.train={','.join(map(str, out))}", f"mapping={mapping}", *paired]
    finish(f"{' and '.join(map(str, out))}: {size}{more}", *following)


def index(
    paths: Annotated[list[str], typer.Argument(help="FASTA or FASTQ files, folders or patterns.", metavar="FILE")],
    header_regex: Regex = None,
    columns: Columns = None,
    on_mismatch: Mismatch = "error",
    names: Annotated[
        bool, typer.Option("--names", help="Look up reads by name even in files of over a million reads.")
    ] = False,
    mapping: Annotated[
        Path | None,
        typer.Option(help="TSV or Parquet of class ids; unknown ids are an error.", metavar="FILE", parser=parse_path),
    ] = None,
    fai: Annotated[bool, typer.Option("--fai", help="Also write a samtools .fai (and .gzi).")] = False,
    index_dir: IndexDir = None,
    memory: Annotated[str, typer.Option(help="Memory budget.", metavar="SIZE")] = "256MB",
    salvage: Salvage = False,
    unverified: Unverified = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Replace existing indexes; they keep settings that are not given.")
    ] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Index FASTA or FASTQ files for random access to any read.

    Files may be plain, gzip, BGZF or zstd; they are never decompressed on disk.
    """
    from millstream.core.console import format_bytes
    from millstream.core.engine import Engine
    from millstream.reads.files import ReadFile, write_fai
    from millstream.reads.prepare import index as index_reads

    reads = index_reads(
        paths, header_regex=header_regex, columns=columns.split(",") if columns else None, on_mismatch=on_mismatch,
        names=names, mapping=mapping, index_dir=index_dir, memory=memory, salvage=salvage, unverified=unverified,
        rebuild=rebuild, engine=Engine(engine, address, workers),
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
    following = [] if index_dir else ["inspect", paths[0]]  # which would look for the index beside the file
    finish(f"{reads.index_paths[0]}: {size}", *following)


def pack(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="FASTA, FASTQ (also bz2, xz), BAM, CRAM, folders or - (stdin), then the file or folder to write.",
            metavar="SOURCE... OUT",
        ),
    ],
    header_regex: Regex = None,
    columns: Columns = None,
    on_mismatch: Mismatch = "error",
    names: Annotated[bool, typer.Option(help="Keep the header lines.")] = True,
    quality: Annotated[bool, typer.Option(help="Keep the base qualities of FASTQ.")] = True,
    reference: Annotated[
        Path | None, typer.Option(help="FASTA that a CRAM was compressed with.", metavar="FILE", parser=parse_path)
    ] = None,
    salvage: Salvage = False,
    unverified: Unverified = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Start over and replace OUT.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Pack reads into one file of 2 bits per base.

    Any read can then be fetched at memory speed.
    Of BAM and CRAM, reads are packed as they were sequenced; their read groups become a column.
    If OUT is a folder, every file gets a pack of its own in it. --engine ray packs files on many machines.
    Run the same command again to resume.
    """
    from millstream.core.console import format_bytes, plural
    from millstream.core.engine import Engine
    from millstream.core.remote import to_path
    from millstream.reads.prepare import pack as pack_reads

    if len(paths) < 2:
        raise typer.BadParameter("name the sources, then the file to write: millstream pack reads.fa.gz reads.pack")
    *sources, out = paths
    is_folder = out.endswith("/") or to_path(out).is_dir()
    packs = pack_reads(
        sources, out, header_regex=header_regex, columns=columns.split(",") if columns else None,
        on_mismatch=on_mismatch, names=names, quality=quality, reference=reference, salvage=salvage,
        unverified=unverified, rebuild=rebuild, engine=Engine(engine, address, workers),
    )  # fmt: skip
    if as_json:
        rows = [
            {
                "path": str(done.path) if is_folder else out,
                "records": done.records,
                "bases": done.bases,
                "bytes": done.bytes,
                "exact": done.is_exact,
                "fidelity": done.fidelity,
            }
            for done in packs
        ]
        print_json({"path": out, "packs": rows} if is_folder else rows[0])
    records, bases, num_bytes = (sum(getattr(done, name) for done in packs) for name in ("records", "bases", "bytes"))
    size = f"{records:,} reads, {bases:,} bases, {format_bytes(num_bytes)}"
    many = f"{plural(len(packs), 'pack')}, " if is_folder else ""
    fidelity = "; ".join(dict.fromkeys(done.fidelity for done in packs))
    finish(f"{out}: {many}{size}; {fidelity}", "inspect", out)


def unpack(
    path: Annotated[Path, typer.Argument(help="A packed file.", metavar="PACKED", parser=parse_path)],
    out: Annotated[
        Path,
        typer.Argument(
            help="FASTA or FASTQ to write, gzipped if it ends in .gz; - is stdout.", metavar="OUT", parser=parse_path
        ),
    ],
) -> None:
    """Write a packed file as the FASTA or FASTQ it was made from."""
    from millstream.core.console import progress, say, silent
    from millstream.core.outputs import stdout
    from millstream.core.remote import to_path
    from millstream.reads.pack import PackFile
    from millstream.reads.pack.unpack import unpack as restore

    path, out = to_path(path), to_path(out)
    file = PackFile(path, memory=256 << 20)
    if str(out) == "-":  # a progress bar would mix with the sequences on the same terminal
        restore(path, stdout(), progress=silent)
        say(f"{path}: {file.records:,} reads; {file.fidelity}")
        return
    with progress("unpack", file.records, unit="reads") as update:
        restore(path, out, progress=update)
    finish(f"{out}: {file.records:,} reads; {file.fidelity}", "index", out)


def fetch(
    reads: Annotated[
        str, typer.Argument(help="A FASTA or FASTQ file, a pack, a folder or a pattern.", metavar="READS")
    ],
    names: Annotated[list[str], typer.Argument(help="Names of reads, or regions.", metavar="NAME[:START-END]...")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="FASTA, gzipped if it ends in .gz; - is stdout.", metavar="FILE"),
    ] = Path("-"),
    index_dir: IndexDir = None,
    memory: Annotated[str, typer.Option(help="Memory budget.", metavar="SIZE")] = "256MB",
) -> None:
    """Write reads, or regions of them such as chr1:100-200, as FASTA.

    As with samtools faidx, bases count from 1, both ends are included, and lines have 60 bases.
    """
    from contextlib import nullcontext

    from millstream.core.console import plural
    from millstream.core.outputs import publishing_text, stdout
    from millstream.core.remote import to_path
    from millstream.reads.kind import open as open_reads
    from millstream.reads.names import fasta_of

    out, is_stdout = to_path(out), str(out) == "-"
    with nullcontext(stdout().write) if is_stdout else publishing_text(out) as write:
        for text in fasta_of(open_reads(reads, index_dir=index_dir, memory=memory), names):
            write(text)
    if not is_stdout:
        finish(f"{out}: {plural(len(names), 'record')}", "index", out)
