"""Reads against samtools, pysam, pyfaidx, pyfastx, Biopython, gzip tools and the old scripts, in one run.

    python benchmarks/reads.py                     # 13 M reads, 1 GB of genomes; benchmarks/results/reads.json
    python benchmarks/reads.py num_reads=1000000 genome_bytes=100000000 compressed_bytes=100000000

Every measurement runs in its own process, with its files in the page cache. METAGENE-1's tokenizer is measured if
`tokenizer=PATH` names its tokenizer.json. Compare ratios: the machine's speed cancels out.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import read_data
import read_peers
from measuring import Result, clock, cpu_seconds, measure, memory_bytes, run, save, timed
from read_libraries import HEADER, slice_of
from read_peers import BATCH_READS, NUM_READS

WINDOW_READS = 65536  # about 10 MB of text: the window of window order
BUDGET_MB = 300
PEERS = ("pysam", "pyfaidx", "pyfastx")
FEWER_READS = 4_000_000  # the index of so many is measured, too


def index(*, tool: str, path: Path) -> Result:
    """With all header fields as columns (tool=millstream) or without columns (tool=millstream-plain)."""
    from millstream.reads.files.index import IndexSettings, build_index

    small = path.with_name("small.fa")
    small.write_bytes(b">lbl|1|2|8|a/1\nACGTACGT\n" * 9)
    settings = IndexSettings(header_regex=HEADER if tool == "millstream" else None)
    build_index(small, settings)  # compiles the kernels
    base_mb = read_peers.ready(path)
    result = timed(lambda: build_index(path, settings))
    index_mb = path.with_name(path.name + ".millstream").stat().st_size / 1e6
    rate = path.stat().st_size / 1e6 / result["seconds"]
    return result | {"rate": rate, "unit": "MB/s", "base_mb": base_mb, "index_mb": index_mb}


def fetch(
    *, tool: str, path: Path, plain: Path, order: str, count: int = 100 * BATCH_READS, threads: int = 1
) -> Result:
    """Batches of 4096 reads in exact or window order, as flat bases. The first batch is compared with the file."""
    reads, load_s = _open(path)
    numbers = _order(order, len(reads), count, seed=1)
    reads.fetch(numbers[:20], ["sequence"])
    if order == "exact":  # warm: the file is in the page cache and already mapped
        _timed(_order(order, len(reads), count, seed=2), lambda some: reads.fetch(some, ["sequence"]), threads)
    result = _timed(numbers, lambda some: reads.fetch(some, ["sequence"]), threads)
    batch = reads.fetch(numbers[:BATCH_READS], ["sequence"])
    places = read_data.records_at(plain, numbers[:BATCH_READS])
    with plain.open("rb") as file:
        truth = [slice_of(file, start, end) for _, start, end in places.tolist()]
    if batch.sequences() != truth:
        raise ValueError(f"{path}: fetched reads differ from the file")
    return result | {"load_s": load_s, "decoded_blocks": reads.decoded_blocks}


def single(*, tool: str, path: Path, plain: Path, access: str, count: int = NUM_READS) -> Result:
    """Reads one at a time: `reads[i].sequence`, `reads.by_name(name).sequence`, or all of them in a loop."""
    reads, load_s = _open(path)
    if access == "iterate":
        next(iter(reads))
        num_bases = 0
        start = time.perf_counter()
        for read in reads:
            _, bases = read.name, read.sequence
            num_bases += len(bases)
        seconds = time.perf_counter() - start
        if num_bases != reads.num_bases:
            raise ValueError(f"{path}: {num_bases} bases, not {reads.num_bases}")
        return _rates(len(reads), seconds) | {"load_s": load_s}
    numbers = read_data.record_numbers(len(reads), count)  # those of the peers
    names = read_data.names_at(plain, read_data.records_at(plain, numbers))
    keys, get = (numbers.tolist(), reads.__getitem__) if access == "number" else (names, reads.by_name)
    [get(key).sequence for key in keys[:20]]
    found: list[str] = []
    seconds = clock(lambda: found.extend(get(key).sequence for key in keys))
    places = read_data.records_at(plain, numbers[:BATCH_READS])
    with plain.open("rb") as file:
        if found[:BATCH_READS] != [slice_of(file, start, end) for _, start, end in places.tolist()]:
            raise ValueError(f"{path}: fetched reads differ from the file")
    return _rates(count, seconds) | {"load_s": load_s}


def tokens(
    *, tool: str, path: Path, spec: str, bits: int = 64, order: str = "exact", count: int = 100 * BATCH_READS,
    threads: int = 1,
) -> Result:  # fmt: skip
    """Fetch and tokenise into torch tensors ready for a model, with the label; ids of 32 or 64 bits."""
    import torch

    from millstream.features import tokens as feature_of

    reads, load_s = _open(path)
    feature = feature_of(spec, columns=["class_id"], dtype=np.int32 if bits == 32 else np.int64)
    numbers = _order(order, len(reads), count, seed=1)

    def ready(some: np.ndarray) -> dict[str, Any]:
        return {name: torch.from_numpy(value) for name, value in feature(reads.fetch(some, feature.fields)).items()}

    _timed(_order(order, len(reads), count, seed=2), ready, 1)  # kernels compiled, file mapped, tokenizer tables filled
    return _timed(numbers, ready, threads) | {"load_s": load_s}


def bpe(*, tool: str, path: Path, tokenizer: Path, count: int = NUM_READS, threads: int = 1) -> Result:
    """Tokenising alone, on the same reads as the peer."""
    from millstream.reads.tokenizers import hf

    reads, _ = _open(path)
    numbers = np.arange(count)
    batches = {start: reads.fetch(numbers[start : start + BATCH_READS], ["sequence"]) for start in _starts(count)}
    fast = hf(tokenizer)
    warm = reads.fetch(np.arange(100_000), ["sequence"])
    fast.tokenize(warm.flat, warm.offsets)
    first = fast.tokenize(batches[0].flat, batches[0].offsets)
    ids = np.asarray(first.input_ids)[np.asarray(first.attention_mask) > 0].astype(np.int32)
    tokenise = lambda at: fast.tokenize(batches[int(at[0])].flat, batches[int(at[0])].offsets)  # noqa: E731
    result = _timed(np.array(list(batches)), tokenise, threads, batch=1)
    import zlib

    return result | {
        "rate": count / result["seconds"],
        "num_reads": count,
        "crc_of_first_batch": zlib.crc32(ids.tobytes()),
    }


def regions(*, tool: str, path: Path, count: int = NUM_READS, width: int = 150) -> Result:
    """Regions of genomes by name."""
    reads, load_s = _open(path)
    names, _, num_bases = read_data.genomes_at(path)
    numbers, starts = read_data.regions(num_bases, count, width=width)
    wanted = [
        (names[number], start, start + width) for number, start in zip(numbers.tolist(), starts.tolist(), strict=True)
    ]
    for region in wanted[:20]:
        reads.region(*region)
    seconds = clock(lambda: [reads.region(*region) for region in wanted])
    return {"seconds": seconds, "rate": count / seconds, "unit": "regions/s", "load_s": load_s}


def decode(*, tool: str, path: Path) -> Result:
    """Our own decompression alone, the reference for packing."""
    from millstream.core.remote import open_raw
    from millstream.reads.files.containers import open_stream, sniff

    read_peers.ready(path)
    buffer = np.empty(1 << 20, np.uint8)
    stream = open_stream(path, sniff(path), open_raw(path), points=False)
    counts: list[int] = []

    def decode_all() -> None:
        while count := stream.readinto(buffer):
            counts.append(count)

    result = timed(decode_all)
    return result | {"rate": sum(counts) / 1e6 / result["seconds"], "unit": "MB/s"}


def pack(*, tool: str, path: Path, plain: Path, folder: Path) -> Result:
    """Directly from the file, in one pass; tool=millstream-nonames omits the header lines."""
    from millstream.reads.files.index import IndexSettings
    from millstream.reads.pack.pack import pack as put

    small = folder / "small-pack.fa"
    small.write_bytes(b">lbl|1|2|8|a/1\nACGTACGT\n" * 9)
    put([small], folder / f"{tool}-small.pack", settings=IndexSettings(header_regex=HEADER), rebuild=True)
    out = folder / f"{tool}.pack"
    read_peers.ready(path)
    names = tool == "millstream"
    result = timed(lambda: put([path], out, settings=IndexSettings(header_regex=HEADER), names=names, rebuild=True))
    size = plain.stat().st_size
    return result | {"rate": size / 1e6 / result["seconds"], "unit": "MB/s", "size": out.stat().st_size / size}


def start(*, tool: str) -> Result:
    """The start of a process: the best of ten."""
    command = Path(sys.executable).with_name("millstream")
    ways = {"python": [sys.executable, "-c", "pass"], "import": [sys.executable, "-c", "import millstream"]}
    ways["help"] = [str(command), "--help"] if command.exists() else [sys.executable, "-m", "millstream", "--help"]
    found: dict[str, list[Result]] = {way: [] for way in ways}
    for _ in range(10):
        for way, arguments in ways.items():
            run_it = partial(subprocess.run, arguments, stdout=subprocess.DEVNULL, check=True)
            found[way].append(timed(run_it))
    return {f"{way}_{key}": min(one[key] for one in turns) for way, turns in found.items() for key in turns[0]}


def memory(*, tool: str, path: Path) -> Result:
    """PSS above interpreter and libraries during an epoch of token batches, within a memory budget."""
    import millstream as ms
    from millstream.features import tokens as feature_of

    feature = feature_of("kmer(6)", columns=["class_id"])
    small = ms.open(path, header_regex=None if tool == "millstream-packed" else HEADER, memory="1MB")
    feature(small.fetch(np.arange(100), feature.fields))
    base = memory_bytes("Pss", file="smaps_rollup") / 1e6
    reads = ms.open(path, memory=f"{BUDGET_MB * 3 // 4}MB")
    most, done, start = 0.0, 0, time.perf_counter()
    for number, some in enumerate(_windows(len(reads), seed=2)):
        for at in range(0, len(some), BATCH_READS):
            feature(reads.fetch(some[at : at + BATCH_READS], feature.fields))
        done += len(some)
        if number % 4 == 0:
            most = max(most, memory_bytes("Pss", file="smaps_rollup") / 1e6 - base)
    rate = done / (time.perf_counter() - start)
    return {"rate": rate, "unit": "reads/s", "above_libraries_mb": most, "libraries_mb": base}


MEASURES: dict[str, Callable[..., Result]] = {
    "index": index, "fetch": fetch, "single": single, "tokens": tokens, "bpe": bpe, "regions": regions,
    "decode": decode, "pack": pack, "start": start, "memory": memory,
}  # fmt: skip


def _open(path: Path) -> tuple[Any, float]:
    import millstream as ms

    read_peers.ready(path)
    start = time.perf_counter()
    reads = ms.open(path, memory="8GB")
    return reads, time.perf_counter() - start


def _order(order: str, num_reads: int, count: int, *, seed: int) -> np.ndarray:
    if order == "exact":
        return np.random.default_rng(seed).integers(0, num_reads, count)
    windows = _windows(num_reads, seed=seed)
    return np.concatenate([next(windows) for _ in range(-(-min(count, num_reads // 2) // WINDOW_READS))])


def _windows(num_reads: int, *, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    for window in rng.permutation(num_reads // WINDOW_READS).tolist():
        yield rng.permutation(WINDOW_READS) + window * WINDOW_READS


def _starts(count: int) -> range:
    return range(0, count, BATCH_READS)


def _timed(
    numbers: np.ndarray, action: Callable[[np.ndarray], object], threads: int, batch: int = BATCH_READS
) -> Result:
    batches = [numbers[at : at + batch] for at in range(0, len(numbers), batch)]

    def work(part: list[np.ndarray]) -> None:
        for some in part:
            action(some)

    workers = [threading.Thread(target=work, args=(batches[first::threads],)) for first in range(threads)]
    start, cpu = time.perf_counter(), cpu_seconds()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    return _rates(len(numbers), seconds) | {"cpu_s": cpu_seconds() - cpu}


def _rates(num_reads: int, seconds: float) -> Result:
    return {"seconds": seconds, "rate": num_reads / seconds, "unit": "reads/s", "num_reads": num_reads}


def ours(name: str, **kwargs: Any) -> Result:
    """One of our measurements in a new process."""
    return measure(__file__, name, timeout_s=900, **{"tool": "millstream", **kwargs})


def all_measurements(
    *, num_reads: int = 13_000_000, genome_bytes: int = 1_000_000_000, compressed_bytes: int = 500_000_000,
    tokenizer: str | None = None, folder: str | None = None,
) -> int:  # fmt: skip
    """Run everything, peers and ours; prints the tables and writes the results."""
    with tempfile.TemporaryDirectory(prefix="millstream-reads-", dir=folder) as place:
        work = Path(place)
        say = lambda text: print(text, flush=True)  # noqa: E731
        say(f"generating {num_reads} reads and {genome_bytes} bytes of genomes in {work}")
        plain = read_data.short_reads(work, num_reads)
        genomes = read_data.wrapped_genomes(work, genome_bytes)
        packed = read_data.compressed(work, plain, compressed_bytes)
        rows: list[Result] = []

        def add(name: str, of: str, result: Result) -> None:
            rows.append({"measure": name, "of": of, **result})
            stop = next((f"{key}: {result[key]}" for key in ("absent", "timeout", "error") if key in result), None)
            shown = ("seconds", "rate", "unit", "index_mb", "load_s", "peak_mb", "size", "above_libraries_mb")
            text = stop or "  ".join(f"{key} {result[key]}" for key in shown if key in result)
            say(f"{name:10} {of:14} {result.get('tool', ''):18} {text}")

        kinds = {plain: "reads", genomes: "genomes", **{path: kind for kind, path in packed.items()}}
        small = packed["plain"]
        for path in (plain, genomes, *packed.values()):
            add(
                "index",
                kinds[path],
                ours("index", tool="millstream" if path != genomes else "millstream-plain", path=path),
            )
        if num_reads > FEWER_READS:
            fewer = read_data.first_reads(work, plain, FEWER_READS)
            kinds[fewer] = "fewer reads"
            add("index", kinds[fewer], ours("index", path=fewer))
            for tool in ("samtools", "pyfastx"):
                add("index", kinds[fewer], measure(read_peers.__file__, "index", tool=tool, path=fewer, folder=work))
        for order in ("exact", "window"):
            add(f"fetch {order}", "reads", ours("fetch", path=plain, plain=plain, order=order))
            for path in packed.values():
                few = {"count": 4096} if order == "exact" and path == packed["gz"] else {}
                add(f"fetch {order}", kinds[path], ours("fetch", path=path, plain=small, order=order, **few))
        for kind in ("plain", "gz"):
            two = ours("fetch", path=packed[kind], plain=small, order="window", threads=2)
            add("fetch window, 2 threads", kind, two)
        for access in ("number", "name", "iterate"):
            for path in (plain, packed["gz"], packed["bgz"]) if "bgz" in packed else (plain, packed["gz"]):
                few = {"count": 4096} if path == packed["gz"] else {}
                text = plain if path == plain else small
                add(f"single {access}", kinds[path], ours("single", path=path, plain=text, access=access, **few))
        for spec in ("kmer(6)", "base"):
            for bits in (32, 64):
                add(f"{spec} int{bits}", "reads", ours("tokens", path=plain, spec=spec, bits=bits))
        add("start", "process", ours("start"))
        add("regions", "genomes", ours("regions", path=genomes))
        add("decode", "gz", ours("decode", path=packed["gz"]))
        for tool in ("millstream", "millstream-nonames"):
            add("pack", "gz", ours("pack", tool=tool, path=packed["gz"], plain=small, folder=work))
        for access in ("number", "name", "iterate"):
            pack_path = work / "millstream.pack"
            add(f"single {access}", "pack", ours("single", path=pack_path, plain=small, access=access))
        add("fetch exact", "pack", ours("fetch", path=work / "millstream.pack", plain=small, order="exact"))
        for path in (plain, packed["gz"]):
            add("memory", kinds[path], ours("memory", path=path))
        add("memory", "pack", ours("memory", tool="millstream-packed", path=work / "millstream.pack"))
        if tokenizer:
            for threads in (1, 2):
                add(f"bpe {threads}", "reads", ours("bpe", path=plain, tokenizer=tokenizer, threads=threads))
        for name, kwargs in read_peers.jobs(
            reads=plain, genomes=genomes, packed=packed, folder=work, tokenizer=Path(tokenizer) if tokenizer else None
        ):
            title = f"{name} {kwargs['threads']}" if "threads" in kwargs else name
            add(title, kinds[kwargs["path"]], measure(read_peers.__file__, name, **kwargs))
    summary = _summary(rows)
    for line, value in summary.items():
        print(f"{line:72} {value}")
    print(f"\n{save('reads', {'summary': summary, 'rows': rows})}")
    return 0


def _summary(rows: list[Result]) -> dict[str, str]:
    """The results as ratios, with the goals."""
    found = {(row["measure"], row["of"], row.get("tool")): row for row in rows}

    def of(key: str, name: str, kind: str, tool: str = "millstream") -> float:
        return found.get((name, kind, tool), {}).get(key, 0)

    def per_cpu(name: str, kind: str = "reads", tool: str = "millstream") -> float:
        return of("num_reads", name, kind, tool) / (of("cpu_s", name, kind, tool) or 1)

    def per_cpu_of(tool: str) -> float:
        return per_cpu("fetch", tool=tool)

    def ratio(a: float, b: float) -> str:
        return f"{a / b:.2f}x" if a and b else "not measured"

    exact, window = of("rate", "fetch exact", "reads"), of("rate", "fetch window", "plain")
    peers = max(of("rate", "fetch", "reads", tool) for tool in PEERS)
    kmers, gz = of("rate", "kmer(6) int64", "reads"), of("rate", "fetch window", "gz")
    sizes = [of("size", "pack", "gz", tool) for tool in ("millstream", "millstream-nonames")]
    same = {found.get(("bpe 1", "reads", tool), {}).get("crc_of_first_batch") for tool in ("millstream", "tokenizers")}
    lines = {
        **{
            f"index of {kind}: {what} of {tool} / ours (>= {goal})": ratio(
                of(key, "index", kind, tool), of(key, "index", kind)
            )
            for kind in ("reads", "fewer reads")
            for tool, goal in (("samtools", 20), ("pyfastx", 10))
            for key, what in (("seconds", "time"), ("cpu_s", "CPU time"))
        },
        "index: our peak MB (< 700)": str(of("peak_mb", "index", "reads")),
        "index: bytes of .fai / ours (>= 20)": ratio(
            of("index_mb", "index", "reads", "samtools"), of("index_mb", "index", "reads")
        ),
        "index genomes: samtools' seconds / ours": ratio(
            of("seconds", "index", "genomes", "samtools"), of("seconds", "index", "genomes", "millstream-plain")
        ),
        "fetch exact: ours / best of pysam, pyfaidx, pyfastx (>= 25)": ratio(exact, peers),
        "fetch exact: reads per CPU second, the same": ratio(per_cpu("fetch exact"), max(map(per_cpu_of, PEERS))),
        "reads[i]: ours / best of pysam, pyfaidx, pyfastx (>= 1)": ratio(of("rate", "single number", "reads"), peers),
        "by_name: ours / best of pysam, pyfastx (>= 1)": ratio(
            of("rate", "single name", "reads"), max(of("rate", "named", "reads", tool) for tool in ("pysam", "pyfastx"))
        ),
        "iteration: M reads/s (>= 3), and ours / best of pysam, pyfastx": (
            f"{of('rate', 'single iterate', 'reads') / 1e6:.2f}, "
            + ratio(
                of("rate", "single iterate", "reads"),
                max(of("rate", "iterate", "reads", tool) for tool in ("pysam", "pyfastx")),
            )
        ),
        "6-mers as tensors, int32 and int64: M reads per CPU second (>= 3)": " ".join(
            f"{per_cpu(f'kmer(6) int{bits}') / 1e6:.2f}" for bits in (32, 64)
        ),
        "6-mers as tensors: ours / pysam and Python (>= 40)": ratio(kmers, of("rate", "kmers", "reads", "pysam")),
        "regions of genomes: ours / pysam": ratio(
            of("rate", "regions", "genomes"), of("rate", "regions", "genomes", "pysam")
        ),
        "window order: gz / plain": ratio(gz, window),
        "window order, two threads: gz / plain (>= 0.8)": ratio(
            of("rate", "fetch window, 2 threads", "gz"), of("rate", "fetch window, 2 threads", "plain")
        ),
        "window order: bgz / plain": ratio(of("rate", "fetch window", "bgz"), window),
        "window order: zst / plain": ratio(of("rate", "fetch window", "zst"), window),
        "window order: gz, reads/s (>= 1000, 100 times the old 10)": f"{gz:.0f}",
        "packed exact / plain exact (>= 1)": ratio(per_cpu("fetch exact", "pack"), per_cpu("fetch exact", "plain")),
        "pack from gz / decompression alone (>= 0.9)": ratio(of("rate", "pack", "gz"), of("rate", "decode", "gz")),
        "the same if two cores shared all CPU time": ratio(2 * of("cpu_s", "decode", "gz"), of("cpu_s", "pack", "gz")),
        "CPU seconds of `import millstream` and --help (<= 0.12), of Python alone": " ".join(
            f"{of(f'{way}_cpu_s', 'start', 'process'):.3f}" for way in ("import", "help", "python")
        ),
        "packed bytes / plain bytes, with and without names": " ".join(f"{size:.3f}" for size in sizes),
    }
    for threads in (1, 2):
        rates = [of("rate", f"bpe {threads}", "reads", tool) for tool in ("millstream", "tokenizers")]
        lines[f"BPE: ours / Rust, {threads} thread(s) (>= 3)"] = ratio(*rates)
    lines["BPE: ids of the first batch are identical"] = str(len(same) == 1 and None not in same)
    above = [f"{row['of']} {row['above_libraries_mb']:.0f}" for row in rows if "above_libraries_mb" in row]
    return lines | {"an epoch in window order: MB above libraries (< 300)": ", ".join(above)}


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in MEASURES:
        sys.exit(run(MEASURES, sys.argv[1], sys.argv[2:]))
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    sys.exit(all_measurements(**{key: int(value) if value.isdigit() else value for key, value in arguments.items()}))
