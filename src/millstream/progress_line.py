"""How far a job has come, as one line of text: its pace, the time left, its memory. Knows nothing of terminals."""

from collections import deque

WINDOW_S = 30.0  # the pace is that of so many seconds, or of so many looks if those are rarer
LEAST_LOOKS = 8
WIDE, NARROW = 20, 8  # letters of the bar
GAP = "  "


class Pace:
    """How fast a count rises of late. The first one told is where the work begins: what was there is not done now."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque()

    def look(self, now: float, done: float) -> None:
        self._looks.append((now, done))
        while len(self._looks) > LEAST_LOOKS and self._looks[1][0] < now - WINDOW_S:
            self._looks.popleft()

    @property
    def rate(self) -> float | None:
        """A second; None while there is nothing to tell it from."""
        if len(self._looks) < 2:
            return None
        (first, before), (last, done) = self._looks[0], self._looks[-1]
        return (done - before) / (last - first) if last > first and done > before else None

    def left(self, total: float) -> float | None:
        """Seconds until the total, at this rate."""
        return max(0.0, total - self._looks[-1][1]) / self.rate if self.rate else None


def format_bytes(num_bytes: float) -> str:
    """`2.1 GB`: three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def format_seconds(seconds: float) -> str:
    """`2 h 5 min`, `3 min 20 s`, `40 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_amount(count: float, unit: str) -> str:
    """`1,200 reads`, `3.5 reads`; of bytes `1.2 MB`."""
    if unit == "bytes":
        return format_bytes(count)
    return f"{count:,.1f} {unit}" if 0 < count < 10 and count != int(count) else f"{count:,.0f} {unit}"


def facts_of(
    done: int, total: int, unit: str, pace: Pace, memory: tuple[int, int] | None = None
) -> tuple[str, str, str, str]:
    """The amount, the rate, the time left and the memory of its budget; what is not known is empty."""
    amount = _of_bytes(done, total) if unit == "bytes" else f"{done:,} of {total:,} {unit}"
    rate = f"{format_amount(pace.rate, unit)}/s" if pace.rate else ""
    seconds = pace.left(total)
    left = "" if seconds is None or done >= total else f"{format_seconds(seconds)} left"
    held = f"RAM {_of_bytes(*memory)}" if memory and memory[0] else ""
    return amount, rate, left, held


def plain_line(label: str, done: int, total: int, facts: tuple[str, str, str, str], note: str) -> str:
    """For a log: `label: 1,200 of 4,000 reads (30 %), 100 reads/s, 28 s left, RAM 210.0 of 500.0 MB, note`."""
    amount, rate, left, held = facts
    share = f" ({100 * done // total} %)" if total else ""
    return f"{label}: {', '.join(filter(None, [amount + share, rate, left, held, note]))}"


def fitted_line(
    label: str, done: int, total: int, facts: tuple[str, str, str, str], note: str, *, width: int, marks: str = "━─"
) -> str:
    """For a terminal of this width. Where there is little room the note is cut, then facts go."""
    amount, rate, left, held = facts
    label = _cut(label, max(8, width // 3))
    room = width - len(label) - len(GAP) - len(amount)
    kept: dict[str, str] = {}
    for name, text in (("left", left), ("held", held), ("bar", " " * NARROW), ("rate", rate)):
        if text and len(text) + len(GAP) <= room:
            kept[name] = text
            room -= len(text) + len(GAP)
    kept["note"] = _cut(note, room - len(GAP)) if room > len(GAP) + NARROW else ""
    room -= len(kept["note"]) + (len(GAP) if kept["note"] else 0)
    if "bar" in kept:
        size = min(WIDE, NARROW + room // 4 * 4)  # in steps: numbers that grow a letter leave it as it is
        full = round(size * min(1.0, done / total)) if total else size
        kept["bar"] = marks[0] * full + marks[1] * (size - full)
    order = (label, kept.get("bar"), amount, kept.get("rate"), kept.get("left"), kept.get("held"), kept["note"])
    return GAP.join(filter(None, order))[:width]


def _of_bytes(part: int, whole: int) -> str:
    """`15.5 of 95.6 MB`: both in the unit of the whole."""
    number, _, unit = format_bytes(whole).partition(" ")
    scale = 1000.0 ** ["B", "kB", "MB", "GB", "TB"].index(unit)
    return f"{part / scale:.{0 if unit == 'B' else 1}f} of {number} {unit}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
