"""Compiled inner loops: numba when it is installed, the same source as plain Python otherwise.

A kernel is compiled on first use and the result is kept on disk beside the module (or under NUMBA_CACHE_DIR), so every
kernel is always called with the same dtypes: one compilation each.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

HAVE_NUMBA = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"


def kernel(function: F) -> F:
    """Compile a loop over arrays that releases the GIL and is cached on disk."""
    if not HAVE_NUMBA:
        return function
    import numba

    return cast(F, numba.njit(nogil=True, cache=True)(function))
