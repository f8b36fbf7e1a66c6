"""Builds the wheel and tries it in an empty environment of each Python: installs it, and runs an example.

    python tests/smoke.py [PYTHON ...]    # default: every other Python from 3.11 on that is found

The example simulates reads, indexes them, loads batches, trains, reports and classifies. Environments are removed.
torch is the version of constraints.txt: its CPU build where pip finds one for that Python, else gigabytes for CUDA.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
EXTRAS = "reads,train,report"
VERSIONS = ("3.11", "3.12", "3.13")
NOT_INSTALLED = 75  # the exit code if pip failed, perhaps for want of a network or disk


def main(*pythons: str) -> None:
    found = pythons or others()
    if not found:
        print(f"smoke test: no other Python of {', '.join(VERSIONS)} is installed")
    with tempfile.TemporaryDirectory(prefix="millstream-smoke-") as folder:
        wheel = build(Path(folder))
        for number, python in enumerate(found):
            started = time.perf_counter()
            name = run(python, "--version").strip()
            try_wheel(wheel, python, Path(folder) / str(number))
            print(f"smoke test: {name}: installed and ran in {time.perf_counter() - started:.0f} s", flush=True)


def others() -> list[str]:
    """An interpreter of each other version: on the PATH, or of pyenv."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found: list[str] = []
    for version in VERSIONS:
        candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
        works = [one for one in candidates if one and not subprocess.call([one, "-c", ""], stderr=subprocess.DEVNULL)]
        found += works[:1] if version != here else []
    return found


def build(folder: Path) -> Path:
    """The wheel, which has every file of the package."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    package = ROOT / "src"
    files = {str(file.relative_to(package)) for file in package.rglob("*") if file.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    with ZipFile(wheel) as archive:
        missing = expected - set(archive.namelist())
    assert not missing, f"the wheel lacks {', '.join(sorted(missing))}"
    return wheel


def try_wheel(wheel: Path, python: str, folder: Path) -> None:
    run(python, "-m", "venv", str(folder))
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    run(*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[{EXTRAS}]", failure=NOT_INSTALLED)
    shutil.copy(ROOT / "examples" / "4_reads.py", folder)
    output = run(str(folder / "bin" / "python"), "4_reads.py", "out", cwd=folder)
    assert "test  kmer-linear" in output, output
    missing = run(str(folder / "bin" / "millstream"), "view", "out/reads/train.fa.gz", cwd=folder, code=1)
    assert "pip install 'millstream[view]'" in missing, missing
    shutil.rmtree(folder)


def run(*command: str, cwd: Path | None = None, code: int = 0, failure: int = 1) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != code:
        print(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}", flush=True)
        sys.exit(failure)
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
