"""Where an epoch is, as plain JSON: enough to go on, and enough to notice that it belongs to something else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from millstream.config import config_diff
from millstream.errors import StateMismatch
from millstream.loader.order import Mode
from millstream.loader.plan import Plan

VERSION = 1


@dataclass(frozen=True)
class State:
    """The whole state of a loader: the seed, the epoch and how many of its positions were used, by all ranks."""

    seed: int
    epoch: int
    samples: int
    records: int
    collection: str
    plan: Plan

    def to_json(self) -> dict[str, object]:
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": self.samples,
            "records": self.records,
            "collection": self.collection,
            "order": [self.plan.mode, self.plan.block, self.plan.window],
        }

    def resumed(self, saved: Mapping[str, object], *, any_order: bool) -> "State":
        """The saved state, if it belongs to the same data and seed (and order, unless any will do)."""
        if saved.get("version") != VERSION:
            raise StateMismatch(f"a loader state of version {saved.get('version')!r}; this millstream reads {VERSION}")
        mode, block, window = cast("tuple[Mode, int, int]", saved["order"])
        fixed = ["seed", "records", "collection"]
        theirs, mine = ({key: state.get(key) for key in fixed} for state in (saved, self.to_json()))
        if not any_order:  # its geometry, which depends on the memory, is taken over
            theirs, mine = {**theirs, "order": mode}, {**mine, "order": self.plan.mode}
        if differs := config_diff(theirs, mine):
            raise StateMismatch(f"the state was saved for something else (saved -> here): {differs}")
        plan = Plan(mode, block, window, "as in the state resumed")
        epoch, samples = cast(int, saved["epoch"]), cast(int, saved["samples"])
        return State(self.seed, epoch, samples, self.records, self.collection, plan)
