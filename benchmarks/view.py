"""Response times of `millstream view`: a store of 100,000 traces and 10 GB, a run, and 10 GB of reads.

    python benchmarks/view.py [folder=FOLDER] [traces=100000] [gigabytes=10]

Each row is one HTTP request of a page to a server in its own process: the first after the files were dropped from the
page cache (cold), and the median of ten more with other numbers (warm). There is no peer for such stores; the goal is
that every view opens in under a second. Scores after each layer need torch: they are timed for the first trace that is
opened, a second after the list was shown. Results: benchmarks/results/view.json.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

import millstream as ms
from measuring import Result, drop_cache, save
from millstream.core.tables import publish_table
from millstream.reads.kind import HEADERS
from millstream.traces.llm.fields import parse_fields

LAYERS, TOKENS, DIM, STEPS, TOP = 12, 46, 64, 12, 20
READING_S = 1.0  # somebody looks at the list before opening a trace


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    folder = Path(given.get("folder") or tempfile.mkdtemp(prefix="millstream-view-"))
    num_traces, size = int(given.get("traces", 100_000)), int(float(given.get("gigabytes", 10)) * 1e9)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        store, reads = folder / "traces", folder / "reads.fa"
        if not store.exists():
            make_store(store, num_traces)
            make_store(folder / "few", 400)
            make_run(folder / "run", store, num_traces, trained_on=folder / "few")
        if not reads.exists():
            make_reads(reads, size)
            ms.open(reads, header_regex=HEADERS)
        found = show_traces(store, num_traces) | {"reads": show_reads(reads)}
        print(f"\n{save('view', found)}")
    finally:
        if "folder" not in given:
            shutil.rmtree(folder)


def make_store(path: Path, num_traces: int) -> None:
    rng = np.random.default_rng(0)
    schema = parse_fields("probe", "nodes,edges,states", stored="float16").schema()
    words = [f"word{number}" for number in range(5000)]
    with ms.TraceWriter(path, schema=schema) as writer:
        nodes = rng.standard_normal((64, LAYERS + 1, TOKENS, DIM)).astype(np.float16)
        source = np.tril(np.ones((TOKENS, TOKENS), np.int16), -1).cumsum(1)[:, :8].astype(np.int16) - 1
        for number in range(num_traces):
            picked = rng.integers(0, len(words), 12)
            writer.append(
                {
                    "question_id": f"q{number}",
                    "question": " ".join(words[place] for place in picked[:9]) + "?",
                    "answer": words[picked[9]],
                    "aliases": [words[place] for place in picked[9:]],
                    "generated_answer": words[picked[9 + number % 2]],
                    "status": "ok",
                    "prompt_len": TOKENS - STEPS,
                    "answer_len": STEPS,
                    "tokens": rng.integers(0, 32_000, TOKENS).astype(np.int32),
                    "logprobs": -rng.exponential(1, STEPS).astype(np.float32),
                    "entropy": rng.exponential(1, STEPS).astype(np.float32),
                    "rank": rng.integers(0, 9, STEPS).astype(np.int32),
                    "topk_ids": rng.integers(0, 32_000, (STEPS, TOP)).astype(np.int32),
                    "topk_logprobs": -np.sort(rng.exponential(2, (STEPS, TOP)).astype(np.float32)),
                    "nodes": nodes[number % 64],
                    "states": nodes[number % 64][:, :4],
                    "offsets": None,
                    "given_logprobs": None,
                    "edge_source": np.broadcast_to(source, (LAYERS, TOKENS, 8)),
                    "edge_weight": nodes[number % 64, :LAYERS, :, :8].__abs__(),
                    "edge_rest": nodes[number % 64, :LAYERS, :, 8],
                }
            )
    verdicts = np.where(np.arange(num_traces) % 2, "wrong", "right").tolist()
    ids = [f"q{number}" for number in range(num_traces)]
    publish_table(path / "labels.parquet", pa.table({"question_id": ids, "verdict": verdicts}))


def make_run(run: Path, store: Path, num_traces: int, *, trained_on: Path) -> None:
    """Two trained nets, and scores of twenty detectors on 30 % of the records, as `millstream train` stores them."""
    rng = np.random.default_rng(1)
    ms.train(data=str(trained_on), out=str(run), model="lstm,gnn", seeds=1, epochs=1, memory="500MB")
    records = np.sort(rng.permutation(num_traces)[: num_traces * 3 // 10])
    tables = [
        pa.table(
            {
                "part": pa.array(["val", "test"] * (len(records) // 2)),
                "record": records[: len(records) // 2 * 2],
                "question_id": [f"q{number}" for number in records[: len(records) // 2 * 2]],
                "label": records[: len(records) // 2 * 2] % 2,
                "model": [f"detector{place}"] * (len(records) // 2 * 2),
                "seed": np.zeros(len(records) // 2 * 2, np.int64),
                "score": rng.random(len(records) // 2 * 2),
            }
        )
        for place in range(20)
    ]
    publish_table(run / "predictions.parquet", pa.concat_tables(tables))
    card = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps({**card, "store": str(store.resolve())}))
    lines = [{"kind": "memory", "time_s": second, "bytes": 5e8, "budget": 1e9} for second in range(86_400)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_reads(path: Path, size: int) -> None:
    rng = np.random.default_rng(2)
    bases = np.frombuffer(b"ACGT", np.uint8)[rng.integers(0, 4, (200_000, 150))]
    block = b"".join(
        b">lbl|%d|%d|150|read%d/1\n%s\n" % (number % 20, 562 + number % 20, number, row.tobytes())
        for number, row in enumerate(bases)
    )
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(block)


def show_traces(store: Path, num_traces: int) -> Result:
    rng = np.random.default_rng(3)

    def any_trace() -> int:
        return int(rng.integers(0, num_traces))

    requests: dict[str, Callable[[], tuple[str, dict[str, object]]]] = {
        "the page": lambda: ("traces/", {}),
        "summary of the store": lambda: ("traces/api/about", {}),
        "first page of the list": lambda: ("traces/api/list", {}),
        "a page in the middle": lambda: ("traces/api/list", {"page": any_trace() // 50}),
        "search for a word": lambda: ("traces/api/list", {"q": f"word{any_trace() % 5000}"}),
        "sorted by largest error": lambda: ("traces/api/list", {"sort": "mistaken", "detector": "detector3"}),
        "open a trace": lambda: ("traces/api/trace", {"number": any_trace()}),
        "attention of one layer": lambda: (
            "traces/api/attention",
            {"number": any_trace(), "layer": any_trace() % LAYERS},
        ),
        "norms of all layers": lambda: ("traces/api/layers", {"number": any_trace()}),
    }
    size = sum(file.stat().st_size for file in store.iterdir())
    print(f"\n{store.name}: {num_traces} traces, {size / 1e9:.1f} GB")
    run = store.parent / "run"
    found: Result = {"traces": measure([store, run], store, requests)}
    with serving(store) as address:
        for request in ("the page", "summary of the store", "first page of the list"):
            _time(address, *requests[request]())
        time.sleep(READING_S)
        trace = {"number": any_trace()}
        opened, scored = (_time(address, f"traces/api/{name}", trace) for name in ("trace", "evolution"))
    print(f"{'scores after each layer':28} {opened + scored:9.0f}")
    print(f"\n{run.name}: {(run / 'metrics.jsonl').stat().st_size / 1e6:.1f} MB of metrics.jsonl, one day")
    pages = {"the page": lambda: ("run/", {}), "the whole log": lambda: ("run/api/state", {})}
    return found | {"scores after each layer": opened + scored, "run": measure([run], run, pages)}


def show_reads(file: Path) -> Result:
    reads = ms.open(file)
    rng = np.random.default_rng(4)
    print(f"\n{file.name}: {len(reads)} reads, {file.stat().st_size / 1e9:.1f} GB")
    requests: dict[str, Callable[[], tuple[str, dict[str, object]]]] = {
        "the page": lambda: ("reads/", {}),
        "summary of the reads": lambda: ("reads/api/overview", {}),
        "read lengths": lambda: ("reads/api/lengths", {}),
        "base composition of a sample": lambda: ("reads/api/composition", {}),
        "classes": lambda: ("reads/api/classes", {"column": "class_id"}),
        "a page in the middle": lambda: ("reads/api/list", {"first": int(rng.integers(0, len(reads)))}),
        "a read by number": lambda: ("reads/api/record", {"number": int(rng.integers(0, len(reads)))}),
    }
    return measure([file.parent], file, requests)


def measure(cold: list[Path], path: Path, requests: dict[str, Callable[[], tuple[str, dict[str, object]]]]) -> Result:
    """Milliseconds of each request, cold and warm."""
    for place in cold:
        drop_cache(place)
    found: Result = {}
    started = time.perf_counter()
    with serving(path) as address:
        print(f"{'':28} {'cold, ms':>9} {'warm, ms':>9}")
        for name, make in requests.items():
            first = _time(address, *make())
            found[name] = first, statistics.median(_time(address, *make()) for _ in range(10))
            print(f"{name:28} {first:9.0f} {found[name][1]:9.0f}")
            if name == "the page":
                found["from command to page"] = 1000 * (time.perf_counter() - started)
                print(f"{'from command to page':28} {found['from command to page']:9.0f}")
    return found


@contextmanager
def serving(path: Path) -> Generator[str]:
    """The address of the explorer in its own process."""
    command = [sys.executable, "-m", "millstream", "view", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        line = next(line for line in server.stderr if "http://" in line)
        yield next(word for word in line.split() if word.startswith("http://"))
        server.terminate()


def _time(address: str, path: str, query: dict[str, object]) -> float:
    """Milliseconds to the response; polls until it is ready, as a page does."""
    started = time.perf_counter()
    while True:
        with urllib.request.urlopen(f"{address}{path}?{urllib.parse.urlencode(query)}") as response:
            found = response.read()
        if not found.startswith(b'{"ready":false') or path.endswith("about"):
            return 1000 * (time.perf_counter() - started)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
