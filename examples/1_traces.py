"""Ask a language model questions, keep what goes on inside it, judge its answers. Writes FOLDER/traces.

The model is a tiny Llama that was told where some people live and makes up the rest. Yours is a folder, or a name on
the Hugging Face hub: model="Qwen/Qwen3-4B". In a shell it is `millstream extract`, then `millstream label`.
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
    torch.set_num_threads(1)  # for so small a model more of them only wait for each other
    rng = random.Random(0)
    pairs = zip(rng.sample(PEOPLE, len(PEOPLE)), rng.choices(HOMES, k=len(PEOPLE)), strict=True)
    rows = [{"id": who, "question": f"Where does {who} live?", "answer": home} for who, home in pairs]
    make_model([f"{row['question']} {row['answer']} <end>" for row in rows], folder / "model")
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"tier": "full", "prompt": "{question}", "max_new_tokens": 6, "memory": "200MB"}
    done = ms.extract(folder / "questions.jsonl", folder / "traces", model=str(folder / "model"), **settings)
    said = ms.label(done.path, rule="em").counts  # labels.parquet: exact match, F1, ROUGE-L and verdict of each
    print(f"{done.records} traces, {done.bytes / 1e6:.1f} MB: {said['right']} answers right, {said['wrong']} made up")
    for trace in ms.open(done.path).subset([0, 240, 479]):
        print(f"  {trace['question']} {trace['generated_answer']} (true: {trace['answer']})", trace["hidden"].shape)
    print(f"Wrote {done.path}: texts, log-probs, hidden states, attention. Next: python examples/2_loader.py {folder}")


def make_model(texts: list[str], folder: Path) -> None:
    """A Llama that is told a third of the texts often, a third rarely, a third never; as a Hugging Face folder."""
    words = dict.fromkeys(["<end>", *" ".join(texts).replace("?", " ?").split()])
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), initializer_range=0.06, eos_token_id=0, **sizes))
    rows, often = torch.tensor(fast(texts)["input_ids"]), torch.tensor([3.0, 1.0, 0.0]).repeat(len(texts) // 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(85):  # by then it knows about half of what it is told
        batch = rows[torch.multinomial(often, 64)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    logging.disable_progress_bar()
    model.save_pretrained(folder), fast.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "examples/out"))
