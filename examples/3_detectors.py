"""Train detectors of made-up answers, one of your own among them, and compare them on questions none has seen.

In a shell: millstream train data=FOLDER/traces model=lstm,mean_logprob out=FOLDER/run; millstream evaluate FOLDER/run
"""

import runpy
import sys
from pathlib import Path

import numpy as np

import millstream as ms
from millstream.model.detector import Means, Scores
from millstream.report.reported import report_of


class Doubt:
    """How far the most likely next token is ahead of the second, at the answer's least sure token."""

    fields = ("topk_logprobs",)  # what it reads of a record: [token, 20]

    def __init__(self, means: Means) -> None:
        self.arrays, self.chosen, self.means = {}, {}, means  # what fit learned; what it chose, for the report

    def fit(self, train: ms.Collection, val: ms.Collection) -> None:
        """Nothing to learn. One that learns reads `train` as in 2_loader.py and puts its weights into `arrays`."""

    def score(self, collection: ms.Collection) -> Scores:
        """One number a record, in order; higher: more likely wrong."""
        features = ms.features.fields("topk_logprobs", pad=False)
        loader = ms.Loader(collection, batch_size=256, features=features, order="none", memory=self.means.memory)
        ahead = [top[:, 0] - top[:, 1] for batch in loader for top in batch["topk_logprobs"]]
        return np.array([-float(margins.min()) for margins in ahead])


def main(folder: Path) -> None:
    if not (folder / "traces" / "labels.parquet").exists():  # made by the first example
        runpy.run_path(str(Path(__file__).with_name("1_traces.py")))["main"](folder)
    sys.path.insert(0, str(Path(__file__).parent))  # where the class is found, by the name of its file
    models = "lstm,length,mean_logprob,probe_last_answer,3_detectors:Doubt"  # run again with more, and these are added
    settings = {"seeds": 1, "epochs": 8, "parameters": 20_000, "token": "first_answer", "memory": "200MB"}
    run = ms.train(folder / "traces", model=models, out=str(folder / "run"), **settings)
    scored = ms.evaluate(run.path, model="lstm")  # its test part again; or data=OTHER_STORE of the same model
    print(f"{scored / 'predictions.parquet'} has the scores of lstm alone")
    report = report_of(run.path)
    print(report.lines())
    page = report.write(run.path / "report.html")
    print(f"Wrote {page}: open it in a browser. Next: python examples/4_reads.py {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out"))
