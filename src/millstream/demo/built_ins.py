"""Built-in questions, models and prompts: see `millstream.traces.llm.model`."""

from pathlib import Path

from millstream.demo.facts import FACTS_PROMPT, facts_model, facts_questions
from millstream.demo.smollm2 import smollm2_model

QUESTIONS = {"facts": facts_questions, "world": Path(__file__).parent / "world.jsonl"}
MODELS = {"facts": facts_model, "smollm2": smollm2_model}
PROMPTS = {"facts": FACTS_PROMPT}  # the default prompt of a model
