"""Reads -> one row each, with a trained classifier of a run. Progress is saved while it runs."""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.config import Count, NonNegative, Probability, SizeInBytes, parse_bytes
from millstream.core.console import Progress, say, silent
from millstream.core.engine import Engine
from millstream.core.outputs import (
    STDOUT,
    PartialOutput,
    TextOutput,
    check_new,
    done_file,
    find_finished,
    forget_finished,
    partial_folder,
    remember_finished,
)
from millstream.core.remote import to_path
from millstream.errors import BadSetting, BadSource
from millstream.reads.calibration import Thresholds
from millstream.reads.evidence import MOST_SETS, Evidence, EvidenceSum
from millstream.reads.filtered import FilteredReads, Sample, check_outputs, filtered_paths
from millstream.reads.kraken import Assignments, check_tax_ids, ranks_without_tax_ids
from millstream.reads.open import Paths, first_of, index_files
from millstream.reads.row_outputs import EarlyRows, Span, Stdout, early_file
from millstream.reads.rows import Rows, head_of, kind_of
from millstream.reads.sample_reports import SampleReports
from millstream.reads.scorer import (
    ClassifyWorker,
    ReadSource,
    Scorer,
    ScoreSettings,
    TrainedClassifier,
    find_classifier,
)

VERSION = 2  # of what is saved
Watch = Callable[[int], AbstractContextManager[Progress]]  # progress over this many reads
THRESHOLD = 0.5


@dataclass(frozen=True)
class Classified:
    """What was written. A read pair is one row; `num_resumed` rows were written before, and do not count for speed."""

    out: str
    model: str
    num_reads: int
    num_rows: int
    num_classified: int
    num_unclassified: int
    num_resumed: int
    reads_per_s: float
    interrupted: bool = False


@checked
def classify(
    run: str | Path | TrainedClassifier,
    reads: Paths,
    out: str | Path,
    *,
    model: str | None = None,
    mates: Paths | None = None,
    paired: bool = False,
    threshold: Probability | None = None,
    precision: Probability | None = None,
    report: Paths | None = None,
    kraken_output: Paths | None = None,
    classified_out: str | Path | None = None,
    unclassified_out: str | Path | None = None,
    memory: SizeInBytes = "1GB",
    index_dir: str | Path | None = None,
    force: bool = False,
    engine: Engine | str = "local",
    watch: Watch = lambda total: nullcontext(silent),
    stop: Callable[[], bool] = lambda: False,
    batch_size: Count | None = None,
    save_s: NonNegative = 5.0,
    chunk_reads: Count = 1 << 16,
) -> Classified:
    """Classify reads with a run's classifier: a TSV of read, class, tax_id, taxon, rank and probability.

    Read pairs, either neighbours (`paired`) or with the second mates in other files (`mates`), get one row each.
    A read whose class is less likely than `threshold` (0.5) is assigned to the lowest taxon above that reaches it, or
    to none; with `threshold=0` only reads without evidence for any class are unclassified. With `precision` instead,
    each rank has the threshold at which this share of the reads assigned at it should be correct, from the validation
    reads of the run. The same call resumes where it was interrupted, and ends with the same bytes; progress is saved
    every `save_s` seconds. `batch_size` is as large as the net and the memory allow if not given. A name that ends in
    `.kraken` or `.binning` gets rows as Kraken 2 or CAMI have them. `report` is a Kraken 2-style report to write, or
    several (`kraken_output` is its old name); one that ends in `.profile` is a CAMI profile, and beside the first are
    the abundances, in `NAME.abundance.tsv`. `classified_out` and `unclassified_out` are FASTA or FASTQ files of the
    reads themselves; for pairs, `#` in a name stands for `_1` and `_2`, a file per mate. `out="-"` writes to stdout. A
    finished output is not written again, unless `force` replaces it. With `engine="ray"`, workers index the files and
    score `chunk_reads` reads at a time, each within `memory`; the rows are those of one process, and every chunk is
    saved when it arrives.

    >>> done = ms.classify("runs/reads", "sample.fq.gz", "sample.tsv", report="sample.kreport", precision=0.99)
    """
    path, reports = to_path(out), SampleReports.at(report or kraken_output)
    if paired and mates is not None:
        raise BadSetting("paired and mates: mates are either neighbours or in other files, not both")
    if threshold is not None and precision is not None:
        raise BadSetting(f"threshold={threshold:g} and precision={precision:g}: a precision sets thresholds. Give one")
    num_mates = 2 if paired or mates is not None else 1
    filtered = {
        wanted: to_path(given) for wanted, given in ((True, classified_out), (False, unclassified_out)) if given
    }
    is_stdout = str(out) == STDOUT
    others = [file for given in filtered.values() for file in filtered_paths(given, num_mates)]
    check_outputs([path, *others])
    reports.check([path, *others])
    if not (is_stdout or force or done_file(path).exists()):
        check_new(path)
    chosen_engine = engine if isinstance(engine, Engine) else Engine(engine)
    trained = run if isinstance(run, TrainedClassifier) else find_classifier(to_path(run), model)
    if reports.reports or kind_of(path):
        check_tax_ids(trained.classes, str(trained.run))
    least = THRESHOLD if threshold is None else threshold
    thresholds = None if precision is None else trained.thresholds(precision)
    source = ReadSource(reads, mates, memory, index_dir)
    if chosen_engine.name != "local":
        index_files(source.files, index_dir=index_dir, engine=chosen_engine)
    collection, parts = source.open()
    if len(collection) % num_mates:
        raise BadSource(
            f"{first_of(reads)}: {len(collection)} reads are an odd number, not read pairs. Leave out --paired"
        )
    sample = Sample(collection, parts, num_mates)
    terms: dict[str, object] = {
        "version": VERSION,
        "model": f"{trained.name}-{trained.seed}",
        "run": trained.digest,
        "reads": collection.fingerprint,
        "mates": num_mates,
        "threshold": float(least) if thresholds is None else [*map(str, thresholds.values)],
    }
    for wanted, given in filtered.items():
        terms["classified_out" if wanted else "unclassified_out"] = str(given)
    if force:
        _remove([*([] if is_stdout else [path]), *others], reports.files)
    known = find_finished(path, terms) if done_file(path).exists() and not is_stdout else None
    if known is not None:
        work = _Work(trained, Stdout(path, terms, known), len(collection), num_mates)
        work.write_reports(reports)
        return work.summary()
    with (
        Stdout(path, terms) if is_stdout else TextOutput(path, terms) as file,
        ExitStack() as stack,
    ):
        if not file.is_finished:
            reports.check_new()
        opened = [
            FilteredReads(
                given, sample, wanted=wanted, memory=parse_bytes(memory), terms=terms, is_finished=file.is_finished
            )
            for wanted, given in filtered.items()
        ]
        sides = [stack.enter_context(one) for one in opened]
        work = _Work(trained, file, len(collection), num_mates, sides)
        if not file.is_finished:
            if not trained.is_loaded:
                why = "the best on validation" if model is None else "as given"
                ranks = ranks_without_tax_ids(trained.classes) if reports.reports or least else []
                _describe(trained, thresholds, why=why, without_ids=ranks)
            settings = ScoreSettings(
                num_mates,
                least if thresholds is None else thresholds.values,
                parse_bytes(memory),
                batch_size,
                where=first_of(reads),
                kind=kind_of(path),
            )
            scorer = Scorer(trained, collection, parts, settings)
            make = partial(ClassifyWorker, trained.absolute(), source.absolute(), collection.fingerprint, settings)
            if chosen_engine.name == "local":
                results = partial(_rows_here, scorer, stop)
            else:
                chunk = -(-chunk_reads // scorer.size) * scorer.size
                results = partial(_rows_on_workers, chosen_engine, make, chunk, stop)
                save_s = 0.0
            with _early(path, terms, chosen_engine, is_stdout=is_stdout) as early, watch(len(collection)) as progress:
                if not work.run(early, results, progress, save_s=save_s):
                    return work.summary(interrupted=True)
        work.write_reports(reports, replace=True)
        for side in sides:
            side.publish()
        file.publish()
    if not is_stdout:
        remember_finished(path, terms, work.state())
    return work.summary()


def _describe(
    trained: TrainedClassifier, thresholds: Thresholds | None, *, why: str, without_ids: Sequence[str]
) -> None:
    """Say which classifier it is, its thresholds, and which ranks have taxa without tax ids."""
    score = "" if trained.score is None else f", macro F1 {trained.score:.3f}"
    say(f"{trained.run}: {trained.name} seed {trained.seed}, {why}{score}")
    if thresholds is not None:
        say(thresholds.about)
    if without_ids:
        say(
            f"{trained.run}: no tax ids are known for some taxa of {', '.join(without_ids)}; they get 0. Train with "
            f"taxonomy=FOLDER, or a column {without_ids[0]}_tax_id in the mapping"
        )


def _early(out: Path, terms: Mapping[str, object], engine: Engine, *, is_stdout: bool) -> EarlyRows:
    """Only workers deliver rows before their turn, perhaps in an earlier run."""
    is_used = engine.name != "local" or partial_folder(early_file(out)).exists()
    return EarlyRows(out if is_used and not is_stdout else None, terms)


def _rows_here(scorer: Scorer, stop: Callable[[], bool], gaps: Sequence[Span]) -> Generator[Rows]:
    """The rows of ranges of reads, batch by batch."""
    for gap in gaps:
        for rows in scorer.rows(*gap):
            yield rows
            if stop():
                return


def _rows_on_workers(
    engine: Engine,
    make: Callable[[], ClassifyWorker],
    chunk: int,
    stop: Callable[[], bool],
    gaps: Sequence[Span],
) -> Generator[Rows]:
    """The rows of ranges of reads, `chunk` reads at a time, as they arrive. Chunks in progress when it stops arrive."""

    def jobs() -> Iterator[Span]:
        for first, last in gaps:
            # Batches are the same whoever scores them: chunks start at multiples of a batch.
            edges = [first, *range((first // chunk + 1) * chunk, last, chunk), last]
            for span in pairwise(edges):
                if stop():
                    return
                yield span

    with (
        redirect_stdout(sys.stderr),
        closing(engine.run(make, jobs())) as results,
    ):  # Ray reports dead workers on stdout
        yield from results


def _remove(outputs: Sequence[Path], reports: Sequence[Path]) -> None:
    """Remove outputs, their progress and the reports, unless another process is writing them."""
    for out in outputs:
        with PartialOutput(out, {}, rebuild=True):
            if partial_folder(early_file(out)).exists():
                with PartialOutput(early_file(out), {}, rebuild=True):
                    pass
            forget_finished(out)
    for report in reports:
        report.unlink(missing_ok=True)


class _Work:
    """Writes the rows of all reads in order, and counts them per taxon."""

    def __init__(
        self,
        trained: TrainedClassifier,
        file: TextOutput | Stdout,
        num_reads: int,
        group: int,
        sides: Sequence[FilteredReads] = (),
    ) -> None:
        self.file, self.num_reads, self.group, self._sides = file, num_reads, group, sides
        self.assignments = assignments = Assignments(trained.classes)
        saved = file.saved or {"counts": [0] * len(assignments), "evidence": None}
        self.counts: NDArray[np.int64] = np.array(saved["counts"], np.int64)
        known = saved["evidence"]
        self._evidence = EvidenceSum(
            Evidence.none(len(trained.classes)) if known is None else Evidence.from_text(known)
        )
        self._before = int(self.counts.sum())
        self._started = time.perf_counter()

    def run(
        self,
        early: EarlyRows,
        results: Callable[[Sequence[Span]], Iterator[Rows]],
        progress: Progress,
        *,
        save_s: float,
    ) -> bool:
        """Write `results`, which are the rows of ranges of reads; whether all are written."""
        if self.file.saved is None:
            self.file.write(head_of(self.file.out))
        early.drop_before(self.position)
        self._started = saved = time.perf_counter()
        progress(self.position)
        for rows in results(self._gaps(early.spans)):
            if rows.first == self.position:
                self._add(rows)
                self._add_early(early)
            else:
                early.add(rows)
            progress(self.position + sum(last - first for first, last in early.spans))
            if time.perf_counter() - saved > save_s:
                self._save(early)
                saved = time.perf_counter()
        self._add_early(early)
        if self.position < self.num_reads:
            self._save(early)
            return False
        for side in self._sides:
            side.finish(self.num_rows)
        self.file.finish(self.state())
        early.drop_before(self.position)
        return True

    def write_reports(self, reports: SampleReports, *, replace: bool = False) -> None:
        """The reports of all rows."""
        evidence = self._evidence.total()
        if reports.reports and evidence.num_merged:
            say(
                f"{self.file.out}: {evidence.num_merged:,} reads count for their most probable class only: their "
                f"classes are more than {MOST_SETS:,} different sets"
            )
        reports.write(self.assignments, self.counts.tolist(), evidence, replace=replace)

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @property
    def position(self) -> int:
        """The number of the next read."""
        return self.num_rows * self.group

    def summary(self, *, interrupted: bool = False) -> Classified:
        num_unclassified = int(self.counts[self.assignments.unclassified])
        num_new = (self.num_rows - self._before) * self.group
        return Classified(
            out=str(self.file.out),
            model=str(self.file.terms["model"]),
            num_reads=self.position,
            num_rows=self.num_rows,
            num_classified=self.num_rows - num_unclassified,
            num_unclassified=num_unclassified,
            num_resumed=self._before,
            reads_per_s=round(num_new / max(time.perf_counter() - self._started, 1e-9), 1),
            interrupted=interrupted,
        )

    def state(self) -> dict[str, object]:
        return {"counts": self.counts.tolist(), "evidence": self._evidence.total().to_text()}

    def _add(self, rows: Rows) -> None:
        for side in self._sides:
            side.add(rows.first // self.group, rows.is_classified)
        self.file.write(rows.text)
        self.counts += rows.counts
        self._evidence.add(rows.evidence)

    def _add_early(self, early: EarlyRows) -> None:
        """The rows whose turn has come."""
        for span in early.spans:
            if span[0] == self.position:
                self._add(early.take(span))

    def _save(self, early: EarlyRows) -> None:
        for side in self._sides:
            side.save(self.num_rows)
        self.file.save(self.state())
        early.drop_before(self.position)

    def _gaps(self, spans: Sequence[Span]) -> list[Span]:
        """The ranges of reads that are neither written nor in `spans`."""
        edges = [self.position, *(edge for span in spans for edge in span), self.num_reads]
        return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]
