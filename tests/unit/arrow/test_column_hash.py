"""The vectorized hash of a column equals the hash of each row."""

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keylane.arrow.column_hash import BLOCK_ROWS, hash_column


def hashes_of(rows: list[bytes], before: bytes = b"") -> list[int]:
    blob = np.frombuffer(before + b"".join(rows), np.uint8)
    edges = np.cumsum([len(before), *map(len, rows)], dtype=np.int64)
    return hash_column(blob, edges).tolist()


def test_column_hash_is_that_of_each_row_for_every_length():
    rows = [bytes((7 * length + place) % 256 for place in range(length)) for length in range(300)]
    assert hashes_of(rows) == [xxhash.xxh3_64_intdigest(row) for row in rows]


@given(st.lists(st.binary(max_size=150), max_size=40), st.binary(max_size=9))
def test_column_hash_is_that_of_each_row_for_any_column(rows: list[bytes], before: bytes):
    assert hashes_of(rows, before) == [xxhash.xxh3_64_intdigest(row) for row in rows]


def test_column_hash_is_that_of_each_row_when_there_are_many():
    rows = [b"%d" % number for number in range(2 * BLOCK_ROWS + 5)]
    assert hashes_of(rows) == [xxhash.xxh3_64_intdigest(row) for row in rows]
