"""Detectors of wrong answers, compared on the same splits of a labelled store."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.batches import codes_of
from millstream.core.collection import Collection
from millstream.core.config import read_settings, without_effect
from millstream.core.remote import to_path
from millstream.core.split import LABEL, Split, split
from millstream.core.tables import publish_table
from millstream.traces.convert import names_of
from millstream.traces.detectors import Scored, detector_specs, scores_of, used_by
from millstream.traces.examples import (
    check_both,
    fields_of,
    has_bare_samples,
    label_values,
    labels_of,
    open_labelled,
    split_of,
)
from millstream.traces.kind import TrainSettings
from millstream.traces.spans import TOKEN_LABELS, TOKEN_SCORES, as_lists, as_token_labels
from millstream.traces.store.traces import Traces
from millstream.training.folder import SPLIT
from millstream.training.study import Built, Fold, ModelSpec

SEEN = "seen.parquet"  # in a run folder: the questions of the splits that models were fitted to
FITTED = ("train", "val")


def folds_of(collection: Collection, parts: Split, settings: TrainSettings) -> list[Fold]:
    """What models train on: the train split, or that of each fold; and before it, those of a learning curve.

    The validation split of a fold is drawn from the records outside its test split.
    """
    if settings.folds is None:
        wholes = [Fold(parts["train"], {name: parts[name] for name in ("val", "test")})]
    else:
        wholes = [_cross_fold(*parted, number, settings) for number, parted in enumerate(parts.pairs(), start=1)]
    folds = [one for whole in wholes for one in (*_curve(whole, settings), whole)]
    return [replace(one, whole=collection) for one in folds] if len(folds) > 1 else folds


def _cross_fold(rest: Collection, test: Collection, number: int, settings: TrainSettings) -> Fold:
    share = settings.val / (settings.train + settings.val)
    inner = split(rest, {"train": 1 - share, "val": share}, by=settings.by, salt=f"{settings.salt} fold {number}")
    for name in ("train", "val"):
        check_both(inner[name], f"{name} (fold {number})", settings)
    return Fold(inner["train"], {"val": inner["val"], "test": test}, number)


def _curve(whole: Fold, settings: TrainSettings) -> Iterator[Fold]:
    """The same fold with fewer labelled questions, in train and val alike; those of fewer are among those of more."""
    train, val = (_question_ranks(part, settings) for part in (whole.train, whole.scored["val"]))
    total = len(np.unique(train)) + len(np.unique(val))
    for labels in settings.curve_points():
        if labels >= total:
            continue
        share = labels / total
        some = [
            part.subset(np.flatnonzero(ranks < round(share * len(np.unique(ranks)))))
            for part, ranks in ((whole.train, train), (whole.scored["val"], val))
        ]
        if all(len(np.unique(label_values(part))) == 2 for part in some):
            yield Fold(some[0], {"val": some[1], "test": whole.scored["test"]}, whole.number, labels)


def _question_ranks(part: Collection, settings: TrainSettings) -> NDArray[np.int64]:
    """The place of each record's question in a random order of the questions."""
    codes, values = codes_of(part.column(settings.by))
    keys = [blake2b(f"{settings.salt}/{value}".encode(), digest_size=8).digest() for value in values]
    return np.argsort(np.argsort(np.frombuffer(b"".join(keys), "<u8")))[codes]


def data_card(path: str, collection: Collection, parts: Mapping[str, Collection], how: str) -> dict[str, object]:
    """A summary of the data that accounts for every record."""
    traces = Traces(path)
    names = traces.field_names
    verdicts: Counter[str] = Counter()
    table, about = labels_of(traces), dict[str, object]()
    samples = traces.column("sample").to_pylist() if has_bare_samples(traces) else [0] * len(traces)
    if table.column_names:
        written = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        about = {name: written.get(f"millstream.{name}") for name in ("rule", "label_version")}
        if "verdict" in table.column_names:
            found = table.column("verdict").to_pylist()
            drawn = samples if len(samples) == len(found) else [0] * len(found)  # traces were added after labelling
            pairs = zip(found, drawn, strict=True)
            verdicts.update("sample" if sample else str(verdict or "unlabelled") for verdict, sample in pairs)
    if "status" in names:
        states = zip(traces.column("status").to_pylist(), samples, strict=True)
        failed = sum(status == "error" and not sample for status, sample in states)
        verdicts["unlabelled"] = max(0, verdicts["unlabelled"] - failed)  # a failed record has no verdict
        verdicts["error"] = failed
    config = dict(traces.config)
    return {
        "store": str(to_path(path).resolve()),
        "fingerprint": traces.fingerprint,
        "records": len(traces),
        "label_digest": digest_of(collection),
        "used": len(collection),
        "verdicts": dict(verdicts),
        "parts": {name: _counts(part) for name, part in parts.items()},
        "split": how,
        "language_model": str(config.get("model", "")),
        "label_rule": about.get("rule"),
        "label_version": about.get("label_version"),
        "trace_bytes": traces.num_bytes // max(1, len(traces)),
        "fields": names,
        "config": config,
    }


def make_study(settings: Mapping[str, object]) -> "Detection":
    return Detection(read_settings(TrainSettings, settings))


class Detection:
    """A comparison of detectors: all of them see the same splits, by question."""

    keys: Sequence[str] = ("fingerprint", "label_digest")  # other records or labels make another run

    def __init__(self, settings: TrainSettings) -> None:
        settings.check()
        self.settings, self.source = settings, settings.data
        self.collection = open_labelled(settings.data, settings.label, settings.positive)
        self.parts: Split = split_of(self.collection, settings)
        self.folds = folds_of(self.collection, self.parts, settings)
        specs = detector_specs(settings, fields_of(self.collection))
        self.specs: Sequence[ModelSpec] = specs
        self.libraries: Sequence[str] = sorted({spec.library for spec in specs if spec.library})
        self._fitted = [_fitted(one) for one in self.folds if not one.labels]
        self.card = self._card()

    def _card(self) -> Mapping[str, object]:
        rule = self.parts.rule
        parts = {name: self.parts[name] for name in rule.shares}
        card = data_card(self.source, self.collection, parts, f"by a hash of {rule.by}, salt {rule.salt!r}")
        tested = [one.scored["test"] for one in self.folds if not one.labels]
        seen = np.concatenate([seen_in(test, fitted) for test, fitted in zip(tested, self._fitted, strict=True)])
        questions = [len(set(fitted.column("question_id").to_pylist())) for fitted in self._fitted]
        labelled = round(sum(questions) / len(questions))  # of each model
        return {**card, "labelled": labelled, "seen": seen_card(seen, left_out=False)}

    def keep(self, run: Path) -> None:
        self.parts.save(run / SPLIT)
        publish_table(run / SEEN, pa.concat_tables(self._fitted))

    def finish(self, run: Path) -> None:
        """Nothing to write: predictions.parquet has all scores."""

    def summary(self) -> str:
        used = f"{self.source}: {len(self.collection)} of {self.card['records']} records are right or wrong"
        unused = without_effect(self.settings, used_by(), [spec.name for spec in self.specs])
        return "\n".join([used, *unused, str(self.parts.report(LABEL))])

    def table(self, built: Built, part: str, records: Collection) -> pa.Table:
        return scores_table(part, records, scores_of(built.model, records))


def scores_table(name: str, part: Collection, found: Scored) -> pa.Table:
    """Rows of predictions.parquet, without the model and its seed.

    If tokens are labelled: with `token_labels`, and the `token_scores` of a detector that scores tokens.
    """
    records = part.record_numbers(np.arange(len(part)))

    def ids(field: str) -> pa.Array:
        found = part.column(field).to_pylist() if field in part.field_names else records.tolist()
        return pa.array([None if one is None else str(one) for one in found], pa.string())

    table = pa.table(
        {
            "part": pa.array([name] * len(part), pa.string()),
            "record": pa.array(records),
            "record_id": ids(part.id_field or ""),
            "question_id": ids("question_id"),
            "label": pa.array(np.asarray(part.column(LABEL).to_numpy(), np.int8)),
            "score": pa.array(np.asarray(found.scores, np.float64)),
        }
    )
    is_labelled = TOKEN_LABELS in part.field_names
    if not is_labelled and found.tokens is None:
        return table
    none = [None] * len(part)
    labels = part.column(TOKEN_LABELS).to_pylist() if is_labelled and found.tokens is not None else none
    labels = as_lists(as_token_labels(one) for one in labels)
    table = table.append_column(TOKEN_LABELS, pa.array(labels, pa.list_(pa.int8())))
    return table.append_column(TOKEN_SCORES, pa.array(found.tokens or none, pa.list_(pa.float32())))


def _fitted(fold: Fold) -> pa.Table:
    """The questions that models of a fold are fitted to."""
    return questions_of({"train": fold.train, "val": fold.scored["val"]})


def questions_of(parts: Mapping[str, Collection]) -> pa.Table:
    """The rows of seen.parquet: split, id and a hash of the text of every question; null where a record has none."""
    tables: list[pa.Table] = []
    for name, part in parts.items():
        ids, texts = _ids_and_texts(part)
        columns = {"part": pa.array([name] * len(part), pa.string()), "question_id": pa.array(ids, pa.string())}
        tables.append(pa.table({**columns, "text": pa.array(texts, pa.uint64())}))
    return pa.concat_tables(tables)


def _ids_and_texts(part: Collection) -> tuple[list[str | None], list[int | None]]:
    """The id of every question, and a hash of its text that ignores case and spaces."""

    def column(names: Sequence[str]) -> list[object]:
        name = next((name for name in names if name in part.field_names), None)
        return [None] * len(part) if name is None else part.column(name).to_pylist()

    ids, texts = column(["question_id"]), column(names_of("question"))
    return [None if one is None else str(one) for one in ids], [_text_hash(one) for one in texts]


def _text_hash(text: object) -> int | None:
    words = " ".join(str(text or "").casefold().split())
    return (
        int.from_bytes(blake2b(words.encode("utf-8", "replace"), digest_size=8).digest(), "little") if words else None
    )


def seen_in(collection: Collection, seen: pa.Table) -> NDArray[np.str_]:
    """The split of `seen` that contains the question of each record, or "". Ids count only if a text is missing."""
    by_text: dict[int, str] = {}
    by_id: dict[str, tuple[str, bool]] = {}
    for row in reversed(seen.to_pylist()):  # the training split comes first in the table, and wins
        if row["text"] is not None:
            by_text[row["text"]] = row["part"]
        if row["question_id"] is not None:
            by_id[row["question_id"]] = row["part"], row["text"] is not None
    found: list[str] = []
    for name, text in zip(*_ids_and_texts(collection), strict=True):
        part, has_text = by_id.get(name or "", ("", False))
        found.append(part if text is None or (part and not has_text) else by_text.get(text, ""))
    return np.array(found, np.str_)


def seen_card(seen: NDArray[np.str_], *, left_out: bool) -> dict[str, object]:
    return {**{name: int((seen == name).sum()) for name in FITTED}, "left_out": left_out}


def digest_of(collection: Collection) -> str:
    """Changes when a label changes, of a record or of a token, or the set of labelled records."""
    numbers = collection.record_numbers(np.arange(len(collection)))
    labels = np.asarray(collection.column(LABEL).to_numpy(), np.float64)
    found = blake2b(numbers.tobytes() + labels.tobytes(), digest_size=8)
    if TOKEN_LABELS in collection.field_names:
        for one in collection.column(TOKEN_LABELS).to_pylist():
            found.update(b"-" if one is None else bytes(2 + label for label in one) + b"|")
    return found.hexdigest()


def _counts(part: Collection) -> dict[str, int]:
    """Records, questions and wrong answers of a split."""
    questions = part.column("question_id") if "question_id" in part.field_names else None
    wrong = int(np.asarray(part.column(LABEL).to_numpy(), np.int64).sum())
    num_questions = len(part) if questions is None else len(set(questions.to_pylist()))
    return {"records": len(part), "questions": num_questions, "wrong": wrong}
