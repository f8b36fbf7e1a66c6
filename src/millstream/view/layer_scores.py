"""The nets of a run -> what each would say of one trace if a layer were the last it saw."""

import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from millstream.errors import MillstreamError
from millstream.model.detector import Means
from millstream.model.zoo import NETS
from millstream.store.traces import Traces
from millstream.train.checkpoint import load
from millstream.train.detectors import AskedDetector
from millstream.train.evaluate import read_run_settings
from millstream.train.finished import AtWork
from millstream.train.folder import CHECKPOINTS, DETECTOR
from millstream.train.trained import NetModel, Workplace

MEMORY = 200_000_000  # for the inputs of a few traces


class LayerScores:
    """Nets that read layer by layer, restored once; means over their seeds."""

    def __init__(self, run: Path, traces: Traces) -> None:
        self._traces = traces
        self._lock = threading.Lock()  # one trace at a time: torch takes all cores as it is
        self._models: defaultdict[str, list[NetModel]] = defaultdict(list)
        files = sorted((run / CHECKPOINTS).glob(f"*/{DETECTOR}"))
        if not files:  # of an evaluation, which has scores alone
            return
        place = Workplace(read_run_settings(run), AtWork.here(), str(run))
        for file in files:
            name, _, seed = file.parent.name.rpartition("-")
            if name not in NETS or NETS[name].family == "charm":
                continue
            built = AskedDetector(name, traces.field_names).build(means=Means(int(seed), MEMORY), place=place)
            assert isinstance(built.model, NetModel)
            built.model.arrays = {key: tensor.numpy() for key, tensor in load(file)[0].items()}
            self._models[name].append(built.model)
        if len(traces):  # builds the nets, which takes seconds the first time; a record that failed builds none
            with suppress(MillstreamError, ValueError):
                self.of(0)

    def of(self, number: int) -> dict[str, Any]:
        """By detector: a score after every layer; the last one is the detector's own."""
        record = self._traces.subset([number])
        found: dict[str, Any] = {}
        with self._lock:
            for name, models in self._models.items():
                scores = [model.by_layer(record) for model in models]
                known = [rows[0] for rows in scores if rows is not None]
                if known:
                    found[name] = np.mean(known, axis=0)
        return found
