"""Features of a trace for detectors, and `featurize`, which computes them once and keeps them in another store."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.arguments import checked
from millstream.core.batches import Batch, ColumnBatch, Floats, as_floats, assign, fetch_batch, stack
from millstream.core.config import Count, parse_bytes, read_settings, without_effect
from millstream.core.console import Progress, format_bytes, say, silent
from millstream.core.engine import Engine
from millstream.core.features import Feature, fields
from millstream.core.memory import empty
from millstream.core.record import Array, Tensor
from millstream.core.remote import is_url, to_path
from millstream.errors import BadSetting, NotFinite, SchemaMismatch
from millstream.traces.graphs import GraphFeature, graphs
from millstream.traces.kind import FeaturizeSettings
from millstream.traces.store.format import id_field
from millstream.traces.store.jobs import JobWriter, done_records, new_job, prepare_store, upload_left
from millstream.traces.store.labels import carry_labels, is_labelled
from millstream.traces.store.locks import StoreLock, only_job
from millstream.traces.store.rewrite import Written
from millstream.traces.store.traces import Traces

# B batch, L layers, T tokens, D hidden, S statistics, A answer tokens of all records, concatenated, K top tokens

Token = Literal["first", "last", "mean", "last_prompt", "first_answer", "last_answer", "mean_answer"] | int
PROMPT, ANSWER = "prompt_len", "answer_len"
_OF_ANSWER = ("last_prompt", "first_answer", "last_answer", "mean_answer")
TOKENS = ("first", "last", "mean", *_OF_ANSWER)
STATS = (
    "num_tokens",
    "num_words",
    "sum_logprob",
    "mean_logprob",
    "min_logprob",
    "first_logprob",
    "last_logprob",
    "mean_entropy",
    "max_entropy",
    "first_entropy",
    "mean_margin",
    "min_margin",
    "first_margin",
    "mean_logrank",
    "max_logrank",
    "mean_topmass",
    "mean_part1",
    "mean_part2",
    "mean_part3",
    "mean_partrest",
)
"""`margin`: probability of the most likely token minus that of the second; `logrank`: log(1 + rank); `topmass`: total
probability of the stored top tokens; `part1`: contribution of the most likely token to the entropy, -p log p."""

_MIN_LOGPROB = np.float32(-100)  # a token that was ruled out has -inf


@dataclass(frozen=True)
class LayerFeature:
    """`layers` [B, L, D]. Made by `ms.features.layers`."""

    token: Token
    field: str
    layers: tuple[int, ...] | None
    dtype: str | None

    @property
    def fields(self) -> list[str]:
        layers = None if self.layers is None else ",".join(map(str, self.layers))
        place = layers
        if isinstance(self.token, int):
            place = f"{':' if layers is None else f'[{layers}]'}, {self.token}"
        picked = self.field if place is None else f"{self.field}[{place}]"
        return [picked, *([PROMPT] if self.token in _OF_ANSWER else []), *([ANSWER] if self._to_end else [])]

    @property
    def _to_end(self) -> bool:
        """Whether the feature depends on where the answer ends."""
        return self.token == "last_answer"

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ColumnBatch):
            raise ValueError("features.layers needs the hidden states of traces; these records are reads")
        prompts = cast("Sequence[int]", batch.columns[PROMPT]) if self.token in _OF_ANSWER else [0] * len(batch)
        answers = cast("Sequence[int | None]", batch.columns[ANSWER]) if self._to_end else [0] * len(batch)
        hidden = cast("Array | Sequence[Array | None]", batch.columns[self.field])
        is_picked = isinstance(self.token, int)  # no other token was fetched
        if (
            is_picked
            and isinstance(hidden, np.ndarray)
            and hidden.ndim == 3
            and (self.dtype is None or hidden.dtype == self.dtype)
        ):
            return {"layers": hidden}
        rows: list[Array] = []
        for number, states, prompt, answer in zip(batch.numbers.tolist(), hidden, prompts, answers, strict=True):
            num_axes = 0 if states is None else states.ndim + is_picked
            if states is None or num_axes != 3:
                found = "None" if states is None else f"{num_axes} axes"
                raise ValueError(f"record {number}: {self.field!r} has {found}, expected [layer, token, dim]")
            floats = as_floats(states)
            rows.append(floats if is_picked else self._row(floats, int(prompt), int(answer or 0), number))
        if len({row.shape for row in rows}) == 1:
            out = empty((len(rows), *rows[0].shape), self.dtype or rows[0].dtype)
            for row, target in zip(rows, out, strict=True):
                assign(target, row)
            return {"layers": out}
        whole, mask = stack([row.astype(self.dtype or row.dtype) for row in rows])
        return {"layers": whole} if mask is None else {"layers": whole, "layers_mask": mask}

    def _row(self, states_LTD: Floats, prompt: int, answer: int, number: int) -> Floats:
        count = states_LTD.shape[1]
        start, end = {"mean": (0, count), "mean_answer": (prompt, count)}.get(str(self.token), (0, 0))
        if self.token in ("mean", "mean_answer") and start < end:
            return states_LTD[:, start:end].mean(axis=1, dtype=np.float32)
        named = {
            "first": 0,
            "last": count - 1,
            "last_prompt": prompt - 1 if prompt else count,
            "first_answer": prompt,
            # For an empty answer: its stop token.
            "last_answer": prompt + answer - 1 if answer else max(count - 1, prompt),
        }
        position = named.get(str(self.token), count)
        if not -count <= position < count:
            raise ValueError(
                f"record {number}: no token {self.token!r} in its {count} tokens ({prompt} of them in the prompt)"
            )
        return states_LTD[:, position]


@checked
def layers(
    token: Token = "last",
    *,
    field: str = "hidden",
    layers: Sequence[int] | None = None,
    dtype: str | None = "float32",
) -> LayerFeature:
    """`layers` [batch, layer, dim]: the hidden states of a trace at one token, or their mean over tokens.

    `token` is an index (0, -1, ...), "first", "last" or "mean"; with the field `prompt_len` also "last_prompt",
    "first_answer" or "mean_answer" (over all tokens after the prompt); with `answer_len` also "last_answer".
    With `dtype=None` they keep the precision they are stored in.

    >>> loader = ms.Loader(traces, batch_size=4, features=ms.features.layers(token="last_prompt"))
    >>> [batch["layers"].shape[1:] for batch in loader][0]
    torch.Size([3, 16])
    """
    if isinstance(token, str) and token not in TOKENS:
        raise ValueError(f"token={token!r}: must be one of {', '.join(TOKENS)}, or an integer")
    return LayerFeature(token, field, None if layers is None else tuple(layers), dtype)


@dataclass(frozen=True)
class TokenStats:
    """`stats` [B, S]. Made by `ms.features.token_stats`."""

    names: tuple[str, ...] = STATS

    @property
    def fields(self) -> list[str]:
        return list(dict.fromkeys(name for stat in self.names for name in _fields_of(stat)))

    def __call__(self, batch: Batch, *, seed: int = 0, epoch: int = 0) -> Mapping[str, object]:
        if not isinstance(batch, ColumnBatch):
            raise ValueError("features.token_stats needs the log-probs of traces; these records are reads")
        out_BS = np.zeros((len(batch), len(self.names)), np.float32)
        answers: dict[str, tuple[Floats, NDArray[np.int64]]] = {}
        for column, stat in enumerate(self.names):
            if stat == "num_words":
                texts = cast("Sequence[str | None]", batch.columns["generated_answer"])
                out_BS[:, column] = [len((text or "").split()) for text in texts]
                continue
            field = _fields_of(stat)[0]
            if field not in answers:
                answers[field] = answer_rows(batch, field)
            values, lengths = answers[field]
            out_BS[:, column] = lengths if stat == "num_tokens" else _reduce(stat, values, lengths)
        (bad,) = np.nonzero(~np.isfinite(out_BS).all(axis=1))
        if len(bad):
            stats = [name for name, value in zip(self.names, out_BS[bad[0]], strict=True) if not np.isfinite(value)]
            raise NotFinite(f"record {batch.numbers[bad[0]]}: {', '.join(stats)} is NaN or infinite; extract it again")
        return {"stats": out_BS}


@checked
def token_stats(*names: str) -> TokenStats:
    """`stats` [batch, statistic]: how confident the model was in its answer, by the named statistics or all `STATS`.

    Computed over the first `answer_len` generated tokens, without a stop token.

    >>> feature = ms.features.token_stats("mean_logprob", "min_logprob")
    """
    for name in names:
        if name not in STATS:
            raise ValueError(f"{name!r}: unknown token statistic; must be one of {', '.join(STATS)}")
    return TokenStats(names or STATS)


def _fields_of(stat: str) -> list[str]:
    if stat == "num_words":
        return ["generated_answer"]
    plain = {"tokens": "logprobs", "logprob": "logprobs", "entropy": "entropy", "logrank": "rank"}
    return [plain.get(stat.split("_")[1], "topk_logprobs"), "answer_len"]


def answer_rows(batch: ColumnBatch, field: str) -> tuple[Floats, NDArray[np.int64]]:
    """The rows of a field that belong to answers, concatenated, and the number of rows per record.

    A record has a row for each generated token: the answer, then possibly a stop token. For an empty answer, all rows.
    """
    rows = cast("Sequence[Array | None]", batch.columns[field])
    answer_lens = cast("Sequence[int | None]", batch.columns["answer_len"])
    kept: list[Array] = []
    for number, values, length in zip(batch.numbers.tolist(), rows, answer_lens, strict=True):
        if values is None:
            raise ValueError(f"record {number} has no {field!r}; use a subset of records that have it")
        kept.append(values[: int(length or 0) or None])
    lengths = np.array([len(values) for values in kept], np.int64)
    flat = np.concatenate([as_floats(values) for values in kept]) if kept else np.zeros(0)
    return flat.astype(np.float32), lengths


def _reduce(stat: str, values: Floats, lengths: NDArray[np.int64]) -> Floats:
    """One number per record; 0 if it has no tokens."""
    how, what = stat.split("_")
    values_A = _QUANTITIES[what](values)
    out = np.zeros(len(lengths), np.float32)
    some = lengths > 0  # `reduceat` cannot reduce empty records
    if some.any():
        ends = np.cumsum(lengths[some])
        starts = ends - lengths[some]
        match how:
            case "first":
                out[some] = values_A[starts]
            case "last":
                out[some] = values_A[ends - 1]
            case "min":
                out[some] = np.minimum.reduceat(values_A, starts)
            case "max":
                out[some] = np.maximum.reduceat(values_A, starts)
            case _:
                total = np.add.reduceat(values_A.astype(np.float64), starts)
                out[some] = total / lengths[some] if how == "mean" else total
    return out


def _clip(logprobs: Floats) -> Floats:
    return np.maximum(logprobs, _MIN_LOGPROB)


def _margin(top_AK: Floats) -> Floats:
    """The most likely tokens come first."""
    probs = np.exp(top_AK[:, :2])
    return probs[:, 0] - (probs[:, 1] if probs.shape[1] > 1 else 0)


def contributions(top_AK: Floats) -> Floats:
    """Of each of the most likely tokens to the entropy: -p log p."""
    logs = _clip(top_AK)
    return -np.exp(logs) * logs


def _part(start: int, end: int | None) -> Callable[[Floats], Floats]:
    def part(top_AK: Floats) -> Floats:
        return contributions(top_AK[:, start:end]).sum(axis=1)

    return part


_QUANTITIES: dict[str, Callable[[Floats], Floats]] = {
    "logprob": _clip,
    "entropy": lambda entropy: entropy,
    "logrank": np.log1p,
    "margin": _margin,
    "topmass": lambda top_AK: np.exp(top_AK).sum(axis=1),
    "part1": _part(0, 1),
    "part2": _part(1, 2),
    "part3": _part(2, 3),
    "partrest": _part(3, None),
}


_USED_BY = {  # settings of `featurize` that have no effect on other features
    **dict.fromkeys(("token", "field"), ("layers",)),
    **dict.fromkeys(("k", "threshold"), ("graphs",)),
    "fields": ("fields",),
    "dtype": ("layers", "graphs"),
}


@dataclass(frozen=True)
class Featurized(Written):
    """A store of features; `left_out` records lack the tensors (their extraction failed)."""

    left_out: int = 0


@checked
def featurize(
    source: str | Path,
    out: str | Path,
    *,
    engine: Engine | str = "local",
    progress: Progress = silent,
    chunk_records: Count = 256,
    **settings: object,
) -> Featurized:
    """Compute a feature of every record of a store; write it with the record's scalars to the store `out`.

    A worker processes `chunk_records` records at a time.

    >>> done = ms.featurize("full/", "layers/", feature="layers", token="last")
    """
    chosen = read_settings(FeaturizeSettings, settings)
    traces, out = Traces(source), to_path(out)
    _check(chosen, traces)
    for unused in without_effect(chosen, _USED_BY, [chosen.feature]):
        say(unused)
    if traces.id_field is None:
        raise SchemaMismatch(f"{source}: its records have no {id_field(traces.fields)!r}, which is needed to resume")
    chosen_engine = engine if isinstance(engine, Engine) else Engine(engine)
    with only_job(out), StoreLock(traces.path, exclusive=False):  # until it is done, no shard is replaced
        traces.refresh()
        return _featurize(traces, out, chosen, engine=chosen_engine, progress=progress, chunk_records=chunk_records)


def _featurize(
    traces: Traces,
    path: Path,
    chosen: FeaturizeSettings,
    *,
    engine: Engine,
    progress: Progress,
    chunk_records: int,
) -> Featurized:
    config, job = _store_config(chosen, traces), new_job()
    prepare_store(path, config, engine=engine)
    ids, key = traces.ids, id_field(traces.fields)

    def left(chunk: Sequence[int]) -> list[int] | None:
        known = {name for (name,) in done_records(path, [key])}
        return [number for number in chunk if ids[number] not in known] or None

    def left_of(chunk: Sequence[int]) -> list[int] | None:
        upload_left(path, config, job=job, engine=engine)
        return left(chunk)

    missing = left(range(len(ids))) or []
    jobs = [missing[start : start + chunk_records] for start in range(0, len(missing), chunk_records)]
    done, left_out = len(ids) - len(missing), 0
    progress(done)
    for written, without in engine.run(partial(FeaturizeWorker, traces.path, path, chosen, job), jobs, redo=left_of):
        done, left_out = done + written + without, left_out + without
        progress(done)
    if is_url(path):
        prepare_store(path, config, engine=engine)
    result = Traces(path)
    note = "" if is_labelled(path) else carry_labels([traces.path], path, path)
    return Featurized(path, len(result), result.num_bytes, note, left_out)


class FeaturizeWorker:
    """Computes the feature of some records and appends it to the output store."""

    def __init__(self, source: Path, out: Path, settings: FeaturizeSettings, job: str) -> None:
        self._traces = Traces(source).within(parse_bytes(settings.memory) // 4)  # read, not mapped
        self._feature = make_feature(settings)
        self._one_by_one = isinstance(self._feature, GraphFeature)  # it makes one graph of a whole batch
        self._memory = parse_bytes(settings.memory)
        self._scalars = [name for name, kind in self._traces.fields.items() if not isinstance(kind, Tensor)]
        config = _store_config(settings, self._traces)
        self._writer = JobWriter(out, job=job, config=config, shard_bytes=settings.shard_bytes)

    def do(self, numbers: list[int]) -> tuple[int, int]:
        """How many records were written, and how many lack the tensors."""
        wanted = self._feature.fields or self._traces.field_names
        tensors = [name for name in wanted if isinstance(self._traces.fields.get(name.split("[")[0]), Tensor)]
        whole = [number for number in numbers if self._has(number, tensors)]
        sizes = np.maximum(self._traces.sizes(np.array(whole, np.int64), list(wanted)), 1)
        groups = np.arange(len(whole)) if self._one_by_one else np.cumsum(sizes) // max(1, self._memory // 4)
        for group in np.unique(groups):
            self._write([number for number, own in zip(whole, groups, strict=True) if own == group])
        return len(whole), len(numbers) - len(whole)

    def close(self) -> None:
        self._writer.close()

    def _has(self, number: int, tensors: Sequence[str]) -> bool:
        row = self._traces.row(number)
        return all(row.tensors.get(name.split("[")[0]) is not None for name in tensors)

    def _write(self, numbers: list[int]) -> None:
        scalars = self._traces.fetch(numbers, self._scalars)
        with _bad_setting():
            batch = fetch_batch(self._traces, np.array(numbers, np.int64), self._feature.fields)
            made = cast("Mapping[str, Array]", self._feature(batch))
        for row in range(len(numbers)):
            tensors = made if self._one_by_one else {name: values[row] for name, values in made.items()}
            about = {name: scalars[name][row] for name in self._scalars if name not in tensors}
            self._writer.append({**about, **tensors})


def make_feature(settings: FeaturizeSettings) -> Feature:
    """The feature that the settings describe."""
    if settings.feature == "layers":
        token = int(settings.token) if settings.token.lstrip("-").isdigit() else settings.token
        return layers(cast("Token", token), field=settings.field, dtype=settings.dtype)
    if settings.feature == "graphs":
        return graphs(settings.k, threshold=settings.threshold, dtype=settings.dtype)
    if settings.feature == "fields" and settings.fields:
        names = re.split(r",(?![^\[]*\])", settings.fields)  # not at the comma in hidden[8,16]
        return fields(*(name.strip() for name in names), pad=False)
    raise BadSetting(f"feature={settings.feature}: must be one of layers, graphs, or fields with fields=NAME,NAME")


def _check(settings: FeaturizeSettings, source: Traces) -> None:
    """Raise BadSetting before a store is created."""
    with _bad_setting():
        memory, largest = parse_bytes(settings.memory), source.medium.largest_bytes or 0
        if memory < 2 * largest:
            raise BadSetting(
                f"memory={settings.memory}: the largest trace takes {format_bytes(largest)}. Set at least memory="
                f"{format_bytes(-(-2 * largest // 100_000) * 100_000).replace(' ', '')}"
            )
        parse_bytes(settings.shard_bytes or 1)
        np.dtype(settings.dtype)
        source.sizes(np.empty(0, np.int64), list(make_feature(settings).fields or ()))


def _store_config(settings: FeaturizeSettings, source: Traces) -> dict[str, object]:
    """The settings that determine the content of the store; they must not change on resume."""
    ignored = ("shard_bytes", "memory")
    own: dict[str, object] = {key: value for key, value in asdict(settings).items() if key not in ignored}
    return {"source": source.fingerprint, **own}


@contextmanager
def _bad_setting() -> Generator[None]:
    """Report what a feature cannot be computed from as a bad setting."""
    try:
        yield
    except (ValueError, TypeError, IndexError) as error:
        raise BadSetting(str(error)) from None
