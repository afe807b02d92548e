"""Arrow data of which a row may end its process: parts get smaller until the row is alone."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.consumer.delivery.pulled_batch import PulledBatch
from keylane.consumer.pulling.column_suspects import ColumnSuspects, SuspectPart
from keylane.consumer.pulling.suspects import CAREFUL_MS

STORED = 300


def suspects(cursor: int, begun: dict[int, int], *, upto: int = STORED) -> ColumnSuspects:
    """All rows from the cursor on, in batches of 100."""
    made = ColumnSuspects(upto, begun.items(), now_ms=0)
    client: Any = None
    header: Any = None
    for start in range(0, STORED, 100):
        if start + 100 > cursor:
            ranges = [(max(start, cursor), start + 100)]
            made.put(PulledBatch(client, memoryview(b"x"), header, ranges))
    return made


def offsets(part: SuspectPart) -> list[int]:
    return [
        offset
        for batch in part.batches
        for low, high in batch.ranges
        for offset in range(low, high)
    ]


@pytest.mark.parametrize("guilty", [0, 1, 99, 100, 150, 298, 299])
def test_guilty_row_is_alone_after_a_few_crashes_and_is_the_only_one_accused(guilty: int):
    cursor, begun, ends = 0, {}, 0
    while True:
        rows = suspects(cursor, begun)
        while guilty not in offsets(part := rows.next()):  # type: ignore[arg-type]
            assert offsets(part) == list(range(cursor, part.last + 1)), "nothing is overtaken"
            assert not part.crashes
            cursor = part.last + 1
            begun = {offset: crashes for offset, crashes in begun.items() if offset >= cursor}
        ends += 1
        begun[part.last] = part.crashes + 1
        if part.crashes:
            break
    assert offsets(part) == [guilty]
    assert ends <= 5
    assert suspects(cursor, begun).next().crashes == 2  # type: ignore[union-attr]


def test_careful_part_ends_in_time_but_not_before_an_accused_row():
    rows = suspects(0, {})
    assert not rows.is_over(STORED, 0)
    assert rows.is_over(STORED, CAREFUL_MS)
    assert not suspects(0, {200: 1}).is_over(STORED, CAREFUL_MS)
    assert suspects(201, {}, upto=201).is_over(STORED, 0)
    rows.next()
    assert rows.is_over(STORED, 0)
    assert rows.next() is None
    assert rows.take_remaining() == []
