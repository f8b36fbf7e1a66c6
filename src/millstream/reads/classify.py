"""Reads -> one row each, with a trained classifier of a run. Progress is saved while it runs."""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.config import Count, NonNegative, Probability, SizeInBytes, parse_bytes
from millstream.core.console import Progress, say, silent
from millstream.core.engine import Engine
from millstream.core.files import already_exists, check_replaceable, publish
from millstream.core.outputs import (
    RESUME,
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
from millstream.reads.kraken import Assignments, check_tax_ids, kraken_report, ranks_without_tax_ids
from millstream.reads.open import Paths, first_of, index_files
from millstream.reads.scorer import (
    ClassifyWorker,
    ReadSource,
    Rows,
    Scorer,
    ScoreSettings,
    TrainedClassifier,
    find_classifier,
)

Watch = Callable[[int], AbstractContextManager[Progress]]  # progress over this many reads
Span = tuple[int, int]  # reads, from the first to before the last
HEAD = b"read\tclass\ttax_id\ttaxon\trank\tprobability\n"


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
    run: str | Path,
    reads: Paths,
    out: str | Path,
    *,
    model: str | None = None,
    mates: Paths | None = None,
    paired: bool = False,
    threshold: Probability = 0.5,
    report: str | Path | None = None,
    kraken_output: str | Path | None = None,
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
    A read whose class is less likely than `threshold` is assigned to the lowest taxon above that reaches it, or to
    none; with `threshold=0` only reads without evidence for any class are unclassified. The same call resumes where it
    was interrupted, and ends with the same bytes; progress is saved every `save_s` seconds. `batch_size` is as large as
    the net and the memory allow if not given. `report` is a Kraken 2-style report to write (`kraken_output` is its old
    name). `out="-"` writes to stdout. A finished output is not written again, unless `force` replaces it. With
    `engine="ray"`, workers index the files and score `chunk_reads` reads at a time, each within `memory`; the rows are
    those of one process, and every chunk is saved when it arrives.

    >>> done = ms.classify("runs/reads", "sample.fq.gz", "sample.tsv", report="sample.kreport", threshold=0.9)
    """
    path, report = to_path(out), to_path(given) if (given := report or kraken_output) else None
    if paired and mates is not None:
        raise BadSetting("paired and mates: mates are either neighbours or in other files, not both")
    if report is not None and report.absolute() == path.absolute():
        raise BadSetting(f"report={report}: is also the output file. Choose another name for the report")
    is_stdout = str(out) == STDOUT
    for file in (path, report):
        if file is not None:
            check_replaceable(file)
    if not (is_stdout or force or done_file(path).exists()):
        check_new(path)
    chosen_engine = engine if isinstance(engine, Engine) else Engine(engine)
    trained = find_classifier(to_path(run), model)
    if report is not None:
        check_tax_ids(trained.classes, str(run))
    source = ReadSource(reads, mates, memory, index_dir)
    if chosen_engine.name != "local":
        index_files(source.files, index_dir=index_dir, engine=chosen_engine)
    collection, parts = source.open()
    num_mates = 2 if paired or mates is not None else 1
    if len(collection) % num_mates:
        raise BadSource(
            f"{first_of(reads)}: {len(collection)} reads are an odd number, not read pairs. Leave out --paired"
        )
    terms = {
        "model": f"{trained.name}-{trained.seed}",
        "run": trained.digest,
        "reads": collection.fingerprint,
        "mates": num_mates,
        "threshold": float(threshold),
    }
    if force and not is_stdout:
        _remove(path, report)
    known = find_finished(path, terms) if done_file(path).exists() and not is_stdout else None
    if known is not None:
        work = _Work(trained, _Stdout(path, terms, known), len(collection), num_mates)
        if report is not None:
            work.write_report(report)
        return work.summary()
    with _Stdout(path, terms) if is_stdout else TextOutput(path, terms) as file:
        if report is not None and not file.is_finished:
            check_new(report)
        work = _Work(trained, file, len(collection), num_mates)
        if not file.is_finished:
            why = "the best on validation" if model is None else "as given"
            score = "" if trained.score is None else f", macro F1 {trained.score:.3f}"
            say(f"{run}: {trained.name} seed {trained.seed}, {why}{score}")
            if (report is not None or threshold) and (ranks := ranks_without_tax_ids(trained.classes)):
                say(
                    f"{run}: no tax ids are known for some taxa of {', '.join(ranks)}; they get 0. Train with "
                    f"taxonomy=FOLDER, or a column {ranks[0]}_tax_id in the mapping"
                )
            settings = ScoreSettings(num_mates, threshold, parse_bytes(memory), batch_size, first_of(reads))
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
        if report is not None:
            work.write_report(report, replace=file.is_finished)
        file.publish()
    if not is_stdout:
        remember_finished(path, terms, work.state())
    return work.summary()


def _early(out: Path, terms: Mapping[str, object], engine: Engine, *, is_stdout: bool) -> "_Early":
    """Only workers deliver rows before their turn, perhaps in an earlier run."""
    is_used = engine.name != "local" or partial_folder(early_file(out)).exists()
    return _Early(out if is_used and not is_stdout else None, terms)


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


def _remove(out: Path, report: Path | None) -> None:
    """Remove the output, its progress and its report, unless another process is writing it."""
    with PartialOutput(out, {}, rebuild=True):
        if partial_folder(early_file(out)).exists():
            with PartialOutput(early_file(out), {}, rebuild=True):
                pass
        forget_finished(out)
        if report is not None:
            report.unlink(missing_ok=True)


class _Stdout:
    """Stdout with the methods of `TextOutput`, or, with `saved`, an output to which nothing is left to write."""

    def __init__(self, out: Path, terms: Mapping[str, object], saved: Mapping[str, Any] | None = None) -> None:
        self.out, self.terms, self.saved, self.is_finished = out, terms, saved, saved is not None

    def __enter__(self) -> "_Stdout":
        self._file = sys.stdout.buffer
        return self

    def __exit__(self, *_: object) -> None:
        self._file.flush()

    def write(self, text: bytes) -> None:
        self._file.write(text)

    def save(self, saved: Mapping[str, object]) -> None:
        """Nothing to save."""

    def finish(self, saved: Mapping[str, object]) -> None:
        self.is_finished = True

    def publish(self) -> None:
        """It is published as it is written."""


def early_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.early")


class _Early:
    """Rows that arrive before their turn: on disk in `OUT.early.partial`, safe at once; for stdout in memory."""

    def __init__(self, out: Path | None, terms: Mapping[str, object]) -> None:
        self._output = None if out is None else PartialOutput(early_file(out), terms)
        self._held: dict[Span, Rows | None] = {}  # None: on disk
        if self._output is not None:
            spans: Sequence[Span] = (self._output.load() or {"spans": []})["spans"]
            self._held.update(((first, last), None) for first, last in spans)

    @property
    def spans(self) -> list[Span]:
        return sorted(self._held)

    def __enter__(self) -> "_Early":
        return self

    def __exit__(self, *_: object) -> None:
        if self._output is not None:
            if not self._held:
                self._output.remove()
            self._output.__exit__()

    def add(self, rows: Rows) -> None:
        span = rows.first, rows.last
        self._held[span] = rows if self._output is None else None
        if self._output is not None:
            publish(self._output.path / _name(span), rows.counts.tobytes() + rows.text, RESUME)
            self._commit()

    def take(self, span: Span, num_counts: int) -> Rows:
        rows = self._held[span]
        if rows is None:
            assert self._output is not None
            data = (self._output.path / _name(span)).read_bytes()
            counts = np.frombuffer(data, np.int64, num_counts)
            rows = Rows(*span, data[counts.nbytes :], counts)
        return rows

    def drop_before(self, position: int) -> None:
        """Forget rows that are saved in the output, or that it has passed."""
        past = [span for span in self._held if span[0] < position]
        for span in past:
            del self._held[span]
        if past and self._output is not None:
            self._commit()
            for span in past:
                (self._output.path / _name(span)).unlink()

    def _commit(self) -> None:
        assert self._output is not None
        sizes = {_name(span): (self._output.path / _name(span)).stat().st_size for span in self._held}
        self._output.commit({"spans": self.spans}, sizes)


def _name(span: Span) -> str:
    return f"{span[0]}-{span[1]}"


class _Work:
    """Writes the rows of all reads in order, and counts them per taxon."""

    def __init__(
        self,
        trained: TrainedClassifier,
        file: "TextOutput | _Stdout",
        num_reads: int,
        group: int,
    ) -> None:
        self.file, self.num_reads, self.group = file, num_reads, group
        self.assignments = assignments = Assignments(trained.classes)
        saved = file.saved or {"counts": [0] * len(assignments)}
        self.counts: NDArray[np.int64] = np.array(saved["counts"], np.int64)
        self._before = int(self.counts.sum())
        self._started = time.perf_counter()

    def run(
        self,
        early: _Early,
        results: Callable[[Sequence[Span]], Iterator[Rows]],
        progress: Progress,
        *,
        save_s: float,
    ) -> bool:
        """Write `results`, which are the rows of ranges of reads; whether all are written."""
        if self.file.saved is None:
            self.file.write(HEAD)
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
        self.file.finish(self.state())
        early.drop_before(self.position)
        return True

    def write_report(self, report: Path, *, replace: bool = False) -> None:
        """The Kraken-style report; one that exists must be the same, unless it is to be replaced."""
        text = kraken_report(self.assignments, self.counts.tolist()).encode()
        if not replace and report.exists() and report.read_bytes() != text:
            raise already_exists(report)
        publish(report, text)

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
        return {"counts": self.counts.tolist()}

    def _add(self, rows: Rows) -> None:
        self.file.write(rows.text)
        self.counts += rows.counts

    def _add_early(self, early: _Early) -> None:
        """The rows whose turn has come."""
        for span in early.spans:
            if span[0] == self.position:
                self._add(early.take(span, len(self.counts)))

    def _save(self, early: _Early) -> None:
        self.file.save(self.state())
        early.drop_before(self.position)

    def _gaps(self, spans: Sequence[Span]) -> list[Span]:
        """The ranges of reads that are neither written nor in `spans`."""
        edges = [self.position, *(edge for span in spans for edge in span), self.num_reads]
        return [(first, last) for first, last in zip(edges[::2], edges[1::2], strict=True) if first < last]
