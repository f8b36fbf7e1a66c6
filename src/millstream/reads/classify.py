"""Reads of any number -> a row each, by a trained classifier. What was written is kept when it is interrupted."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millstream.collection import Collection
from millstream.config import parse_bytes
from millstream.console import Progress, say, silent, unsaid
from millstream.dataset.batch import Feature
from millstream.errors import BadSetting, BadSource
from millstream.loader.loader import Loader
from millstream.model.reading import fitting_batch
from millstream.store.layout import publish
from millstream.train.calls import Calls
from millstream.train.finished import Finished, find_finished
from millstream.train.kraken_report import check_tax_ids, kraken_report
from millstream.train.log import Heap
from millstream.train.partial_file import PartialFile, check_new
from millstream.train.read_files import NAME, Paths, first_of, name_feature, open_files, shared_names

SAVE_S = 5.0  # so much is done again, at most, after a kill
HEAD = b"read\tclass\ttax_id\ttaxon\trank\tprobability\n"


@dataclass(frozen=True)
class Classified:
    """What was written. A pair counts as one; `resumed` were there from before; the speed is of the others."""

    out: str
    model: str
    num_reads: int
    num_rows: int
    num_classified: int
    num_unclassified: int
    num_resumed: int
    reads_per_s: float
    interrupted: bool = False


@contextmanager
def unwatched(total: int) -> Generator[Progress]:
    """Nobody watches."""
    yield silent


def classify(
    run: str | Path,
    reads: Paths,
    out: str | Path,
    *,
    model: str | None = None,
    mates: Paths | None = None,
    paired: bool = False,
    threshold: float = 0.0,
    kraken_output: str | Path | None = None,
    memory: int | str = "1GB",
    index_dir: str | Path | None = None,
    watch: Callable[[int], AbstractContextManager[Progress]] = unwatched,
    stop: Callable[[], bool] = lambda: False,
) -> Classified:
    """Write what a run's classifier says of reads: a TSV of read, class, tax_id, taxon, rank and probability.

    Pairs, of neighbours (`paired`) or with the second reads in files of their own (`mates`), get one row each. A read
    whose class is less likely than `threshold` is given to the lowest taxon above that is likely enough, or to none.
    The same call goes on where it was interrupted, and ends with the same bytes.

    >>> done = ms.classify("runs/reads", "sample.fq.gz", "sample.tsv", kraken_output="sample.kreport", threshold=0.5)
    """
    path, report = Path(out), None if kraken_output is None else Path(kraken_output)
    if not 0 <= threshold <= 1:
        raise BadSetting(f"threshold={threshold}: a probability, from 0 to 1")
    if paired and mates is not None:
        raise BadSetting("paired and mates: neighbours are mates, or the mates are in another file; not both")
    if report is not None and report.absolute() == path.absolute():
        raise BadSetting(f"kraken_output={report}: is where the rows go. Choose another name for the report")
    check_new(path)
    finished = find_finished(Path(run), model)
    if report is not None:
        check_tax_ids(finished.classes, str(run))
    collection, parts = open_files(reads, mates, memory=parse_bytes(memory) // 4, index_dir=index_dir)
    num_mates = 2 if paired or mates is not None else 1
    if len(collection) % num_mates:
        raise BadSource(
            f"{first_of(reads)}: has {len(collection)} reads, which is no number of pairs. Leave out --paired"
        )
    key = {
        "model": f"{finished.name}-{finished.seed}",
        "run": finished.digest,
        "reads": collection.fingerprint,
        "mates": num_mates,
        "threshold": float(threshold),
    }
    with PartialFile(path, key) as file:
        if report is not None and not file.is_finished:
            check_new(report)
        work = _Work(finished, collection, file, num_mates, threshold, where=first_of(reads))
        if not file.is_finished:
            _say_which(finished, given=model is not None)
            if not work.run(name_feature(parts), parse_bytes(memory), watch, stop):
                return work.told(interrupted=True)
        if report is not None:
            publish(report, kraken_report(work.calls, work.counts.tolist()).encode())
        file.publish()
    return work.told()


class _Work:
    """From the reads to the file, batch by batch."""

    def __init__(
        self, finished: Finished, collection: Collection, file: PartialFile, mates: int, threshold: float, where: str
    ) -> None:
        self.finished, self.collection, self.file, self.where = finished, collection, file, where
        self.mates, self.threshold = mates, threshold
        self.calls = calls = Calls(finished.classes)
        saved = file.saved or {"counts": [0] * len(calls), "loader": None}
        self.counts: NDArray[np.int64] = np.array(saved["counts"], np.int64)
        self._loaded: Mapping[str, object] | None = saved["loader"]
        self._before = int(self.counts.sum())
        self._begun = time.perf_counter()
        rows = zip(calls.class_ids, calls.taxa, calls.ranks, strict=True)
        self._middles = [f"\t{own}\t{taxon.tax_id}\t{_cell(taxon.name)}\t{rank}\t" for own, taxon, rank in rows]

    def run(
        self,
        names: Feature,
        memory: int,
        watch: Callable[[int], AbstractContextManager[Progress]],
        stop: Callable[[], bool],
    ) -> bool:
        """Whether it came to its end."""
        model, net = self.finished.restore(self.collection, memory=memory)
        net.ask_for(self.calls.asked, self.mates)
        features, heap = [*model.scoring, names], Heap(memory // 2)
        most = max(model.at_once // self.mates, 1) * self.mates
        size = fitting_batch(self.collection, features, memory=memory // 2, at_most=most)
        loader = Loader(
            self.collection,
            batch_size=-(-size // self.mates) * self.mates,
            features=features,
            order="none",
            memory=memory // 2,
            rank=0,
            world=1,
            notify=unsaid,
        )
        if self._loaded is None:
            self.file.write(HEAD)
        else:
            loader.load_state_dict(self._loaded)
        self._begun = saved = time.perf_counter()
        with torch.inference_mode(), watch(len(self.collection)) as progress:
            progress(self.num_rows * self.mates)
            for batch in loader:
                self._add(batch.pop(NAME), net.answer(model.fabric.to_device(batch)))
                self._loaded = loader.state_dict()
                del batch
                heap.settle()
                progress(self.num_rows * self.mates)
                asked = stop()
                if asked or time.perf_counter() - saved > SAVE_S:
                    self.file.save(self._state())
                    saved = time.perf_counter()
                if asked and self.num_rows * self.mates < len(self.collection):
                    return False
        self.file.finish(self._state())
        return True

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @property
    def reads_per_s(self) -> float:
        return (self.num_rows - self._before) * self.mates / max(time.perf_counter() - self._begun, 1e-9)

    def told(self, *, interrupted: bool = False) -> Classified:
        none = int(self.counts[self.calls.nothing])
        return Classified(
            out=str(self.file.out),
            model=str(self.file.key["model"]),
            num_reads=self.num_rows * self.mates,
            num_rows=self.num_rows,
            num_classified=self.num_rows - none,
            num_unclassified=none,
            num_resumed=self._before,
            reads_per_s=round(self.reads_per_s, 1),
            interrupted=interrupted,
        )

    def _add(self, names: Any, answers: Mapping[str, torch.Tensor]) -> None:
        """The rows of one batch."""
        if self.mates == 2:
            names = shared_names(names, first=self.num_rows, where=self.where)
        numbers, chances = self.calls.choose(answers, self.threshold)
        middles = self._middles
        rows = zip(names, numbers.tolist(), chances.tolist(), strict=True)
        self.file.write("".join([f"{name}{middles[number]}{chance:.4f}\n" for name, number, chance in rows]).encode())
        self.counts += np.bincount(numbers, minlength=len(self.calls))

    def _state(self) -> dict[str, object]:
        return {"counts": self.counts.tolist(), "loader": self._loaded}


def _say_which(finished: Finished, *, given: bool) -> None:
    why = "asked for" if given else "the best on validation"
    score = "" if finished.score is None else f", macro F1 {finished.score:.3f}"
    say(f"{finished.run}: {finished.name} seed {finished.seed}, {why}{score}")


def _cell(text: str) -> str:
    return " ".join(text.split())
