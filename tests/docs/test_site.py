"""The site builds without warnings, loads nothing from other servers, and has every command, setting and name."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import millstream
import millstream.classic
from support.docs_blocks import DOCS, ROOT

REFERENCE = runpy.run_path(str(DOCS / "make_reference.py"))
CLI = ["cli", "cli-maintain", "cli-reads", "cli-traces"]

needs_mkdocs = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings_handlers")),
    reason="the site needs mkdocs: pip install 'millstream[docs]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


@needs_mkdocs
def test_the_site_builds_in_strict_mode_and_no_page_loads_anything_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)=\"?(https?:[^\" >]*)", text)
        assert loaded == [], page
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?https?:|@import", styles) == []


@needs_mkdocs
def test_every_public_name_is_on_the_site(site: Path):
    found = {
        match for page in site.rglob("*.html") for match in re.findall(r'id="(millstream[\w.]*)"', page.read_text())
    }
    modules = {"millstream.__version__", "millstream.errors", "millstream.features"}
    names = {f"millstream.{name}" for name in millstream.__all__} - modules
    names |= {f"millstream.features.{name}" for name in millstream.features.__all__}
    names |= {f"millstream.classic.{name}" for name in millstream.classic.__all__}
    assert sorted(names - found) == []
    assert "CorruptRecord" in (site / "reference" / "api.html").read_text()


@pytest.mark.parametrize("name", ["api", *CLI, "config", "questions"])
def test_the_generated_parts_of_the_reference_are_current(name: str):
    """If not: python docs/make_reference.py"""
    text = (DOCS / "reference" / f"{name}.md").read_text()
    assert text == REFERENCE["expand"](text)
    assert len(text.split("<!-- end -->")) > 1


def test_the_reference_lists_every_command_and_option():
    import typer.main

    from millstream.cli.app import make_app

    text = "".join((DOCS / "reference" / f"{name}.md").read_text() for name in CLI)
    for name, command in typer.main.get_command(make_app()).commands.items():  # pyright: ignore
        assert text.count(f"\n### {name}\n") == 1
        for option in (option for param in command.params for option in param.opts if option.startswith("--")):
            assert option in text or getattr(command, "hidden", False)


def test_every_setting_is_explained():
    for name in REFERENCE["SETTINGS"]:
        assert [one.name for one in REFERENCE["settings_of_name"](name) if not one.help] == [], name
