"""Sequences: a batch is stored once, in order, or refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keylane.broker.partition.appends import (
    REMEMBERED_BATCHES,
    Duplicate,
    ProducerState,
    StoredBatch,
    after_append,
    decide_append,
)
from keylane.protocol.batch import check_batch
from keylane.protocol.errors import (
    InvalidRequestError,
    ProducerFencedError,
    SequenceGapError,
    SequenceReusedError,
)
from keylane.protocol.ids import MAX_I64
from keylane.protocol.record import Header
from sim.machines.store import batch


def header(sequence: int, count: int = 2, *, epoch: int = 0, value: bytes = b"value") -> Header:
    return check_batch(batch(sequence=sequence, count=count, epoch=epoch, value=value))


def stored(*batches: tuple[int, int], epoch: int = 0) -> ProducerState:
    """A producer after batches of (sequence, count), stored one after another from offset 100
    on.
    """
    state: ProducerState | None = None
    for sequence, count in batches:
        state = after_append(
            state, header(sequence, count, epoch=epoch), base_offset=100 + sequence
        )
    assert state is not None
    return state


def test_next_sequence_is_stored():
    """A batch that begins where the one before ended is stored; the first begins at 0."""
    assert decide_append(None, header(0)) is None
    assert decide_append(stored((0, 2)), header(2)) is None


@pytest.mark.parametrize(("sequence", "count", "offset"), [(0, 2, 100), (2, 3, 102), (5, 1, 105)])
def test_batch_sent_again_gets_its_offset_back(sequence, count, offset):
    """A batch that was stored is a duplicate at its old offset."""
    duplicate = decide_append(stored((0, 2), (2, 3), (5, 1)), header(sequence, count))

    assert duplicate == Duplicate(offset)


@pytest.mark.parametrize("stamps", [{"base_offset": 77}, {"position": 77}, {"appended_at_ms": 77}])
def test_repeat_is_known_by_what_its_producer_made(stamps):
    """What the broker stamps into a stored batch has no part in the comparison."""
    assert decide_append(stored((0, 2)), replace(header(0), **stamps)) == Duplicate(100)


def test_another_batch_under_a_stored_sequence_is_refused():
    """The count and the checksum have to be those of the stored batch; what is known is not enough
    for an ack.
    """
    for other in (header(2, 3, value=b"other"), header(2, 2), header(2, 4)):
        with pytest.raises(SequenceReusedError) as caught:
            decide_append(stored((0, 2), (2, 3), (5, 1)), other)
        assert caught.value.details == {"sequence": 2, "count": other.count, "expected": 6}


@pytest.mark.parametrize(("sequence", "count"), [(3, 1), (1, 1), (1, 3), (0, 5), (2, 4), (0, 6)])
def test_batch_across_stored_ones_is_refused(sequence, count):
    """A repeat has the bounds of its first sending: a part of a stored batch, or several of them,
    is none.
    """
    with pytest.raises(SequenceReusedError):
        decide_append(stored((0, 2), (2, 3), (5, 1)), header(sequence, count))


def test_batch_older_than_all_remembered_is_refused():
    """What was stored under its sequence is no longer known."""
    state = stored(*((number * 2, 2) for number in range(REMEMBERED_BATCHES + 1)))

    assert len(state.latest) == REMEMBERED_BATCHES
    assert decide_append(state, header(2)) == Duplicate(102)
    with pytest.raises(SequenceReusedError):
        decide_append(state, header(0))


def test_epoch_used_twice_stores_nothing_more():
    """What is stored is still told to be; a newer epoch begins again."""
    state = stored((0, 2), (2, 3))
    with pytest.raises(SequenceReusedError):
        decide_append(state, header(5), is_clashed=True)
    assert decide_append(state, header(2, 3), is_clashed=True) == Duplicate(102)
    assert decide_append(state, header(0, epoch=1), is_clashed=True) is None
    assert decide_append(None, header(0), is_clashed=True) is None


@pytest.mark.parametrize("sequence", [1, 4, 100])
def test_gap_is_refused(sequence):
    """A batch that leaves a gap is refused with the sequence that is expected."""
    state = None if sequence == 1 else stored((0, 2))
    with pytest.raises(SequenceGapError) as caught:
        decide_append(state, header(sequence))

    assert caught.value.expected == (0 if state is None else 2)


def test_batch_across_the_end_is_refused():
    """A batch under a sequence of which a part is stored is refused whole."""
    with pytest.raises(SequenceReusedError) as caught:
        decide_append(stored((0, 2)), header(1, 2))

    assert caught.value.expected == 2


def test_producer_may_begin_with_any_epoch():
    """Epochs rise over all partitions of a subject, so the first that one of them sees is any."""
    assert decide_append(None, header(0, epoch=7)) is None


def test_higher_epoch_begins_again():
    """A new epoch starts at sequence 0 and fences the epochs before it."""
    state = stored((0, 2))
    assert decide_append(state, header(0, epoch=1)) is None
    with pytest.raises(SequenceGapError):
        decide_append(state, header(2, epoch=1))

    newer = after_append(state, header(0, epoch=1), base_offset=200)
    with pytest.raises(ProducerFencedError):
        decide_append(newer, header(2, epoch=0))
    assert newer.latest == (StoredBatch(0, 2, 200, header(0, epoch=1).body_crc),)


def test_sequence_beyond_all_numbers_is_refused():
    """A sequence that would not fit 63 bits is refused."""
    with pytest.raises(InvalidRequestError):
        decide_append(None, header(MAX_I64 - 1))
