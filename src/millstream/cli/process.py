"""A program of its own: Ctrl-C ends it with a sentence, libraries are quiet. Imports next to nothing."""

import os
import signal
import sys
import warnings

TYPE_CHECKING = False  # as typing has it, which takes its time
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

PART = "_MILLSTREAM_PART"  # set for commands that another one runs: what is next is not theirs to say

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
    "baseline": _AGAIN,
    "inspect_traces": "nothing was changed",
    "trace_extractor": _AGAIN,
    "train_streaming": _AGAIN,
}
_SCRIPTS = "millstream.classic."


def listen() -> None:
    """From now on. Where KeyboardInterrupt would be lost, in imports and in what is called by C, it ends at once.

    That is safe because every file is: a command that is killed leaves nothing half done under its name.
    """
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable


def run_script(main: "Callable[[], None]", name: str) -> None:
    """Run a script's `main` as the command line runs a command: what ends it is said in a line."""
    listen()
    keep_quiet()
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        tell(name)
        sys.exit(130)
    except BrokenPipeError:
        close_quietly()
    except OSError as error:
        print(f"{name}: {error.filename or ''}: {error.strerror or error}".replace(": : ", ": "), file=sys.stderr)
        sys.exit(1)


def keep_quiet() -> None:
    """No adverts, tips, bars or warnings of libraries, unless they are asked for."""
    for name, value in {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1",  # it would end with an escape code on the terminal
        "TOKENIZERS_PARALLELISM": "true",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module="millstream")
        warnings.showwarning = _show_warning


def close_quietly() -> None:
    """The reader of our output has seen enough; end as other programs do."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError):  # not one of the system's
            pass
    sys.exit(141)


def tell(command: str | None) -> None:
    """The sentence. Of processes that work together the first one says it; another Ctrl-C has no more to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("LOCAL_RANK", "0") != "0" or PART in os.environ:
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
    scripts = [word.removeprefix(_SCRIPTS) for word in sys.orig_argv if word.startswith(_SCRIPTS)]
    tell(next((word for word in [*scripts, *sys.argv[1:]] if word in _KEPT), None))
    os._exit(130)


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"millstream: {message}", file=sys.stderr)
