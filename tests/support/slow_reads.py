"""A slow, obviously right parser of FASTA and FASTQ, and texts of odd but legal files to try it on."""

from typing import NamedTuple

from hypothesis import strategies as st

BLANKS = b" \t\v\f\r"


class Slow(NamedTuple):
    header: bytes
    sequence: bytes
    quality: bytes | None


def lines_of(text: bytes) -> list[bytes]:
    """Lines without their ends; the end of the text ends a line too."""
    lines = [line.removesuffix(b"\r") for line in text.split(b"\n")]
    return lines[:-1] if text.endswith(b"\n") or not text else lines


def letters_of(line: bytes) -> bytes:
    return bytes(byte for byte in line if byte not in BLANKS)


def parse(text: bytes) -> list[Slow]:
    first = next(line for line in lines_of(text) if line.strip() and not line.startswith(b";"))
    return parse_fastq(text) if first.startswith(b"@") else parse_fasta(text)


def parse_fasta(text: bytes) -> list[Slow]:
    records: list[Slow] = []
    for line in lines_of(text):
        if line.startswith(b">"):
            records.append(Slow(line[1:], b"", None))
        elif not line.startswith(b";") and records:
            records[-1] = Slow(records[-1].header, records[-1].sequence + letters_of(line), None)
    return records


def parse_fastq(text: bytes) -> list[Slow]:
    lines = lines_of(text)
    records: list[Slow] = []
    at = 0
    while at < len(lines):
        if not letters_of(lines[at]):
            at += 1
            continue
        assert lines[at].startswith(b"@")
        header = lines[at][1:]
        at += 1
        sequence = b""
        while not lines[at].startswith(b"+"):
            sequence += letters_of(lines[at])
            at += 1
        at += 1
        quality = b""
        while len(quality) < len(sequence):
            quality += lines[at]
            at += 1
        assert len(quality) == len(sequence)
        records.append(Slow(header, sequence, quality))
    return records


def wrapped(letters: str, width: int, end: str = "\n") -> str:
    """A sequence in lines."""
    return "".join(letters[at : at + width] + end for at in range(0, len(letters), width))


LETTERS = st.sampled_from([b"A", b"C", b"G", b"T", b"N", b"acgtn", b"ACGTACGTACGTACGT", b"RYKM", b"*-", b"MKVLE"])
ENDS = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n"])
HEADERS = st.one_of(
    st.sampled_from([b"", b"a", b"a b", b">x", b"same", b"same", b" lead", "é ü".encode(), b"x\ty", b"@q;+", b"a\rb"]),
    st.from_regex(rb"lbl\|[0-9]{1,3}\|[0-9]{0,4}\|[0-9]{1,2}\|[a-z]{1,6}/[12]", fullmatch=True),
)


@st.composite
def fasta_texts(draw: st.DrawFn) -> bytes:
    """FASTA with whatever one finds in the wild."""
    text = draw(st.sampled_from([b"", b"", b"", b"\n", b"; a comment\n", b"\r\n\n", b" \n"]))
    for _ in range(draw(st.integers(1, 8))):
        end = draw(ENDS)
        text += b">" + draw(HEADERS) + end
        width = draw(st.sampled_from([0, 0, 1, 3, 7, 60]))
        sequence = b"".join(draw(st.lists(LETTERS, max_size=8)))
        if width == 0:
            text += sequence + end if sequence or draw(st.booleans()) else b""
        else:
            for start in range(0, len(sequence), width):
                text += sequence[start : start + width] + end
        text += b"".join(
            draw(st.lists(st.sampled_from([b"\n", b";c\n", b"AC\n", b"A C\n", b"AC \r\n", b"G\r\r\n"]), max_size=2))
        )
    cut = draw(st.sampled_from([0, 0, 1]))
    return text[:-1] if cut and text.endswith(b"\n") else text


@st.composite
def fastq_texts(draw: st.DrawFn) -> bytes:
    """FASTQ, one-line or wrapped, with qualities that look like headers."""
    text = draw(st.sampled_from([b"", b"", b"\n", b"\r\n"]))
    for _ in range(draw(st.integers(1, 6))):
        end = draw(ENDS)
        header = draw(HEADERS)
        sequence = b"".join(draw(st.lists(LETTERS, max_size=6)))
        grades = st.integers(33, 126) | st.sampled_from(list(b"@+>I"))
        quality = bytes(draw(st.lists(grades, min_size=len(sequence), max_size=len(sequence))))
        width = draw(st.sampled_from([0, 0, 5]))
        step = width if width and len(sequence) > width else max(len(sequence), 1)
        pieces = range(0, max(len(sequence), 1), step)
        text += b"@" + header + end + b"".join(sequence[at : at + step] + end for at in pieces)
        text += b"+" + draw(st.sampled_from([b"", header])) + end
        text += b"".join(quality[at : at + step] + end for at in pieces)
        text += draw(st.sampled_from([b"", b"", b"\n"]))
    cut = draw(st.sampled_from([0, 0, 1]))
    return text[:-1] if cut and text.endswith(b"\n") else text
