"""Inner loops over arrays, compiled by numba. Importing this works without numba; calling a kernel does not.

A kernel is compiled on first use and cached on disk next to its module (or under NUMBA_CACHE_DIR). Every kernel is
always called with the same dtypes, so it is compiled once.
"""

import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from millstream.core.console import say
from millstream.core.memory import Allowance
from millstream.errors import MissingExtra

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile a loop over arrays that releases the GIL and is cached on disk. Without numba, calling it fails."""
    if not _has_numba():
        return cast(F, _refuse)
    import numba

    _announce_compilation()
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # nowhere to cache: compile in every process
        return cast(F, numba.njit(nogil=True)(function))


def inlined(function: F) -> F:
    """A small function for kernels to call, compiled into them: a call would count references to its arrays."""
    if not _has_numba():
        return cast(F, _refuse)
    import numba

    return cast(F, numba.njit(inline="always")(function))


def c_function(name: str, *, num_arguments: int) -> Callable[..., int]:
    """A function of the C library for kernels to call: integers in, an integer out.

    It is looked up by name when a kernel is loaded, so compiled kernels can be cached on disk.
    """
    if not _has_numba():
        return _refuse
    from numba import types

    return types.ExternalFunction(name, types.int64(*[types.int64] * num_arguments))  # pyright: ignore


def require_numba() -> None:
    """Raise MissingExtra if kernels cannot be compiled."""
    if not _has_numba():
        raise MissingExtra("compiled kernels need the package 'numba': pip install 'millstream[reads]'")


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def _refuse(*arguments: object) -> Any:
    require_numba()


@cache
def _announce_compilation() -> None:
    """Print once per process why the first use of a kernel takes a while."""
    from numba.core import event

    class Announcement(event.Listener):
        """Receives compilations, not kernels loaded from the cache."""

        is_announced = False

        def on_start(self, event: Any) -> None:
            module = event.data["dispatcher"].py_func.__module__
            if not self.is_announced and module.startswith("millstream"):
                self.is_announced = True
                say("millstream: compiling kernels (first run only, a few seconds)")

        def on_end(self, event: Any) -> None:
            """Nothing to say."""

    class Memory(event.Listener):
        """Receives all work of the compiler: also what it sets up first (60 MB), and kernels loaded from the cache."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self._depth = 0  # a kernel compiles those it calls, and other threads wait for their turn

        def on_start(self, event: Any) -> None:
            with self._lock:
                if not self._depth:
                    Allowance.begin_compiling()
                self._depth += 1

        def on_end(self, event: Any) -> None:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    Allowance.end_compiling()

    event.register("numba:compile", Announcement())  # pyright: ignore[reportUnknownMemberType]
    event.register("numba:compiler_lock", Memory())  # pyright: ignore[reportUnknownMemberType]
