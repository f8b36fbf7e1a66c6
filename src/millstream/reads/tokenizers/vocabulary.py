"""The vocab.txt of a Nucleotide Transformer -> the tokenizer.json of the same tokenizer."""

import json
from itertools import product
from pathlib import Path

from millstream.core.config import parse_json
from millstream.errors import BadSource

VOCABULARY, CONFIG = "vocab.txt", "tokenizer_config.json"
HEAD, TAIL, UNKNOWN = "<cls>", "<eos>", "<unk>"


def tokenizer_json(file: Path) -> str:
    """A read is cut into k-mers from its start on; bases before an N, and at the end, that are too few stay single.

    That is what transformers' EsmTokenizer does, which has no tokenizer.json. `<cls>` comes first; `<eos>` last, if the
    vocabulary has it.
    """
    tokens = file.read_text(encoding="utf-8").split()
    vocab = {token: number for number, token in enumerate(tokens)}
    k = max((len(token) for token in tokens if set(token) <= set("ACGT")), default=0)
    kmers = {*"ACGT", *map("".join, product("ACGT", repeat=k))} if k <= 8 else {""}
    if k < 2 or not kmers | {HEAD, UNKNOWN} <= vocab.keys():
        raise BadSource(
            f"{file}: not the vocabulary of a Nucleotide Transformer, which has all k-mers of one length, the single "
            f"bases, {HEAD} and {UNKNOWN}. Give the folder of a model with a tokenizer.json"
        )
    settings = file.parent / CONFIG
    end = parse_json(settings.read_text(encoding="utf-8")).get("eos_token", TAIL) if settings.exists() else TAIL
    tail = [TAIL] if end == TAIL and TAIL in vocab else []
    around = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in (HEAD, *tail)}
    read = {"Sequence": {"id": "A", "type_id": 0}}
    template = [{"SpecialToken": {"id": HEAD, "type_id": 0}}, read]
    template += [{"SpecialToken": {"id": token, "type_id": 0}} for token in tail]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": token, **plain} for token, number in vocab.items() if token[0] == "<"
            ],
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": f"[ACGT]{{{k}}}|."},
                "behavior": "Isolated",
                "invert": False,
            },
            "post_processor": {
                "type": "TemplateProcessing",
                "single": template,
                "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": around,
            },
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN},
        }
    )
