"""Extraction at each tier against plain `generate` and against the peers, on the same prompts and batches.

    python benchmarks/extract.py                      # a random Llama of 84 M parameters, and SmolLM2 if installed
    python benchmarks/extract.py model=FOLDER         # another model

Variants are interleaved, so that noise affects all of them; ratios compare the fastest rounds. `extract` includes
writing to a store. Each peak is measured in its own process. Writes benchmarks/results/extract.json.
"""

import argparse
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
from millstream.traces.llm.fields import TIERS, parse_fields, plan_batches
from millstream.traces.llm.model import Decoding, LoadedModel, ModelSettings, describe_model, load_model
from millstream.traces.llm.prompts import make_prompt
from millstream.traces.llm.questions import Question
from millstream.traces.llm.tracer import EncodedQuestion, Tracer
from millstream.traces.store.writer import TraceWriter

SHAPES = {
    "B8 P32 N12": (8, 32, 12),
    "B8 P32 N48": (8, 32, 48),
    "B8 P128 N12": (8, 128, 12),
    "B32 P32 N12": (32, 32, 12),
}
GOALS = {"stats": 1.25, "graph": 1.25, "probe": None, "full": 1.4}
PEAK_SHAPE = "B32 P32 N12"
BUDGET = 300_000_000  # the `memory` that batches are planned for


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
        max_position_embeddings=2048,
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
        self.config.output_logits = False
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

    def extract(self, tier: str) -> Callable[[], None]:
        prompt = make_prompt("plain", self.loaded.tokenizer, stop="")
        fields = parse_fields(tier, None, stored="float16")
        tracer = Tracer(self.loaded, fields=fields, decoding=self.decoding, prompt=prompt)
        batch = [EncodedQuestion(Question(f"q{i}", "?"), row) for i, row in enumerate(self.ids)]
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
        plan = plan_batches(
            [len(one.ids) for one in pool],
            size=bench.loaded.card.size,
            fields=fields,
            max_new_tokens=12,
            num_beams=beams,
            memory=BUDGET,
        )
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
            shapes = {shape: measure(place, shape, turns) for shape in list(SHAPES)[:count]}
            peaks = {variant: peak_bytes(place, variant) for variant in ("bare", *TIERS, "generate with outputs")}
            results["models"][name] = {"shapes": shapes, "peaks": peaks, "budgets": budgets(place)}
            show(name, results["models"][name])
    print(f"\n{save('extract', results)}")


if __name__ == "__main__":
    main()
