"""The program `millstream`, also as `python -m millstream`: the command line in its own process."""

from millstream.cli import process

process.handle_interrupts()  # before anything else is imported


def main() -> None:
    """Run the command line with quiet libraries, and Ctrl-C reported in one line from the start."""
    import sys

    process.quiet_libraries()
    from millstream.cli.app import main as run

    try:
        run()
    except KeyboardInterrupt:
        process.report_interrupt(None)
        sys.exit(130)


if __name__ == "__main__":
    main()
