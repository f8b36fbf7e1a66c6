"""Griffe extension: shows `>>>` examples of docstrings as code blocks that can be copied."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts every run of `>>>` lines into a fenced block."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    return re.sub(r"^>>> .*(?:\n\S.*)*", _fence, text, flags=re.MULTILINE)


def _fence(match: re.Match[str]) -> str:
    lines = match[0].splitlines()
    code = [line[4:] if line.startswith((">>> ", "... ")) else f"# {line}" for line in lines]
    return "\n".join(["```python", *code, "```"])
