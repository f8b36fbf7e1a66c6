"""`python -m millstream`, and the program `millstream`: the command line in a process of its own."""

from millstream import process

process.listen()  # before anything else is imported


def main() -> None:
    """Libraries are kept quiet, and Ctrl-C ends in a sentence from the first moment on."""
    import sys

    process.keep_quiet()
    from millstream.cli import main as run

    try:
        run()
    except KeyboardInterrupt:
        process.tell(None)
        sys.exit(130)


if __name__ == "__main__":
    main()
