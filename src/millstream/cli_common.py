"""What all commands share."""

import json
import os
import shlex
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def print_json(answer: object) -> None:
    print(json.dumps(answer, indent=1, default=str, ensure_ascii=False))


def finish(done: str, *following: object) -> None:
    """The last words of a command: what it made, and the command to go on with, which can be pasted."""
    from millstream.console import say
    from millstream.process import PART

    say(done)
    if following and PART not in os.environ:
        say(f"Next: {shlex.join(['millstream', *map(str, following)])}")
