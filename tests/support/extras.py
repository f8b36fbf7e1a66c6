"""Whether a package that tests need is there, without importing it: every process of a test run collects all files."""

from importlib.util import find_spec

import pytest


def need(*names: str) -> None:
    """Skip the whole file if one of these packages is not installed."""
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
