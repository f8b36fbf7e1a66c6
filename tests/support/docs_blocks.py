"""Markdown pages -> their code blocks, headings and links, as CommonMark and GitHub see them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("python", "sh", "yaml", "json", "text")


@dataclass(frozen=True)
class Block:
    """A code block: its language ("" if none is given, "indented" if it has no fence) and the comments above it."""

    page: Path
    line: int
    language: str
    text: str
    comments: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def comment(self, word: str) -> str | None:
        """The text after `word:` in a comment above, as in `<!-- not run: needs several machines -->`."""
        found = [comment.removeprefix(f"{word}:") for comment in self.comments if comment.startswith(f"{word}:")]
        return found[0].strip() if found else None

    @property
    def file(self) -> str | None:
        """The name in a first line such as `# mine.py`: the block is also written to that file."""
        match = re.match(r"# ([\w./-]+\.(?:py|yaml|yml))\n", self.text)
        return match[1] if match else None


def pages() -> list[Path]:
    """README.md and all of docs/."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    comments: list[str] = []
    for token in _tokens(page):
        if token.type == "html_block":
            comments += [match.strip() for match in re.findall(r"<!--(.*?)-->", token.content, re.DOTALL)]
            continue
        if token.type in ("fence", "code_block"):
            language = token.info.strip() if token.type == "fence" else "indented"
            line = token.map[0] + 1 if token.map else 0
            found.append(Block(page, line, language, token.content, tuple(comments)))
        comments = []
    return found


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page, made from its headings as on GitHub and the site."""
    found: set[str] = set()
    tokens = _tokens(page)
    for place, token in enumerate(tokens):
        if token.type == "heading_open":
            text = "".join(part.content for part in tokens[place + 1].children or () if part.type != "html_inline")
            slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
            found.add(slug if slug not in found else f"{slug}-1")
    return found


def links_of(page: Path) -> list[str]:
    """Targets of all links and images."""
    return [
        str(part.attrs.get("href") or part.attrs.get("src"))
        for token in _tokens(page)
        for part in token.children or ()
        if part.type in ("link_open", "image")
    ]


@cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())
