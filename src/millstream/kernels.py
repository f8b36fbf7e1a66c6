"""Compiled inner loops: numba when it is installed, the same source as plain Python otherwise.

A kernel is compiled on first use and the result is kept on disk beside the module (or under NUMBA_CACHE_DIR), so every
kernel is always called with the same dtypes: one compilation each.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from millstream.console import say

F = TypeVar("F", bound=Callable[..., Any])

HAVE_NUMBA = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"


def kernel(function: F) -> F:
    """Compile a loop over arrays that releases the GIL and is cached on disk."""
    if not HAVE_NUMBA:
        return function
    import numba

    _tell_when_compiling()
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # nowhere to keep what is compiled: compile in every process
        return cast(F, numba.njit(nogil=True)(function))


@cache
def _tell_when_compiling() -> None:
    """Say once a process why the first use of a kernel takes its time."""
    from numba.core import event

    class Teller(event.Listener):
        """Told of compilations, not of what is loaded from the cache."""

        told = False

        def on_start(self, event: Any) -> None:
            module = event.data["dispatcher"].py_func.__module__
            if not self.told and module.startswith("millstream"):
                self.told = True
                say("millstream: compiling inner loops for their first use; this takes seconds, once")

        def on_end(self, event: Any) -> None:
            """Nothing to say."""

    event.register("numba:compile", Teller())  # pyright: ignore[reportUnknownMemberType]
