"""Every code block of README.md and docs/**/*.md is run, page by page, from top to bottom. Rules for authors:

- Languages are `python`, `sh`, `yaml`, `json` and `text` (output and drawings, not run). A block without a language or
  with another one, and indented code, are failures. So are admonitions (`!!!`): pages are plain CommonMark.
- A page runs in its own copy of a small folder (support/docs_world.py): `Qwen/Qwen3-4B` (a tiny model),
  `triviaqa.jsonl`, `traces/`, `other_traces/` and `more_traces/` (labelled, tier probe, other questions), `full/` (12
  traces of tier full), `runs/first` (detectors), `genomes/` and `genomes/strains/` (*.fna.gz), `species.tsv`,
  `train.fa.gz`, `val.fa`, `known.fa`, `strains.fa`, `reads.fa.gz`, `sample.fq.gz`, `reads_1.fq.gz`, `reads_2.fq.gz`,
  `runs/reads` (classifiers), and `configs/` with few epochs. From the old scripts: `old/*.pkl`, `preprocessed_data/`,
  `ground_truth_scores.csv`. `traces/`, `runs/first` and `runs/reads` were made with commands of the README, so the
  same commands resume them.
- python: the blocks of a page share one namespace. A block that begins with `# name.py` is also written to that file.
- sh: every command exits with 0, or with N if its line says `# exit N`. Plain `millstream` and `python` lines run in
  this process; a block with pipes, variables, `&` and so on runs as a whole in `bash -e`. `--reads N` is reduced.
  `pip install` is checked against the extras and pins, `make X` against the Makefile; scripts of benchmarks/, examples/
  and docs/ must exist; `millstream demo` and `model=smollm2` are only parsed; `millstream view` stops before serving.
- `http://127.0.0.1:8000/v1` is an OpenAI-compatible server with one model (support/model_server.py).
- yaml: settings of `train`, `extract`, `label`, `featurize`, `evaluate` or the old `train_streaming`; a first line
  `# name.yaml` also writes the file. json: must parse, as a whole or line by line.
- Comments directly above a block: `<!-- first: COMMANDS -->` runs commands in bash before it, to clean up
  (`rm -r traces`). `<!-- not run: REASON -->` marks what cannot run on one machine; it must be listed in NOT_RUN below.
- Links within docs/ stay within docs/ (the site has nothing else); anchors are made from headings as on GitHub.
"""

import contextlib
import doctest
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from inspect import isclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from torch.utils.data import DataLoader

import millstream
from millstream.core.remote import RemotePath, to_path
from millstream.reads.kind import HEADERS
from support.docs_blocks import DOCS, LANGUAGES, ROOT, Block, anchors_of, blocks_of, links_of, pages
from support.docs_commands import run_block
from support.docs_world import copy_world
from support.model_server import ModelServer
from support.s3_server import make_bucket, s3_environment

for _extra in ("transformers", "lightning_fabric", "matplotlib", "numba"):
    pytest.importorskip(_extra, reason=f"pages use all extras, and {_extra} is not installed")

# Page and reason of every block that is not run: adding one is a decision.
NOT_RUN = {
    ("docs/install.md", "needs the index of PyTorch"),
    ("docs/tutorials/reads.md", "downloads from NCBI"),
    ("docs/tutorials/traces.md", "installs a language model"),
    ("docs/how-to/compare.md", "needs a Ray cluster"),
    ("docs/how-to/many-gpus.md", "needs four GPUs"),
    ("docs/how-to/cami.md", "needs OPAL and AMBER"),
    ("docs/how-to/many-gpus.md", "needs several machines"),
    ("docs/how-to/many-gpus.md", "needs a Ray cluster"),
    ("docs/how-to/many-gpus.md", "needs machines and a bucket"),
    ("docs/how-to/share.md", "needs an account on the hub"),
    ("docs/how-to/share.md", "needs a dataset on the hub"),
    ("docs/how-to/share.md", "needs datasets and a dataset on the hub"),
}
SERVER = "http://127.0.0.1:8000/v1"  # on a page; the tests have one at another port
COMMENTS = ("first:", "not run:")
# Warnings of other libraries when they are used as documented; all others are errors.
THEIR_OWN = [
    "ignore:.*LeafSpec:FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:Your `IterableDataset` has",
    "ignore:'set_vital' is deprecated",  # torchdata
    "ignore:.*found in sys.modules after import:RuntimeWarning",  # `python -m` of a module that is already imported
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.filterwarnings(*THEIR_OWN)
@pytest.mark.parametrize("page", pages(), ids=name_of)
@pytest.mark.usefixtures("unrendered_figures")
def test_every_block_of_a_page_runs(
    page: Path, world: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    if not any(block.language != "text" for block in blocks_of(page)):
        return
    if any("s3://" in block.text for block in blocks_of(page)):
        _fill_bucket(request.getfixturevalue("s3_address"), world, tmp_path, monkeypatch)
    address = None
    if any(SERVER in block.text for block in blocks_of(page)):
        server: ModelServer = request.getfixturevalue("model_server")
        server.reply = lambda prompt: "INCORRECT" if "1" in prompt else "CORRECT"
        address = server.url
    with contextlib.chdir(copy_world(world, tmp_path / "world")), _no_modules_left(tmp_path):
        namespace: dict[str, object] = {"__name__": "__main__"}
        for block in blocks_of(page):
            if block.comment("not run"):
                continue
            if commands := block.comment("first"):
                subprocess.run(["bash", "-e", "-c", commands], check=True)
            _run(block if address is None else replace(block, text=block.text.replace(SERVER, address)), namespace)


@contextlib.contextmanager
def _no_modules_left(folder: Path) -> Iterator[None]:
    """Forget modules that a page imported from its own folder."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def _fill_bucket(address: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`s3://bucket` with a copy of a trace store, reads and a table; runs and spools are in the page's folder."""
    for name, value in s3_environment(address).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MILLSTREAM_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("MILLSTREAM_CACHE", "1GB")  # the pages set it for this process
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    make_bucket(address, "bucket")
    for file in (*(world / "traces").glob("*.*"), world / "sample.fq.gz", world / "triviaqa.jsonl"):
        remote = to_path(f"s3://bucket/{file.relative_to(world)}")
        assert isinstance(remote, RemotePath)
        remote.put(file)


def _run(block: Block, namespace: dict[str, object]) -> None:
    if block.file:
        Path(block.file).write_text(block.text)
    if block.language == "python":
        code = "\n" * block.line + block.text  # so that a traceback has the line number of the page
        exec(compile(code, str(block.page), "exec"), namespace)
    elif block.language == "sh":
        run_block(block)
    elif block.language == "yaml":
        _read_settings(block)
    elif block.language == "json":
        _read_json(block)


def _read_settings(block: Block) -> None:
    """Some command accepts these settings and their values."""
    from millstream.classic.train_streaming import KEYS
    from millstream.core.config import read_settings, setting_pairs
    from millstream.errors import BadSetting
    from millstream.reads.kind import ReadSettings
    from millstream.traces.kind import (
        EvaluateSettings,
        ExtractSettings,
        FeaturizeSettings,
        LabelSettings,
        TrainSettings,
    )

    given = yaml.safe_load(block.text)
    if {key for key, _ in setting_pairs(given)} <= set(KEYS):
        return
    refusals: list[str] = []
    for kind in (TrainSettings, ReadSettings, ExtractSettings, FeaturizeSettings, LabelSettings, EvaluateSettings):
        try:
            read_settings(kind, given)
        except BadSetting as error:
            refusals.append(f"{kind.__name__}: {error}")
        else:
            return
    pytest.fail(f"{block.place}: no command accepts these settings\n" + "\n".join(refusals))


def _read_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)


def test_every_block_is_in_a_language_that_runs_or_is_output():
    others = [
        f"{block.place} {block.language!r}"
        for page in pages()
        for block in blocks_of(page)
        if block.language not in LANGUAGES
    ]
    assert others == []
    assert [page for page in pages() if "\n!!! " in page.read_text() or "\n??? " in page.read_text()] == []


@pytest.fixture(scope="module")
def own_world(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the examples of all docstrings: each writes to its own path."""
    return copy_world(world, tmp_path_factory.mktemp("examples") / "world")


@pytest.mark.parametrize("name", [name for name in millstream.__all__ if callable(getattr(millstream, name))])
@pytest.mark.usefixtures("unrendered_figures")
def test_every_public_name_has_an_example_that_runs(name: str, own_world: Path):
    named = getattr(millstream, name)
    methods = [value for key, value in vars(named).items() if not key.startswith("_")] if isclass(named) else []
    assert named.__doc__ and ">>> " in named.__doc__
    _run_examples([named, *methods], own_world)


def test_every_feature_has_an_example_that_runs(own_world: Path):
    features = [getattr(millstream.features, name) for name in millstream.features.__all__]
    assert [feature for feature in features if ">>> " not in feature.__doc__] == []
    _run_examples(features, own_world)


def _run_examples(named: list[object], folder: Path) -> None:
    """As doctest does, with `traces` (tier full) and `reads` defined."""
    with contextlib.chdir(folder):
        given = {
            "ms": millstream,
            "np": np,
            "DataLoader": DataLoader,
            "traces": millstream.open("full/"),
            "reads": millstream.open("reads.fa.gz", header_regex=HEADERS, mapping="species.tsv"),
        }
        runner = doctest.DocTestRunner(verbose=False)
        for item in named:
            function = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
            text = getattr(function, "__doc__", None)
            if isinstance(text, str) and ">>> " in text:
                example = doctest.DocTestParser().get_doctest(text, dict(given), str(item), None, 0)
                output = io.StringIO()
                assert runner.run(example, out=output.write).failed == 0, output.getvalue()


def test_every_block_that_is_not_run_is_listed_with_its_reason():
    blocks = [block for page in pages() for block in blocks_of(page)]
    not_run = [(name_of(block.page), reason) for block in blocks if (reason := block.comment("not run")) is not None]
    assert set(not_run) == NOT_RUN and len(not_run) == len(NOT_RUN)
    comments = [comment for block in blocks for comment in block.comments if block.language != "text"]
    assert [comment for comment in comments if not comment.startswith(COMMENTS)] == []


def test_every_link_and_anchor_points_to_something():
    for page in pages():
        for link in links_of(page):
            if "://" in link or link.startswith("mailto:"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{name_of(page)}: {link} does not exist"
            if anchor:
                assert anchor in anchors_of(target), (
                    f"{name_of(page)}: {link} must be one of {sorted(anchors_of(target))}"
                )
            if page != ROOT / "README.md":
                assert target.is_relative_to(DOCS), f"{name_of(page)}: {link} is not part of the site"


def test_every_command_is_shown_in_a_block():
    import typer.main

    from millstream.cli.app import make_app

    shown = "\n".join(block.text for page in pages() for block in blocks_of(page) if block.language == "sh")
    commands = typer.main.get_command(make_app()).commands  # pyright: ignore
    assert [name for name in commands if f"millstream {name}" not in shown] == []
