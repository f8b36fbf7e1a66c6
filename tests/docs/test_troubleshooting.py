"""The troubleshooting page explains every error that millstream raises, and quotes real messages."""

import ast
import inspect
import re
from pathlib import Path

from millstream import errors

ROOT = Path(__file__).parents[2]
PAGE = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("troubleshooting*.md")))


def test_every_error_is_explained():
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__]
    leaves = [
        one.__name__ for one in classes if not any(issubclass(other, one) and other is not one for other in classes)
    ]
    assert [name for name in leaves if f"`{name}`" not in PAGE] == []


def test_every_message_in_a_table_is_one_of_ours():
    texts = "\n".join(_texts(ROOT / "src"))
    rows = re.findall(r"^\| (`[^|]*`)[^|]*\|", PAGE, re.M)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row) if " " in message]
    assert len(messages) > 30
    assert [message for message in messages if _core(message) not in texts] == []


def _texts(folder: Path) -> list[str]:
    """Every string in the code; of an f-string, the pieces between its values."""
    trees = (ast.parse(file.read_text()) for file in folder.rglob("*.py"))
    return [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def _core(message: str) -> str:
    """The longest piece of a message without values: numbers, names of files and fields, omissions."""
    values = r"\d+(?:\.\d+)?|\.\.\.|'[^']*'|[\w.-]+\.(?:tsv|arrow|parquet|millstream)|->|float\w*|\w+="
    pieces = re.split(rf"{values}|[\[\]{{}}():;,]", message)
    return max((piece.strip() for piece in pieces), key=len)
