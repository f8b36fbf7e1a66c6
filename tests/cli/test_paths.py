"""Every path that a command takes may be wrong, or a URL: the command works, or says in one line why not."""

import os
import pickle
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

import millstream as ms
from millstream.cli.app import make_app
from support.classifying import make_run as make_read_run
from support.commands import run_here
from support.extracting import SETTINGS, write_questions
from support.extras import need
from support.making_traces import make_traces
from support.remote_stores import objects, remote, upload
from support.s3_server import make_bucket, s3_environment

need("obstore", "transformers")

GROUP: Any = typer.main.get_command(make_app())
NO_PATHS = {"KEY=VALUE", "NUMBER", "N", "X", "NAME", "HOST:PORT", "SIZE", "REGEX", "NAMES", "ACTION", "P", "RATE"}
NO_PATHS |= {"KIND", "SQL", "NUMBERS", "NAME[:START-END]..."}
EXTRACT = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in SETTINGS.items())
CASES = {  # for every path: a command in which that path begins with @
    ("report", "run"): "report @run --out page.html",
    ("report", "--out"): "report run --out @new/page.html",
    ("view", "path"): "view @nothing",
    ("view", "--run"): "view traces --run @nothing",
    ("view", "--mapping"): "view @nothing --mapping @nothing",
    ("inspect", "path"): "inspect @traces",
    ("inspect", "other"): "inspect traces @traces",
    ("verify", "path"): "verify @traces",
    ("copy", "source"): "copy @traces copied",
    ("copy", "target"): "copy traces @new/traces",
    ("demo", "path"): "demo @new/demo",
    ("extract", "questions"): f"extract @q.jsonl extracted model=lm {EXTRACT}",
    ("extract", "store"): f"extract q.jsonl @new/extracted model=lm {EXTRACT}",
    ("extract", "settings"): "extract q.jsonl other @lm.yaml",
    ("label", "store"): "label @extracted-before",
    ("label", "settings"): "label copy references=@references.jsonl",
    ("featurize", "store"): "featurize @traces features field=states",
    ("featurize", "out"): "featurize traces @new/features field=states",
    ("featurize", "settings"): "featurize traces other @features.yaml",
    ("convert", "paths"): "convert old.pkl @new/converted",
    ("evaluate", "run"): "evaluate @run",
    ("evaluate", "stores"): "evaluate run @traces out=evaluated",
    ("repair", "path"): "repair @traces",
    ("merge", "paths"): "merge @traces merged",
    ("subset", "path"): "subset @traces some --shards 0",
    ("subset", "out"): "subset traces @new/some --shards 0",
    ("subset", "--ids"): "subset traces picked --ids @ids",
    ("simulate", "genomes"): "simulate @562_genome.fna -o r.fa --reads 9",
    ("simulate", "--out"): "simulate 562_genome.fna -o @new/r.fa --reads 9",
    ("simulate", "--mapping"): "simulate 562_genome.fna -o r2.fa --reads 9 --mapping @species.tsv",
    ("simulate", "--index-dir"): "simulate 562_genome.fna -o r3.fa --reads 9 --index-dir @new/",
    ("index", "paths"): "index @a.fa",
    ("index", "--mapping"): "index a.fa --header-regex 'lbl\\|(?P<class_id>\\d+)' --mapping @species.tsv --rebuild",
    ("index", "--index-dir"): "index a.fa --index-dir @new/indexes",
    ("pack", "paths"): "pack a.fa @new/a.pack",
    ("unpack", "path"): "unpack @a.pack again.fa",
    ("unpack", "out"): "unpack a.pack @new/again.fa",
    ("classify", "run"): "classify @reads-run a.fa -o rows.tsv",
    ("classify", "reads"): "classify reads-run @a.fa -o rows2.tsv",
    ("classify", "--out"): "classify reads-run a.fa -o @new/rows.tsv",
    ("classify", "--mates"): "classify reads-run a.fa --mates @a.fa -o rows3.tsv",
    ("classify", "--report"): "classify reads-run a.fa -o rows4.tsv --report @new/report.txt",
    ("classify", "--index-dir"): "classify reads-run a.fa -o rows5.tsv --index-dir @new/indexes",
    ("classify", "--classified-out"): "classify reads-run a.fa -o rows6.tsv --classified-out @new/classified.fa",
    ("classify", "--unclassified-out"): "classify reads-run a.fa -o rows7.tsv --unclassified-out @new/others.fa.gz",
    ("classify", "--table"): "classify reads-run a.fa -o samples --table @new/table.tsv",
    ("fetch", "reads"): "fetch @562_genome.fna 0",
    ("fetch", "--out"): "fetch 562_genome.fna 0:2-9 --out @new/part.fa",
    ("fetch", "--index-dir"): "fetch 562_genome.fna 0 --index-dir @new/indexes",
    ("pack", "--reference"): "pack a.fa b.pack --reference @562_genome.fna",
    ("train", "settings"): "train @run.yaml out=trained",
}


@pytest.fixture(scope="module")
def world(
    llama: Path, s3_address: str, tmp_path_factory: pytest.TempPathFactory, unrendered_figures: None, quick_fits: None
) -> Iterator[str]:
    """A working folder with something for every path, and the URL of a bucket with the same."""
    folder = tmp_path_factory.mktemp("urls")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {**s3_environment(s3_address), **SECRETS}.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        files, run = make_read_run(folder)
        run.rename(folder / "reads-run")
        for file in files[1:]:
            file.unlink()
        assert run_here("pack", "a.fa", "a.pack")[0] == 0
        make_traces(folder / "traces")
        ms.train(folder / "traces", model="length", seeds=1, out=str(folder / "run"))
        for name in ("copy", "extracted-before"):
            shutil.copytree(folder / "traces", folder / name)
        write_questions(folder / "q.jsonl", count=2)
        shutil.copytree(llama, folder / "lm")
        Path("lm.yaml").write_text("model: lm\n" + "".join(f"{name}: {value}\n" for name, value in SETTINGS.items()))
        Path("features.yaml").write_text("token: last\n")
        Path("run.yaml").write_text("data: traces\nmodel: length\n")
        Path("references.jsonl").write_text('{"question_id": "q0", "answer": "A"}\n')
        Path("ids").write_text("q0\nq7\n")
        old = [{"example_id": 0, "generated_text": "a", "hidden_states": np.zeros((2, 3, 4))}]
        Path("old.pkl").write_bytes(pickle.dumps(old))
        bucket = f"urls-{os.getpid()}"
        make_bucket(s3_address, bucket)
        yield upload(folder, f"s3://{bucket}")


def test_every_path_of_every_command_is_here() -> None:
    paths = {
        (name, parameter.name if "Argument" in type(parameter).__name__ else parameter.opts[0])
        for name, command in GROUP.commands.items()
        for parameter in command.params
        if (not getattr(parameter, "is_flag", False) and parameter.metavar not in NO_PATHS)
        or parameter.name == "settings"
    }
    assert paths == set(CASES)


SECRETS = {
    "AWS_ACCESS_KEY_ID": "access-key-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-key-of-the-tests",
    "AWS_SESSION_TOKEN": "session-token-of-the-tests",
    "AZURE_STORAGE_SAS_KEY": "sv=2024-11-04&sig=sas-token-of-the-tests",
    "GOOGLE_BEARER_TOKEN": "bearer-token-of-the-tests",
    "HF_TOKEN": "hf_token-of-the-tests",
}
SETTINGS_WITH_URLS = [
    "train data=@traces out=t",
    "train data.train=@a.fa out=t",
    "train data=traces out=@new",
    "label traces scores=@scores.csv",
    "label traces rule=judge endpoint=@v1",
    "evaluate run data=@traces",
    "extract q.jsonl t model=@lm",
]
SECRET = re.compile(rb"(key|token|password|signature)-of-the-tests")
REFUSED = {  # all others work
    ("report", "--out"): "local file",
    ("view", "path"): "not a trace store",
    ("view", "--run"): "not a run",
    ("view", "--mapping"): "no classes",
    ("demo", "path"): "local folder",
    ("extract", "settings"): "local file",
    ("featurize", "settings"): "local file",
    ("train", "settings"): "local file",
    ("repair", "path"): "never rewritten",
}


def run_and_check(words: list[str]) -> tuple[int, str]:
    """Exit code and the last line: of an error there is one, and never a folder named after a URL."""
    code, out, err = run_here(*words)
    assert not SECRET.search((out + err).encode())
    lines = err.splitlines()
    assert code in (0, 1, 2) and "Traceback" not in err
    assert code == 0 or (lines[-1].startswith("millstream: ") and sum(": error" in line for line in lines) == 0)
    wrong = [path for path in Path.cwd().iterdir() if ":" in path.name]
    for path in wrong:
        shutil.rmtree(path)
    assert not wrong
    return code, lines[-1] if lines else ""


PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40
WRONG = {  # paths to read, and to write
    "@": ("missing", "picture.png", "empty", "folder/", "a.fa/inside"),
    "@new": ("traces", "a.fa", "a.fa/inside", "/proc/new/x"),
}
WORKS = {  # paths that are not wrong for these commands, or not named
    ("copy", "source"): {"picture.png", "empty"},  # any file may be copied, though not as another one
    ("simulate", "--mapping"): {"missing"},  # it is written
    ("simulate", "--index-dir"): {"traces"},
    ("index", "--index-dir"): {"traces"},
    ("pack", "paths"): {"traces"},  # into the folder
    ("pack", "--reference"): {"picture.png", "empty"},  # read for a CRAM only
    ("classify", "--index-dir"): {"traces"},
    ("fetch", "--index-dir"): {"traces"},
}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_wrong_paths_are_refused_in_one_line_that_names_them(
    world: str, case: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)
    for name, content in (("picture.png", PICTURE), ("empty", b"")):
        Path(name).write_bytes(content)
    Path("folder").mkdir(exist_ok=True)
    Path("missing").unlink(missing_ok=True)
    found: dict[str, str] = {}
    wrongs = WRONG["@new" if "@new" in CASES[case] else "@"]
    for wrong in wrongs[2:] if case[0] == "demo" else wrongs:  # the demo may go into any folder
        code, said = run_and_check([re.sub(r"@.*", wrong, word) for word in shlex.split(CASES[case])])
        if code == 0 or wrong.strip("/").split("/")[0] not in said:
            found[wrong] = said
    Path("copied").unlink(missing_ok=True)
    assert set(found) == WORKS.get(case, set()), found


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_path_in_a_bucket_works_or_is_refused_in_one_line(world: str, case: tuple[str, str]) -> None:
    words = [word.replace("@", f"{world}/") for word in shlex.split(CASES[case])]
    code, said = run_and_check(words)
    assert (code != 0) == (case in REFUSED), said
    assert REFUSED.get(case, "") in said and not re.search(r"s3:/[^/]", said)


@pytest.mark.parametrize("place", ["https://127.0.0.1:1/x", "hf://datasets/me/x"])
@pytest.mark.parametrize("case", [case for case in CASES if "@new" in CASES[case]], ids=" ".join)
def test_what_cannot_be_written_to_is_refused_in_one_line(
    world: str, case: tuple[str, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_PATIENCE", "0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = [word.replace("@", f"{place}/") for word in shlex.split(CASES[case])]
    code, said = run_and_check(words)
    assert code != 0 and place.partition(":")[0] + "://" in said, said


@pytest.mark.parametrize(
    "place",
    [
        "https://user:password-of-the-tests@127.0.0.1:1/x",
        "s3://user:password-of-the-tests@bucket/x",
        "https://127.0.0.1:1/x?X-Amz-Signature=signature-of-the-tests&file=",
        "az://container/x?sv=1&sig=signature-of-the-tests&file=",
    ],
    ids=["password", "s3 password", "presigned", "SAS"],
)
@pytest.mark.parametrize("command", [*CASES.values(), *SETTINGS_WITH_URLS])
def test_a_url_with_a_secret_is_refused_and_not_repeated(world: str, command: str, place: str) -> None:
    code, said = run_and_check([word.replace("@", f"{place}/", 1) for word in shlex.split(command)])
    assert code != 0 and "credentials" in said, said


def test_nothing_that_was_written_has_a_secret(world: str) -> None:
    """By all the tests above: on disk, in the spool, in the cache and in the bucket."""
    folders = [Path.cwd(), *(Path(os.environ[name]) for name in ("MILLSTREAM_SPOOL_DIR", "MILLSTREAM_CACHE_DIR"))]
    written = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert [path for path in written if SECRET.search(path.read_bytes())] == []
    assert [name for name in objects(world) if SECRET.search(remote(f"{world}/{name}").read_bytes())] == []
