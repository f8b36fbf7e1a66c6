"""`python -m millstream`, and the program `millstream`: the command line in a process of its own."""

import os
import signal
import sys
import warnings


def main() -> None:
    """Libraries are kept quiet here, and Ctrl-C ends in a sentence from the first moment on."""
    try:
        _keep_quiet()
        from millstream.cli import main as run  # takes a tenth of a second, in which Ctrl-C may come

        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("millstream: interrupted, before anything was done", file=sys.stderr)
        sys.exit(130)


def _keep_quiet() -> None:
    """No adverts, tips, bars or warnings of libraries, unless they are asked for."""
    for name, value in {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
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
