"""Byte-pair encoding by the rules of a tokenizer.json: one pass over the bases, the tokens of pairwise merging.

Byte-pair encoding merges the pair of lowest rank, leftmost first, until no rule applies. Two facts replace that loop:

1. A sequence of tokens is the encoding of its text exactly if every two neighbours in it are the encoding of *their*
   text: until the first merge across a border, what happens on either side of it does not depend on anything beyond
   the two neighbours, so that merge would also happen with the neighbours alone. This is true for any list of rules.
2. So the encoding of a prefix is unique, and a walk that takes the longest token whose border with the last one is
   valid, and backtracks from positions where none is, finds it (as the `bpe` crate of github/rust-gems does).

Whether a border is valid is determined once per pair of tokens, by merging their text the slow way, and cached.
Measured on METAGENE-1 (1,024 tokens), 125 bases, one thread of a shared machine: 0.4-0.6 M reads/s, the first 100,000
reads (which meet most pairs) 0.13-0.22 M, against 0.026-0.043 M for `tokenizers`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.kernels import kernel
from millstream.reads.tokenizers.kmers import Bases, Numbers

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MOST_TOKENS = 8192  # the borders take a byte per pair of tokens: at most 64 MB, allocated as pairs are met
DROP, OTHER = 254, 255  # codes of letters without a token, and of bytes that are not letters
UNSEEN, VALID, INVALID = 0, 1, 2
ZERO, ONE = np.uint64(0), np.uint64(1)


class NotPlain(Exception):
    """These rules are more than this encoder supports; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Plain byte-pair encoding: the merges in order, and the special tokens around a read."""

    vocab: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    unk: str | None = None
    fuse_unk: bool = False
    prefix: str = ""
    """One character put before every read that is not empty."""
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()


def plain_rules(file: Mapping[str, Any]) -> Rules:
    """The rules of a tokenizer.json that only merges and adds special tokens; otherwise NotPlain."""
    model = cast(dict[str, Any], file["model"])
    if model.get("type") != "BPE":
        raise NotPlain(f"its model is {model.get('type')}, not BPE")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(option):
            raise NotPlain(f"its model has {option} = {model[option]!r}")
    prefix = _prefix(file.get("normalizer"))
    _check_splits(file.get("pre_tokenizer"), prefix)
    for token in cast(list[dict[str, Any]], file.get("added_tokens", [])):
        if set(token["content"]) <= set(LETTERS + prefix):
            raise NotPlain(f"its added token {token['content']!r} could occur in a read")
    unk, vocab = model.get("unk_token"), model["vocab"]
    if unk is not None and unk not in vocab:
        raise NotPlain(f"its unknown token {unk!r} is not in the vocabulary")
    head, tail = _special_tokens(file.get("post_processor"))
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return Rules(
        vocab=vocab,
        merges=[(left, right) for left, right in merges],
        unk=unk,
        fuse_unk=bool(model.get("fuse_unk")),
        prefix=prefix,
        head=head,
        tail=tail,
    )


class Encoded(NamedTuple):
    """The tokens of all reads: those of read i are tokens[starts[i] : starts[i] + counts[i]]."""

    tokens: NDArray[np.int32]
    starts: Numbers
    counts: Numbers


class Bpe:
    """Rules compiled for encoding. Threads may share one: all write the same values to its cache.

    encoded = Bpe(Rules(vocab={"A": 0, "C": 1, "AC": 2}, merges=[("A", "C")])).encode(flat, offsets)
    """

    def __init__(self, rules: Rules, *, most_tokens: int = MOST_TOKENS) -> None:
        self.rules = rules
        self._tables = _tables(rules, most_tokens)

    def encode(self, flat: Bases, offsets: Numbers, *, max_length: int | None = None) -> Encoded | None:
        """The tokens of every read, special tokens included; None if there is a byte other than A-Z and a-z."""
        num_special = len(self.rules.head) + len(self.rules.tail)
        room = flat.size + 1 if max_length is None else max_length - num_special
        num_reads = offsets.size - 1
        starts = offsets[:-1] - offsets[0] + np.arange(num_reads) * (num_special + 1)  # 1: the prefix
        tokens = np.empty(int(offsets[-1] - offsets[0]) + num_reads * (num_special + 1), np.int32)
        counts = np.empty(num_reads, np.int64)
        whole = _encode(flat, offsets, self._tables, room, tokens, starts, counts)
        return Encoded(tokens, starts, counts) if whole else None


class _Tables(NamedTuple):
    """A symbol is a token's number here; single characters come first, so a character's code is its symbol."""

    codes: NDArray[np.uint8]  # byte -> code, DROP or OTHER
    prefix: int  # its code, or DROP
    fused: int  # the code written once per run of it, or DROP
    end: int  # the code after the last character, in no token; rows of the trie have end + 1 entries
    trie: NDArray[np.uint32]  # row + code -> row of the longer string, or 0
    matches: NDArray[np.uint32]  # row -> the longest symbol that the row's string starts with
    shorter: NDArray[np.uint32]  # symbol -> the next longest symbol it starts with, or num_symbols
    lengths: NDArray[np.uint32]  # symbol -> number of characters
    borders: NDArray[np.uint8]  # [symbol or num_symbols, symbol] -> UNSEEN, VALID or INVALID
    spelling: Numbers  # codes of the characters of all symbols, one symbol after another
    spelling_starts: Numbers
    pairs: Numbers  # hash table: left * num_symbols + right, or -1
    ranks: Numbers
    merged: Numbers
    ids: NDArray[np.int32]  # symbol -> the token's id
    head: NDArray[np.int32]
    tail: NDArray[np.int32]


def _prefix(normalizer: Mapping[str, Any] | None) -> str:
    match normalizer:
        case None:
            return ""
        case {"type": "Prepend", "prepend": str(prefix)} if len(prefix) == 1:
            return prefix
        case {"type": "Replace", "pattern": {"Regex": "^"}, "content": str(prefix)} if len(prefix) == 1:
            return prefix
        case _:
            raise NotPlain(f"its normalizer {normalizer.get('type')} may change bases")


def _check_splits(pre_tokenizer: Mapping[str, Any] | None, prefix: str) -> None:
    """`Whitespace` splits at spaces and between \\w and the rest, `WhitespaceSplit` at spaces: never between bases."""
    kind = None if pre_tokenizer is None else pre_tokenizer.get("type")
    if kind not in (None, "Whitespace", "WhitespaceSplit"):
        raise NotPlain(f"its pre-tokenizer {kind} may split or change bases")
    if (kind == "Whitespace" and not re.fullmatch(r"[A-Za-z0-9_]?", prefix)) or (kind and prefix.isspace()):
        raise NotPlain(f"its pre-tokenizer {kind} splits after the prefix {prefix!r}")


def _special_tokens(processor: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after the tokens of a read."""
    if processor is None:
        return (), ()
    if processor.get("type") != "TemplateProcessing":
        raise NotPlain(f"its post-processor is {processor.get('type')}, not TemplateProcessing")
    sides: list[tuple[int, ...]] = [()]
    for piece in processor["single"]:
        if "Sequence" in piece:
            sides.append(())
        else:
            sides[-1] += tuple(processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    if len(sides) != 2:
        raise NotPlain(f"its template contains a read {len(sides) - 1} times")
    return sides[0], sides[1]


def _tables(rules: Rules, most_tokens: int) -> _Tables:
    alphabet = [letter for letter in dict.fromkeys(LETTERS + rules.prefix) if letter in rules.vocab]
    parts = {token for pair in rules.merges for token in (*pair, "".join(pair))}
    if rules.unk is not None and (rules.unk in parts or rules.unk in alphabet):
        raise NotPlain(f"its unknown token {rules.unk!r} occurs in merges")
    if len(set(rules.vocab.values())) < len(rules.vocab):
        raise NotPlain("two tokens of its vocabulary have the same id")
    unknown = [] if rules.unk is None else [rules.unk]
    longer = sorted(token for token in parts if len(token) > 1 and set(token) <= set(alphabet))
    symbols = {token: symbol for symbol, token in enumerate(alphabet + unknown + longer)}
    if len(symbols) > most_tokens:
        raise NotPlain(f"it has {len(symbols)} tokens, more than {most_tokens}")

    unknown_code = len(alphabet) if unknown else DROP
    codes = np.full(256, OTHER, np.uint8)
    codes[list(LETTERS.encode())] = [symbols[letter] if letter in alphabet else unknown_code for letter in LETTERS]
    prefix = (symbols[rules.prefix] if rules.prefix in alphabet else unknown_code) if rules.prefix else DROP
    spelled = [[symbols[token]] if token in unknown else [symbols[letter] for letter in token] for token in symbols]
    lengths = np.array([len(spelling) for spelling in spelled] + [0], np.uint32)
    pairs, ranks, merged = _pair_table(rules.merges, symbols)
    end = len(alphabet) + len(unknown)
    stable = [
        len(spelling) == 1 or _merge(np.array(spelling), len(spelling), -1, len(symbols), pairs, ranks, merged) == 1
        for spelling in spelled
    ]
    trie, matches, shorter = _trie(spelled, stable, end)
    borders = np.zeros((len(symbols) + 1, len(symbols)), np.uint8)
    borders[-1] = VALID  # the border before the first token
    return _Tables(
        codes=codes,
        prefix=prefix,
        fused=unknown_code if rules.fuse_unk else DROP,
        end=end,
        trie=trie,
        matches=matches,
        shorter=shorter,
        lengths=lengths,
        borders=borders,
        spelling=np.array([code for spelling in spelled for code in spelling], np.int64),
        spelling_starts=np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64),
        pairs=pairs,
        ranks=ranks,
        merged=merged,
        ids=np.array([rules.vocab[token] for token in symbols], np.int32),
        head=np.array(rules.head, np.int32),
        tail=np.array(rules.tail, np.int32),
    )


def _pair_table(merges: Sequence[tuple[str, str]], symbols: Mapping[str, int]) -> tuple[Numbers, Numbers, Numbers]:
    """Pair of symbols -> rank and merged symbol, as a hash table with linear probing."""
    size = 1 << (2 * len(merges) + 1).bit_length()
    pairs, ranks, merged = np.full(size, -1), np.zeros(size, np.int64), np.zeros(size, np.int64)
    for rank, (left, right) in enumerate(merges):
        if left in symbols and right in symbols:
            pair = symbols[left] * len(symbols) + symbols[right]
            slot = _slot(pairs, pair)
            pairs[slot], ranks[slot], merged[slot] = pair, rank, symbols[left + right]
    return pairs, ranks, merged


def _trie(
    spelled: Sequence[Sequence[int]], stable: Sequence[bool], end: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """A trie of the symbols that encode to themselves; only these are ever output."""
    nowhere, row_size = len(spelled), end + 1
    trie, matches, shorter = [0] * row_size, [nowhere] * row_size, [nowhere] * (nowhere + 1)
    for symbol in sorted(range(len(spelled)), key=lambda symbol: len(spelled[symbol])):
        if not stable[symbol]:
            continue
        row = 0
        for code in spelled[symbol]:
            if trie[row + code] == 0:
                trie[row + code] = len(trie)
                matches += [matches[row]] * row_size
                trie += [0] * row_size
            row = trie[row + code]
        shorter[symbol], matches[row] = matches[row], symbol
    return np.array(trie, np.uint32), np.array(matches, np.uint32), np.array(shorter, np.uint32)


@kernel
def _slot(pairs: Numbers, pair: int) -> int:
    """The slot of a pair in the hash table, or the free slot where it would go."""
    last = pairs.size - 1
    slot = ((pair * 0x1E3779B1) >> 9) & last
    while pairs[slot] != pair and pairs[slot] >= 0:
        slot = (slot + 1) & last
    return slot


@kernel
def _merge(
    row: Numbers, count: int, border: int, num_symbols: int, pairs: Numbers, ranks: Numbers, merged: Numbers
) -> int:
    """Merge pair by pair, in place; returns how many symbols are left, or -1 if a merge crosses the border."""
    while True:
        best, at, found = -1, -1, -1
        for i in range(count - 1):
            slot = _slot(pairs, row[i] * num_symbols + row[i + 1])
            if pairs[slot] >= 0 and (at < 0 or ranks[slot] < best):
                best, at, found = ranks[slot], i, slot
        if at < 0:
            return count
        if at + 1 == border:
            return -1
        row[at] = merged[found]
        for i in range(at + 1, count - 1):
            row[i] = row[i + 1]
        count -= 1
        if at < border:
            border -= 1


@kernel
def _border(left: int, right: int, tables: _Tables, row: Numbers) -> int:
    """Whether the text of two tokens encodes to these two tokens."""
    count = 0
    for i in range(tables.spelling_starts[left], tables.spelling_starts[left + 1]):
        row[count] = tables.spelling[i]
        count += 1
    border = count
    for i in range(tables.spelling_starts[right], tables.spelling_starts[right + 1]):
        row[count] = tables.spelling[i]
        count += 1
    num_left = _merge(row, count, border, tables.ids.size, tables.pairs, tables.ranks, tables.merged)
    return INVALID if num_left < 0 else VALID


@kernel
def _encode(
    flat: Bases,
    offsets: Numbers,
    tables: _Tables,
    room: int,
    tokens: NDArray[np.int32],
    starts: Numbers,
    counts: Numbers,
) -> bool:
    """Write head, at most `room` tokens and tail of every read; False if a byte is not a letter.

    Indices are unsigned, so numba does not check for negative ones (measured: 500 k -> 700 k reads/s).
    """
    trie, matches, shorter = tables.trie, tables.matches, tables.shorter
    lengths, borders = tables.lengths, tables.borders
    longest = 0
    for read in range(counts.size):
        longest = max(longest, offsets[read + 1] - offsets[read])
    text = np.empty(longest + 2, np.uint8)
    dead = np.empty(longest + 2, np.uint8)  # positions from which no encoding exists
    path = np.empty(longest + 2, np.uint32)
    row = np.empty(2 * lengths.max(), np.int64)
    none = np.uint64(tables.ids.size)
    for read in range(counts.size):
        size = 0
        if offsets[read + 1] > offsets[read] and tables.prefix != DROP:
            text[0] = tables.prefix
            size = 1
        for i in range(offsets[read], offsets[read + 1]):
            code = tables.codes[flat[i]]
            if code >= DROP:
                if code == OTHER:
                    return False
            elif not (code == tables.fused and size > 0 and text[size - 1] == code):
                text[size] = code
                size += 1
        text[size] = tables.end
        dead[: size + 1] = 0

        position, stop, depth = ZERO, np.uint64(size), ZERO
        last = symbol = none
        while position < stop or symbol != none:
            if symbol == none:
                ahead = position
                place = np.uint64(trie[text[ahead]])
                while place != ZERO:
                    symbol = np.uint64(matches[place])
                    ahead += ONE
                    place = np.uint64(trie[place + text[ahead]])
            after = position + lengths[symbol]
            while True:
                if dead[after] == 0:
                    state = borders[last, symbol]
                    if state == UNSEEN:
                        state = _border(int(last), int(symbol), tables, row)
                        borders[last, symbol] = state
                    if state == VALID:
                        path[depth] = symbol
                        depth += ONE
                        position, last, symbol = after, symbol, none
                        break
                symbol = np.uint64(shorter[symbol])
                if symbol == none:  # no token is valid here: backtrack to a shorter one before
                    dead[position] = 1
                    symbol = last
                    position -= lengths[symbol]
                    depth -= ONE
                    last = np.uint64(path[depth - ONE]) if depth != ZERO else none
                    break
                after = position + lengths[symbol]

        at = starts[read]
        for i in range(tables.head.size):
            tokens[at + i] = tables.head[i]
        at += tables.head.size
        kept = min(np.int64(depth), room)
        for i in range(kept):
            tokens[at + i] = tables.ids[path[i]]
        at += kept
        for i in range(tables.tail.size):
            tokens[at + i] = tables.tail[i]
        counts[read] = at + tables.tail.size - starts[read]
    return True
