"""The schedule index decides which scheduled messages are due, taken, given back, canceled,
delivered; and from its records.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import TypeVar

import pytest

from keylane.broker.scheduled import schedule_index as schedule_index_module
from keylane.broker.scheduled.records import (
    Canceled,
    Delivered,
    DroppedMessages,
    Place,
    ScheduledMessageRecord,
    Taken,
    bind_to_subject,
)
from keylane.broker.scheduled.schedule_index import (
    DELIVERY_BYTES_MAX,
    DELIVERY_COUNT_MAX,
    DUE_MAX,
    SETTLED_MAX,
    ScheduledEntry,
    ScheduleIndex,
)
from keylane.protocol.errors import Reason
from keylane.protocol.scheduled.receipt import CancelOutcome
from support.raising import raises

PLACE = Place(100, 100)
CANCELED, DELIVERED = CancelOutcome.CANCELED, CancelOutcome.DELIVERED
R = TypeVar("R")


def number(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


def waits(
    name: str, at_ms: int, *, subject: str = "s", value: bytes = b"v"
) -> ScheduledMessageRecord:
    return ScheduledMessageRecord(number(name), at_ms, subject, 0, value, b"")


def schedule_index_of(*messages: ScheduledMessageRecord) -> ScheduleIndex:
    schedule_index = ScheduleIndex()
    for message in messages:
        schedule_index.add(message, PLACE)
    return schedule_index


def ended(look: Generator[None, None, R]) -> R:
    """What a look returns at its end."""
    while True:
        try:
            next(look)
        except StopIteration as end:
            return end.value


def soonest(
    schedule_index: ScheduleIndex, limit: int, subject: str | None = None
) -> tuple[int, list[ScheduledEntry]]:
    return ended(schedule_index.list_soonest(limit, subject))


def cancel(schedule_index: ScheduleIndex, name: str) -> None:
    assert schedule_index.cancel(number(name)) is None
    schedule_index.on_canceled(number(name), PLACE.position)


def taken(schedule_index: ScheduleIndex, now_ms: int, boot_ms: int = 0) -> list[list[str]]:
    """Names of the messages that are taken now, by batch."""
    return [
        [entry.scheduled_id.rstrip(b"\0").decode() for entry in batch]
        for batch in schedule_index.take_due(now_ms, boot_ms)
    ]


def test_messages_are_taken_by_subject_at_their_times_the_oldest_first():
    schedule_index = schedule_index_of(
        waits("c", 30), waits("a", 10), waits("b", 20), waits("other", 15, subject="t")
    )
    assert schedule_index.next_due_ms == 10
    assert taken(schedule_index, 9) == []
    assert taken(schedule_index, 20) == [["a", "b"], ["other"]]
    assert schedule_index.next_due_ms == 30


def test_busy_subject_has_one_delivery_at_a_time():
    """What becomes due meanwhile is in the next."""
    schedule_index = schedule_index_of(waits("a", 10), waits("b", 20), waits("c", 20))
    assert taken(schedule_index, 10) == [["a"]]
    assert taken(schedule_index, 20) == []
    schedule_index.release_subject("s")
    assert taken(schedule_index, 20) == [["b", "c"]]


def test_delivery_has_a_limit_of_messages_and_of_bytes():
    many = [waits(f"{each}", each) for each in range(DELIVERY_COUNT_MAX + 1)]
    schedule_index = schedule_index_of(*many)
    assert len(taken(schedule_index, 10_000)[0]) == DELIVERY_COUNT_MAX
    schedule_index.release_subject("s")
    assert len(taken(schedule_index, 10_000)[0]) == 1
    large = bytes(DELIVERY_BYTES_MAX)
    schedule_index = schedule_index_of(waits("a", 1, value=large), waits("b", 2), waits("c", 3))
    assert taken(schedule_index, 3) == [["a"]]
    schedule_index.release_subject("s")
    assert taken(schedule_index, 3) == [["b", "c"]]


def test_canceled_message_is_never_taken():
    """Neither one that waits, nor one that is due behind a delivery of its subject."""
    schedule_index = schedule_index_of(waits("a", 10), waits("b", 20), waits("c", 30))
    assert taken(schedule_index, 10) == [["a"]]
    assert taken(schedule_index, 20) == []
    for name in ("b", "c"):
        cancel(schedule_index, name)
        assert schedule_index.cancel(number(name)) is CANCELED
    schedule_index.release_subject("s")
    assert taken(schedule_index, 30) == []
    assert schedule_index.next_due_ms is None
    assert schedule_index.bytes == schedule_index.entries[number("a")].size


def test_cancel_of_a_taken_message_has_no_outcome_until_it_is_given_back():
    """It was "delivered" once; then the message was given back, and another cancel was carried
    out.
    """
    schedule_index = schedule_index_of(waits("a", 10))
    taken(schedule_index, 10)
    assert schedule_index.is_in_delivery(number("a"))
    with raises(Reason.SCHEDULED_TAKEN):
        schedule_index.cancel(number("a"))
    schedule_index.requeue([number("a")], retry_at_ms=50)
    schedule_index.release_subject("s")
    assert (schedule_index.next_due_ms, schedule_index.next_try_ms) == (None, 50)
    assert taken(schedule_index, 10, boot_ms=49) == []
    assert schedule_index.cancel(number("a")) is None


def test_unknown_message_cannot_be_canceled():
    """Nor one that was settled SETTLED_MAX messages ago."""
    schedule_index = schedule_index_of(*(waits(f"{each}", 1) for each in range(SETTLED_MAX + 1)))
    with raises(Reason.SCHEDULED_UNKNOWN):
        schedule_index.cancel(number("strange"))
    for each in range(SETTLED_MAX + 1):
        cancel(schedule_index, f"{each}")
    with raises(Reason.SCHEDULED_UNKNOWN):
        schedule_index.cancel(number("0"))
    assert schedule_index.cancel(number("1")) is CANCELED


def test_cancel_that_was_not_written_is_undone():
    schedule_index = schedule_index_of(waits("a", 10))
    assert schedule_index.cancel(number("a")) is None
    assert taken(schedule_index, 10) == []
    schedule_index.requeue([number("a")])
    assert taken(schedule_index, 10) == [["a"]]


def test_dropped_message_is_settled_and_the_others_of_its_delivery_wait():
    schedule_index = schedule_index_of(waits("a", 10), waits("b", 10))
    taken(schedule_index, 10)
    schedule_index.begin_delivery(Taken("d", "s", 0, (number("a"), number("b"))), 1)
    schedule_index.requeue([number("b")])
    schedule_index.begin_drop([number("a")])
    assert schedule_index.is_settling(PLACE.position + 1)
    assert not schedule_index.is_needed(number("a"), PLACE)
    schedule_index.on_dropped([number("a")], 300)
    assert not schedule_index.is_settling(PLACE.position + 1)
    assert schedule_index.cancel(number("a")) is CancelOutcome.DROPPED
    schedule_index.release_subject("s")
    assert taken(schedule_index, 10) == [["b"]]


def test_drop_that_was_not_written_is_undone():
    schedule_index = schedule_index_of(waits("a", 10))
    taken(schedule_index, 10)
    schedule_index.begin_drop([number("a")])
    schedule_index.requeue([number("a")], retry_at_ms=20)
    schedule_index.release_subject("s")
    assert taken(schedule_index, 10, boot_ms=20) == [["a"]]


def test_messages_for_two_subjects_of_a_name_are_in_two_deliveries():
    schedule_index = schedule_index_of(
        bind_to_subject(waits("a", 1), 7),
        bind_to_subject(waits("b", 2), 8),
        bind_to_subject(waits("c", 3), 8),
    )
    assert taken(schedule_index, 5) == [["a"]]
    schedule_index.release_subject("s")
    assert taken(schedule_index, 5) == [["b", "c"]]


def test_soonest_messages_are_named_by_their_times():
    schedule_index = schedule_index_of(
        *(waits(f"{each}", 100 - each) for each in range(5)), waits("x", 1, subject="t")
    )
    count, entries = soonest(schedule_index, 2, "s")
    assert (count, [each.deliver_at_ms for each in entries]) == (5, [96, 97])
    assert soonest(schedule_index, 9)[0] == 6
    assert soonest(ScheduleIndex(), 9) == (0, [])


def test_soonest_messages_are_looked_for_in_portions(monkeypatch):
    """The first ones of all portions, in the order of their times; one that is settled meanwhile is
    left out.
    """
    monkeypatch.setattr(schedule_index_module, "SEARCH_COUNT", 7)
    times = random.Random(5).choices(range(40), k=60)
    schedule_index = schedule_index_of(
        *(waits(f"{each}", at_ms) for each, at_ms in enumerate(times))
    )
    for limit in (1, 10, 100):
        count, entries = soonest(schedule_index, limit)
        assert (count, entries) == (
            60,
            sorted(schedule_index.entries.values(), key=lambda each: each.deliver_at_ms)[:limit],
        )
    look = schedule_index.list_soonest(3)
    for _ in range(2):
        next(look)
    first = soonest(schedule_index, 1)[1][0]
    schedule_index.cancel(first.scheduled_id)
    schedule_index.on_canceled(first.scheduled_id, 1)
    count, entries = ended(look)
    assert (count, first in entries) == (59, False)


def test_stored_delivery_settles_its_messages():
    schedule_index = schedule_index_of(waits("a", 10), waits("b", 10))
    taken(schedule_index, 10)
    schedule_index.begin_delivery(Taken("d", "s", 0, (number("a"), number("b"))), 1)
    schedule_index.end_delivery("d")
    assert not schedule_index.entries
    assert schedule_index.bytes == 0
    assert schedule_index.cancel(number("a")) is DELIVERED
    assert schedule_index.knows(number("b"))


def test_replay_finds_a_dropped_message_of_a_delivery():
    both = (number("a"), number("b"))
    schedule_index = replayed(
        bind_to_subject(waits("a", 10), 7),
        bind_to_subject(waits("b", 10), 7),
        Taken("d", "s", 0, both),
        DroppedMessages(both[:1]),
    )
    assert schedule_index.cancel(both[0]) is CancelOutcome.DROPPED
    assert not schedule_index.deliveries
    assert schedule_index.entries[both[1]].subject_id == 7
    assert taken(schedule_index, 10) == [["b"]]


def replayed(*records: object) -> ScheduleIndex:
    schedule_index = ScheduleIndex()
    for position, record in enumerate(records):
        schedule_index.replay(record, Place(position, 1))
    schedule_index.finish_replay()
    return schedule_index


A, B = waits("a", 10), waits("b", 20)
TAKEN = Taken("d", "s", 7, (A.scheduled_id, B.scheduled_id))


def test_replay_has_the_deliveries_that_are_not_stored():
    """Their messages are not taken a second time."""
    schedule_index = replayed(A, B, TAKEN, waits("c", 15))
    assert schedule_index.deliveries["d"].scheduled_ids == TAKEN.scheduled_ids
    assert taken(schedule_index, 100) == [["c"]]
    assert schedule_index.is_in_delivery(A.scheduled_id)


def test_replay_settles_stored_deliveries_and_canceled_messages():
    schedule_index = replayed(
        A, B, TAKEN, Delivered("d", TAKEN.scheduled_ids), waits("c", 15), Canceled(number("c"))
    )
    assert not schedule_index.entries
    assert not schedule_index.deliveries


def test_replay_gives_back_what_is_left_of_a_delivery_that_stored_nothing():
    """One of its messages was canceled later, or is in a later delivery."""
    schedule_index = replayed(A, B, TAKEN, Canceled(A.scheduled_id))
    assert not schedule_index.deliveries
    assert taken(schedule_index, 100) == [["b"]]
    schedule_index = replayed(A, B, TAKEN, Taken("e", "s", 8, (B.scheduled_id,)))
    assert list(schedule_index.deliveries) == ["e"]
    assert taken(schedule_index, 100) == [["a"]]


def test_replay_knows_records_that_were_written_again():
    """A message behind its delivery, and a message twice, as after a repeat."""
    schedule_index = replayed(TAKEN, B, A, A)
    assert list(schedule_index.deliveries) == ["d"]
    assert taken(schedule_index, 100) == []
    schedule_index.end_delivery("d")
    assert not schedule_index.entries


def test_records_are_settling_until_the_ones_that_settle_their_messages_are_durable():
    """Meanwhile the messages are neither written again nor removed."""
    a, b = number("a"), number("b")
    schedule_index = schedule_index_of(waits("a", 10), waits("b", 20))
    assert not schedule_index.is_settling(101)
    schedule_index.cancel(b)
    assert schedule_index.is_settling(101)
    assert not schedule_index.is_settling(100), "only what is below a position is removed"
    assert not schedule_index.is_needed(b, PLACE)
    schedule_index.requeue([b])
    assert not schedule_index.is_settling(101)
    assert schedule_index.is_needed(b, PLACE)
    assert not schedule_index.is_needed(b, Place(90, 1)), "it was written again"
    taken(schedule_index, 10)
    schedule_index.begin_delivery(Taken("d", "s", 0, (a,)), 50)
    schedule_index.end_delivery("d")
    assert schedule_index.is_settling(51)
    assert not schedule_index.is_settling(50)
    assert not schedule_index.is_needed(a, PLACE)
    schedule_index.on_delivered(Delivered("d", (a,)), 300)
    assert not schedule_index.is_settling(101)


def test_end_of_a_delivery_settles_its_messages_when_its_beginning_is_removed():
    """The oldest segment had the record of the delivery, and the messages were written again before
    their end.
    """
    assert not replayed(A, B, Delivered("d", TAKEN.scheduled_ids)).entries


def test_only_waiting_messages_and_open_deliveries_are_written_again():
    schedule_index = replayed(A, B, TAKEN, waits("c", 15), waits("d", 16), Canceled(number("d")))
    assert schedule_index.is_needed(A.scheduled_id, Place(0, 1))
    assert schedule_index.is_needed(number("c"), Place(3, 1))
    assert not schedule_index.is_needed(number("d"), Place(4, 1))
    assert schedule_index.open_deliveries(2) == []
    assert schedule_index.open_deliveries(3) == schedule_index.open_deliveries() == [TAKEN]
    schedule_index.relocate([A, B, TAKEN, waits("c", 15)], Place(20, 1))
    assert not schedule_index.is_needed(A.scheduled_id, Place(0, 1))
    assert schedule_index.is_needed(A.scheduled_id, Place(20, 1))
    assert schedule_index.open_deliveries(20) == []
    cancel(schedule_index, "c")
    schedule_index.relocate([waits("c", 15)], Place(30, 1))
    assert number("c") not in schedule_index.entries


@pytest.mark.parametrize(
    "end",
    [
        Canceled(A.scheduled_id),
        Delivered("d", TAKEN.scheduled_ids),
        DroppedMessages(TAKEN.scheduled_ids),
    ],
    ids=["canceled", "delivered", "dropped"],
)
def test_end_of_a_message_is_written_again_when_its_record_is_removed(end):
    """A start that finds nothing else knows what became of the message."""
    records = [A, B, TAKEN, end] if not isinstance(end, Canceled) else [A, end]
    schedule_index = replayed(*records)
    assert schedule_index.settled_changes(len(records) - 1) == []
    again = schedule_index.settled_changes(len(records))
    assert len(again) == 1
    schedule_index.relocate(again, Place(20, 1))
    assert schedule_index.settled_changes(20) == []
    assert schedule_index.settled_changes(21) == again
    later = replayed(*again)
    assert later.knows(A.scheduled_id)
    assert later.cancel(A.scheduled_id) is schedule_index.cancel(A.scheduled_id)


def test_ends_of_deliveries_are_one_record_when_they_are_written_again():
    first, second = Delivered("d", TAKEN.scheduled_ids), Delivered("e", (number("c"),))
    schedule_index = replayed(A, B, waits("c", 15), first, second)
    again = schedule_index.settled_changes()
    assert again == [Delivered("", (*TAKEN.scheduled_ids, number("c")))]


def test_end_of_a_delivery_is_not_written_again_until_it_is_durable():
    schedule_index = replayed(A, B, TAKEN)
    schedule_index.end_delivery("d")
    delivered = Delivered("d", TAKEN.scheduled_ids)
    assert schedule_index.settled_changes() == []
    schedule_index.on_delivered(delivered, 9)
    assert schedule_index.settled_changes() == [Delivered("", TAKEN.scheduled_ids)]


def test_end_of_a_forgotten_message_is_not_written_again():
    """It may be sent anew, and an old record would settle it."""
    others = [waits(f"{each}", 1) for each in range(SETTLED_MAX - 1)]
    delivered = Delivered("d", TAKEN.scheduled_ids)
    schedule_index = replayed(A, B, TAKEN, delivered, *others)
    for each in range(SETTLED_MAX - 1):
        cancel(schedule_index, f"{each}")
    assert not schedule_index.knows(A.scheduled_id)
    again = schedule_index.settled_changes(4)
    assert again == [Delivered("", (B.scheduled_id,))]
    schedule_index.add(A, Place(20_000, 1))
    schedule_index.relocate(again, Place(30_000, 1))
    assert list(schedule_index.entries) == [A.scheduled_id]


def copied(schedule_index: ScheduleIndex) -> ScheduleIndex:
    copy = ScheduleIndex()
    for image in schedule_index.images():
        copy.restore(image)
    return copy


def test_copy_has_what_the_index_has():
    schedule_index = replayed(
        *(A, bind_to_subject(B, 7), TAKEN, waits("c", 15), waits("d", 16), waits("e", 17)),
        *(Canceled(number("d")), DroppedMessages((number("e"),))),
    )
    copy = copied(schedule_index)
    copy.finish_replay()
    assert copy.entries == schedule_index.entries
    assert copy.deliveries == schedule_index.deliveries
    assert copy.settled_changes() == schedule_index.settled_changes()
    assert copy.bytes == schedule_index.bytes
    assert taken(copy, 100) == [["c"]]


def test_copy_knows_the_end_of_a_delivery_when_its_record_is_not_durable():
    """The batch is stored; its record is written again before anything of the log is removed."""
    schedule_index = replayed(A, B, TAKEN)
    schedule_index.end_delivery("d")
    copy = copied(schedule_index)
    assert copy.cancel(A.scheduled_id) is DELIVERED
    assert copy.settled_changes(1) == [Delivered("", TAKEN.scheduled_ids)]


def test_canceled_messages_take_no_memory_until_their_times():
    """Reminders that are mostly canceled: as few are remembered as wait."""
    schedule_index = schedule_index_of(waits("kept", 2_000_000))
    for each in range(20 * SETTLED_MAX):
        schedule_index.add(waits(f"{each}", 1_000_000 + each), PLACE)
        cancel(schedule_index, f"{each}")
    assert len(schedule_index._due_heap) < 2 * SETTLED_MAX
    assert schedule_index.next_due_ms == 2_000_000
    assert taken(schedule_index, 2_000_000) == [["kept"]]


def test_due_messages_become_ready_in_steps_when_there_are_very_many():
    """A step keeps the event loop for milliseconds, also where a quarter of a million are due."""
    schedule_index = schedule_index_of(
        *(waits(f"{each}", each, subject=f"s{each}") for each in range(DUE_MAX + 1))
    )
    assert len(taken(schedule_index, DUE_MAX)) == DUE_MAX
    assert schedule_index.next_due_ms == DUE_MAX
    assert taken(schedule_index, DUE_MAX) == [[f"{DUE_MAX}"]]


@pytest.mark.parametrize("tried", [False, True])
def test_message_waits_for_its_time_when_the_calendar_is_set_back(tried):
    """Also one that was ready, behind another of its subject, or had been tried: its time comes by
    the new calendar.
    """
    schedule_index = schedule_index_of(waits("first", 10), waits("a", 50))
    assert taken(schedule_index, 20) == [["first"]]
    if tried:
        schedule_index.release_subject("s")
        assert taken(schedule_index, 50) == [["a"]]
        schedule_index.requeue([number("a")], retry_at_ms=7)
    assert taken(schedule_index, 50, boot_ms=6) == []
    schedule_index.release_subject("s")
    assert taken(schedule_index, 49, boot_ms=7) == []
    assert schedule_index.next_due_ms == 50
    assert taken(schedule_index, 50, boot_ms=7) == [["a"]]
