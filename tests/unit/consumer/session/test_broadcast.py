"""A broadcast consumer's session: no broker learns of it."""

import random

import pytest

from keylane.consumer.session.events import (
    CallFailed,
    FindBroker,
    LeaseGranted,
    MessageFailed,
    Note,
    NoteKind,
    Paused,
    Pulled,
    Stopped,
    Tick,
    WorkWanted,
)
from keylane.consumer.session.state import LocalAcks, PartitionSession
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import OffsetOutOfRangeError, UnreachableError
from keylane.protocol.frames import Read
from keylane.protocol.limits import READ_WAIT_MS
from keylane.protocol.message import Message
from keylane.protocol.offsets import AckedOffsets
from support.session.partition_model import PARTITION_ID, BatchModel
from support.session.steps import FAILURE, Steps, offsets_of

A, NONE = b"a", b""
NO_END_MS = 1 << 53


def reading(*keys: bytes, acked: AckedOffsets | None = None, **given: object) -> Steps:
    """A session of a broadcast consumer, which has sent its first read."""
    steps = Steps(*keys)
    settings = ConsumerSettings(broadcast=True, handler_backoff=Backoff(first_ms=100, max_ms=100))
    broadcast = LocalAcks(AckedOffsets() if acked is None else acked, **given)
    lease = (PARTITION_ID, "", "", 0)
    steps.session = PartitionSession(lease, settings, random.Random(1), broadcast=broadcast)
    steps.step(LeaseGranted(NO_END_MS))
    return steps


def reads(steps: Steps) -> list[int]:
    """The offsets from which the last step has read."""
    return [read.offset for read in steps.requested(Read)]


def test_session_reads_without_a_group():
    steps = reading(A)
    [read] = steps.ready.requests
    assert (type(read), read.partition_id, read.offset) == (Read, PARTITION_ID, 0)
    assert read.wait_ms == READ_WAIT_MS, "the broker waits for messages"


def test_handled_messages_are_acked_in_the_process():
    acked = AckedOffsets()
    steps = reading(A, A, NONE, acked=acked)
    steps.pull(3)
    steps.want(2)
    steps.handle(0, 2)
    assert acked.cursor == 0
    steps.step(Tick(), after_ms=20)
    assert (acked.cursor, acked.ranges) == (1, [(2, 3)])
    assert not steps.ready.requests


def test_next_session_goes_on_where_this_one_ended():
    steps = reading(NONE, NONE, NONE, NONE, acked=AckedOffsets(1, [(2, 3)]))
    assert reads(steps) == [1]
    steps.step(Pulled([BatchModel(steps.keys, 1, 4)], 4, 4))
    assert steps.want(9) == [1, 3]


def test_failed_message_is_tried_again_and_no_broker_is_told():
    steps = reading(A, A)
    steps.pull(2)
    [message] = steps.step(WorkWanted(1)).hand_out
    steps.step(MessageFailed(message, FAILURE))
    assert steps.want() == []
    steps.step(Tick(), after_ms=20)
    assert not steps.ready.requests
    [again] = steps.step(WorkWanted(1), after_ms=100).hand_out
    assert (again.offset, again.attempt) == (0, 2)


def test_hand_over_acks_and_ends_without_a_release():
    acked = AckedOffsets()
    steps = reading(A, acked=acked)
    steps.pull(1)
    steps.want()
    steps.step(Stopped(500))
    assert not steps.session.has_ended
    steps.handle(0)
    assert steps.session.has_ended
    assert acked.cursor == 1
    assert not steps.ready.requests


def test_failed_read_looks_for_the_broker_and_reads_again_after_a_pause():
    steps = reading(A)
    [read] = steps.requested(Read)
    steps.step(CallFailed(read, UnreachableError("no answer")))
    assert [type(request) for request in steps.ready.requests] == [FindBroker]
    steps.step(Tick(), after_ms=2_000)
    assert reads(steps) == [0]


def test_broker_that_stores_less_than_was_read_is_asked_again():
    steps = reading(A, A)
    steps.pull(2)
    [read] = steps.requested(Read)
    error = OffsetOutOfRangeError(offset=2, first_offset=0, next_offset=1)
    steps.step(CallFailed(read, error))
    assert not steps.session.has_ended
    steps.step(Tick(), after_ms=2_000)
    assert reads(steps) == [2]


def test_removed_messages_are_counted_and_need_no_ack():
    acked = AckedOffsets()
    steps = reading(*[A] * 9, acked=acked)
    [read] = steps.requested(Read)
    error = OffsetOutOfRangeError(offset=0, first_offset=4, next_offset=9)
    steps.step(CallFailed(read, error))
    assert steps.ready.notes == (Note(NoteKind.MISSED, 4, 4),)
    assert reads(steps) == [4]
    assert acked.cursor == 4


def test_read_that_brings_nothing_at_once_is_repeated_after_a_pause():
    steps = reading()
    steps.step(Pulled([], 0, 0))
    assert reads(steps) == []
    steps.step(Tick(), after_ms=10)
    assert reads(steps) == [0]
    steps.step(Pulled([], 0, 0), after_ms=5_000)
    assert reads(steps) == [0], "this broker waits for messages"


def test_acks_that_could_not_be_kept_are_kept_at_the_hand_over():
    class FullOffsets(AckedOffsets):
        is_full = True

        def add(self, start: int, end: int) -> None:
            if self.is_full:
                raise MemoryError("no")
            super().add(start, end)

    acked = FullOffsets()
    steps = reading(A, acked=acked)
    steps.pull(1)
    steps.want()
    steps.handle(0)
    with pytest.raises(MemoryError):
        steps.step(Tick(), after_ms=20)
    acked.is_full = False
    steps.step(Stopped(500))
    assert acked.cursor == 1


def test_paused_session_reads_nothing():
    steps = reading(A)
    steps.step(Paused(True))
    steps.step(Pulled([], 0, 1), after_ms=5_000)
    assert reads(steps) == []
    steps.step(Paused(False))
    assert reads(steps) == [0]


def test_sealed_partition_is_drained_when_all_is_handled():
    steps = reading(A)
    steps.pull(1, sealed=True)
    steps.want()
    assert not steps.session.is_drained
    steps.handle(0)
    assert steps.session.is_drained, "its children wait: the last acks do not linger"


def test_rows_whose_originals_were_handled_are_left_out():
    def is_superfluous(message: Message) -> bool:
        return message.offset == 1

    steps = reading(A, A, A, is_superfluous=is_superfluous)
    steps.pull(3)
    assert offsets_of(steps.step(WorkWanted(9, 9, 9)).hand_out) == [0, 2]
    assert steps.session.intake.held == 2
    steps.step(Tick(), after_ms=20)
    assert 1 in steps.session.offsets.acked
