"""What the old scripts left behind, small: pickled traces, preprocessed sequences, a table of scores, an old index."""

import csv
import pickle
from pathlib import Path

import numpy as np
import torch

L, T, H, D = 3, 12, 2, 8  # layers, tokens, heads, dimensions


def make_old(num_traces: int = 40) -> None:
    """`old/trivia_qa_traces_batch_*.pkl`, `preprocessed_data/lstm_solo/*.pt` and `ground_truth_scores.csv`."""
    rng = np.random.default_rng(0)
    Path("old").mkdir()
    Path("preprocessed_data/lstm_solo").mkdir(parents=True)
    traces = [_trace(number, rng) for number in range(num_traces)]
    half = num_traces // 2
    for batch in range(2):
        some = traces[batch * half : (batch + 1) * half]
        Path(f"old/trivia_qa_traces_batch_{batch:04d}.pkl").write_bytes(pickle.dumps(some))
        last_tokens = [[layer[-1] for layer in trace["hidden_states"]] for trace in some]
        content = {
            "sequences": torch.tensor(np.array(last_tokens)),
            "labels": torch.tensor([float(trace["example_id"] % 2) for trace in some]),
            "question_ids": [trace["question_id"] for trace in some],
        }
        torch.save(content, f"preprocessed_data/lstm_solo/preprocessed_{batch:04d}.pt")
    with open("ground_truth_scores.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question_id", "bleurt_score"])
        table.writerows([trace["question_id"], 1 - trace["example_id"] % 2] for trace in traces)
    Path("reads.fa.gz.index.pkl").write_bytes(pickle.dumps([0, 1]))


def _trace(number: int, rng: np.random.Generator) -> dict[str, object]:
    attention = np.tril(rng.random((L, H, T, T))) + 1e-3
    return {
        "question_id": f"tc_{number}",
        "question": f"Which river flows through town {number}?",
        "generated_answer_clean": f"river {number % 4}",
        "ground_truth_answers": [f"river {number % 2}"],
        "tokens": np.arange(T),
        "prompt_length": 8,
        "example_id": number % 20,
        "global_example_id": number,
        "batch_number": number // 20,
        "hidden_states": list(rng.standard_normal((L, T, D)).astype(np.float16)),
        "attentions": list((attention / attention.sum(-1, keepdims=True)).astype(np.float16)),
    }
