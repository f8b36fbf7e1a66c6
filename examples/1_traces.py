"""Run a language model on questions, store its activations, label its answers. Writes FOLDER/traces.

The model is a tiny Llama that learned where some people live and hallucinates the rest. Use your own: a folder, or a
name on the Hugging Face Hub, model="Qwen/Qwen3-4B". In a shell: `millstream extract`, then `millstream label`.
"""

import json
import random
import sys
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

import millstream as ms

PEOPLE = ["".join(parts) for parts in product("KLMNRSTV", "aeiou", "lmnrst", ["a", "os"])]
HOMES = [" ".join(parts) for parts in product("123456789", ["Old", "New", "High", "Low"], ["Mill", "Castle", "Bridge"])]


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # more threads do not help a model this small
    rng = random.Random(0)
    pairs = zip(rng.sample(PEOPLE, len(PEOPLE)), rng.choices(HOMES, k=len(PEOPLE)), strict=True)
    rows = [{"id": who, "question": f"Where does {who} live?", "answer": home} for who, home in pairs]
    make_model([f"{row['question']} {row['answer']} <end>" for row in rows], folder / "model")
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"tier": "full", "prompt": "{question}", "max_new_tokens": 6, "memory": "200MB"}
    done = ms.extract(folder / "questions.jsonl", folder / "traces", model=str(folder / "model"), **settings)
    counts = ms.label(done.path, rule="em").counts  # labels.parquet: exact match, F1, ROUGE-L and verdict per answer
    print(f"{done.records} traces, {done.bytes / 1e6:.1f} MB: {counts['right']} answers right, {counts['wrong']} wrong")
    for trace in ms.open(done.path).subset([0, 240, 479]):
        print(f"  {trace['question']} {trace['generated_answer']} (true: {trace['answer']})", trace["hidden"].shape)
    print(f"Wrote {done.path}: text, log-probs, hidden states, attention. Next: python examples/2_loader.py {folder}")


def make_model(texts: list[str], folder: Path) -> None:
    """Train a Llama on a third of the texts often, a third rarely, a third never; save it as a Hugging Face folder."""
    words = dict.fromkeys(["<end>", *" ".join(texts).replace("?", " ?").split()])
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), initializer_range=0.06, eos_token_id=0, **sizes))
    rows, often = torch.tensor(fast(texts)["input_ids"]), torch.tensor([3.0, 1.0, 0.0]).repeat(len(texts) // 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(85):  # by then it knows about half of the answers
        batch = rows[torch.multinomial(often, 64)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    logging.disable_progress_bar()
    model.save_pretrained(folder), fast.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out"))
