"""One question and what counts as its answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """`aliases` are all accepted answers, `answer` (the main one) first; both may be missing."""

    id: str
    question: str
    answer: str | None = None
    aliases: tuple[str, ...] = ()
    kind: str | None = None  # what is asked for: a relation, a category
    exposure: str | None = None  # how well known it is: often .. never, popular, obscure
