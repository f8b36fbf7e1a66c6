"""Writes the lock files from pyproject.toml and constraints.txt: `make lock`.

Each package is in one of them, with the SHA-256 of each of its files on the package index, so that they hold for every
supported Python and platform:

demo.txt       what `make demo` installs, and what builds millstream
dev.txt        what `make install` installs beyond that
torch-cpu.txt  torch for CPUs, installed where pip finds it
torch.txt      torch from PyPI, installed elsewhere: on Linux a build for CUDA, with its libraries
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
DEV = (*DEMO, "bam", "cloud", "dev", "docs", "lora", "ray")
BUILD = "hatchling\neditables\n"  # pip installs millstream without fetching what builds it
TORCH = re.compile(r"torch$|(nvidia|cuda)-|triton$")
PYTHONS = ("3.11", "3.12", "3.13")
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


def cpu_builds_found_by_pip(pin: str) -> set[str]:
    """The hashes of the CPU builds of torch that pip finds here; PyPI has none."""
    found: set[str] = set()
    for python in PYTHONS:
        for platform in PLATFORMS:
            where = ["--target=unused", f"--python-version={python}", f"--platform={platform}", "--only-binary=:all:"]
            command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--report=-"]
            done = subprocess.run([*command, *where, pin], capture_output=True, text=True)
            for package in json.loads(done.stdout)["install"] if done.returncode == 0 else []:
                found.add("sha256:" + package["download_info"]["archive_info"]["hashes"]["sha256"])
    return found


def main() -> None:
    before = "".join(file.read_text() for file in sorted(LOCKS.glob("*.txt")))
    upgrade = ["--upgrade"] if sys.argv[1:] == ["--upgrade"] else []
    everything = resolve(DEV, BUILD, known=before, options=upgrade)
    text = "".join(f"{pin} \\\n{hashes}" for pin, hashes in everything.items())
    demo = {name_of(pin) for pin in resolve(DEMO, BUILD + "gguf\n", known=text, options=[])}

    cpu = next(pin for pin in everything if name_of(pin) == "torch") + "+cpu"
    known = re.findall(r"sha256:\w+", entries_of(before).get(cpu, ""))  # found on other machines
    if not (hashes := sorted({*known, *cpu_builds_found_by_pip(cpu)})):
        sys.exit(f"{cpu}: pip finds no such build here; set PIP_EXTRA_INDEX_URL to an index that has it")
    files: dict[str, Entries] = {"demo": {}, "dev": {}, "torch": {}}
    files["torch-cpu"] = {cpu: " \\\n".join(f"    --hash={hash}" for hash in hashes) + "\n"}
    for pin, lines in everything.items():
        file = "torch" if TORCH.match(name_of(pin)) else "demo" if name_of(pin) in demo else "dev"
        files[file][pin] = lines
    for file, entries in files.items():
        body = "".join(f"{pin} \\\n{lines}" for pin, lines in entries.items())
        (LOCKS / f"{file}.txt").write_text("# Written by `make lock` from pyproject.toml and constraints.txt.\n" + body)
        print(f"locks/{file}.txt: {len(entries)} packages")


if __name__ == "__main__":
    main()
