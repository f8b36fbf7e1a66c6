"""docs/site_hooks.py, which mkdocs loads from its file, for tests."""

import importlib.util
from types import ModuleType

from support.docs_blocks import DOCS


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_hooks = _load()
SETTINGS, commands, settings_of_name = _hooks.SETTINGS, _hooks.commands, _hooks.settings_of_name
