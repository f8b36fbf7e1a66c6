"""Which inputs and settings a finished file was written with, so that the same command again finds its work done.

A hidden file next to it, `.NAME.done`, has them together with size and time of the file: a file that was changed, or
that another program wrote, is never taken for ours.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from millstream.core.config import config_diff, parse_json
from millstream.core.console import say
from millstream.core.files import already_exists, publish_json
from millstream.errors import StoreExists

STDOUT = "-"  # the name of an output that goes to stdout instead


def done_file(out: Path) -> Path:
    return out.with_name(f".{out.name}.done")


def remember_finished(out: Path, terms: Mapping[str, object], state: object = True) -> None:
    """Record that `out` is finished; `state` is JSON for `find_finished` to return."""
    publish_json(done_file(out), {"terms": terms, "state": state, **_size_and_time(out)})


def find_finished(out: Path, terms: Mapping[str, object]) -> Any:
    """The state recorded for `out` if it was written with these inputs and settings; None if it does not exist.

    StoreExists if it was written with others, by another program, or changed since.
    """
    if not out.exists():
        done_file(out).unlink(missing_ok=True)  # of an output that was removed
        return None
    try:
        known = cast("dict[str, Any]", parse_json(done_file(out).read_bytes()))
        is_ours = {key: known[key] for key in ("bytes", "mtime_ns")} == _size_and_time(out)
        before, state = dict[str, object](known["terms"]), known["state"]
    except (OSError, ValueError, LookupError, TypeError):
        raise already_exists(out) from None
    if not is_ours:
        raise already_exists(out)
    wanted = cast("dict[str, object]", json.loads(json.dumps(terms)))
    if before != wanted:
        raise StoreExists(
            f"{out}: already exists, with other inputs or settings ({config_diff(before, wanted)}). Choose another "
            "name, or remove it"
        )
    say(f"{out}: already written by the same command; nothing to do")
    return state


def forget_finished(out: Path) -> None:
    """Remove an output and the record of how it was written."""
    for file in (out, done_file(out)):
        file.unlink(missing_ok=True)


def _size_and_time(out: Path) -> dict[str, int]:
    stat = out.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
