"""Draws docs/shuffle.svg: the order of a file sorted by label within an epoch, under three kinds of shuffle.

python docs/make_shuffle.py
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millstream.core.order import Order

Numbers = NDArray[np.int64]

RECORDS, CLASSES, BUFFER = 50_000, 20, 1_000
BLOCK, WINDOW = 16, 64  # 1,024 records in memory at once, about as many as in the buffer
POINTS = 2_000

PANEL, GAP, LEFT, TOP = 300, 48, 76, 72
WIDTH, HEIGHT = LEFT + 3 * PANEL + 2 * GAP + 28, TOP + PANEL + 128
INK, QUIET, DOT, FRAME = "#1f2937", "#5b6472", "#1d5fa8", "#c9ced6"


def buffer_shuffle(n: int, size: int, rng: np.random.Generator) -> Numbers:
    """A shuffle buffer over a stream: return a random record of the buffer and put the next one in its place."""
    buffer, picks, out = list(range(size)), rng.integers(0, size, n - size).tolist(), np.empty(n, np.int64)
    for position, pick in enumerate(picks):
        out[position] = buffer[pick]
        buffer[pick] = size + position
    out[n - size :] = rng.permutation(buffer)
    return out


def neighbour_distance(numbers: Numbers) -> float:
    return float(np.abs(np.diff(numbers)).mean())


def class_runs(numbers: Numbers) -> int:
    """The number of runs of consecutive records of one class."""
    return 1 + int(np.count_nonzero(np.diff(numbers * CLASSES // len(numbers))))


def text(x: float, y: float, content: str, *, size: int = 14, color: str = INK, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}" {more}>{content}</text>'


def panel(column: int, title: str, subtitle: str, numbers: Numbers, uniform: Numbers) -> list[str]:
    """A plot of record number against position; below it, two measures relative to a true shuffle."""
    left, scale = LEFT + column * (PANEL + GAP), PANEL / RECORDS
    middle, bottom = left + PANEL / 2, TOP + PANEL
    centred = 'text-anchor="middle"'
    bold = 'text-anchor="middle" font-weight="600"'
    positions = np.arange(0, RECORDS, RECORDS // POINTS)
    points = zip(positions, numbers[positions], strict=True)
    dots = "".join(f"M{left + p * scale:.1f} {bottom - n * scale:.1f}h0" for p, n in points)
    distance = neighbour_distance(numbers) / neighbour_distance(uniform)
    runs = class_runs(numbers) / class_runs(uniform)
    return [
        text(middle, TOP - 34, title, size=17, more=bold),
        text(middle, TOP - 14, subtitle, size=13, color=QUIET, more=centred),
        f'<rect x="{left}" y="{TOP}" width="{PANEL}" height="{PANEL}" fill="#ffffff" stroke="{FRAME}"/>',
        f'<path d="{dots}" stroke="{DOT}" stroke-width="3" stroke-linecap="round" stroke-opacity="0.65"/>',
        text(left, bottom + 18, "0", size=12, color=QUIET, more=centred),
        text(left + PANEL, bottom + 18, f"{RECORDS:,}", size=12, color=QUIET, more=centred),
        text(middle, bottom + 18, "position in the epoch", size=12, color=QUIET, more=centred),
        text(middle, bottom + 54, f"neighbour distance {distance:.1%}", more=centred),
        text(middle, bottom + 76, f"class runs {runs:.1%}", more=centred),
    ]


def draw() -> str:
    uniform = np.random.default_rng(1).permutation(RECORDS)
    buffered = buffer_shuffle(RECORDS, BUFFER, np.random.default_rng(0))
    window = Order(RECORDS, seed=7, mode="window", block=BLOCK, window=WINDOW)[:]
    exact = Order(RECORDS, seed=7)[:]
    middle = TOP + PANEL / 2
    turned = f'text-anchor="middle" transform="rotate(-90 22 {middle:.0f})"'
    parts = [
        *panel(0, "buffer", f"{BUFFER:,} records in memory", buffered, uniform),
        *panel(1, "window", f"{WINDOW} blocks of {BLOCK}: {WINDOW * BLOCK:,} records in memory", window, uniform),
        *panel(2, "exact", "any record at any position", exact, uniform),
        text(22, middle, "record number (the file is sorted by label)", size=12, color=QUIET, more=turned),
        text(LEFT - 8, TOP + PANEL, "0", size=12, color=QUIET, more='text-anchor="end"'),
        text(LEFT - 8, TOP + 10, f"{RECORDS:,}", size=12, color=QUIET, more='text-anchor="end"'),
        text(
            WIDTH / 2,
            HEIGHT - 16,
            f"{RECORDS:,} records of {CLASSES} classes; 1 in {RECORDS // POINTS} records plotted; "
            "percentages are relative to a true shuffle (numpy's permutation)",
            size=12,
            color=QUIET,
            more='text-anchor="middle"',
        ),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fafbfc"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    target = Path(__file__).with_name("shuffle.svg")
    target.write_text(draw())
    print(target)
