"""What all commands share."""

import json
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]


def print_json(answer: object) -> None:
    print(json.dumps(answer, indent=1, default=str, ensure_ascii=False))
