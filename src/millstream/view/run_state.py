"""How a run stands: at work, finished, or stopped with models left. Told by its log: it leaves no process number."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millstream.console import format_seconds
from millstream.train.folder import CHECKPOINTS, CONFIG, METRICS, SCORES
from millstream.view.run_log import RunLog

QUIET_S = 10.0  # training writes a line every second
_GROUP = "baselines"
_NAMED = 6  # models in a sentence


class RunState:
    """Of one run folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._expanded: Callable[[Sequence[str]], list[str]] | None = None
        self._asking: threading.Thread | None = None

    def tell(self, log: RunLog, config: Mapping[str, object]) -> dict[str, object]:
        """`state` is waiting, training, finished, stopped, or quiet while it is not known which; `text` says more."""
        age = self._age()
        if age is None or not log.num_lines:
            return {"state": "waiting", "text": f"There is nothing in {METRICS} yet.", "age_s": age, "at_work": None}
        left = self._left(log, config, ask=age > QUIET_S)
        if left == []:
            state, text = "finished", f"All models that were asked for are finished; the last line came {_ago(age)}."
        elif age <= QUIET_S:
            state, text = "training", f"The last line came {_ago(age)}."
        elif left is None:
            state, text = "quiet", f"The last line came {_ago(age)}, and training writes one every second."
        else:
            again = f"millstream train {self._run / CONFIG} out={self._run}"
            text = f"The last line came {_ago(age)}, and training writes one every second: it has stopped, or hangs. "
            named = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
            state, text = "stopped", f"{text}Not finished: {named}. To go on: {again}"
        at_work = self._at_work(log) if state == "training" else None
        return {"state": state, "text": text, "age_s": age, "at_work": at_work}

    def _age(self) -> float | None:
        try:
            return max(0.0, time.time() - (self._run / METRICS).stat().st_mtime)
        except OSError:
            return None

    def _left(self, log: RunLog, config: Mapping[str, object], *, ask: bool) -> list[str] | None:
        """The models that were asked for and are not finished; None as long as that is not known."""
        if "evaluates" in config:
            return []
        names = [name.strip() for name in str(config.get("model") or "").split(",") if name.strip()]
        if not names:
            return None
        if _GROUP in names:
            expanded = self._find_expanded(ask=ask)
            if expanded is None:
                return None
            names = expanded(names)
        first, seeds = _whole(config.get("seed"), 0), _whole(config.get("seeds"), 1)
        left: list[str] = []
        for name in dict.fromkeys(names):
            if name in log.missing:
                continue
            families = {fit.get("family") for (model, _), fit in log.fits.items() if model == name}
            is_net = any(model == name for model, _ in log.curves)
            if families and not is_net:  # a baseline is fitted once
                continue
            undone = [seed for seed in range(first, first + seeds) if (name, seed) not in log.fits]
            if undone:
                left.append(name if len(undone) == seeds else f"{name} (seed {', '.join(map(str, undone))})")
        return left

    def _find_expanded(self, *, ask: bool) -> Callable[[Sequence[str]], list[str]] | None:
        """Who knows what `baselines` means. It comes with torch: seconds, so in a thread, and only when asked."""
        if self._asking is None and ask:
            self._asking = threading.Thread(target=self._import_expanded, daemon=True)
            self._asking.start()
        return self._expanded

    def _import_expanded(self) -> None:
        from millstream.train.detectors import expanded

        self._expanded = expanded

    def _at_work(self, log: RunLog) -> dict[str, object] | None:
        job, epoch = log.at_work, None
        if job is not None:
            epochs = log.curves[job].epochs if job in log.curves else {}
            epoch = max(epochs, default=-1) + 1
        else:  # a model that has begun, and not said anything yet
            folders = [folder for folder in (self._run / CHECKPOINTS).glob("*-*") if not (folder / SCORES).exists()]
            newest = max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
            if newest is None:
                return None
            name, _, seed = newest.name.rpartition("-")
            if not seed.isdigit() or (name, int(seed)) in log.fits:
                return None
            job = name, int(seed)
        return {"model": job[0], "seed": job[1], "epoch": epoch}


def _ago(age: float) -> str:
    return "just now" if age < 2 else f"{format_seconds(age)} ago"


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) else default
