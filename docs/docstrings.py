"""Examples in docstrings stand after `>>>`, as at Python's prompt; the site shows them as code to copy."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts every run of prompt lines into a fence of its own."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    return re.sub(r"^>>> .*(?:\n\S.*)*", _fence, text, flags=re.MULTILINE)


def _fence(match: re.Match[str]) -> str:
    lines = match[0].splitlines()
    typed = [line[4:] if line.startswith((">>> ", "... ")) else f"# {line}" for line in lines]
    return "\n".join(["```python", *typed, "```"])
