"""Jobs -> results: one worker in this process, or many on a Ray cluster. Knows nothing about the jobs."""

import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeVar

from millstream.errors import BadSetting, EngineError, MillstreamError, MissingExtra

Job = TypeVar("Job")
Result = TypeVar("Result")
JobIn = TypeVar("JobIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # if 0, Ray uses loopback, as it does by default on these systems
_MAX_DEATHS = 3  # per worker, without a result in between


class Worker(Protocol[JobIn, ResultOut]):
    """Does jobs, one at a time."""

    def do(self, job: JobIn, /) -> ResultOut: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Engine:
    """Where work runs: `local`, or `ray` with `workers` workers on the cluster at `address` (None: a local one)."""

    name: str = "local"
    address: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ("local", "ray"):
            raise BadSetting(f"engine {self.name}: must be one of local, ray")
        if self.name == "local" and (self.address or self.workers):
            raise BadSetting("--address and --workers require --engine ray")
        if self.workers is not None and self.workers < 1:
            raise BadSetting(f"--workers {self.workers}: must be at least 1")

    def run(
        self,
        make: Callable[[], Worker[Job, Result]],
        jobs: Iterable[Job],
        *,
        redo: Callable[[Job], Job | None] = lambda job: job,
    ) -> Generator[Result]:
        """The results as they arrive. `redo` returns what is left of a job whose worker died; None: nothing.

        `make` creates a worker in the process where it runs. A job is taken when a worker is free for it: an iterator
        that ends early lets the jobs in progress finish, and their results arrive.
        """
        if self.name == "local":
            return _run_here(make, jobs)
        return _run_on_ray(self, make, jobs, redo)

    def map(self, function: Callable[[Job], Result], items: Iterable[Job]) -> Iterator[Result]:
        """`function` of each item, in order, like the builtin map."""
        if self.name == "local":
            yield from map(function, items)
            return
        found: dict[int, Result] = {}
        due = 0
        for place, result in self.run(partial(_Caller, function), enumerate(items)):
            found[place] = result
            while due in found:
                yield found.pop(due)
                due += 1

    def on_nodes(self, function: Callable[[], Result], nodes: Sequence[str] | None = None) -> dict[str, Result]:
        """`function` on these nodes of a cluster, by default all, at the same time: its results by node.

        Nodes that die are left out. This machine alone is no cluster: its results are none.
        """
        ray = sys.modules.get("ray")
        if self.name == "local" or (self.address is None and not (ray is not None and ray.is_initialized())):
            return {}
        with _connected(self) as ray:
            return _run_on_nodes(ray, function, nodes)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Caller:
    """A worker that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def do(self, job: tuple[int, Any]) -> tuple[int, Any]:
        return job[0], self._function(job[1])

    def close(self) -> None:
        """Nothing to close."""


def _run_here(make: Callable[[], Worker[Job, Result]], jobs: Iterable[Job]) -> Generator[Result]:
    worker = make()
    try:
        for job in jobs:
            yield worker.do(job)
    finally:
        worker.close()


class _Actor:
    """A worker in a process of its own."""

    def __init__(self, make: Callable[[], Worker[Any, Any]]) -> None:
        self._worker = make()

    def start(self) -> None:
        """Returns when the worker is made."""

    def do(self, job: Any) -> Any:
        return self._worker.do(job)

    def close(self) -> None:
        self._worker.close()


def _run_on_ray(
    engine: Engine,
    make: Callable[[], Worker[Job, Result]],
    jobs: Iterable[Job],
    redo: Callable[[Job], Job | None],
) -> Generator[Result]:
    with _connected(engine) as ray:
        yield from _work_on_ray(ray, engine, make, jobs, redo)


def _work_on_ray(
    ray: Any,
    engine: Engine,
    make: Callable[[], Worker[Job, Result]],
    jobs: Iterable[Job],
    redo: Callable[[Job], Job | None],
) -> Generator[Result]:
    count, needs = _layout(ray, engine.workers)
    actor_class: Any = ray.remote(_Actor).options(**needs)
    left, waiting, deaths = iter(jobs), deque[Job](), 0
    idle, busy = list[Any](), dict[Any, tuple[Any, Job]]()
    starting = dict[Any, Any]()  # for ever, if a machine was lost: no job depends on one of them

    def assign() -> None:
        """Give every worker a job, and start workers while there are jobs for them. Takes only jobs that can start."""
        while len(busy) + len(waiting) < count and (job := next(left, None)) is not None:
            waiting.append(job)
        while waiting and idle:
            actor, job = idle.pop(), waiting.popleft()
            busy[actor.do.remote(job)] = (actor, job)
        while len(starting) < len(waiting):
            actor = actor_class.remote(make)
            starting[actor.start.remote()] = actor

    try:
        while True:
            assign()
            if not busy and not waiting:
                break
            (done,), _ = ray.wait([*busy, *starting], num_returns=1)
            actor, job = busy.pop(done, (None, None))
            actor = actor or starting.pop(done)
            try:
                result = _result(ray, done)
            except ray.exceptions.RayActorError as error:
                deaths += 1
                if deaths > _MAX_DEATHS * count:
                    raise EngineError(f"workers keep dying; the last error was: {_short(error)}") from None
                if job is not None and (rest := redo(job)) is not None:
                    waiting.appendleft(rest)
                continue
            idle.append(actor)
            if job is not None:
                deaths = 0
                yield result
    finally:
        for actor in starting.values():
            ray.kill(actor)
        if busy:
            ray.wait(list(busy), num_returns=len(busy))
        closing = [actor.close.remote() for actor in [*idle, *(actor for actor, _ in busy.values())]]
        if closing:
            ray.wait(closing, num_returns=len(closing))


def _run_on_nodes(ray: Any, function: Callable[[], Result], nodes: Sequence[str] | None) -> dict[str, Result]:
    on_node: Any = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    task: Any = ray.remote(_call)
    errors: Any = ray.exceptions
    if nodes is None:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    running = {
        node: task.options(num_cpus=0, scheduling_strategy=on_node(node, soft=False)).remote(function) for node in nodes
    }
    found: dict[str, Result] = {}
    for node, reference in running.items():
        with suppress(errors.WorkerCrashedError, errors.TaskUnschedulableError, errors.NodeDiedError):
            found[node] = _result(ray, reference)
    return found


def _call(function: Callable[[], Result]) -> Result:
    return function()


@contextmanager
def _connected(engine: Engine) -> Generator[Any]:
    """Ray, connected to the cluster of the engine."""
    if engine.address is None and "ray" not in sys.modules:
        _keep_local()
    try:
        ray: Any = import_module("ray")  # its types are partly unknown
    except ImportError:
        raise MissingExtra("--engine ray needs Ray: pip install 'millstream[ray]'") from None
    own = not ray.is_initialized()
    if own:
        _connect(ray, engine.address)
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()


def _keep_local() -> None:
    """Settings with which a cluster that we start listens on loopback only, and serves only those who know a token.

    Ray reads them when it is imported. By default it listens on all interfaces, and runs what anyone sends.
    """
    os.environ[_LOOPBACK] = "0"
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def _connect(ray: Any, address: str | None) -> None:
    import logging

    if address is None and os.environ.get(_LOOPBACK) != "0":
        raise EngineError(
            "Ray was imported before --engine ray could set it up, so its cluster would listen on all network "
            "interfaces: import it later, or start the cluster yourself with ray.init()"
        )
    options = {} if address else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        what = f"--address {address}: no Ray cluster answers there" if address else "Ray does not start"
        raise EngineError(f"{what} ({_short(error)})") from None


def _layout(ray: Any, workers: int | None) -> tuple[int, dict[str, float]]:
    """The number of workers and the resources of each: a GPU if there are any, else its share of the cores."""
    have: dict[str, float] = ray.cluster_resources()
    gpus, cores = int(have.get("GPU", 0)), max(1, int(have.get("CPU", 1)))
    if gpus:
        count = min(workers or gpus, gpus)
        return count, {"num_gpus": 1, "num_cpus": max(1, min(4, cores // (count + 1)))}
    count = min(workers or len(ray.nodes()), cores)
    return count, {"num_gpus": 0, "num_cpus": max(1, cores // count)}


def _result(ray: Any, reference: Any) -> Any:
    """A result; an error of a worker is raised as it was there, without Ray's report."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, MillstreamError) else error from None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
