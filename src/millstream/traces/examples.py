"""A labelled store -> the records that detectors are trained on, right or wrong, with the fields that they have."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.core.collection import Collection, Subset, subset
from millstream.core.console import quoted
from millstream.core.split import LABEL, Labelled, Split, find_labels, labelled, split
from millstream.core.tables import read_table
from millstream.errors import BadSetting, BadSource, BadSplit, MillstreamError, MissingLabel
from millstream.traces.groups import SAMPLE, read_groups, statistics_in
from millstream.traces.kind import TrainSettings
from millstream.traces.spans import TOKEN_LABELS, as_token_labels
from millstream.traces.store.traces import LABELS_FILE, Traces

VERDICTS = {"right": 0, "wrong": 1}
POSITIVE = {  # what 1 means in our own columns
    "verdict": "wrong",
    LABEL: "wrong",
    **dict.fromkeys(("em", "f1", "rouge_l", "contains"), "right"),
}


def open_labelled(path: str, label: str, positive: str | None = None) -> Collection:
    """The records labelled right (0) or wrong (1), without samples of which only texts and log-probs are kept.

    The data card counts the others.

    `positive` says what 1 means in the column `label`; the columns that `millstream label` writes need none.
    """
    traces = Traces(path)
    found = _labelled(traces, path, label, positive)
    if not has_bare_samples(traces):
        return found
    return subset(found, np.flatnonzero(found.column(SAMPLE).to_numpy() == 0))


def split_of(collection: Collection, settings: TrainSettings) -> Split:
    """Train, val and test splits, or with `folds` the test splits of all folds; by question unless set otherwise.

    Each must have right and wrong answers.
    """
    if settings.by not in collection.field_names:
        found = ", ".join(collection.field_names)
        raise BadSplit(
            f"{settings.data}: no field {settings.by!r} to split by; choose another: by=NAME, one of {found}"
        )
    shares = {"train": settings.train, "val": settings.val, "test": 1 - settings.train - settings.val}
    if settings.folds is not None:
        shares = {f"fold {number}": 1 / settings.folds for number in range(1, settings.folds + 1)}
    parts = split(collection, shares, by=settings.by, salt=settings.salt)
    for name in shares:
        check_both(parts[name], name, settings)
    return parts


def check_both(part: Collection, name: str, settings: TrainSettings) -> None:
    """BadSplit if a split has no right or no wrong answers."""
    labels = label_values(part)
    if len(np.unique(labels)) < 2:
        found = dict(Counter[object](labels.tolist()))
        raise BadSplit(
            f"{settings.data}: the {name} split has {len(labels)} records with the labels {found}; "
            "a detector needs 0 (right) and 1 (wrong) in each split: label or extract more, or choose another salt="
        )


def label_values(part: Collection) -> NDArray[np.float64]:
    return np.asarray(part.column(LABEL).to_numpy(), np.float64)


def missing_in_splits(store: Path) -> str:
    """Why `train` cannot split a labelled store by itself; nothing if it can."""
    settings = TrainSettings(data=str(store))
    try:
        split_of(open_labelled(settings.data, settings.label), settings)
    except MillstreamError as error:
        return str(error)
    return ""


def has_bare_samples(traces: Traces) -> bool:
    """Whether there are samples without the fields that detectors read."""
    return traces.config.get("sample_fields") == "logprobs"


def fields_of(collection: Collection) -> list[str]:
    """Fields of the records, and statistics of the samples of their questions: what detectors can be made of."""
    return [*collection.field_names, *statistics_in(read_groups(collection.labels_file))]


def labels_of(traces: Traces) -> pa.Table:
    """What `millstream label` wrote; an empty table if it did not."""
    file = traces.path / LABELS_FILE
    try:
        return read_table(file) if file.exists() else pa.table({})
    except pa.ArrowInvalid as error:
        raise BadSource(f"{file}: damaged ({error}). Next: millstream label {quoted(traces.path)}") from None


def _labelled(traces: Traces, path: str, label: str, positive: str | None) -> Collection:
    schema = labels_of(traces).schema
    has_verdicts = label in schema.names
    if label == "verdict" and not has_verdicts and LABEL not in traces.field_names:
        raise MissingLabel(f"{path}: its answers are not labelled. Next: millstream label {quoted(path)}")
    column = LABEL if label == "verdict" and not has_verdicts else label
    if column in schema.names:
        is_ours = b"millstream.rule" in (schema.metadata or {}) or "verdict" in schema.names
    else:
        is_ours = column == LABEL and _is_converted(traces.config)  # in files of the old scripts, 1 means wrong
    positive = _positive(column, positive, is_ours=is_ours)
    if column == "verdict":
        found = labelled(traces, column=label, values=cast("dict[object, float]", VERDICTS), missing="drop")
        return _with_token_labels(found, traces, schema)
    found = labelled(traces, column=column, missing="drop")
    values = np.asarray(found.column(LABEL).to_numpy(), np.float64)
    if not np.isin(values, (0, 1)).all():
        other = values[~np.isin(values, (0, 1))][0]
        raise BadSource(f"{path}: label={column} has the value {other:g}; a label column has only 0 and 1")
    return _with_token_labels(found if positive == "wrong" else _inverted(traces, found), traces, schema)


def _with_token_labels(found: Labelled | Subset, traces: Traces, schema: pa.Schema) -> Collection:
    """The same records with `token_labels`, if the store has them."""
    if TOKEN_LABELS not in schema.names:
        return found
    values, _ = find_labels(traces, None, TOKEN_LABELS)
    columns = {TOKEN_LABELS: [as_token_labels(cast("Sequence[int | None] | None", one)) for one in values]}
    if isinstance(found, Labelled):
        return Labelled(traces, found.labels, columns)
    return Subset(Labelled(traces, cast(Labelled, found.collection).labels, columns), found.chosen)


def _is_converted(config: Mapping[str, object]) -> bool:
    merged = cast("Sequence[Mapping[str, object]]", config.get("merged", [config]))
    return all("converted" in one for one in merged)


def _positive(label: str, given: str | None, *, is_ours: bool) -> str:
    """What 1 means in a label column: right or wrong."""
    known = POSITIVE.get(label) if is_ours else None
    if (positive := given or known) is None:
        raise BadSetting(
            f"label={label}: whether 1 is right or wrong is unknown. Say it: positive=wrong or positive=right"
        )
    if known is not None and positive != known:
        raise BadSetting(f"positive={given}: in the column {label} that millstream writes, 1 means {known}")
    return positive


def _inverted(traces: Traces, found: Labelled | Subset) -> Labelled | Subset:
    """The same records, with 0 and 1 exchanged."""
    if isinstance(found, Labelled):
        return Labelled(traces, 1 - found.labels)
    return Subset(Labelled(traces, 1 - cast(Labelled, found.collection).labels), found.chosen)
