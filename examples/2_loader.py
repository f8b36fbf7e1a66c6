"""Train on a store larger than memory with your own torch loop: split, shuffle, stop halfway, resume exactly.

The records stay on disk. The order of an epoch is a function of seed and position, so its state is a few numbers.
"""

import json
import runpy
import sys
from pathlib import Path

import torch

import millstream as ms


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # more threads do not help a net this small
    if not (folder / "traces" / "labels.parquet").exists():  # written by the first example
        runpy.run_path(str(Path(__file__).with_name("1_traces.py")))["main"](folder)
    traces = ms.open(folder / "traces")  # reads the manifest only
    labelled = ms.labelled(traces, column="verdict", values={"right": 0, "wrong": 1}, missing="drop")
    split = ms.split(labelled, {"train": 0.7, "val": 0.15, "test": 0.15}, by="question_id")  # by a hash of the question
    print(split.report("label"))
    features = [ms.features.layers("first_answer"), ms.features.fields("label")]
    loader = ms.Loader(split["train"], batch_size=32, features=features, seed=7, memory="50MB")

    torch.manual_seed(0)
    lstm, head = torch.nn.LSTM(64, 32, batch_first=True), torch.nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-2)
    for epoch in range(8):
        total = 0.0
        for batch in loader:  # layers [batch, layer, dim], label [batch], numbers [batch]
            over_layers, _ = lstm(batch["layers"])
            logits = head(over_layers[:, -1])[:, 0]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"  epoch {epoch}: loss {total / len(loader):.3f}")

    seen = []
    for batch in loader:
        seen += batch["numbers"].tolist()
        if len(seen) > len(split["train"]) // 2:
            (folder / "loader.json").write_text(json.dumps(loader.state_dict()))
            break  # like a kill: only the file is left

    again = ms.Loader(split["train"], batch_size=20, features=features, seed=7, memory="50MB", threads=1)
    again.load_state_dict(json.loads((folder / "loader.json").read_text()))
    rest = [number for batch in again for number in batch["numbers"].tolist()]
    assert len({*seen, *rest}) == len(seen) + len(rest) == len(split["train"])
    print(f"{len(seen)} records before the stop, {len(rest)} after it, in batches of another size: each exactly once")
    print(f"Wrote {folder / 'loader.json'}. Next: python examples/3_detectors.py {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out"))
