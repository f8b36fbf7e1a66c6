"""How tables are inspected and verified. They have no commands of their own."""

from pathlib import Path

import typer

from millstream.cli.app import finish, print_json
from millstream.errors import BadSetting


def add_commands(app: typer.Typer) -> None:
    """None."""


def inspect(path: Path, other: Path | None, *, examples: int, tolerance: float, as_json: bool) -> None:
    """Print the columns of a table and its first rows."""
    from millstream.core.console import format_bytes, printable
    from millstream.tables.kind import open as open_rows

    if other is not None:
        raise BadSetting(f"{path} {other}: only trace stores can be compared; inspect tables one at a time")
    rows = open_rows(path, memory="1GB")
    num_bytes = sum(table.source.size for table in rows.tables)
    shown = [rows[number] for number in range(min(examples, len(rows)))]
    formats = sorted({table.format for table in rows.tables})
    if as_json:
        paths = [str(path) for path in rows.paths]
        print_json(
            {"paths": paths, "formats": formats, "records": len(rows), "bytes": num_bytes, "columns": rows.types}
            | {"fingerprint": rows.fingerprint, "examples": shown}
        )
        return
    files = str(rows.paths[0]) if len(rows.paths) == 1 else f"{rows.paths[0]} and {len(rows.paths) - 1} more files"
    lines = [files, f"  {', '.join(formats)}: {len(rows):,} rows, {format_bytes(num_bytes)}", "  columns"]
    width = max(map(len, rows.types))
    lines += [f"    {name:<{width}}  {kind}" for name, kind in rows.types.items()]
    for number, row in enumerate(shown):
        lines += [f"  row {number}", *(f"    {name:<{width}}  {_short(value)}" for name, value in row.items())]
    print("\n".join(map(printable, lines)))


def verify(path: Path, *, fast: bool, as_json: bool) -> None:
    """Read all of a table and print all damage found; exit code 1 if there is any."""
    from millstream.core.console import show
    from millstream.tables.kind import open as open_rows

    rows = open_rows(path, memory="1GB")
    damages = [] if fast else list(rows.verify())
    if as_json:
        print_json({"records": len(rows), "damages": damages})
    elif damages:
        show("\n".join(damages))
    if damages:
        finish(f"{path}: {len(damages)} damage(s) in {len(rows):,} rows")
        raise typer.Exit(1)
    done = "the structure is intact" if fast else "all can be read"
    finish(f"{path}: {len(rows):,} rows: {done}", "inspect", path)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
