"""The loader against the old scripts' two methods, MDS, litdata, webdataset, HF datasets, grain and Lance, in one run.

    python benchmarks/loader.py                           # about 25 minutes; benchmarks/results/loader.json
    python benchmarks/loader.py traces=60 reads=100000    # small and quick
    python benchmarks/loader.py only=epoch,resume         # parts: A, B, cold, first, epoch, resume

A: traces of 2.7 MB, batches of 16. B: reads of 150 bases with their label, batches of 4096. Every measurement runs in
its own process on files in the page cache, except those marked cold; each peer with the better of 0 and 2 workers, its
best settings and its best shuffle. Compare ratios: the machine's speed cancels out.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "loader.json"
PEERS = {
    "A": ["torch-shards", "pickle-lru", "safetensors", "mosaic-py1e", "mosaic-naive", "litdata", "webdataset",
          "hf-datasets", "grain", "lance"],
}  # fmt: skip
PEERS["B"] = [name for name in PEERS["A"] if name != "mosaic-py1e"]  # its exact shuffle is as fast on reads
NO_LOADER = ("safetensors",)  # a format without a loader: we wrote the loader, so it is shown but not compared
LIMIT_S = 6  # an epoch is stopped after this long
EPOCHS = 3

Result = dict[str, Any]


def main() -> int:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    counts = {"A": int(options.get("traces", 600)), "B": int(options.get("reads", 2_000_000))}
    only = options.get("only", "A,B,cold,first,epoch,resume").split(",")
    result: Result = {"counts": counts}
    with tempfile.TemporaryDirectory(dir=options.get("dir"), prefix="millstream-loader-") as place:
        folder = Path(place)
        for workload in ("A", "B"):
            if workload in only:
                result[workload] = compare(workload, folder, counts[workload])
                show(workload, result[workload])
        for part in ("cold", "first", "epoch", "resume"):
            if part in only:
                result[part] = tool("loader_parts.py", part, str(folder / part), str(counts["A"]), str(counts["B"]))
                print(f"\n{part}: " + json.dumps(result[part], indent=1), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{RESULTS}")
    return 0


def compare(workload: str, folder: Path, count: int) -> Result:
    """millstream and its peers on the same records."""
    ours = ["millstream"] if workload == "A" else ["millstream", "millstream-pack"]
    found: Result = {"limits": peers("limits", workload, str(folder / "limits"), "--count", str(count)), "peers": {}}
    for name in [*ours, *PEERS[workload], "empty", "millstream again"]:
        peer = name.removesuffix(" again")
        place = folder / f"{workload}-{peer}"
        wrote = {} if place.exists() else peers("write", peer, workload, str(place), "--count", str(count))
        rows: Result = {"write": wrote}
        for workers in (0, 2):
            read = ["read", peer, workload, str(place), "--workers", str(workers), "--limit-s", str(LIMIT_S)]
            rows[f"workers{workers}"] = peers(*read, "--epochs", str(EPOCHS), "--no-memory")
        if fastest := best(rows):  # memory separately: sampling it takes a tenth of a core
            memory = peers(*read[:-3], str(fastest["workers"]), *read[-2:])
            fastest |= {key: memory[key] for key in ("base_pss_bytes", "peak_pss_bytes", "peak_pss_file_bytes")}
        found["peers"][name] = rows
        print(f"{workload} {name}: {_line(rows)}", file=sys.stderr, flush=True)
    return found


def show(workload: str, found: Result) -> None:
    """Print a table: the better of 0 and 2 workers, and the speed of millstream relative to each peer."""
    rows = {name: best(row) for name, row in found["peers"].items()}
    ours = max(rows[name]["epoch_records_per_s"] for name in ("millstream", "millstream again") if rows.get(name))
    scale, unit = (2.72e-3, "GB/s") if workload == "A" else (1e-6, "M reads/s")
    print(f"\n{workload}: whole epoch, warm, the better of 0 and 2 workers")
    print(f"{'':18}{'shuffle':>8}{unit:>11}{'2 workers':>11}{'speedup':>8}{'first ms':>10}{'PSS over base, MB':>20}")
    for name, row in rows.items():
        if not row:
            print(f"{name:18}{'absent':>8}")
            continue
        two = found["peers"][name]["workers2"].get("epoch_records_per_s", 0) * scale
        print(
            f"{name:18}{row['shuffle']:>8}{row['epoch_records_per_s'] * scale:>11.2f}{two:>11.2f}"
            f"{ours / row['epoch_records_per_s']:>7.1f}x{(row['open_s'] + row['first_batch_s']) * 1e3:>10.0f}"
            f"{(row['peak_pss_bytes'] - row['base_pss_bytes']) / 1e6:>20.0f}"
        )
    real = {name: row for name, row in rows.items() if row and name in PEERS[workload] and name not in NO_LOADER}
    exact = max((row["epoch_records_per_s"] for row in real.values() if row["shuffle"] == "exact"), default=0)
    every = max((row["epoch_records_per_s"] for row in real.values()), default=0)
    limits = found["limits"]
    print(
        f"speedup over the best peer with exact shuffle: {ours / exact:.1f}x; over the best peer: {ours / every:.1f}x"
    )
    bytes_per_s = ours * (2.72e6 if workload == "A" else 158)
    memcpy = limits["memcpy_bytes_per_s"]
    print(f"relative to memcpy ({memcpy / 1e9:.1f} GB/s): {bytes_per_s / memcpy:.2f}")
    found["ratios"] = {
        "to_best_exact_peer": ours / exact,
        "to_best_peer": ours / every,
        "of_memcpy": bytes_per_s / memcpy,
    }


def best(rows: Result) -> Result:
    """The faster of 0 and 2 workers."""
    measured = [row for name, row in rows.items() if name != "write" and "absent" not in row]
    return max(measured, key=lambda row: row["epoch_records_per_s"], default={})


def _line(rows: Result) -> str:
    reads = {name: row for name, row in rows.items() if name != "write"}
    return ", ".join(
        f"{name} {row.get('absent') or round(row['epoch_records_per_s'])}/s" for name, row in reads.items()
    )


def peers(*arguments: str) -> Result:
    return tool("loader_peers.py", *arguments)


def tool(script: str, *arguments: str) -> Result:
    """One measurement in its own process; the last line of its output is the result."""
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        return {"absent": f"{' '.join(arguments[:3])}: {done.stderr.strip().splitlines()[-1:]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
