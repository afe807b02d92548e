"""Which of the messages that may have ended a process is handled next, and how."""

from __future__ import annotations

from typing import Any

from keylane.consumer.pulling.suspects import (
    CAREFUL_MAX,
    CAREFUL_MS,
    SuspectQueue,
    SuspectStep,
)
from keylane.consumer.settings import FailurePolicy
from keylane.protocol.message import Message

CAREFUL, PLAIN, SET_ASIDE = SuspectStep.CAREFUL, SuspectStep.PLAIN, SuspectStep.SET_ASIDE


def queue_of(upto: int, *begun: tuple[int, int], keys: str = "", **changes: Any) -> SuspectQueue:
    """A message of each key is put, from offset 0 on."""
    settings = {"now_ms": 0, "policy": FailurePolicy.PARK, "tries_max": 10} | changes
    queue = SuspectQueue(upto, begun, **settings)
    queue.put(message(offset, key.encode()) for offset, key in enumerate(keys))
    return queue


def message(offset: int, key: bytes = b"k") -> Message:
    return Message("s", key, b"", offset, 1, 0)


def steps(queue: SuspectQueue, next_offset: int) -> list[tuple[int, SuspectStep]]:
    """The steps until the careful part is over, or something has to be pulled."""
    taken = []
    while not queue.is_over(next_offset, 0) and (step := queue.next()) is not None:
        taken.append((step[0].offset, step[1]))
    return taken


def test_suspects_are_tried_alone_and_the_rest_is_handed_out():
    queue = queue_of(2, keys="abcd")
    assert steps(queue, 4) == [(0, CAREFUL), (1, CAREFUL)]
    assert [each.offset for each in queue.take_remaining()] == [2, 3]
    assert len(queue) == 0


def test_careful_part_is_not_over_before_all_suspects_are_pulled():
    queue = queue_of(4, keys="ab")
    assert steps(queue, 2) == [(0, CAREFUL), (1, CAREFUL)]
    assert not queue.is_over(2, 0)
    assert queue.is_over(4, 0), "the others were acked, or are stored no longer"


def test_accused_message_is_tried_again_once_and_then_set_aside():
    once, twice = queue_of(3, (1, 1), keys="abc"), queue_of(3, (1, 2), keys="abc")
    assert steps(once, 3) == [(0, CAREFUL), (1, CAREFUL), (2, CAREFUL)]
    assert steps(twice, 3) == [(0, CAREFUL), (1, SET_ASIDE), (2, CAREFUL)]


def test_end_that_made_suspects_counts_when_nothing_was_begun():
    """Once for each message that may have been with a handler; one end more, alone, is the
    second.
    """
    queue = queue_of(2, keys="abc")
    assert [queue.crashes_if_alone(offset) for offset in range(3)] == [2, 2, 1]
    assert [queue.crashes_if_shared(offset) for offset in range(3)] == [1, 1, 1]


def test_end_of_a_process_with_one_message_alone_accuses_no_other():
    """It has its culprit."""
    queue = queue_of(3, (1, 2), keys="abc")
    assert [queue.crashes_if_alone(offset) for offset in range(3)] == [1, 3, 1]


def test_crashes_count_as_tries():
    """One crash is enough behind `tries_max - 1` failed tries; failed tries alone are not."""
    accused, failed = message(0), message(1)
    accused.attempt = failed.attempt = 3
    queue = queue_of(2, (0, 1), tries_max=3)
    queue.put([accused, failed])
    assert accused.attempt == 4
    assert steps(queue, 2) == [(0, SET_ASIDE), (1, CAREFUL)]


def test_accused_message_is_tried_on_when_the_policy_is_block():
    queue = queue_of(1, (0, 9), keys="a", policy=FailurePolicy.BLOCK)
    assert steps(queue, 1) == [(0, CAREFUL)]


def test_message_behind_a_failed_one_of_its_key_waits_for_it():
    """Until the last of them has ended; messages without a key wait for none."""
    queue = queue_of(8, keys="a-aab")
    failed, _ = queue.next()
    queue.block_key(failed)
    no_key = message(5, b"")
    queue.put([no_key, message(6, b"a"), message(7, b"a")])
    queue.block_key(no_key)
    assert [queue.next()[1] for _ in range(6)] == [
        CAREFUL,
        PLAIN,
        PLAIN,
        CAREFUL,
        CAREFUL,
        PLAIN,
    ]
    queue.unblock_key(0)
    queue.unblock_key(3)
    assert queue._blocked_keys, "the last one that left has not ended"
    queue.unblock_key(6)
    assert queue.next()[1] is CAREFUL


def test_careful_part_is_short():
    """It ends after a number of messages, and after a time; but not before an accused message."""
    many = queue_of(10 * CAREFUL_MAX, keys="a" * (CAREFUL_MAX + 1))
    assert len(steps(many, CAREFUL_MAX + 1)) == CAREFUL_MAX
    late, accused = queue_of(9, keys="abc"), queue_of(9, (1, 1), keys="abc")
    assert late.is_over(3, CAREFUL_MS)
    assert not accused.is_over(3, CAREFUL_MS)
    accused.next()
    accused.next()
    assert accused.is_over(3, CAREFUL_MS)
