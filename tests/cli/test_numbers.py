"""Numbers in settings and options: each has limits, and what is outside of them is refused in one line, at once."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main

import millstream
from millstream.cli.app import make_app
from millstream.core.config import Between, ByteSize, Setting, check_settings, list_settings, read_settings
from millstream.errors import BadSetting
from support.commands import run_here

NOT_SET_BY_USERS = {"ModelSettings", "ScoreSettings", "CacheSettings", "IndexSettings"}
NEVER = ("nan", "inf", "-inf", "1e400", "-1e30", "1" + "0" * 30, "9" * 5000)


def settings_classes() -> list[type[Any]]:
    root, found = Path(millstream.__file__).parent, list[type[Any]]()
    for file in sorted(root.rglob("*.py")):
        for name in re.findall(r"^class (\w*Settings)\b", file.read_text(), re.MULTILINE):
            module = ".".join(["millstream", *file.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
            found += [getattr(import_module(module), name)] if name not in NOT_SET_BY_USERS else []
    return found


def numbers() -> list[Any]:
    """Every setting that takes a number, and its class."""
    found = [(kind, setting) for kind in settings_classes() for setting in list_settings(kind)]
    return [
        pytest.param(kind, setting, id=f"{kind.__name__}.{setting.name}")
        for kind, setting in found
        if int in setting.types or float in setting.types
    ]


def outside(setting: Setting) -> list[str]:
    """Texts that are never a value of this setting."""
    (limit,) = setting.limits
    texts = ["1,5", "one", "--1"]
    if isinstance(limit, ByteSize):
        return [*texts, *NEVER, "0", "-1"]
    assert isinstance(limit, Between)
    low, high = limit.least, limit.most
    texts += [f"{low:g}", f"{high:g}"] if limit.is_open else [f"{high:g}"] if limit.is_below else []
    beyond = [f"{low - 1:g}", f"{high + 1:g}"]
    huge = "-1e30" if float in setting.types and low == float("-inf") else ""
    large = "1" + "0" * 30 if float in setting.types and high == float("inf") else ""  # a number like any other
    return [text for text in (*texts, *beyond, *NEVER) if text not in (huge, large)]


@pytest.mark.parametrize(("kind", "setting"), numbers())
def test_a_number_outside_of_the_limits_of_its_setting_is_refused_in_one_line(kind: Any, setting: Setting) -> None:
    assert len(setting.limits) == 1
    for text in outside(setting):
        for given in ([f"{setting.name}={text}"], {setting.name: text}):
            with pytest.raises(BadSetting, match=rf"^{setting.name}[=:] ?.{{1,250}}$"):
                read_settings(kind, given)


@pytest.mark.parametrize("kind", settings_classes())
def test_defaults_are_within_the_limits_of_their_settings(kind: Any) -> None:
    check_settings(kind())


def options() -> list[Any]:
    """Every option that takes a number, with the words of its command that are needed before it."""
    group: Any = typer.main.get_command(make_app())
    found: list[Any] = []
    for name, command in sorted(group.commands.items()):
        needed: list[Any] = [one for one in command.params if one.required]
        words = [word for one in needed for word in (one.opts[0], "nowhere") if word[:1] == "-" or word == "nowhere"]
        for option in command.params:
            if option.type_descriptor.annotation in (int, float):
                extra = {"--workers": ["--engine=ray"], "--tolerance": ["nowhere"]}.get(option.opts[0], [])
                found.append(pytest.param([name, *words, *extra], option.opts[0], id=f"{name}{option.opts[0]}"))
    return found


@pytest.mark.parametrize(("command", "option"), options())
def test_a_number_outside_of_the_limits_of_an_option_is_refused_in_one_line(command: list[str], option: str) -> None:
    """Before any file is looked at: there is no file `nowhere`."""
    for value in ("nan", "inf", "-1", "one"):
        code, out, err = run_here(*command, f"{option}={value}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert option.strip("-") in err
