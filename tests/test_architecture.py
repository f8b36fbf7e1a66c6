"""The shape of the package: rooms and wings, the public module, a fast start, and an architecture page that is true."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import millstream
from millstream.core.registry import KINDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "millstream"
# Each floor may import itself and the floors below it; rooms of one floor may import each other, wings may not.
FLOORS = ({"errors", "core"}, {"training", "report", "view", "cli"}, set(KINDS), {"demo", "classic"})
PUBLIC = {"__init__", "__main__", "features"}  # the public names, assembled from both wings


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(SOURCE.rglob("*.py"))}


def room_of(module: str) -> str:
    """`core` of `millstream.core.order`; public modules are their own room."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def all_imports_of(module: str, *, lazy: bool) -> frozenset[str]:
    """The modules that a module imports, also inside functions if `lazy`; types do not count."""
    tree = ast.parse(MODULES[module].read_text())
    for block in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if ast.unparse(block.test) == "TYPE_CHECKING":
            block.body = [ast.Pass()]
    if not lazy:
        for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]:
            function.body = [ast.Pass()]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                full if (full := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            }
    return frozenset(found)


def imports_of(module: str, *, lazy: bool) -> set[str]:
    """The other modules of millstream among them."""
    return {name for name in all_imports_of(module, lazy=lazy) if name.split(".")[0] == "millstream"} - {module}


def reached_from(module: str, *, lazy: bool) -> set[str]:
    """The modules of millstream that importing a module imports in the end, itself among them."""
    found, left = set[str](), [module]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += imports_of(name, lazy=lazy)
    return found


def libraries_of(module: str) -> set[str]:
    """The packages outside the standard library that importing a module loads."""
    names = [name for one in reached_from(module, lazy=False) for name in all_imports_of(one, lazy=False)]
    return {name.split(".")[0] for name in names} - {"millstream", *sys.stdlib_module_names}


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) not in PUBLIC])
def test_a_module_imports_only_what_its_floor_may(module: str):
    room = room_of(module)
    floor = next(number for number, rooms in enumerate(FLOORS) if room in rooms)
    allowed = set[str]().union(*FLOORS[: floor + 1])
    if room in KINDS:
        allowed -= set(KINDS) - {room}
    outside = {name for name in imports_of(module, lazy=True) if room_of(name) not in allowed}
    assert not outside, f"{module} may not import {sorted(outside)}"


def test_there_are_no_import_cycles():
    graph = {module: imports_of(module, lazy=False) for module in MODULES}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_no_lazy_import_hides_a_cycle():
    """A lazy import may close a cycle only to load a library that the importing module does without."""
    lazy = [(one, other) for one in MODULES for other in imports_of(one, lazy=True) - imports_of(one, lazy=False)]
    hidden = [
        f"{one} -> {other}"
        for one, other in lazy
        if one in reached_from(other, lazy=True) and libraries_of(other) <= libraries_of(one)
    ]
    assert not hidden


@pytest.mark.parametrize(
    ("home", "names", "others"),
    [
        # A shard grows under a name of its own, and sealing it renames it.
        ("millstream.core.files", r"os\.rename|os\.replace|\bfcntl\b", {"millstream.traces.store.shard_writer"}),
        ("millstream.core.memory", r"/proc/self|/proc/meminfo|smaps|malloc_trim|madvise|\bresource\.", set[str]()),
    ],
)
def test_files_are_published_and_memory_is_measured_in_one_module_each(home: str, names: str, others: set[str]):
    found = {module for module, file in MODULES.items() if re.search(names, file.read_text())}
    assert found == {home} | others


def test_every_folder_is_a_room_or_a_wing():
    rooms = {room_of(module) for module in MODULES} - PUBLIC
    assert rooms == set[str]().union(*FLOORS)


def test_the_public_names_are_sorted_and_exist():
    assert millstream.__all__ == sorted(millstream.__all__)
    assert [name for name in millstream.__all__ if getattr(millstream, name, None) is None] == []
    assert dir(millstream) == millstream.__all__


def test_an_unknown_public_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match="TraceWriter"):
        _ = millstream.Tracewriter


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys; sys.argv = ['millstream', '--help']\n"
        "from millstream.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'pyarrow', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout


def test_storing_numpy_records_does_not_import_torch(tmp_path: Path):
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
    assert f"version: {millstream.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins["torch"] == "2.13.0"
    wanted = set(re.findall(r'"([\w-]+)(?:\[\w+\])?>=', project))
    assert {name.lower() for name in wanted} <= {name.lower() for name in pins}


@cache
def locked() -> dict[str, str]:
    """The version of each package in locks/, none of which is in two files; of torch that from PyPI."""
    hashes = r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
    entry = re.compile(rf"^([a-z0-9-]+)==([^ ]+)(?: ; [^\\\n]+)? \\\n{hashes}", re.MULTILINE)
    texts = {file.stem: file.read_text().partition("\n")[2] for file in (ROOT / "locks").glob("*.txt")}
    assert [file for file, text in texts.items() if entry.sub("", text)] == [], "there is more than names and hashes"
    found = {file: entry.findall(text) for file, text in texts.items()}
    assert found.pop("torch-cpu") == [("torch", "2.13.0+cpu")]
    assert set(found) == {"demo", "dev", "torch"}
    assert sum(map(len, found.values())) == len({name for entries in found.values() for name, _ in entries})
    return {name: version for entries in found.values() for name, version in entries}


def test_the_locks_have_the_versions_of_the_constraints():
    pins = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {canonicalize_name(name): version for name, version in pins}.items() <= locked().items()
    assert locked()["torch"] == "2.13.0"


def test_the_locks_have_all_that_the_project_and_its_dependencies_require():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    todo = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(name for e in extras for name in e),
    ]
    seen: set[str] = set()
    while todo:
        text = todo.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name == "millstream" or text in seen:
            continue
        seen.add(text)
        assert name in locked(), text
        version = locked()[name]
        assert requirement.specifier.contains(version, prereleases=True), f"{text}: {version} is locked"
        try:  # what it requires is known if it is installed in this version
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if Version(installed.version).public == version:
            needs = [(need, Requirement(need).marker) for need in installed.requires or ()]
            wanted = requirement.extras or {""}
            todo += [need for need, marker in needs if not marker or any(marker.evaluate({"extra": e}) for e in wanted)]
    assert len(seen) > 130


def names_in(file: Path) -> set[str]:
    """`function`, `Class` and `Class.method` that a file defines."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body if file.exists() else []:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_the_walks_of_the_architecture_page_name_functions_that_exist():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(steps) >= 40
    missing = [f"{path}:{name}" for path, name in steps if name not in names_in(SOURCE / path)]
    assert not missing
    for walk in page.split("## ")[1:]:
        if walk.startswith("A "):
            assert 10 <= len({path for path, _ in re.findall(r"`([\w/]+\.py):([\w.]+)`", walk)}) <= 45


def test_the_architecture_page_shows_every_folder():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {file.parent.relative_to(SOURCE) for file in MODULES.values()} - {Path()}
    missing = [str(folder) for folder in folders if f"{folder.name}/" not in page]
    assert not missing
