"""The shape of the package: one public door, imports that follow the flow, a quick start."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import millstream

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "millstream"
FLOW = ["source", "store", "dataset", "loader", "model", "train", "report", "view", "classic"]
GROUND = {
    "buffers",
    "collection",
    "engine",
    "errors",
    "config",
    "console",
    "kernels",
    "process",
    "progress_line",
    "records",
    "",
}
TOP = {
    "cli",
    "cli_common",
    "cli_complete",
    "cli_help",
    "cli_llm",
    "cli_reads",
    "cli_settings",
    "cli_train",
    "cli_view",
    "door",
    "demo",
    "demo_reads",
    "__main__",
    "__init__",
}


def imports_of(file: Path) -> set[str]:
    """The parts of millstream a file imports: `store`, `records`, ... Types that are only named do not count."""
    found: set[str] = set()
    tree = ast.parse(file.read_text())
    for block in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if ast.unparse(block.test) == "TYPE_CHECKING":
            block.body = []
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] if "." in name else "" for name in names if name.split(".")[0] == "millstream"}
    return found


def test_a_file_imports_only_from_folders_to_its_left_or_the_ground_floor():
    for file in SOURCE.rglob("*.py"):
        part = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if part in TOP:
            continue
        allowed = GROUND | set(FLOW[: FLOW.index(part) + 1] if part in FLOW else ())
        assert imports_of(file) <= allowed, f"{file.name} imports {imports_of(file) - allowed}"


def test_the_public_door_is_sorted_and_every_name_in_it_exists():
    assert millstream.__all__ == sorted(millstream.__all__)
    assert [name for name in millstream.__all__ if getattr(millstream, name, None) is None] == []
    assert dir(millstream) == millstream.__all__


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="TraceWriter"):
        _ = millstream.Tracewriter


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys; sys.argv = ['millstream', '--help']\n"
        "from millstream.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'pyarrow', 'torch', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout


def test_the_core_does_not_import_torch_for_numpy_records(tmp_path: Path):
    code = (
        "import sys, numpy as np, millstream as ms\n"
        f"with ms.TraceWriter({str(tmp_path / 's')!r}) as w: w.append({{'a': np.zeros((3, 4)), 'b': 1, 'c': 'x'}})\n"
        f"assert ms.open({str(tmp_path / 's')!r})[0]['a'].shape == (3, 4)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_licence_version_and_constraints_agree():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{millstream.__version__}"' in project
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins["torch"] == "2.13.0"
    wanted = set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', project))
    assert {name.lower() for name in wanted} <= {name.lower() for name in pins}
