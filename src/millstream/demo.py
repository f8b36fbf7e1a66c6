"""`millstream demo`: a store is written, its writer killed, the work resumed, and everything is still there."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from millstream.console import format_bytes
from millstream.store.repair import verify
from millstream.store.show import show_summary
from millstream.store.summary import summarise
from millstream.store.traces import Traces
from millstream.store.writer import TraceWriter

NUM_TRACES = 300
CONFIG = {"demo": "synthetic traces", "traces": NUM_TRACES}
SCHEMA = {
    "hidden": "float16[layer, token, dim]",
    "attention": "float16[layer, head, query, key]",
    "logprobs": "float32[token]",
}


def traces() -> Iterator[dict[str, object]]:
    """What a small causal LM might leave behind, made up: 12 layers, 4 heads, 128 dimensions."""
    for i in range(NUM_TRACES):
        rng = np.random.default_rng(i)
        tokens = int(rng.integers(20, 60))
        yield {
            "question_id": f"demo-{i}",
            "question": f"What is {i} times {tokens}?",
            "answer": str(i * tokens),
            "right": bool(rng.random() < 0.6),
            "hidden": rng.standard_normal((13, tokens, 128), np.float32).astype(np.float16),
            "attention": np.tril(rng.random((12, 4, tokens, tokens), np.float32)).astype(np.float16),
            "logprobs": -rng.random(tokens, np.float32),
        }


def write(path: Path) -> None:
    """Append every trace the store does not have yet, saying the number of each as soon as it is safe."""
    with TraceWriter(path, shard_bytes="32MB", config=CONFIG, schema=SCHEMA) as writer:
        done = writer.done_ids
        for number, trace in enumerate(traces()):
            if trace["question_id"] not in done:
                writer.append(trace)
                print(number, flush=True)


def run(folder: Path) -> None:
    """The whole demo, with its story on stdout."""
    path = folder / "traces"
    if path.exists() and Traces(path).config == CONFIG:
        shutil.rmtree(path)
    print(f"1. A writer process appends {NUM_TRACES} synthetic traces to {path}, one at a time.")
    command = [sys.executable, "-m", "millstream.demo", str(path)]
    acknowledged = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            acknowledged = int(line) + 1
            if acknowledged == NUM_TRACES // 2:
                child.send_signal(signal.SIGKILL)
        child.wait()
    print(f"2. After trace {NUM_TRACES // 2} it got SIGKILL. {acknowledged} appends had returned.")
    print(f"   A reader sees {len(Traces(path))} records in sealed shards; the rest lies in an unsealed one.")

    start = time.perf_counter()
    with TraceWriter(path, config=CONFIG, schema=SCHEMA) as writer:
        kept, cut = len(writer), sum(recovery.cut_bytes for recovery in writer.recovered)
    print(
        f"3. Opened for writing again, the store recovers by itself in {(time.perf_counter() - start) * 1000:.0f} ms: "
        f"{kept} records ({max(0, acknowledged - kept)} lost, {cut} bytes of an unfinished one cut)."
    )
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    store = Traces(path)
    print(f"4. The same command resumes: {len(store) - kept} traces were missing and are added.")

    start = time.perf_counter()
    damages = list(verify(path))
    seconds = time.perf_counter() - start
    rate = f"{format_bytes(store.num_bytes / seconds)}/s"
    checked = f"every CRC of {format_bytes(store.num_bytes)} in {seconds * 1000:.0f} ms ({rate})"
    print(f"5. Verified: {checked}: {len(damages)} damages.")
    wrong = sum(not _same(trace, record) for trace, record in zip(traces(), store, strict=True))
    print(f"   Compared with the originals, bit by bit: {NUM_TRACES - wrong} identical, {wrong} not.")

    start = time.perf_counter()
    layer = store.fetch([7, 250, 31], fields=["hidden"], layers=-1)["hidden"]
    micros = (time.perf_counter() - start) * 1e6
    shapes = [np.asarray(part).shape for part in layer]
    print(f"6. The last layer of records 7, 250, 31, and nothing else, read in {micros:.0f} us: {shapes}")
    print("7. millstream inspect:\n")
    print(show_summary(summarise(path, examples=2)))
    print(f"\nThe store is {path}. Next: millstream inspect {path}; in Python: millstream.open({str(path)!r})[7]")
    if wrong or damages or kept < acknowledged:
        sys.exit(1)


def _same(a: dict[str, object], b: dict[str, object]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(np.asarray(a[name]), np.asarray(b[name])) for name in a)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
