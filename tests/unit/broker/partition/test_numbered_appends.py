"""Numbered rows: a repeated task's batches are known again, however old they are, unless its rows
are others.
"""

from __future__ import annotations

import pytest

from keylane.broker.partition.appends import (
    OFFSET_UNKNOWN,
    REMEMBERED_BATCHES,
    Duplicate,
    ProducerState,
    after_append,
    decide_append,
)
from keylane.protocol.batch import check_batch, encode_body, join_columns
from keylane.protocol.errors import InvalidRequestError, SequenceGapError, SequenceReusedError
from keylane.protocol.ids import MAX_I64
from keylane.protocol.record import FLAG_NUMBERED, Header


def numbered(sequence: int, count: int = 2, *, digest: int | None = None, time: int = 0) -> Header:
    """A batch of `count` rows whose digest, unless it is given, follows from its end."""
    body = join_columns(
        time.to_bytes(8, "little") * count,
        bytes(4 * count),
        bytes(4 * count),
        (),
        (),
        count=count,
    )
    data = encode_body(
        body,
        count=count,
        partition_id=1,
        producer_id=7,
        producer_epoch=sequence + count if digest is None else digest,
        sequence=sequence,
        flags=FLAG_NUMBERED,
    )
    return check_batch(data)


def after(batches: int) -> ProducerState:
    state: ProducerState | None = None
    for number in range(batches):
        header = numbered(2 * number)
        assert decide_append(state, header) is None
        state = after_append(state, header, base_offset=100 + 2 * number)
    assert state is not None
    return state


def test_digest_is_no_epoch():
    """Batches of one task have different digests, and none begins the numbers anew."""
    state = after(3)
    assert state.next_sequence == 6
    assert state.epoch == 0
    assert [batch.body_crc for batch in state.latest] == [2, 4, 6]


def test_repeated_rows_are_duplicates_however_old():
    """Of remembered batches the offset is known; older ones are below what is stored."""
    state = after(3 * REMEMBERED_BATCHES)
    first = 2 * REMEMBERED_BATCHES
    for number in range(3 * REMEMBERED_BATCHES):
        offset = 100 + 2 * number if number >= first else OFFSET_UNKNOWN
        assert decide_append(state, numbered(2 * number)) == Duplicate(offset)


def test_rows_are_known_again_at_another_time():
    """A replayed stream sends its rows with the time of the replay."""
    assert decide_append(after(2), numbered(2, time=5)) == Duplicate(102)


@pytest.mark.parametrize(
    "header", [numbered(2, digest=9), numbered(2, 1), numbered(1), numbered(3, 4)]
)
def test_other_rows_under_a_taken_number_are_refused(header: Header):
    """Another digest, other bounds, or rows that are stored in part."""
    with pytest.raises(SequenceReusedError):
        decide_append(after(3), header)


def test_later_batches_are_refused_after_other_rows():
    """What follows in flight would be stored behind the rows of the first attempt."""
    with pytest.raises(SequenceReusedError):
        decide_append(after(3), numbered(6), is_clashed=True)
    with pytest.raises(SequenceReusedError):
        decide_append(after(3), numbered(4), is_clashed=True)


def test_gap_is_refused():
    """An earlier batch is missing."""
    with pytest.raises(SequenceGapError):
        decide_append(after(3), numbered(8))
    with pytest.raises(SequenceGapError):
        decide_append(None, numbered(2))
    with pytest.raises(InvalidRequestError):
        decide_append(None, numbered(MAX_I64, digest=0))
