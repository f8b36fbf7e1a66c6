"""Writes the lock files from pyproject.toml and constraints.txt: `make lock`.

Each package is in one of three files, with the SHA-256 of each of its files on the package index, so that they hold for
every supported Python and platform:

demo.txt  what `make demo` installs, and what builds millstream
dev.txt   what `make install` installs beyond that
cuda.txt  the libraries that a CUDA build of torch needs; a CPU build does not
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
DEMO = ("graph", "llm", "reads", "report", "train", "view")
DEV = (*DEMO, "cloud", "dev", "docs", "lora", "ray")
BUILD = "hatchling\neditables\n"  # pip installs millstream without fetching what builds it
CUDA = re.compile(r"(nvidia|cuda)-|triton$")
TORCH_FOR = ("3.11", "3.12", "3.13")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_14_0_arm64")

Entries = dict[str, str]  # from `name==version ; marker` to the lines of its hashes


def entries_of(text: str) -> Entries:
    found = re.findall(r"^(\S+==[^\\\n]+?) \\\n((?:    --hash=\S+(?: \\)?\n)+)", text, re.MULTILINE)
    return dict(found)


def name_of(pin: str) -> str:
    return pin.partition("==")[0]


def resolve(extras: tuple[str, ...], more: str, *, known: str, options: list[str]) -> Entries:
    """All packages of some extras; one version for all Pythons, that of `known` where it fits."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, output = Path(folder, "more.in"), Path(folder, "lock.txt")
        inputs.write_text(more)
        output.write_text(known)
        flags = ["--universal", "--python-version=3.11", "--fork-strategy=fewest", "--generate-hashes", "--quiet"]
        plain = ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command = [sys.executable, "-m", "uv", "pip", "compile", *flags, *plain, *options, f"--output-file={output}"]
        command += [f"--extra={extra}" for extra in extras]
        subprocess.run([*command, "--constraints=constraints.txt", "pyproject.toml", inputs], cwd=ROOT, check=True)
        return entries_of(output.read_text())


def torch_found_by_pip(pin: str) -> set[str]:
    """The hashes of the builds that pip would choose here: perhaps CPU builds, which PyPI does not have."""
    found: set[str] = set()
    for python in TORCH_FOR:
        for platform in PLATFORMS:
            where = ["--target=unused", f"--python-version={python}", f"--platform={platform}", "--only-binary=:all:"]
            command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--report=-"]
            done = subprocess.run([*command, *where, pin], capture_output=True, text=True, check=True)
            for package in json.loads(done.stdout)["install"]:
                found.add("sha256:" + package["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def main() -> None:
    before = "".join(file.read_text() for file in sorted(LOCKS.glob("*.txt")))
    upgrade = ["--upgrade"] if sys.argv[1:] == ["--upgrade"] else []
    everything = resolve(DEV, BUILD, known=before, options=upgrade)
    text = "".join(f"{pin} \\\n{hashes}" for pin, hashes in everything.items())
    demo = {name_of(pin) for pin in resolve(DEMO, BUILD + "gguf\n", known=text, options=[])}

    # A CPU build has another hash than PyPI's: those of all machines that wrote this version of torch are kept.
    torch = next(pin for pin in everything if name_of(pin) == "torch")
    known = set(re.findall(r"sha256:\w+", everything[torch] + entries_of(before).get(torch, "")))
    hashes = sorted(known | torch_found_by_pip(torch))
    everything[torch] = " \\\n".join(f"    --hash={hash}" for hash in hashes) + "\n"

    files: dict[str, Entries] = {"demo": {}, "dev": {}, "cuda": {}}
    for pin, lines in everything.items():
        file = "cuda" if CUDA.match(name_of(pin)) else "demo" if name_of(pin) in demo else "dev"
        files[file][pin] = lines
    for file, entries in files.items():
        body = "".join(f"{pin} \\\n{lines}" for pin, lines in entries.items())
        (LOCKS / f"{file}.txt").write_text("# Written by `make lock` from pyproject.toml and constraints.txt.\n" + body)
        print(f"locks/{file}.txt: {len(entries)} packages")


if __name__ == "__main__":
    main()
