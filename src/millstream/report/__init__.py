"""The skeleton of a report on any kind of record: measures, intervals, tables, figures, page."""

from pathlib import Path

STYLE_SHEET = Path(__file__).parent / "style.css"  # of the explorer, too
