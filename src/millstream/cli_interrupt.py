"""Ctrl-C ends a command with a sentence: what is kept, and whether the command goes on. Imports next to nothing."""

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_AGAIN = "what was done is kept: the same command goes on from there"
_NOTHING = "nothing was written: the same command begins anew"
_AS_BEFORE = "the run is as it was: the same command begins anew"
_KEPT = {
    "demo": "the demo begins anew",
    "extract": _AGAIN,
    "label": "no labels were written: the same command begins anew",
    "featurize": _AGAIN,
    "convert": _AGAIN,
    "train": "what the last checkpoint holds is kept: the same command goes on from there",
    "classify": _AGAIN,
    "pack": _AGAIN,
    "repair": "what is repaired stays so: the same command goes on",
    "evaluate": _AS_BEFORE,
    "report": _AS_BEFORE,
    "inspect": "nothing was changed",
    "verify": "nothing was changed",
    "view": "nothing was changed",
}


def listen() -> None:
    """From now on. Where KeyboardInterrupt would be lost, in imports and in what is called by C, it ends at once.

    That is safe because every file is: a command that is killed leaves nothing half done under its name.
    """
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable


def tell(command: str | None) -> None:
    """The sentence. Of processes that work together the first one says it; another Ctrl-C has no more to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        drawn = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        sys.stderr.write("\r\x1b[K" if drawn else "")  # the ^C that the terminal shows, or a line of progress
        print(f"millstream: interrupted; {_KEPT.get(command or '', _NOTHING)}", file=sys.stderr, flush=True)
    except OSError:
        pass


def _interrupt(signum: int, frame: "FrameType | None") -> None:
    if _is_importing(frame):
        _end()
    raise KeyboardInterrupt


def _is_importing(frame: "FrameType | None") -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _unraisable(unraisable: "Any") -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end()
    sys.__unraisablehook__(unraisable)


def _end() -> None:
    tell(next((word for word in sys.argv[1:] if word in _KEPT), None))
    os._exit(130)
