"""Small batches are combined in order, and all rows before an error are yielded."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from keylane.arrow import rows as rows_module
from keylane.arrow.rows import coalesce
from keylane.errors import OffsetOutOfRangeError


def batches(*sizes: int) -> Iterator[pa.RecordBatch]:
    first = 0
    for size in sizes:
        yield pa.RecordBatch.from_pydict({"offset": list(range(first, first + size))})
        first += size


def sizes_and_rows(made: Iterator[pa.RecordBatch]) -> tuple[list[int], list[int]]:
    got = list(made)
    return [each.num_rows for each in got], [n for each in got for n in each["offset"].to_pylist()]


def test_small_batches_become_one_of_the_rows_that_were_asked_for():
    sizes, rows = sizes_and_rows(coalesce(batches(4, 4, 4, 20, 1, 9, 3), 10))
    assert rows == list(range(45))
    assert sizes == [8, 4, 20, 10, 3]


def test_batch_is_no_larger_than_its_bytes_allow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows_module, "BATCH_BYTES_MAX", 64)
    sizes, rows = sizes_and_rows(coalesce(batches(4, 4, 4), 1_000))
    assert (sizes, rows) == ([8, 4], list(range(12)))


def test_full_batch_is_given_before_the_next_one_is_asked_for():
    asked: list[int] = []

    def source() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches(10, 10)):
            asked.append(number)
            yield batch

    assert next(coalesce(source(), 10)).num_rows == 10
    assert asked == [0]


def test_rows_before_an_error_are_given_first():
    def source() -> Iterator[pa.RecordBatch]:
        yield from batches(3, 3)
        raise OffsetOutOfRangeError

    made = coalesce(source(), 100)
    assert next(made).num_rows == 6
    with pytest.raises(OffsetOutOfRangeError):
        next(made)
