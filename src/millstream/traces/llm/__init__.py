"""Running a causal language model: prompts, generation, replay, and the activations it captures."""

from importlib import import_module
from typing import Any

from millstream.errors import MissingExtra


def transformers(part: str = "") -> Any:
    """The transformers library, or one of its modules."""
    try:
        return import_module(f"transformers.{part}" if part else "transformers")
    except ImportError:
        raise MissingExtra("language models need transformers: pip install 'millstream[llm]'") from None
