"""A tokenizer by its name, as a configuration or a command line spells it: `base`, `kmer(6)`, `hf(folder)`."""

import ast
import re

from millstream.dataset.hf import hf
from millstream.dataset.kmers import base, kmer
from millstream.dataset.tokens import Tokenizer, Tokens

__all__ = ["Tokenizer", "Tokens", "base", "hf", "kmer", "tokenizer"]


def tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names; `tokenizer(spec).name` spells it again.

    tokenizer("kmer(12, stride=2, canonical=True)").tokenize(flat, offsets)
    """
    if spec.strip() == "base":
        return base()
    if match := re.fullmatch(r"\s*hf\((.+)\)\s*", spec):
        return hf(match[1].strip().strip("'\""))
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "kmer":
            positional = [ast.literal_eval(value) for value in call.args]
            named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            return kmer(*positional, **named)
    except (SyntaxError, TypeError, ValueError) as error:
        reason = f" ({error})"
    else:
        reason = ""
    raise ValueError(
        f"tokenizer {spec!r} is not known{reason}; there are base, kmer(6), kmer(12, stride=2, canonical=True) "
        "and hf(path of a tokenizer.json or of the folder that holds it)"
    )
