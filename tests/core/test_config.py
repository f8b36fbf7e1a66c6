"""Byte sizes as people write them, and configurations as a fingerprint and as a difference."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.config import config_diff, config_hash, parse_bytes, parse_json, parse_yaml, read_settings
from millstream.errors import BadSetting


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        (" 2k ", 2_000),
        ("1.5GiB", 3 * 2**29),
        ("64KiB", 65_536),
        ("3g", 3_000_000_000),
        ("1TB", 10**12),
        ("2TiB", 2**41),
        (".5kB", 500),
        (2e9, 2 * 10**9),
        (np.int64(7), 7),
    ],
)
def test_sizes_are_parsed_as_people_write_them(text: float | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "MB", "12 apples", "1e6", "-5MB", "5MBB", "5 M B", "1,5GB", "1.5.2MB", ".", None, [], True]
)
def test_an_invalid_size_is_an_error_that_quotes_it(text: Any) -> None:
    with pytest.raises(BadSetting, match=re.escape(repr(text))):
        parse_bytes(text)


@pytest.mark.parametrize("size", [0, -1, "0", "0MB", "0.4B", 0.3, float("nan"), float("inf"), "9" * 25])
def test_a_size_that_is_not_positive_or_beyond_any_machine_is_an_error(size: float | str) -> None:
    with pytest.raises(BadSetting, match=re.escape(repr(size))):
        parse_bytes(size)


@given(st.integers(1, 2**50), st.sampled_from(["", "B", "kB", "KiB", "mb", "MiB"]))
def test_a_whole_number_of_units_is_exact(count: int, unit: str) -> None:
    scale = {"": 1, "B": 1, "kB": 1000, "KiB": 1024, "mb": 1000**2, "MiB": 1024**2}[unit]
    count = count // scale + 1
    assert parse_bytes(f"{count}{unit}") == count * scale


Configs = st.dictionaries(
    st.text(max_size=4), st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=2), max_size=3
)


@settings(derandomize=True)
@given(Configs, Configs)
def test_configurations_have_the_same_hash_exactly_when_they_are_equal(
    a: dict[str, object], b: dict[str, object]
) -> None:
    assert (config_hash(a) == config_hash(b)) == (a == b)
    assert config_hash(dict(reversed(a.items()))) == config_hash(a)


def test_the_hash_of_a_configuration_never_changes_between_versions() -> None:
    assert config_hash({"model": "gpt2", "seed": 1, "layers": [0, 6]}) == config_hash(
        {"layers": [0, 6], "seed": 1, "model": "gpt2"}
    )
    assert config_hash({}) == "01e7b720ff566d53"
    assert config_hash({"model": "gpt2", "seed": 1, "layers": [0, 6]}) == "63227bf10abd632d"


def test_a_difference_names_exactly_the_settings_that_were_changed_added_or_removed() -> None:
    old = {"model": "gpt2", "seed": 1, "same": [1, 2], "gone": True}
    new = {"model": "pythia", "seed": 1, "same": [1, 2], "came": 0.5}
    assert config_diff(old, new) == "model: 'gpt2' -> 'pythia', gone: True -> None, came: None -> 0.5"


@settings(derandomize=True)
@given(Configs, Configs)
def test_a_difference_is_empty_exactly_when_configurations_are_equal(
    a: dict[str, object], b: dict[str, object]
) -> None:
    assert (config_diff(a, b) == "") == (a == b)


def test_a_setting_of_none_differs_from_a_missing_one() -> None:
    assert "limit" in config_diff({"limit": None}, {})


@dataclass(frozen=True)
class Settings:
    model: str = ""
    beams: int = 1
    temperature: float | None = None
    loud: bool = False
    memory: int | str = "2GB"


def test_settings_are_read_from_texts_and_yaml_files_and_later_ones_win(tmp_path):
    (tmp_path / "base.yaml").write_text("model: 7\nbeams: 3\nloud: true\n")
    read = read_settings(Settings, [str(tmp_path / "base.yaml"), "beams=5", "temperature=0.5", "memory=1GB"])
    assert read == Settings("7", 5, 0.5, True, "1GB")
    assert read_settings(Settings, {"temperature": None, "memory": 10}) == Settings(memory=10)
    assert read_settings(Settings, ["temperature=none", "loud=no", "model=a=b"]) == Settings(model="a=b")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("beam=3", "beams="),
        ("zzz=3", "model, beams"),
        ("beams=many", "beams=many"),
        ("loud=perhaps", "loud=perhaps"),
        ("loud", "key=value"),
        ("missing.yaml", "missing.yaml"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadSetting, match=message):
        read_settings(Settings, [given])


HOSTILE = {
    "nested lists": "[" * 1_500 + "]" * 1_500,
    "nested lists that can be parsed": "[" * 300 + "]" * 300,
    "nested mappings": '{"a": ' * 10_000 + "1" + "}" * 10_000,
    "an unfinished text": '{"epochs": ',
    "an integer of 5,000 digits": '{"epochs": ' + "9" * 5000 + "}",
    "an integer of 5,000 digits in a list": "[[" + "9" * 5000 + "]]",
}
HOSTILE_YAML = {
    **HOSTILE,
    "nested blocks": "\n".join("  " * depth + "a:" for depth in range(500)),
    "a hexadecimal integer of 5,000 digits": "beams: 0x" + "f" * 5000,
    "a value that contains itself": "beams: &a [*a]",
    "a billion values by references": "a0: &a0 [0]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 11)),
    "a Python tag": "beams: !!python/object/apply:os.getcwd []",
    "no date": "beams: 2024-13-45",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_json_text_is_an_error_of_one_line(what: str) -> None:
    for text in (HOSTILE[what], HOSTILE[what].encode()):
        with pytest.raises(ValueError, match=r"^.{1,120}$"):
            parse_json(text)


@pytest.mark.parametrize("what", HOSTILE_YAML)
def test_a_hostile_yaml_file_is_an_error_of_one_line_that_names_it(what: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(HOSTILE_YAML[what])
    with pytest.raises(BadSetting, match=r"^.*base\.yaml.{1,160}$"):
        read_settings(Settings, [str(tmp_path / "base.yaml")])


def test_shared_values_and_large_lists_are_not_mistaken_for_hostile_ones() -> None:
    assert parse_yaml("a: &x [1, 2]\nb: [*x, *x]") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert len(parse_json("[" + "[1]," * 100_000 + "[2]]")) == 100_001
    assert parse_json("9" * 1000) == int("9" * 1000)
