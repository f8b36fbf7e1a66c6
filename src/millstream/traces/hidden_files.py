"""Hidden-state files of vLLM and speculators, and folders of Hugging Face `datasets`, plug into `traces/convert.py`.

vLLM writes `hidden_states` [token, layer, dim] and `token_ids` [token] of a request to one safetensors file.
Importing this module is fast: the reader of safetensors imports torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millstream.core.console import format_bytes
from millstream.core.hf_datasets import STATE, batches_of, data_files, depth_of, is_datasets_folder, is_list
from millstream.core.record import Array
from millstream.errors import BadSource, MissingExtra
from millstream.traces.llm.cells import answers
from millstream.traces.llm.layouts import COLUMNS

if TYPE_CHECKING:
    import torch

SUFFIXES = (".safetensors",)
AXES = {
    ("hidden", 3): "layer, token, dim",
    ("tokens", 1): "token",
    ("loss_mask", 1): "token",
    ("logprobs", 1): "step",
}
_TEXTS = ("question", "answer", "aliases", "kind", "exposure", "context", "prompt", "generated_answer")
_NAMES: Mapping[str, Sequence[str]] = {
    "question_id": COLUMNS["id"],
    **{ours: COLUMNS[ours] for ours in _TEXTS},
    "hidden": ("hidden_states", "hidden"),
    "tokens": ("token_ids", "input_ids", "tokens"),
    "logprobs": ("logprobs", "token_logprobs"),
}
_SIZED = ("hidden", "prompt_token_ids", "token_ids", "tokens")
_DTYPES = ("F16", "BF16", "F32")  # of hidden states


def recognises(path: Path) -> bool:
    return path.suffix in SUFFIXES or (path.suffix == ".arrow" and (path.parent / STATE).is_file())


def has_one_record(path: Path) -> bool:
    return path.suffix in SUFFIXES


def describe(path: Path, *, memory: int | None = None) -> str:
    return "rows of a dataset" if path.suffix == ".arrow" else "hidden states of requests"


def records(path: Path, *, notify: Callable[[str], None], memory: int | None = None) -> Iterator[dict[str, object]]:
    if path.suffix == ".arrow":
        return _dataset_records(path, memory)
    return iter([_request_record(path, memory)])


# -- one request per file


def _request_record(path: Path, memory: int | None) -> dict[str, object]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtra(f"{path}: to read it, run: pip install 'millstream[llm]'") from None
    _check_size(path, path.stat().st_size, memory)
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
            opened = cast(Any, file)
            names = cast("list[str]", list(opened.keys()))
            ids = next((name for name in _NAMES["tokens"] if name in names), None)
            if "hidden_states" not in names or ids is None:
                raise BadSource(
                    f"{path}: expected the tensors hidden_states and token_ids that vLLM writes, found "
                    f"{', '.join(names[:5])[:200] or 'none'}"
                )
            slices = {name: opened.get_slice(name) for name in names}
            shape, dtype = tuple(slices["hidden_states"].get_shape()), slices["hidden_states"].get_dtype()
            tokens = slices[ids].get_shape()
            if len(shape) not in (2, 3) or len(tokens) != 1 or shape[0] != tokens[0] or dtype not in _DTYPES:
                raise BadSource(
                    f"{path}: hidden_states {dtype}{list(shape)} and {ids} {list(tokens)} do not match, expected "
                    "floats [token, layer, dim] and [token]"
                )
            hidden = cast("torch.Tensor", opened.get_tensor("hidden_states")).reshape(shape[0], -1, shape[-1])
            token_ids = cast("torch.Tensor", opened.get_tensor(ids)).numpy()
            mask = cast("torch.Tensor", opened.get_tensor("loss_mask")).numpy() if "loss_mask" in names else None
    except (SafetensorError, OSError) as error:
        raise BadSource(f"{path}: is not a valid safetensors file ({str(error)[:200]})") from None
    mask = _mask_beside(path, token_ids) if mask is None else mask
    return {
        "tokens": token_ids_of(token_ids, str(path)),
        **answer_of(mask, len(token_ids), str(path)),
        "hidden": hidden.permute(1, 0, 2),
    }


def _mask_beside(path: Path, token_ids: NDArray[Any]) -> Array | None:
    """The loss mask of `hs_17.safetensors`: speculators keeps it in row 17 of the dataset in the folder above."""
    prefix, _, number = path.stem.rpartition("_")
    folder = path.absolute().parent.parent
    if prefix != "hs" or not number.isdecimal() or not is_datasets_folder(folder):
        return None
    rows = _rows_of(folder)
    if rows is None:
        return None
    if int(number) >= len(rows[0]) or not np.array_equal(np.asarray(rows[0][int(number)].as_py()), token_ids):
        raise BadSource(f"{path}: its tokens are not those of row {int(number)} of {folder}, so they are of other data")
    return np.asarray(rows[1][int(number)].as_py())


@lru_cache(1)
def _rows_of(folder: Path) -> tuple[pa.ChunkedArray, pa.ChunkedArray] | None:
    """The columns `input_ids` and `loss_mask` of a dataset, mapped."""
    batches = [batch for file in data_files(folder) for batch in batches_of(file)]
    if not batches or not {"input_ids", "loss_mask"} <= set(batches[0].schema.names):
        return None
    ids, masks = ([batch.column(name) for batch in batches] for name in ("input_ids", "loss_mask"))
    return pa.chunked_array(ids), pa.chunked_array(masks)


# -- rows of a dataset


def _dataset_records(path: Path, memory: int | None) -> Iterator[dict[str, object]]:
    start = 0
    for batch in batches_of(path):
        names = _our_names(batch.schema.names)
        for number in range(batch.num_rows):
            where = f"{path}: row {start + number + 1}"
            yield _trace(
                {ours: _cell(batch, theirs, number, where, memory) for ours, theirs in names.items()}, path, where
            )
        start += batch.num_rows


def _our_names(columns: Sequence[str]) -> dict[str, str]:
    """Our name of each column -> the column: first those that we know by other names, then all others."""
    found: dict[str, str] = {}
    if {"prompt_token_ids", "token_ids"} <= set(columns):  # as vLLM returns them
        found |= {"prompt_token_ids": "prompt_token_ids", "token_ids": "token_ids"}
    for ours, names in _NAMES.items():
        theirs = next((name for name in names if name in columns and name not in found.values()), None)
        if theirs:
            found[ours] = theirs
    others = [name for name in columns if name not in found.values()]
    return {**{name.lstrip("_") or "column": name for name in others}, **found}


def _cell(batch: pa.RecordBatch, name: str, number: int, where: str, memory: int | None) -> object:
    """A value; lists of numbers become an array."""
    column = _stored(batch.column(name))
    if not depth_of(column.type):
        return column[number].as_py()
    values = cast(pa.ListScalar, column[number]).values
    if values is None:
        return None
    shape, inner = [len(values)], _stored(values)
    while is_list(inner.type):
        lengths: list[object] = np.unique(pc.list_value_length(inner).to_numpy(zero_copy_only=False)).tolist()
        if inner.null_count or len(lengths) > 1:
            raise BadSource(f"{where}, column {name!r}: its lists have different lengths, so they are no tensor")
        shape.append(cast(int, lengths[0]) if lengths else 0)
        inner = _stored(cast(pa.ListArray, inner).flatten())
    if inner.null_count:
        raise BadSource(f"{where}, column {name!r}: a number is missing")
    _check_size(where, inner.nbytes, memory)
    return inner.to_numpy().reshape(shape)


def _stored(column: pa.Array) -> pa.Array:
    """The lists of an extension type, which is registered if `datasets` is imported."""
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _trace(row: dict[str, object], path: Path, where: str) -> dict[str, object]:
    """The record of a row: our fields first."""
    made: dict[str, object] = {}
    if row.get("question_id") is not None:
        made["question_id"] = str(row.pop("question_id"))
    if "aliases" in row:
        row["aliases"] = answers(row["aliases"])
    prompt, answer = (cast("NDArray[Any] | None", row.pop(name, None)) for name in ("prompt_token_ids", "token_ids"))
    if prompt is not None and answer is not None:
        made |= {"tokens": np.concatenate([prompt, answer]), "prompt_len": len(prompt), "answer_len": len(answer)}
    tokens = cast("NDArray[Any] | None", made.get("tokens", row.get("tokens")))
    if isinstance(tokens, np.ndarray):
        row["tokens"] = made["tokens"] = token_ids_of(tokens, where)
        if isinstance(mask := row.get("loss_mask"), np.ndarray):
            made |= answer_of(cast("NDArray[Any]", mask), len(tokens), where)
    hidden = row.get("hidden")
    if isinstance(hidden, np.ndarray):
        states = cast("NDArray[Any]", hidden)
        with np.errstate(over="ignore"):  # Python's floats become float32
            states = states.astype(np.float32) if states.dtype == np.float64 else states
        made["hidden"] = _layers_first(states, None if tokens is None else len(tokens), path, where)
    return {**row, **made}


def _layers_first(hidden: NDArray[Any], num_tokens: int | None, path: Path, where: str) -> NDArray[Any]:
    """Hidden states [layer, token, dim], given in this order or as vLLM and speculators have them."""
    if num_tokens is not None and hidden.ndim == 2 and len(hidden) == num_tokens:
        return hidden[None]
    if num_tokens is None or hidden.ndim != 3 or num_tokens not in hidden.shape[:2]:
        raise BadSource(
            f"{where}: hidden states {list(hidden.shape)} of {num_tokens or 'unknown'} tokens, expected "
            "[layer, token, dim] or [token, layer, dim], and the ids of the tokens in a column token_ids or input_ids"
        )
    if hidden.shape[0] != hidden.shape[1]:
        return hidden if hidden.shape[1] == num_tokens else hidden.transpose(1, 0, 2)
    is_token_first = _is_token_first(path.parent)
    if is_token_first is None:
        raise BadSource(f"{where}: as many tokens as layers in every row, so their order in hidden states is unknown")
    return hidden.transpose(1, 0, 2) if is_token_first else hidden


@lru_cache(1)
def _is_token_first(folder: Path) -> bool | None:
    """Whether the first axis of hidden states is that of tokens; None if no row of a dataset tells."""
    for file in data_files(folder):
        for batch in batches_of(file):
            names = _our_names(batch.schema.names)
            for number in range(batch.num_rows):
                cells = {name: _cell(batch, names[name], number, str(file), None) for name in names if name in _SIZED}
                hidden, *tokens = (cast("NDArray[Any] | None", cells.get(name)) for name in _SIZED)
                if hidden is not None and hidden.ndim == 3 and hidden.shape[0] != hidden.shape[1]:
                    return hidden.shape[0] == sum(len(some) for some in tokens if some is not None)
    return None


# -- both


def token_ids_of(ids: NDArray[Any], where: str) -> NDArray[np.int32]:
    """The ids as they are stored; BadSource if they are no ids."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (len(ids) and not 0 <= ids.min() <= ids.max() < 1 << 31):
        raise BadSource(f"{where}: token ids must be whole numbers from 0 in one list")
    return ids.astype(np.int32)


def answer_of(mask: NDArray[Any] | None, num_tokens: int, where: str) -> dict[str, object]:
    """Where the answer is by a loss mask: its last run of ones."""
    if mask is None:
        return {}
    if mask.shape != (num_tokens,):
        raise BadSource(f"{where}: loss_mask {list(mask.shape)} for {num_tokens} tokens")
    kept: dict[str, object] = {"loss_mask": mask.astype(np.int8)}
    ones = np.flatnonzero(mask)
    if not len(ones):
        return kept
    breaks = np.flatnonzero(np.diff(ones) > 1)
    start = int(ones[breaks[-1] + 1] if len(breaks) else ones[0])
    return {**kept, "prompt_len": start, "answer_len": int(ones[-1]) + 1 - start}


def _check_size(where: object, num_bytes: int, memory: int | None) -> None:
    if memory is not None and num_bytes > memory:
        raise BadSource(
            f"{where}: has {format_bytes(num_bytes)}. Give it more memory, as in --memory {format_bytes(3 * num_bytes)}"
        )
