"""Files -> a folder of packs, one per file: in this process, or each by a worker of an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from millstream.core.console import Progress, say, silent
from millstream.core.engine import Engine
from millstream.errors import BadSetting, BadSource, EngineError
from millstream.reads.files.in_order import ENDINGS, is_stdin
from millstream.reads.open import READ_NAMES
from millstream.reads.pack import SUFFIX
from millstream.reads.pack.writer import PackSummary

Write = Callable[..., PackSummary]  # `pack` with its settings


@dataclass(frozen=True)
class PackJob:
    """A file to pack."""

    source: Path
    out: Path
    num_bytes: int


def pack_each(
    sources: Sequence[Path],
    folder: Path,
    *,
    write: Write,
    rebuild: bool = False,
    engine: Engine,
    progress: Progress = silent,
    notify: Callable[[str], None] = say,
) -> list[PackSummary]:
    """`write` every file into a pack of its own: `reads.fa.gz` becomes `folder/reads.pack`.

    After an interruption, call it again to resume: finished packs are kept, an unfinished one is resumed.
    """
    jobs = _jobs(sources, folder)
    return run_jobs(jobs, write=write, rebuild=rebuild, engine=engine, progress=progress, notify=notify)


def run_jobs(
    jobs: Sequence[PackJob],
    *,
    write: Write,
    rebuild: bool,
    engine: Engine,
    progress: Progress,
    notify: Callable[[str], None],
) -> list[PackSummary]:
    """`write` the packs that are not there yet."""
    finished: dict[Path, PackSummary] = {}
    done = 0

    def finish(job: PackJob, summary: PackSummary) -> None:
        nonlocal done
        finished[job.out], done = summary, done + job.num_bytes
        progress(done)

    left = [job for job in jobs if rebuild or not job.out.exists()]
    for job in jobs:
        job.out.parent.mkdir(parents=True, exist_ok=True)
        if job not in left:
            finish(job, write([job.source], job.out, notify=notify))  # checks that it is what would be written
    if engine.name == "local":
        for job in left:
            finish(job, write([job.source], job.out, notify=notify, progress=_beyond(done, progress)))
    elif left:
        for job, summary, messages in engine.run(partial(PackWorker, write), left):
            for message in messages:
                notify(message)
            if not job.out.exists():
                raise EngineError(f"{job.out}: written by a worker, but not here. All machines must share this folder")
            finish(job, summary)
    return [finished[job.out] for job in jobs]


class PackWorker:
    """Packs files where it is; returns the summary of each and the messages."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def do(self, job: PackJob) -> tuple[PackJob, PackSummary, list[str]]:
        messages: list[str] = []
        return job, self._write([job.source], job.out, notify=messages.append), messages

    def close(self) -> None:
        """Nothing to close."""


def _beyond(start: int, progress: Progress) -> Progress:
    """Progress of a file, after others of `start` bytes."""
    return lambda done, note="": progress(start + done, note)


def _jobs(sources: Sequence[Path], folder: Path) -> list[PackJob]:
    jobs: dict[Path, PackJob] = {}
    for given in sources:
        if is_stdin(given):
            raise BadSetting(f"-: a pack of stdin needs a name: millstream pack - {folder / 'reads.pack'}")
        source = given.absolute()
        if not source.is_file():
            raise BadSource(f"{source}: {'is a folder' if source.is_dir() else 'no such file'}")
        out = folder.absolute() / f"{_stem(source.name)}{SUFFIX}"
        if out in jobs:
            raise BadSetting(f"{source} and {jobs[out].source}: both would become {out.name}. Pack them separately")
        jobs[out] = PackJob(source, out, source.stat().st_size)
    return list(jobs.values())


def _stem(name: str) -> str:
    """The name without the suffixes of read files."""
    names = [*READ_NAMES, *ENDINGS, *(name + end for name in READ_NAMES for end in ENDINGS)]
    ending = max((end for end in names if name.lower().endswith(end)), key=len, default="")
    return name[: len(name) - len(ending)] or name
