"""Extraction at each tier against plain `generate` and against the peers, on the same prompts and batches.

Then the replay of given answers against generating them and against one bare forward pass, samples that share a prompt
against separate runs, and peak memory for prompts of 8,000 tokens.

    python benchmarks/extract.py                      # a random Llama of 84 M parameters, and SmolLM2 if installed
    python benchmarks/extract.py model=FOLDER         # another model

Variants are interleaved, so that noise affects all of them; ratios compare the fastest rounds. `extract` includes
writing to a store. Each peak is measured in its own process. Writes benchmarks/results/extract.json.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from extract_peers import PEERS
from measuring import clock, memory_bytes, reset_peak, save
from millstream.errors import MillstreamError
from millstream.traces.llm.decoding import Decoding
from millstream.traces.llm.fields import TIERS, Need, parse_fields, plan_batches
from millstream.traces.llm.model import LoadedModel, ModelSettings, describe_model, load_model
from millstream.traces.llm.prompts import EncodedQuestion, make_prompt
from millstream.traces.llm.questions import Question
from millstream.traces.llm.tracer import Tracer
from millstream.traces.store.writer import TraceWriter

SHAPES = {
    "B8 P32 N12": (8, 32, 12),
    "B8 P32 N48": (8, 32, 48),
    "B8 P128 N12": (8, 128, 12),
    "B32 P32 N12": (32, 32, 12),
}
GOALS = {"stats": 1.2, "graph": 1.2, "probe": 1.2, "full": 1.4}
PEAK_SHAPE = "B32 P32 N12"
BUDGET = 300_000_000  # the `memory` that batches are planned for
LONG, LONG_BUDGET = 8000, 2_000_000_000  # tokens of a prompt, and the `memory` to trace it in
SAMPLES = 10


def random_llama(folder: Path) -> Path:
    """84 M parameters, 16 layers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=16_384,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(32_000)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", pad_token="t1").save_pretrained(folder)
    return folder


def prompts(loaded: LoadedModel, batch: int, length: int) -> list[list[int]]:
    """Ragged prompts of random tokens; `length` is the longest."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(length * 0.6, length, batch).long().tolist()
    return [torch.randint(100, 30_000, (n,), generator=generator).tolist() for n in lengths]


class Bench:
    """One model and one shape: the variants, each as a function that processes the whole batch."""

    def __init__(self, model: str, shape: str, scratch: Path) -> None:
        settings = ModelSettings(model, dtype="float32", device="cpu")
        loaded = load_model(settings, describe_model(settings, notify=print))
        self.loaded = replace(loaded, eos=frozenset())  # every variant generates all tokens
        self.model = loaded.model
        batch, length, self.new = SHAPES[shape]
        self.ids = prompts(loaded, batch, length)
        self.scratch = scratch
        self.decoding = Decoding(max_new_tokens=self.new)
        self.config = self.decoding.config(eos=None, pad=loaded.pad)
        self.trace_bytes: dict[str, int] = {}
        self.own: dict[str, Any] = {}  # what a peer keeps between rounds

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, self.ids))
        rows = [[self.loaded.pad] * (width - len(row)) + row for row in self.ids]
        masks = [[0] * (width - len(row)) + [1] * len(row) for row in self.ids]
        return torch.tensor(rows), torch.tensor(masks)

    @torch.inference_mode()
    def bare(self) -> None:
        ids, mask = self.padded()
        self.model.generate(input_ids=ids, attention_mask=mask, generation_config=self.config)

    @torch.inference_mode()
    def forward(self, answers: list[list[int]]) -> None:
        """One plain pass over prompts and answers, padded as a batch, with the logits of every token."""
        rows = [ids + answer for ids, answer in zip(self.ids, answers, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([[self.loaded.pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        self.model(input_ids=ids, attention_mask=mask, use_cache=False)

    def tracer(self, tier: str, **decoding: Any) -> Tracer:
        return Tracer(
            self.loaded,
            fields=parse_fields(tier, None, stored="float16"),
            decoding=replace(self.decoding, **decoding),
            prompt=make_prompt("plain", self.loaded.tokenizer, stop=""),
        )

    def batch(self, answers: list[list[int]] | None = None) -> list[EncodedQuestion]:
        given = answers or [None] * len(self.ids)
        both = zip(self.ids, given, strict=True)
        return [EncodedQuestion(Question(f"q{i}", "?"), ids, answer) for i, (ids, answer) in enumerate(both)]

    def extract(self, tier: str) -> Callable[[], None]:
        tracer, batch = self.tracer(tier), self.batch()
        writer = TraceWriter(self.scratch / tier, schema=tracer.schema())

        def run() -> None:
            records = tracer.trace(batch)
            assert all(record["status"] == "ok" for record in records), records[0]["error"]
            self.trace_bytes[tier] = sum(getattr(v, "nbytes", 0) for r in records for v in r.values()) // len(records)
            writer.extend(records)

        return run

    def variant(self, name: str) -> Callable[[], None]:
        if name == "bare":
            return self.bare
        return self.extract(name) if name in TIERS else PEERS[name](self)


def measure(model: str, shape: str, turns: int) -> dict[str, Any]:
    """Seconds of each variant, the fastest of several rounds."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(model, shape, Path(scratch))
        names = ["bare", *TIERS, *PEERS]
        best: dict[str, float] = {}
        failed: dict[str, str] = {}
        bench.bare()
        for turn in range(turns):
            first = turn * len(names) // turns  # rotate the order: freed memory slows down the next variant
            for name in names[first:] + names[:first]:
                if name in failed:
                    continue
                try:
                    run = bench.variant(name)  # rebuilt each time: hooks of one variant would slow down the next
                    best[name] = min(best.get(name, float("inf")), clock(run))
                except Exception as error:  # a failing peer is a result too
                    failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                bench.model.set_attn_implementation("millstream_trace")
        return {"seconds": best, "failed": failed, "trace_bytes": bench.trace_bytes}


def measure_replay(model: str, shape: str, turns: int) -> dict[str, float]:
    """Seconds per batch, the fastest of several rounds: replay, generate and trace, a bare pass, samples, ten runs."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(model, shape, Path(scratch))
        tracer, drawing = bench.tracer("stats"), bench.tracer("stats", samples=SAMPLES, temperature=1.0)
        seeds = [bench.tracer("stats", temperature=1.0, seed=seed) for seed in range(SAMPLES)]
        records: Any = tracer.trace(bench.batch())
        answers = [record["tokens"][record["prompt_len"] :].tolist() for record in records]
        kinds: dict[str, Callable[[], object]] = {
            "replay": lambda: tracer.trace(bench.batch(answers)),
            "bare pass": lambda: bench.forward(answers),
            "generate and trace": lambda: tracer.trace(bench.batch()),
            "samples": lambda: drawing.trace(bench.batch()),
            "ten runs": lambda: [one.trace(bench.batch()) for one in seeds],
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(turns):
            for name, run in kinds.items():
                times[name].append(clock(run))
        found = {name: min(values) for name, values in times.items()}
        both = zip(times["replay"], times["bare pass"], strict=True)  # neighbours in time share the noise
        found["replay over bare pass, median"] = statistics.median(mine / bare for mine, bare in both)
        return found


def report_long(model: str, tier: str) -> None:
    """Peak memory above the loaded model while a prompt of LONG tokens is traced, generated and replayed."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(model, PEAK_SHAPE, Path(scratch))
        bench.decoding = Decoding(max_new_tokens=12)
        tracer = Tracer(
            bench.loaded,
            fields=parse_fields(tier, None, stored="float16"),
            decoding=bench.decoding,
            prompt=make_prompt("plain", bench.loaded.tokenizer, stop=""),
            memory=LONG_BUDGET,
        )
        ids = torch.randint(100, 30_000, (LONG,), generator=torch.Generator().manual_seed(2)).tolist()
        tracer.trace([EncodedQuestion(Question("q", "?"), [101, 102, 103])])
        peaks: list[int] = []
        for answer in (None, ids[:48]):
            reset_peak()
            before = memory_bytes("VmRSS")
            record = tracer.trace([EncodedQuestion(Question("q", "?"), ids, answer)])[0]
            assert record["status"] == "ok", record["error"]
            peaks.append(memory_bytes("VmHWM") - before)
    print(*peaks)


def long_peaks(model: str) -> dict[str, tuple[int, int]]:
    """Peak bytes of a generated and of a replayed trace with a long prompt, by tier."""
    found: dict[str, tuple[int, int]] = {}
    for tier in ("stats", "graph"):
        command = [sys.executable, __file__, f"model={model}", f"long={tier}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        generated, replayed = map(int, done.stdout.split()[-2:])
        found[tier] = (generated, replayed)
    return found


def show_replay(name: str, times: dict[str, float], peaks: dict[str, tuple[int, int]]) -> None:
    print(f"\n{name}: given answers of 48 tokens, tier stats, batches of 8")
    print(f"  replay against generate and trace: {times['generate and trace'] / times['replay']:.2f}x (goal 3)")
    bare = times["replay over bare pass, median"]
    print(f"  replay over a bare pass: {times['replay'] / times['bare pass']:.2f}, median {bare:.2f} (goal 1.15)")
    print(f"  greedy and {SAMPLES} samples over ten runs: {times['samples'] / times['ten runs']:.2f} (goal 0.7)")
    for tier, (generated, replayed) in peaks.items():
        print(
            f"  prompt of {LONG} tokens, tier {tier}, memory={LONG_BUDGET / 1e6:.0f}MB: peak {generated / 1e6:.0f} MB "
            f"generated, {replayed / 1e6:.0f} MB replayed"
        )


def peak_bytes(model: str, name: str) -> int:
    """Peak resident bytes of a process that runs one variant twice."""
    command = [sys.executable, __file__, f"model={model}", f"peak={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def report_peak(model: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(model, PEAK_SHAPE, Path(scratch))
        run = bench.variant(name)
        run()
        run()
    print(memory_bytes("VmHWM"))


def report_budget(model: str, tier: str, length: int, beams: int) -> None:
    """Peak memory above the loaded model for one batch planned for BUDGET, and its number of rows."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(model, PEAK_SHAPE, Path(scratch))
        fields = parse_fields(tier, None, stored="float16")
        decoding = Decoding(max_new_tokens=12, num_beams=beams)
        prompt = make_prompt("plain", bench.loaded.tokenizer, stop="")
        tracer = Tracer(bench.loaded, fields=fields, decoding=decoding, prompt=prompt)
        pool = [EncodedQuestion(Question(f"q{i}", "?"), row) for i, row in enumerate(prompts(bench.loaded, 64, length))]
        tracer.trace([EncodedQuestion(Question("q", "?"), [101, 102, 103])])
        need = Need(bench.loaded.card.size, fields, rows=beams)
        plan = plan_batches([(len(one.ids), 12) for one in pool], need=need, memory=BUDGET)
        reset_peak()
        before = memory_bytes("VmRSS")
        tracer.trace([pool[place] for place in plan[0]])
    print(len(plan[0]), memory_bytes("VmHWM") - before)


def budgets(model: str) -> dict[str, tuple[int, int]]:
    """Rows and peak bytes of batches planned for BUDGET."""
    found: dict[str, tuple[int, int]] = {}
    for tier, length, beams in (
        ("stats", 32, 1),
        ("graph", 32, 1),
        ("full", 32, 1),
        ("graph", 256, 1),
        ("full", 256, 3),
    ):
        command = [sys.executable, __file__, f"model={model}", f"budget={tier},{length},{beams}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows, peak = map(int, done.stdout.split()[-2:])
        found[f"{tier} P{length} beams {beams}"] = (rows, peak)
    return found


def show(model: str, found: dict[str, Any]) -> None:
    print(f"\n{model}: seconds relative to plain generate (sdpa, greedy, float32, {torch.get_num_threads()} threads)")
    shapes = list(found["shapes"])
    print(f"{'':<34}" + "".join(f"{shape:>14}" for shape in shapes) + f"{'goal':>8}")
    for name in ["bare", *TIERS, *PEERS]:
        cells = ""
        for shape in shapes:
            times = found["shapes"][shape]["seconds"]
            cells += f"{times[name] / times['bare']:>14.2f}" if name in times else f"{'-':>14}"
        goal = GOALS.get(name)
        print(f"{name:<34}{cells}{goal or '':>8}")
    print(f"{'bare, s':<34}" + "".join(f"{found['shapes'][s]['seconds']['bare']:>14.2f}" for s in shapes))
    sizes = [found["shapes"][shape]["trace_bytes"] for shape in shapes]
    print(f"kB per trace: {[{name: round(size / 1e3, 1) for name, size in one.items()} for one in sizes]}")
    for shape in shapes[:1]:
        for name, why in found["shapes"][shape]["failed"].items():
            print(f"{name}: {why}")
    if "peaks" in found:
        base = found["peaks"]["bare"]
        print(f"peak memory of a process, {PEAK_SHAPE}, relative to bare ({base / 1e6:.0f} MB):")
        print("  " + ", ".join(f"{name} {peak / base:.2f}" for name, peak in found["peaks"].items()))
        print(f"peak above the loaded model for a batch planned for memory={BUDGET / 1e6:.0f}MB:")
        print(
            "  "
            + ", ".join(f"{name}: {peak / 1e6:.0f} ({rows} rows)" for name, (rows, peak) in found["budgets"].items())
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="model=FOLDER turns=4 shapes=2")
    given = dict(part.split("=", 1) for part in parser.parse_args().settings)
    if "peak" in given:
        report_peak(given["model"], given["peak"])
        return
    if "long" in given:
        report_long(given["model"], given["long"])
        return
    if "budget" in given:
        tier, length, beams = given["budget"].split(",")
        report_budget(given["model"], tier, int(length), int(beams))
        return
    turns, count = int(given.get("turns", 4)), int(given.get("shapes", len(SHAPES)))
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        models = {given["model"]: given["model"]} if "model" in given else {"random Llama 84M": ""}
        if "model" not in given:
            models["random Llama 84M"] = str(random_llama(Path(folder)))
            try:
                from millstream.demo.smollm2 import smollm2_model

                models["SmolLM2-135M"] = str(smollm2_model(notify=print))
            except MillstreamError as error:
                print(f"SmolLM2: {error}")
        for name, place in models.items():
            times = measure_replay(place, "B8 P32 N48", turns)
            longs = long_peaks(place) if name == "random Llama 84M" else {}
            show_replay(name, times, longs)
            shapes = {shape: measure(place, shape, turns) for shape in list(SHAPES)[:count]}
            peaks = {variant: peak_bytes(place, variant) for variant in ("bare", *TIERS, "generate with outputs")}
            results["models"][name] = {
                "replay": times,
                "long": longs,
                "shapes": shapes,
                "peaks": peaks,
                "budgets": budgets(place),
            }
            show(name, results["models"][name])
    print(f"\n{save('extract', results)}")


if __name__ == "__main__":
    main()
