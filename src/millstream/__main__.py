"""`python -m millstream`, and the program `millstream`: the command line in a process of its own."""

from millstream import cli_interrupt

cli_interrupt.listen()  # before anything else is imported

import os  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402


def main() -> None:
    """Libraries are kept quiet here, and Ctrl-C ends in a sentence from the first moment on."""
    _keep_quiet()
    from millstream.cli import main as run

    try:
        run()
    except KeyboardInterrupt:
        cli_interrupt.tell(None)
        sys.exit(130)


def _keep_quiet() -> None:
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


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"millstream: {message}", file=sys.stderr)


if __name__ == "__main__":
    main()
