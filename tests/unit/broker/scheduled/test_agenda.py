"""The agenda decides which scheduled messages are due, taken, given back, canceled, delivered; and
from its records.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import TypeVar

import pytest

from keylane.broker.scheduled import agenda as agenda_module
from keylane.broker.scheduled.agenda import (
    DELIVERY_BYTES_MAX,
    DELIVERY_COUNT_MAX,
    DUE_MAX,
    SETTLED_BYTES,
    SETTLED_MAX,
    Agenda,
    ScheduledEntry,
)
from keylane.broker.scheduled.records import (
    Canceled,
    Delivered,
    DroppedMessages,
    Place,
    Taken,
    Waits,
    waits_for,
)
from keylane.protocol.errors import Reason
from keylane.protocol.scheduled.receipt import CancelOutcome
from support.raising import raises

PLACE = Place(1, 0, 100)
CANCELED, DELIVERED = CancelOutcome.CANCELED, CancelOutcome.DELIVERED
R = TypeVar("R")


def number(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


def waits(name: str, at_ms: int, *, subject: str = "s", value: bytes = b"v") -> Waits:
    return Waits(number(name), at_ms, subject, 0, value, b"")


def agenda_of(*messages: Waits) -> Agenda:
    agenda = Agenda()
    for message in messages:
        agenda.add(message, PLACE)
    return agenda


def ended(look: Generator[None, None, R]) -> R:
    """What a look returns at its end."""
    while True:
        try:
            next(look)
        except StopIteration as end:
            return end.value


def soonest(
    agenda: Agenda, limit: int, subject: str | None = None
) -> tuple[int, list[ScheduledEntry]]:
    return ended(agenda.soonest(limit, subject))


def cancel(agenda: Agenda, name: str) -> None:
    assert agenda.cancel(number(name)) is None
    agenda.canceled(number(name), PLACE.segment)


def taken(agenda: Agenda, now_ms: int, boot_ms: int = 0) -> list[list[str]]:
    """Names of the messages that are taken now, by batch."""
    return [
        [entry.scheduled_id.rstrip(b"\0").decode() for entry in batch]
        for batch in agenda.take(now_ms, boot_ms)
    ]


def test_messages_are_taken_by_subject_at_their_times_the_oldest_first():
    agenda = agenda_of(
        waits("c", 30), waits("a", 10), waits("b", 20), waits("other", 15, subject="t")
    )
    assert agenda.next_due_ms == 10
    assert taken(agenda, 9) == []
    assert taken(agenda, 20) == [["a", "b"], ["other"]]
    assert agenda.next_due_ms == 30


def test_busy_subject_has_one_delivery_at_a_time():
    """What becomes due meanwhile is in the next."""
    agenda = agenda_of(waits("a", 10), waits("b", 20), waits("c", 20))
    assert taken(agenda, 10) == [["a"]]
    assert taken(agenda, 20) == []
    agenda.free("s")
    assert taken(agenda, 20) == [["b", "c"]]


def test_delivery_has_a_limit_of_messages_and_of_bytes():
    many = [waits(f"{each}", each) for each in range(DELIVERY_COUNT_MAX + 1)]
    agenda = agenda_of(*many)
    assert len(taken(agenda, 10_000)[0]) == DELIVERY_COUNT_MAX
    agenda.free("s")
    assert len(taken(agenda, 10_000)[0]) == 1
    large = bytes(DELIVERY_BYTES_MAX)
    agenda = agenda_of(waits("a", 1, value=large), waits("b", 2), waits("c", 3))
    assert taken(agenda, 3) == [["a"]]
    agenda.free("s")
    assert taken(agenda, 3) == [["b", "c"]]


def test_canceled_message_is_never_taken():
    """Neither one that waits, nor one that is due behind a delivery of its subject."""
    agenda = agenda_of(waits("a", 10), waits("b", 20), waits("c", 30))
    assert taken(agenda, 10) == [["a"]]
    assert taken(agenda, 20) == []
    for name in ("b", "c"):
        cancel(agenda, name)
        assert agenda.cancel(number(name)) is CANCELED
    agenda.free("s")
    assert taken(agenda, 30) == []
    assert agenda.next_due_ms is None
    assert agenda.bytes == agenda.entries[number("a")].size


def test_cancel_of_a_taken_message_has_no_outcome_until_it_is_given_back():
    """It was "delivered" once; then the message was given back, and another cancel was carried
    out.
    """
    agenda = agenda_of(waits("a", 10))
    taken(agenda, 10)
    assert agenda.is_taken(number("a"))
    with raises(Reason.SCHEDULED_TAKEN):
        agenda.cancel(number("a"))
    agenda.give_back([number("a")], again_ms=50)
    agenda.free("s")
    assert (agenda.next_due_ms, agenda.next_try_ms) == (None, 50)
    assert taken(agenda, 10, boot_ms=49) == []
    assert agenda.cancel(number("a")) is None


def test_unknown_message_cannot_be_canceled():
    """Nor one that was settled SETTLED_MAX messages ago."""
    agenda = agenda_of(*(waits(f"{each}", 1) for each in range(SETTLED_MAX + 1)))
    with raises(Reason.SCHEDULED_UNKNOWN):
        agenda.cancel(number("strange"))
    for each in range(SETTLED_MAX + 1):
        cancel(agenda, f"{each}")
    with raises(Reason.SCHEDULED_UNKNOWN):
        agenda.cancel(number("0"))
    assert agenda.cancel(number("1")) is CANCELED


def test_cancel_that_was_not_written_is_undone():
    agenda = agenda_of(waits("a", 10))
    assert agenda.cancel(number("a")) is None
    assert taken(agenda, 10) == []
    agenda.give_back([number("a")])
    assert taken(agenda, 10) == [["a"]]


def test_dropped_message_is_settled_and_the_others_of_its_delivery_wait():
    agenda = agenda_of(waits("a", 10), waits("b", 10))
    taken(agenda, 10)
    agenda.begin(Taken("d", "s", 0, (number("a"), number("b"))), 1)
    agenda.give_back([number("b")])
    agenda.drop([number("a")])
    assert agenda.is_settling(PLACE.segment)
    assert not agenda.needed([waits("a", 10)], PLACE.segment)
    agenda.dropped([number("a")], PLACE.segment)
    assert not agenda.is_settling(PLACE.segment)
    assert agenda.cancel(number("a")) is CancelOutcome.DROPPED
    agenda.free("s")
    assert taken(agenda, 10) == [["b"]]


def test_drop_that_was_not_written_is_undone():
    agenda = agenda_of(waits("a", 10))
    taken(agenda, 10)
    agenda.drop([number("a")])
    agenda.give_back([number("a")], again_ms=20)
    agenda.free("s")
    assert taken(agenda, 10, boot_ms=20) == [["a"]]


def test_messages_for_two_subjects_of_a_name_are_in_two_deliveries():
    agenda = agenda_of(
        waits_for(waits("a", 1), 7), waits_for(waits("b", 2), 8), waits_for(waits("c", 3), 8)
    )
    assert taken(agenda, 5) == [["a"]]
    agenda.free("s")
    assert taken(agenda, 5) == [["b", "c"]]


def test_soonest_messages_are_named_by_their_times():
    agenda = agenda_of(
        *(waits(f"{each}", 100 - each) for each in range(5)), waits("x", 1, subject="t")
    )
    count, entries = soonest(agenda, 2, "s")
    assert (count, [each.deliver_at_ms for each in entries]) == (5, [96, 97])
    assert soonest(agenda, 9)[0] == 6
    assert soonest(Agenda(), 9) == (0, [])


def test_soonest_messages_are_looked_for_in_portions(monkeypatch):
    """The first ones of all portions, in the order of their times; one that is settled meanwhile is
    left out.
    """
    monkeypatch.setattr(agenda_module, "LOOK_COUNT", 7)
    times = random.Random(5).choices(range(40), k=60)
    agenda = agenda_of(*(waits(f"{each}", at_ms) for each, at_ms in enumerate(times)))
    for limit in (1, 10, 100):
        count, entries = soonest(agenda, limit)
        assert (count, entries) == (
            60,
            sorted(agenda.entries.values(), key=lambda each: each.deliver_at_ms)[:limit],
        )
    look = agenda.soonest(3)
    for _ in range(2):
        next(look)
    first = soonest(agenda, 1)[1][0]
    agenda.cancel(first.scheduled_id)
    agenda.canceled(first.scheduled_id, 1)
    count, entries = ended(look)
    assert (count, first in entries) == (59, False)


def test_stored_delivery_settles_its_messages():
    agenda = agenda_of(waits("a", 10), waits("b", 10))
    taken(agenda, 10)
    agenda.begin(Taken("d", "s", 0, (number("a"), number("b"))), 1)
    agenda.end("d")
    assert not agenda.entries
    assert agenda.bytes == 0
    assert agenda.cancel(number("a")) is DELIVERED
    assert agenda.knows(number("b"))


def test_replay_finds_a_dropped_message_of_a_delivery():
    both = (number("a"), number("b"))
    agenda = replayed(
        waits_for(waits("a", 10), 7),
        waits_for(waits("b", 10), 7),
        Taken("d", "s", 0, both),
        DroppedMessages(both[:1]),
    )
    assert agenda.cancel(both[0]) is CancelOutcome.DROPPED
    assert not agenda.deliveries
    assert agenda.entries[both[1]].subject_id == 7
    assert taken(agenda, 10) == [["b"]]


def replayed(*records: object) -> Agenda:
    agenda = Agenda()
    for position, record in enumerate(records):
        agenda.replay(record, Place(1, position, 1))
    agenda.finish()
    return agenda


A, B = waits("a", 10), waits("b", 20)
TAKEN = Taken("d", "s", 7, (A.scheduled_id, B.scheduled_id))


def test_replay_has_the_deliveries_that_are_not_stored():
    """Their messages are not taken a second time."""
    agenda = replayed(A, B, TAKEN, waits("c", 15))
    assert agenda.deliveries["d"].scheduled_ids == TAKEN.scheduled_ids
    assert taken(agenda, 100) == [["c"]]
    assert agenda.is_taken(A.scheduled_id)


def test_replay_settles_stored_deliveries_and_canceled_messages():
    agenda = replayed(
        A, B, TAKEN, Delivered("d", TAKEN.scheduled_ids), waits("c", 15), Canceled(number("c"))
    )
    assert not agenda.entries
    assert not agenda.deliveries


def test_replay_gives_back_what_is_left_of_a_delivery_that_stored_nothing():
    """One of its messages was canceled later, or is in a later delivery."""
    agenda = replayed(A, B, TAKEN, Canceled(A.scheduled_id))
    assert not agenda.deliveries
    assert taken(agenda, 100) == [["b"]]
    agenda = replayed(A, B, TAKEN, Taken("e", "s", 8, (B.scheduled_id,)))
    assert list(agenda.deliveries) == ["e"]
    assert taken(agenda, 100) == [["a"]]


def test_replay_knows_records_that_were_written_again():
    """A message behind its delivery, and a message twice, as after a repeat."""
    agenda = replayed(TAKEN, B, A, A)
    assert list(agenda.deliveries) == ["d"]
    assert taken(agenda, 100) == []
    agenda.end("d")
    assert not agenda.entries


def test_segment_is_settling_until_the_records_that_settle_its_messages_are_durable():
    """Meanwhile its messages are neither written again nor removed."""
    agenda = agenda_of(waits("a", 10), waits("b", 20))
    assert not agenda.is_settling(1)
    agenda.cancel(number("b"))
    assert agenda.is_settling(1)
    assert not agenda.needed([waits("b", 20)], 1)
    agenda.give_back([number("b")])
    assert not agenda.is_settling(1)
    assert agenda.needed([waits("b", 20)], 1)
    taken(agenda, 10)
    agenda.begin(Taken("d", "s", 0, (number("a"),)), 3)
    agenda.end("d")
    assert agenda.is_settling(1)
    assert agenda.is_settling(3)
    assert not agenda.is_settling(2)
    assert not agenda.needed([waits("a", 10)], 1)
    agenda.ended(Delivered("d", (number("a"),)), 3)
    assert not agenda.is_settling(1)


def test_end_of_a_delivery_settles_its_messages_when_its_beginning_is_removed():
    """The oldest segment had the record of the delivery, and the messages were written again before
    their end.
    """
    assert not replayed(A, B, Delivered("d", TAKEN.scheduled_ids)).entries


def test_only_waiting_messages_and_open_deliveries_are_written_again():
    agenda = replayed(A, B, TAKEN, waits("c", 15), waits("d", 16), Canceled(number("d")))
    needed = [A, B, TAKEN, waits("c", 15)]
    assert agenda.needed([*needed, waits("d", 16)], 1) == needed
    assert agenda.needed(needed, 2) == []
    agenda.move(needed, Place(2, 0, 1))
    assert agenda.needed(needed, 2) == needed
    cancel(agenda, "c")
    agenda.move([waits("c", 15)], Place(3, 0, 1))
    assert number("c") not in agenda.entries


@pytest.mark.parametrize(
    "end",
    [
        Canceled(A.scheduled_id),
        Delivered("d", TAKEN.scheduled_ids),
        DroppedMessages(TAKEN.scheduled_ids),
    ],
    ids=["canceled", "delivered", "dropped"],
)
def test_end_of_a_message_is_written_again_when_its_segment_is_removed(end):
    """A start that finds nothing else knows what became of the message."""
    records = [A, B, TAKEN, end] if not isinstance(end, Canceled) else [A, end]
    agenda = replayed(*records)
    assert agenda.needed(records, 2) == []
    again = agenda.needed(records, PLACE.segment)
    assert len(again) == 1
    agenda.move(again, Place(2, 0, 1))
    assert agenda.needed([end], PLACE.segment) == []
    assert agenda.needed(again, 2) == again
    later = replayed(*again)
    assert later.knows(A.scheduled_id)
    assert later.cancel(A.scheduled_id) is agenda.cancel(A.scheduled_id)


def test_ends_of_deliveries_are_one_record_when_they_are_written_again():
    first, second = Delivered("d", TAKEN.scheduled_ids), Delivered("e", (number("c"),))
    agenda = replayed(A, B, waits("c", 15), first, second)
    again = agenda.needed([first, second, first], PLACE.segment)
    assert again == [Delivered("", (*TAKEN.scheduled_ids, number("c")))]


def test_end_of_a_delivery_is_not_written_again_until_it_is_durable():
    agenda = replayed(A, B, TAKEN)
    agenda.end("d")
    delivered = Delivered("d", TAKEN.scheduled_ids)
    assert agenda.needed([delivered], 1) == agenda.needed([delivered], 2) == []
    agenda.ended(delivered, 2)
    assert agenda.needed([delivered], 2) == [Delivered("", TAKEN.scheduled_ids)]


def test_end_of_a_forgotten_message_is_not_written_again():
    """It may be sent anew, and an old record would settle it."""
    others = [waits(f"{each}", 1) for each in range(SETTLED_MAX - 1)]
    delivered = Delivered("d", TAKEN.scheduled_ids)
    agenda = replayed(A, B, TAKEN, delivered, *others)
    for each in range(SETTLED_MAX - 1):
        cancel(agenda, f"{each}")
    assert not agenda.knows(A.scheduled_id)
    again = agenda.needed([delivered], PLACE.segment)
    assert again == [Delivered("", (B.scheduled_id,))]
    agenda.add(A, Place(2, 0, 1))
    agenda.move(again, Place(3, 0, 1))
    assert list(agenda.entries) == [A.scheduled_id]


def test_settled_messages_count_as_bytes_of_the_journal():
    """Else it would be cleaned again and again for them."""
    agenda = agenda_of(A, B)
    before = agenda.journal_bytes
    cancel(agenda, "a")
    assert agenda.bytes == B.size
    assert agenda.journal_bytes == before - A.size + SETTLED_BYTES


def test_canceled_messages_take_no_memory_until_their_times():
    """Reminders that are mostly canceled: as few are remembered as wait."""
    agenda = agenda_of(waits("kept", 2_000_000))
    for each in range(20 * SETTLED_MAX):
        agenda.add(waits(f"{each}", 1_000_000 + each), PLACE)
        cancel(agenda, f"{each}")
    assert len(agenda._heap) < 2 * SETTLED_MAX
    assert agenda.next_due_ms == 2_000_000
    assert taken(agenda, 2_000_000) == [["kept"]]


def test_due_messages_become_ready_in_steps_when_there_are_very_many():
    """A step keeps the event loop for milliseconds, also where a quarter of a million are due."""
    agenda = agenda_of(*(waits(f"{each}", each, subject=f"s{each}") for each in range(DUE_MAX + 1)))
    assert len(taken(agenda, DUE_MAX)) == DUE_MAX
    assert agenda.next_due_ms == DUE_MAX
    assert taken(agenda, DUE_MAX) == [[f"{DUE_MAX}"]]


@pytest.mark.parametrize("tried", [False, True])
def test_message_waits_for_its_time_when_the_calendar_is_set_back(tried):
    """Also one that was ready, behind another of its subject, or had been tried: its time comes by
    the new calendar.
    """
    agenda = agenda_of(waits("first", 10), waits("a", 50))
    assert taken(agenda, 20) == [["first"]]
    if tried:
        agenda.free("s")
        assert taken(agenda, 50) == [["a"]]
        agenda.give_back([number("a")], again_ms=7)
    assert taken(agenda, 50, boot_ms=6) == []
    agenda.free("s")
    assert taken(agenda, 49, boot_ms=7) == []
    assert agenda.next_due_ms == 50
    assert taken(agenda, 50, boot_ms=7) == [["a"]]
