"""The checksum of a whole is known from those of its pieces."""

import google_crc32c
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.store.checksums import joined_crc32c


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_the_crc_of_pieces_put_together_is_that_of_all_bytes(pieces: int, sizes: list[int], seed: int):
    rng = np.random.default_rng(seed)
    rows = [[rng.bytes(size) for _ in range(pieces)] for size in sizes]
    crcs = np.array([[google_crc32c.value(piece) for piece in row] for row in rows], np.uint32)
    expected = [google_crc32c.value(b"".join(row)) for row in rows]
    assert joined_crc32c(crcs, np.array(sizes, np.int64)).tolist() == expected


def test_pieces_of_many_megabytes_are_joined_without_reading_them():
    piece = np.random.default_rng(0).bytes(5_000_003)
    crc = google_crc32c.value(piece)
    joined = joined_crc32c(np.array([[crc] * 7], np.uint32), np.array([len(piece)], np.int64))
    assert joined.tolist() == [google_crc32c.value(piece * 7)]
