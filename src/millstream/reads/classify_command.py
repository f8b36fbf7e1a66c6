"""The command `classify`: a sample, or with `--table` several."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.app import Address, EngineName, Json, RunFolder, Workers, finish, parse_path, print_json
from millstream.errors import BadSetting

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from millstream.core.console import Progress

IndexDir = Annotated[
    Path | None,
    typer.Option(help="Folder for indexes.", show_default="beside the files", metavar="FOLDER", parser=parse_path),
]


def classify(
    run: RunFolder,
    reads: Annotated[
        list[str], typer.Argument(help="FASTA or FASTQ files, folders or patterns; - is stdin.", metavar="READS")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "--output",
            "-o",
            help="TSV; in Kraken 2's format if it ends in .kraken, a CAMI binning if in .binning; - is stdout. "
            "With --table, a folder.",
            metavar="FILE",
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Model of the run.", show_default="the best on validation", metavar="NAME")
    ] = None,
    paired: Annotated[bool, typer.Option("--paired", help="Neighbouring reads are mates.")] = False,
    mates: Annotated[
        list[str] | None, typer.Option(help="Files with the second mates of the read pairs.", metavar="FILE")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Minimum probability; below it, reads are assigned to a higher rank, or unclassified.",
            show_default="0.5",
            metavar="P",
        ),
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(
            help="Share of the reads assigned at each rank that should be correct, instead of a threshold.",
            metavar="P",
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            "--report",
            "--kraken-output",
            help="Also write a Kraken 2-style report (a CAMI profile if it ends in .profile), and abundances.",
            metavar="FILE",
        ),
    ] = None,
    classified_out: Annotated[
        Path | None,
        typer.Option(help="Also write the classified reads; # stands for _1 and _2, the mates.", metavar="FILE"),
    ] = None,
    unclassified_out: Annotated[
        Path | None,
        typer.Option(help="Also write the unclassified reads, the same way.", metavar="FILE"),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="Take each of READS for a sample, and also write a table of all: a TSV, or BIOM if it ends in .biom.",
            metavar="FILE",
            parser=parse_path,
        ),
    ] = None,
    memory: Annotated[
        str, typer.Option(help="Memory budget of the reads, in addition to the model.", metavar="SIZE")
    ] = "1GB",
    index_dir: IndexDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output and the report.")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Classify reads with a trained model.

    Writes a TSV with read, class, tax_id, taxon, rank and probability.
    Run the same command again to resume.
    """
    from contextlib import nullcontext
    from dataclasses import asdict
    from functools import partial

    from millstream.core.arguments import check
    from millstream.core.config import Probability
    from millstream.core.console import interruptible, progress, silent
    from millstream.core.engine import Engine
    from millstream.core.memory import Allowance
    from millstream.core.remote import to_path
    from millstream.reads.classify import classify as predict
    from millstream.reads.rows import kind_of
    from millstream.reads.samples import classify_samples, stdin_as_file
    from millstream.reads.scorer import find_classifier

    out, where = to_path(out), Engine(engine, address, workers)
    is_stdout = str(out) == "-"
    if is_stdout and as_json:
        raise BadSetting("--json: stdout is for the rows. Choose a file: --out calls.tsv")
    if table is not None and (report or classified_out or unclassified_out):
        raise BadSetting(
            f"--table {table}: every sample gets a report in {out}; leave out --report, --classified-out and "
            "--unclassified-out"
        )

    def watch(total: int) -> "AbstractContextManager[Progress]":
        if is_stdout:  # a progress bar would mix with the rows on the same terminal
            return nullcontext(silent)
        return progress("classify", total, unit="reads", memory=Allowance(memory).usage)  # the model is loaded by then

    for name, value in (("threshold", threshold), ("precision", precision)):
        check(name, value, Probability | None)
    trained = find_classifier(to_path(run), model)  # before stdin is read
    with interruptible() as stop, stdin_as_file(reads, where) as files:
        one = partial(
            predict, trained, model=model, paired=paired, threshold=threshold, precision=precision, memory=memory,
            index_dir=index_dir, force=force, engine=where, watch=watch, stop=stop,
        )  # fmt: skip
        if table is not None:
            done = classify_samples(one, files, mates=mates or [], out=out, table=to_path(table), force=force)
        else:
            done = one(
                files, out, mates=mates or None, report=list(report or []), classified_out=classified_out,
                unclassified_out=unclassified_out,
            )  # fmt: skip
    if as_json:
        print_json(asdict(done))
    what = "reads" if done.num_rows == done.num_reads else "read pairs"
    count = f"{done.num_rows:,} {what}, {done.num_classified:,} classified, {done.num_unclassified:,} unclassified"
    if done.interrupted:
        remedy = "" if is_stdout else "; progress saved; run the same command to resume"
        finish(f"{out}: {count} so far; interrupted{remedy}")
        raise typer.Exit(130)
    written = [*map(str, report or []), *([] if table is None else [str(table)])]
    taxa = f"; report in {' and '.join(written)}" if written else "; --report also writes a report of the taxa"
    speed = f"; {done.reads_per_s:,.0f} reads/s" if done.num_resumed < done.num_rows else ""
    is_shown = table is None and not is_stdout and not kind_of(out)
    finish(f"{out}: {count}{speed}{taxa}", "view", out if is_shown else run)
