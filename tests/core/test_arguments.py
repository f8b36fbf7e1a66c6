"""Arguments of the public functions that do not fit their annotations: one line that says what must be given."""

from collections.abc import Callable, Mapping, Sequence
from inspect import isclass, signature
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import millstream as ms
from millstream.core.arguments import check, checked
from millstream.core.config import Count, Natural, Probability, SizeInBytes
from millstream.errors import BadSetting, MillstreamError

UNCHECKED = {"mapping"}  # its types are not imported with the package
MADE_BY_OTHERS = {"Collection", "Read", "ReadBatch", "Reads", "Rows", "Split", "Subset"}


class Wrong:
    """No value for any argument."""

    def __repr__(self) -> str:
        return "Wrong()"


def functions() -> list[Any]:
    """Every public function and class that users call."""
    public = {name: getattr(ms, name) for name in ms.__all__ if name not in MADE_BY_OTHERS}
    features = {f"features.{name}": getattr(ms.features, name) for name in ms.features.__all__}
    methods = {
        f"{one.__name__}.{name}": getattr(one, name)
        for one in (ms.Loader, ms.RecordStream)
        for name in ("set_epoch", "load_state_dict")
    }
    found = {**public, **features, "Split.save": ms.Split.save, "Split.load": ms.Split.load, **methods}
    return [pytest.param(one, id=name) for name, one in found.items() if callable(one) or isclass(one)]


@pytest.mark.parametrize("function", functions())
def test_every_argument_of_a_public_function_is_checked(function: Callable[..., object]) -> None:
    named = [one for one in signature(function).parameters.values() if one.kind is not one.VAR_KEYWORD]
    names = [one.name for one in named if one.kind is not one.VAR_POSITIONAL and one.name not in ("self", "cls")]
    for name in sorted({*names} - UNCHECKED):
        with pytest.raises(BadSetting, match=rf"^{name}(=|: )Wrong\(\):? (expected|must be|is not) .+$"):
            function(**{name: Wrong()})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('ms.Loader(traces, batch_size="4")', "batch_size='4': expected integer"),
        ("ms.Loader(traces, batch_size=4.0)", "batch_size=4.0: expected integer"),
        ("ms.Loader(traces, batch_size=True)", "batch_size=True: expected integer"),
        ("ms.Loader(traces, batch_size=0)", "batch_size=0: must be at least 1"),
        ("ms.Loader(traces, batch_size=4, memory=True)", "memory: True is not a size"),
        ('ms.Loader(traces, batch_size=4, memory="lots")', "memory: 'lots' is not a size"),
        ('ms.Loader(traces, batch_size=4, seed="x")', "seed='x': expected integer"),
        ('ms.Loader(traces, batch_size=4, order="sorted")', "order='sorted': must be one of auto, exact"),
        ('ms.Loader(traces, batch_size=4, features="layers")', "features='layers': expected Feature"),
        ('ms.Loader(traces, batch_size=4, features=["layers"])', r"features=\['layers'\]: expected Feature"),
        ('ms.Loader("traces/", batch_size=4)', "collection='traces/': expected Collection"),
        ('traces.stream(batch_size="4")', "batch_size='4': expected integer or None"),
        ('traces.stream(drop_last="yes")', "drop_last='yes': expected True or False"),
        ("traces.dataset(seed=None)", "seed=None: expected integer"),
        ('ms.split(traces, {"train": "0.7"})', "parts={.*}: expected mapping of text to number or None"),
        ('ms.split(traces, folds="5")', "folds='5': expected integer or None"),
        ("ms.split(traces, folds=2, by=3)", "by=3: expected text or None"),
        ('ms.subset(traces, "12")', "numbers='12': expected"),
        ("ms.concat(traces.path)", "collections=.*: expected list of Collection"),
        ("ms.mix([traces, traces])", "weights=.*: expected mapping of Collection"),
        ("ms.open(5)", "path=5: expected text or path or list of text or path"),
        ('ms.open(traces.path, columns="label")', "columns='label': expected list of text or None"),
        ("ms.open(traces.path, verify=False)", "verify=False: must be one of always, never"),
        ("ms.open(traces.path, memory=-5)", "memory: .*, got -5"),
        ('ms.TraceWriter(traces.path, shard_bytes="x")', "shard_bytes: 'x' is not a size"),
        ("ms.TraceWriter(traces.path, durability=True)", "durability=True: must be one of process, power"),
        ("ms.features.graphs(k=0)", "k=0: must be at least 1"),
        ("ms.split(traces, {'train': float('nan'), 'test': 0.5})", "the shares of a split must be above 0"),
        ("ms.TraceWriter(traces.path, config={'a': object()})", "config=.*: must be a JSON object"),
        ("ms.TraceWriter(traces.path).append(5)", ".*traces: a record is a mapping of field names to values, not 5"),
        ("ms.TraceWriter(traces.path).extend([5])", r"records=\[5\]: expected list of mapping"),
        ("ms.Order(-1)", "n=-1: must be at least 0"),
        ("ms.Order(5, mode='auto')", "mode='auto': must be one of exact, window, none"),
        ("ms.features.tokens('kmer(6)', max_length=-1)", "max_length=-1: must be at least 1"),
        ("ms.train(traces)", "data=.*: expected text or path"),
        ("ms.train(traces.path, epochs=[3])", "epochs=.*3.*: expected integer"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_must_be_given(call: str, says: str, tmp_path: Path) -> None:
    with ms.TraceWriter(tmp_path / "traces") as writer:
        writer.append({"question_id": "q1", "hidden": np.zeros((2, 3), np.float16)})
    with pytest.raises((MillstreamError, ValueError), match=rf"^{says}") as caught:
        eval(call, {"ms": ms, "traces": ms.open(tmp_path / "traces")})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.int64(3), int),
        (np.float32(0.5), float),
        (3, float),
        (np.True_, bool),
        (np.str_("a"), str),
        (Path("a"), str | Path),
        ("2GB", SizeInBytes),
        (2e9, SizeInBytes),
        (None, Count | None),
        ([], Sequence[int]),
        ((1, 2), Sequence[int]),
        (np.arange(3), Sequence[int] | np.ndarray),
        ({"a": 1}, Mapping[str, float]),
        (len, Callable[[object], int]),
        ("a", Literal["a", "b"] | None),
        (object(), Any),
    ],
)
def test_values_that_fit_their_annotation_are_accepted(value: object, hint: Any) -> None:
    check("name", value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.True_, int),
        (1, bool),
        (float("nan"), Probability),
        (-1, Natural),
        pytest.param(10**5000, Natural, id="a huge integer"),
        ("ab", Sequence[str]),
        ([1, "b"], Sequence[str]),
        ({"a": "b"}, Mapping[str, int]),
        (1, Literal["1", "2"]),
        (True, Literal[1]),
        ("len", Callable[[object], int]),
    ],
)
def test_values_that_do_not_fit_their_annotation_are_refused_in_one_line(value: object, hint: Any) -> None:
    with pytest.raises(BadSetting, match=r"^name=.{1,200}$"):
        check("name", value, hint)


def test_missing_and_unknown_arguments_are_left_to_python() -> None:
    @checked
    def function(number: int, *rest: int, flag: bool = False, **others: object) -> tuple[object, ...]:
        return number, rest, flag, others

    assert function(1, 2, flag=True, other="x") == (1, (2,), True, {"other": "x"})
    with pytest.raises(TypeError, match="number"):
        eval("function()", {"function": function})
    assert list(signature(function).parameters) == ["number", "rest", "flag", "others"]
