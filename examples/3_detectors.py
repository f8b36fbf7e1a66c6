"""Train detectors of wrong answers, one of them your own, and compare them on questions not seen in training.

In a shell: millstream train data=FOLDER/traces model=lstm,mean_logprob out=FOLDER/run; millstream evaluate FOLDER/run
"""

import runpy
import sys
from pathlib import Path

import numpy as np

import millstream as ms
from millstream.report import report_of
from millstream.traces.detectors.logistic import Scores
from millstream.training.task import FitResources


class Doubt:
    """The smallest margin between the two most likely next tokens of an answer, in log-probability."""

    fields = ("topk_logprobs",)  # the fields it reads: [token, 20]

    def __init__(self, resources: FitResources) -> None:
        self.arrays, self.chosen, self.resources = {}, {}, resources  # fitted weights; chosen settings, for the report

    def fit(self, train: ms.Collection, val: ms.Collection) -> None:
        """Nothing to fit. Otherwise: read `train` as in 2_loader.py and put the weights into `arrays`."""

    def score(self, collection: ms.Collection) -> Scores:
        """One score per record, in order; higher means more likely wrong."""
        features = ms.features.fields("topk_logprobs", pad=False)
        loader = ms.Loader(collection, batch_size=256, features=features, order="none", memory=self.resources.memory)
        margins = [top[:, 0] - top[:, 1] for batch in loader for top in batch["topk_logprobs"]]
        return np.array([-float(margin.min()) for margin in margins])


def main(folder: Path) -> None:
    if not (folder / "traces" / "labels.parquet").exists():  # written by the first example
        runpy.run_path(str(Path(__file__).with_name("1_traces.py")))["main"](folder)
    sys.path.insert(0, str(Path(__file__).parent))  # so that the class can be imported from this file
    models = "lstm,length,mean_logprob,probe_last_answer,3_detectors:Doubt"  # run again with more models to add them
    settings = {"seeds": 1, "epochs": 8, "parameters": 20_000, "token": "first_answer", "memory": "200MB"}
    run = ms.train(folder / "traces", model=models, out=str(folder / "run"), **settings)
    scored = ms.evaluate(run.path, model="lstm")  # the test split again; or another store of the same model
    print(f"{scored / 'predictions.parquet'} has the scores of lstm only")
    report = report_of(run.path)
    print(report.lines())
    page = report.write(run.path / "report.html")
    print(f"Wrote {page}: open it in a browser. Next: python examples/4_reads.py {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out"))
