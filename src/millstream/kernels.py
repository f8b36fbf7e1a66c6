"""Compiled inner loops: numba when it is installed, the same source as plain Python otherwise.

A kernel is compiled on first use and the result is kept on disk beside the module (or under NUMBA_CACHE_DIR), so every
kernel is always called with the same dtypes: one compilation each.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

try:
    import numba

    HAVE_NUMBA = not numba.config.DISABLE_JIT
except ImportError:
    numba = None
    HAVE_NUMBA = False


def kernel(function: F) -> F:
    """Compile a loop over arrays that releases the GIL and is cached on disk."""
    if numba is None:
        return function
    return cast(F, numba.njit(nogil=True, cache=True, boundscheck=False)(function))
