"""Detectors of wrong answers, compared on one split of a labelled trace store."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from millstream.collection import Collection
from millstream.dataset.labels import LABEL
from millstream.dataset.split import Split
from millstream.model.detector import Scores
from millstream.train.data import data_card, open_labelled, split_of
from millstream.train.detectors import asked_for
from millstream.train.folder import SPLIT
from millstream.train.settings import TrainSettings
from millstream.train.study import Asked, Built


class Detection:
    """All detectors see the same parts, split by question."""

    keys: Sequence[str] = ("fingerprint", "label_digest")  # with other records or labels it is another run

    def __init__(self, settings: TrainSettings) -> None:
        settings.check()
        self.settings, self.source = settings, settings.data
        self.collection = open_labelled(settings.data, settings.label)
        self.parts: Split = split_of(self.collection, settings)
        self.asked: Sequence[Asked] = asked_for(settings, self.collection.field_names)
        self.card = self._card()

    @property
    def train(self) -> Collection:
        return self.parts["train"]

    @property
    def scored(self) -> Mapping[str, Collection]:
        return {name: self.parts[name] for name in ("val", "test")}

    def _card(self) -> Mapping[str, object]:
        rule = self.parts.rule
        parts = {name: self.parts[name] for name in rule.parts}
        return data_card(self.source, self.collection, parts, f"by a hash of {rule.by}, salt {rule.salt!r}")

    def keep(self, run: Path) -> None:
        self.parts.save(run / SPLIT)

    def told(self) -> str:
        used = f"{self.source}: {len(self.collection)} of {self.card['records']} records are right or wrong"
        return f"{used}\n{self.parts.report(LABEL)}"

    def table(self, built: Built, part: str) -> pa.Table:
        return scores_table(part, self.parts[part], built.model.score(self.parts[part]))


def scores_table(name: str, part: Collection, scores: Scores) -> pa.Table:
    """Rows of predictions.parquet, but for the model and its seed."""
    records = part.record_numbers(np.arange(len(part)))
    ids = part.column("question_id").to_pylist() if "question_id" in part.field_names else records.tolist()
    return pa.table(
        {
            "part": pa.array([name] * len(part), pa.string()),
            "record": pa.array(records),
            "question_id": pa.array([None if name is None else str(name) for name in ids], pa.string()),
            "label": pa.array(np.asarray(part.column(LABEL).to_numpy(), np.int8)),
            "score": pa.array(np.asarray(scores, np.float64)),
        }
    )
