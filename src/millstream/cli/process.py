"""The process of a command: Ctrl-C ends it with one line, libraries stay quiet. Imports almost nothing."""

import os
import signal
import sys
import warnings

TYPE_CHECKING = False  # importing typing is too slow
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

PART = "_MILLSTREAM_PART"  # set for a command run by another one, which then prints the next step itself

RESUME = "progress saved; run the same command to resume"
_NOTHING = "nothing was written; run the same command to start over"
_RUN_UNCHANGED = "the run is unchanged; run the same command to start over"
UNCHANGED = "nothing was changed"
_OUTCOMES = {  # by command; here, because Ctrl-C may come before the command is imported
    "demo": "the demo will start over",
    "extract": RESUME,
    "label": "no labels were written, replies of a judge are kept; run the same command to resume",
    "featurize": RESUME,
    "convert": RESUME,
    "train": "progress saved in the last checkpoint; run the same command to resume",
    "classify": RESUME,
    "pack": RESUME,
    "repair": "finished repairs are kept; run the same command to resume",
    "evaluate": _RUN_UNCHANGED,
    "report": _RUN_UNCHANGED,
    "inspect": UNCHANGED,
    "verify": UNCHANGED,
    "copy": RESUME,
    "view": UNCHANGED,
}


def handle_interrupts(**outcomes: str) -> None:
    """Handle Ctrl-C from now on. In imports and callbacks from C, where KeyboardInterrupt would be lost, exit.

    `outcomes` are sentences for scripts, by name: what is left after Ctrl-C.
    Exiting is safe because files are published complete: a killed command leaves none incomplete under its name.
    """
    _OUTCOMES.update(outcomes)
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable


def run_script(main: "Callable[[], None]", name: str) -> None:
    """Run the `main` of a script like a command: errors and interrupts are one line."""
    handle_interrupts()
    quiet_libraries()
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        report_interrupt(name)
        sys.exit(130)
    except BrokenPipeError:
        close_quietly()
    except OSError as error:
        from millstream.core.console import printable

        reason = f"{name}: {error.filename or ''}: {error.strerror or error}".replace(": : ", ": ")
        print(printable(reason), file=sys.stderr)
        sys.exit(1)


def quiet_libraries() -> None:
    """No adverts, tips, progress bars or warnings from libraries, unless the user turns them on."""
    for name, value in {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1",  # it leaves an escape code on the terminal
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
    """Exit as other programs do when their output is closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError):  # a stream without a file descriptor
            pass
    sys.exit(141)


def report_interrupt(command: str | None) -> None:
    """Print what is saved; of several processes only the first prints. A second Ctrl-C kills the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("LOCAL_RANK", "0") != "0" or PART in os.environ:
        return
    try:
        is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        sys.stderr.write("\r\x1b[K" if is_terminal else "")  # clear the ^C that the terminal shows, or a progress bar
        print(f"millstream: interrupted; {_OUTCOMES.get(command or '', _NOTHING)}", file=sys.stderr, flush=True)
    except OSError:
        pass


def _interrupt(signum: int, frame: "FrameType | None") -> None:
    if _is_importing(frame):
        _exit()
    raise KeyboardInterrupt


def _is_importing(frame: "FrameType | None") -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _unraisable(unraisable: "Any") -> None:
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _exit()
    sys.__unraisablehook__(unraisable)


def _exit() -> None:
    scripts = [word.rpartition(".")[2] for word in sys.orig_argv if word.startswith("millstream.")]
    report_interrupt(next((word for word in [*scripts, *sys.argv[1:]] if word in _OUTCOMES), None))
    os._exit(130)


def _show_warning(message: Warning | str, *_: object) -> None:
    from millstream.core.console import printable

    print(f"millstream: {printable(str(message))}", file=sys.stderr)
