"""Train, validation and test, or k folds: decided for each record by a hash of its key, and by nothing else."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.collection import Collection
from millstream.dataset.chosen import Marked
from millstream.dataset.permutation import mix_words
from millstream.dataset.subset import Subset
from millstream.errors import BadSplit
from millstream.store.layout import publish

VERSION = 1
_CHUNK = 1 << 20  # records at once
_OUT = 255  # in no part


@dataclass(frozen=True)
class Rule:
    """What decides: the parts in order with their shares, the key, and the salt of its hash."""

    parts: Mapping[str, float]
    by: str | None
    """The field whose equal values stay together; None: every record is on its own."""
    salt: str
    lineage: str

    def edges(self) -> NDArray[np.uint64]:
        """Hashes below `edges[i]` are in one of the first i + 1 parts."""
        sums = np.minimum(np.cumsum(list(self.parts.values())), 1.0)
        return np.array([min(round(edge * 2**64), 2**64 - 1) for edge in sums.tolist()], np.uint64)


class Split:
    """The parts of a collection, each a collection. Made by `ms.split`.

    >>> split = ms.split(traces, {"train": 0.7, "val": 0.15, "test": 0.15})
    >>> train, val, test = split
    >>> split.save("split.json")
    >>> same = ms.Split.load("split.json", traces)
    """

    def __init__(self, collection: Collection, rule: Rule) -> None:
        self.rule = rule
        self._collection = collection
        assigned = list(_assign(collection, rule))
        step = f"{rule.lineage}/{rule.salt}:{','.join(rule.parts)}"
        self._subsets = {
            name: Subset(collection, Marked(codes == number for codes in assigned), lineage=f"{step}={name}")
            for number, name in enumerate(rule.parts)
        }

    def __getitem__(self, name: str) -> Subset:
        if name not in self._subsets:
            raise KeyError(f"no part {name!r} in this split; it has {', '.join(self._subsets)}")
        return self._subsets[name]

    def __iter__(self) -> Iterator[Subset]:
        return iter(self._subsets.values())

    def __len__(self) -> int:
        return len(self._subsets)

    def pairs(self) -> Iterator[tuple[Subset, Subset]]:
        """For every part: all other records to train on, and the part itself to validate on."""
        assigned = list(_assign(self._collection, self.rule))
        for number, (name, part) in enumerate(self._subsets.items()):
            rest = Marked((codes != number) & (codes != _OUT) for codes in assigned)
            yield Subset(self._collection, rest, lineage=f"{part.lineage}:rest of {name}"), part

    def report(self, field: str | None = None) -> str:
        """How many records and keys each part has; with a field, also the share of each of its values."""
        codes = np.concatenate([np.empty(0, np.uint8), *_assign(self._collection, self.rule)])
        rows: list[list[str]] = [["part", "records", "share", "keys"]]
        keys = None if self.rule.by is None else codes_of(self._collection.column(self.rule.by))[0]
        classes, names = codes_of(self._collection.column(field)) if field is not None else (codes, [])
        rows[0] += [f"{field}={name}" for name in names]
        for number, (name, part) in enumerate(self._subsets.items()):
            mine = codes == number
            share = f"{len(part) / max(len(codes), 1):.1%}"
            num_keys = len(part) if keys is None else len(np.unique(keys[mine]))
            known = classes[mine] >= 0 if names else mine[:0]
            counts = np.bincount(classes[mine][known], minlength=len(names)) if names else np.empty(0, np.int64)
            shares = [f"{count / max(len(part), 1):.1%}" for count in counts.tolist()]
            rows.append([name, str(len(part)), share, str(num_keys), *shares])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    def __repr__(self) -> str:
        by = self.rule.by or "record number"
        return f"Split of {len(self._collection)} records by {by}\n{self.report()}"

    def save(self, path: str | Path) -> None:
        """Write the rule to a small JSON file. It says which part a record is in, also for records added later."""
        counts = {name: len(part) for name, part in self._subsets.items()}
        text = json.dumps({"millstream split": VERSION, **asdict(self.rule), "records": counts}, indent=1)
        publish(Path(path), (text + "\n").encode())

    @classmethod
    def load(cls, path: str | Path, collection: Collection) -> Self:
        """The split of a collection by a saved rule."""
        try:
            saved = cast("dict[str, object]", json.loads(Path(path).read_text()))
            version = saved["millstream split"]
        except OSError as error:
            what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise BadSplit(f"{path}: {what}. Make it with ms.split(...).save({str(path)!r})") from None
        except (ValueError, KeyError, TypeError):
            raise BadSplit(f"{path}: is no split that millstream saved") from None
        if version != VERSION:
            raise BadSplit(f"{path}: has version {version}; this millstream reads {VERSION}")
        try:
            parts = {str(name): float(share) for name, share in cast("dict[str, float]", saved["parts"]).items()}
            by, salt, lineage = cast("str | None", saved["by"]), str(saved["salt"]), str(saved["lineage"])
            _check_shares(parts)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise BadSplit(f"{path}: is damaged ({error}). Save the split again") from None
        if lineage != collection.lineage:
            raise BadSplit(
                f"{path}: splits {lineage or 'a whole collection'}, not {collection.lineage or 'a whole collection'}"
            )
        return cls(collection, Rule(parts, by, salt, lineage))


def split(
    collection: Collection,
    parts: Mapping[str, float] | None = None,
    *,
    folds: int | None = None,
    by: str | None = None,
    salt: str = "",
) -> Split:
    """Split a collection by shares, `{"train": 0.7, "val": 0.15, "test": 0.15}`, or into k equal folds.

    Records of equal `by` stay together: by default the question of a trace, and for reads every record on its own
    (`by="tax_id"` keeps the reads of a genome together). Which part a record is in depends on that value, the shares
    and `salt` alone: not on the other records, so records added later never move it.

    >>> train, val, test = ms.split(traces, {"train": 0.7, "val": 0.15, "test": 0.15})
    >>> folds = ms.split(reads, folds=5)
    """
    if (parts is None) == (folds is None):
        raise ValueError('give shares, as {"train": 0.7, "val": 0.15, "test": 0.15}, or folds=5, and not both')
    if folds is not None:
        if folds < 2:
            raise ValueError(f"folds={folds}: at least 2")
        parts = {f"fold{number}": 1 / folds for number in range(folds)}
    assert parts is not None
    _check_shares(parts)
    rule = Rule(dict(parts), by or collection.default_key, salt, collection.lineage)
    return Split(collection, replace(rule, salt=salt or ("folds" if folds else "")))


def _check_shares(parts: Mapping[str, float]) -> None:
    if not parts or min(parts.values()) <= 0 or sum(parts.values()) > 1 + 1e-9 or len(parts) >= _OUT:
        raise ValueError(f"the shares of a split are above 0 and at most 1 together, got {dict(parts)}")


def _assign(collection: Collection, rule: Rule) -> Iterator[NDArray[np.uint8]]:
    """The part of every record, a chunk at a time."""
    salt = int.from_bytes(blake2b(f"{rule.lineage}/{rule.salt}".encode(), digest_size=8).digest(), "little")
    edges = rule.edges()
    if rule.by is None:
        for start in range(0, len(collection), _CHUNK):
            numbers = np.arange(start, min(start + _CHUNK, len(collection)), dtype=np.int64)
            yield _part(mix_words(collection.record_numbers(numbers), salt), edges, rule)
        return
    codes, values = codes_of(collection.column(rule.by))
    if len(codes) and (missing := int(np.count_nonzero(codes < 0))):
        first = int(np.flatnonzero(codes < 0)[0])
        raise BadSplit(
            f"{missing} of {len(codes)} records have no {rule.by!r} (the first is record {first}), so there is nothing "
            "to split them by; split by another field, or take a subset without them"
        )
    hashed = [blake2b(f"{salt}/{value}".encode(), digest_size=8).digest() for value in values]
    of_value = _part(np.frombuffer(b"".join(hashed), "<u8"), edges, rule)
    for start in range(0, len(codes), _CHUNK):
        yield of_value[codes[start : start + _CHUNK]]


def _part(hashes: NDArray[np.uint64], edges: NDArray[np.uint64], rule: Rule) -> NDArray[np.uint8]:
    found = np.searchsorted(edges, hashes, side="right")
    whole = sum(rule.parts.values()) > 1 - 1e-9  # the last part takes what rounding leaves over
    found = np.minimum(found, len(edges) - 1) if whole else np.where(found == len(edges), _OUT, found)
    return found.astype(np.uint8)


def codes_of(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[object]]:
    """Every record's value as its place in a list of the distinct ones; -1 for None."""
    whole = column.unify_dictionaries().combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # what pyarrow gives for no rows
        return np.empty(0, np.int64), []
    encoded = whole if isinstance(whole, pa.DictionaryArray) else whole.dictionary_encode()
    assert isinstance(encoded, pa.DictionaryArray)
    codes = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
    return codes, encoded.dictionary.to_pylist()


def text_codes_of(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], list[str]]:
    """The same of values as texts."""
    codes, values = codes_of(column.cast(pa.string()))
    return codes, cast("list[str]", values)
