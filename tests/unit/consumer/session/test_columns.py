"""Rows that a program takes as columns: one part of a partition at a time, whole and in order."""

from __future__ import annotations

import random
from collections import deque

import pytest

from keylane.consumer.session.events import (
    ColumnsCut,
    ColumnsHandled,
    ColumnsReturned,
    ColumnsWanted,
    Event,
    KeysListed,
    LeaseGranted,
    NoteKind,
    Paused,
    Pulled,
    Ready,
    SendChanges,
    Stopped,
    TakeTurn,
    Tick,
    TurnTaken,
)
from keylane.consumer.session.lanes import ClosedBatch, ColumnPart, take_part
from keylane.consumer.session.state import CAREFUL_MS, PartitionSession, Taking
from keylane.consumer.session.step import step
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.frames import Ack, Acked, Acquired
from keylane.protocol.message import Message
from keylane.protocol.offsets import Range
from keylane.protocol.parked import Park, ParkedKeyRow, ParkState

PARTITION_ID = 1
STORED = 300


class PulledRows:
    """A pulled batch; the key of a row is its offset modulo two."""

    size = 100

    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self.end = start + count

    def open(self) -> list[Message]:
        return [
            Message("s", b"%d" % (offset % 2), b"", offset, PARTITION_ID, 5)
            for offset in range(self.start, self.end)
        ]


class Columns:
    """A session whose program takes columns, and what it has asked for."""

    def __init__(self, acquired: Acquired | None = None, **settings: object) -> None:
        self.now_ms = 1_000
        self.session = PartitionSession(
            (PARTITION_ID, "g", "s", 5),
            ConsumerSettings(**settings),  # type: ignore[arg-type]
            random.Random(1),
            redrives_here=False,
            taking=Taking(by_column=True),
        )
        self.acks: list[Ack] = []
        self.cursor = 0
        self.feed(LeaseGranted(600_000))
        self.ready = self.feed(acquired or Acquired(0, (), 0, False))

    def feed(self, event: Event) -> Ready:
        self.ready = step(self.session, event, self.now_ms)
        self.acks += [request for request in self.ready.requests if isinstance(request, Ack)]
        return self.ready

    def pull(self, *sizes: int) -> None:
        start = self.session.offsets.next_offset
        batches = []
        for size in sizes:
            batches.append(PulledRows(start, size))
            start += size
        self.feed(Pulled(batches, start, start))

    def take(self) -> Range | None:
        self.feed(ColumnsWanted())
        part = self.part
        return None if part is None else part.range

    @property
    def part(self) -> ColumnPart | None:
        columns = self.session.lanes.columns
        assert columns is not None
        return columns.in_hand

    def handle(self) -> None:
        assert self.part is not None
        self.feed(ColumnsHandled(self.part))

    def give_back(self, wait_ms: int = 0, *, is_try: bool = True) -> ColumnPart:
        part = self.part
        assert part is not None
        self.feed(ColumnsReturned(part, wait_ms, is_try=is_try))
        return part

    def answer_acks(self) -> None:
        """The broker has stored the last ack request."""
        for start, end in self.acks[-1].ranges:
            self.cursor = max(self.cursor, end) if start <= self.cursor else self.cursor
        self.feed(Acked(self.cursor))


def test_pulled_batches_of_a_partition_are_joined_and_acked_together():
    columns = Columns()
    columns.pull(3, 2)
    assert columns.take() == (0, 5)
    columns.pull(1)
    assert columns.take() == (0, 5), "a part is in hand"
    assert not columns.ready.has_more
    columns.handle()
    assert columns.ready.has_more
    assert columns.take() == (5, 6)
    assert columns.session.intake.held == 1
    columns.now_ms += 1_000
    columns.feed(Tick())
    assert columns.acks[-1].ranges == ((0, 5),)


def test_gap_of_acked_messages_ends_a_part():
    columns = Columns(Acquired(0, ((0, 1), (3, 5)), 10, False))
    columns.pull(8, 2)
    places = []
    while (place := columns.take()) is not None:
        places.append(place)
        columns.handle()
    assert places == [(1, 3), (5, 10)]
    assert columns.session.intake.held == 0


def test_part_given_back_comes_first_once_it_is_due():
    columns = Columns()
    columns.pull(2)
    assert columns.take() == (0, 2)
    part = columns.give_back(2_000)
    columns.pull(2)
    assert columns.take() is None
    assert not columns.ready.has_more
    assert columns.session.intake.held == 4
    assert columns.ready.wait_until_ms <= columns.now_ms + 2_000
    columns.now_ms += 2_000
    columns.feed(Tick())
    assert columns.ready.has_more
    assert columns.take() == (0, 2)
    assert columns.part is part
    assert part.attempt == 2


def test_part_that_never_reached_the_program_comes_at_once_as_the_same_attempt():
    columns = Columns()
    columns.pull(2)
    columns.take()
    part = columns.give_back(is_try=False)
    assert columns.take() == (0, 2)
    assert part.attempt == 1


def test_paused_partition_gives_nothing_even_what_was_given_back():
    columns = Columns()
    columns.pull(2)
    columns.take()
    columns.give_back()
    columns.feed(Paused(True))
    assert not columns.ready.has_more
    assert columns.take() is None
    columns.feed(Paused(False))
    assert columns.ready.has_more
    assert columns.take() == (0, 2)


def test_partition_whose_lease_has_lapsed_gives_nothing_and_forgets_its_rows():
    columns = Columns()
    columns.pull(3)
    columns.now_ms = 600_000
    assert columns.take() is None
    assert columns.session.intake.held == 0


def test_rest_of_a_part_goes_back_in_front_when_it_is_cut():
    columns = Columns()
    columns.pull(3, 3, 3)
    assert columns.take() == (0, 9)
    columns.feed(ColumnsCut(3))
    assert columns.part is not None
    assert columns.part.range == (0, 3)
    columns.handle()
    assert columns.take() == (3, 9)
    assert columns.session.intake.held == 6


def test_rows_of_parked_keys_are_in_no_part():
    columns = Columns(Acquired(0, (), 4, False, (), 1))
    columns.feed(KeysListed(1, [ParkedKeyRow(b"0", ParkState.PARKED, 1)]))
    columns.pull(4)
    places = []
    while (place := columns.take()) is not None:
        places.append(place)
        columns.handle()
    assert places == [(1, 2), (3, 4)]
    changes = [change for change, *_ in columns.session.parking.in_flight]
    assert changes == [Park(b"0", ((0, 1), (2, 3)), None)]
    assert columns.session.intake.held == 0


def test_part_waits_for_the_ack_of_the_last_one_with_ack_each():
    columns = Columns(ack="each")
    columns.pull(2)
    columns.take()
    columns.handle()
    columns.pull(2)
    assert columns.take() is None
    columns.answer_acks()
    assert columns.ready.has_more
    assert columns.take() == (2, 4)


@pytest.mark.parametrize("is_in_hand", [False, True])
def test_handed_over_partition_keeps_what_is_in_hand_alone(is_in_hand: bool):
    columns = Columns()
    columns.pull(2)
    columns.take()
    if not is_in_hand:
        columns.give_back(5_000)
    columns.pull(2)
    columns.feed(Stopped(0))
    assert columns.session.intake.held == (2 if is_in_hand else 0)
    assert columns.session.lanes.is_idle is not is_in_hand
    if is_in_hand:
        columns.give_back(is_try=False)
        assert columns.session.intake.held == 0


# ── suspects ──────────────────────────────────────────────────────────────────────────────────────
def careful(cursor: int, begun: dict[int, int], *, upto: int = STORED) -> Columns:
    """All rows from the cursor on, in batches of 100."""
    columns = Columns(
        Acquired(cursor, (), STORED, False, suspects_upto=upto, begun=tuple(begun.items()))
    )
    columns.cursor = cursor
    first = cursor % 100
    columns.pull(*([100 - first] if first else []), *[100] * ((STORED - cursor) // 100))
    return columns


def begin(columns: Columns) -> tuple[Range, int]:
    """Let the next suspects begin; their rows, and the crashes that the broker has recorded."""
    columns.feed(ColumnsWanted())
    assert columns.part is None
    assert any(isinstance(request, TakeTurn) for request in columns.ready.requests)
    columns.feed(TurnTaken())
    ((last, crashes),) = columns.acks[-1].begun
    columns.answer_acks()
    assert columns.ready.has_more
    place = columns.take()
    assert place is not None
    assert last == place[1] - 1, "it was recorded before it was handed out"
    return place, crashes


@pytest.mark.parametrize("guilty", [0, 1, 99, 100, 150, 298, 299])
def test_guilty_row_is_alone_after_a_few_crashes_and_is_the_only_one_accused(guilty: int):
    cursor, begun, ends = 0, {}, 0
    while True:
        columns = careful(cursor, begun)
        while True:
            (start, end), crashes = begin(columns)
            assert start == cursor, "nothing is overtaken"
            assert columns.part is not None
            if start <= guilty < end:
                break
            assert not columns.part.crashes
            columns.handle()
            columns.answer_acks()
            cursor = end
        ends += 1
        begun = {offset: count for offset, count in begun.items() if offset >= cursor}
        begun[end - 1] = crashes
        if columns.part.crashes:
            break
    assert (start, end) == (guilty, guilty + 1)
    assert ends <= 5
    notes = [note for note in careful(cursor, begun).ready.notes if note.kind is NoteKind.CRASHED]
    assert notes == []
    assert begun[guilty] == 2


def test_suspects_given_back_are_no_longer_ones():
    columns = careful(0, {})
    begin(columns)
    columns.give_back()
    assert columns.take() is not None
    assert columns.acks[-1].begun == ((columns.part.offset, 1),)  # type: ignore[union-attr]


def test_careful_part_ends_in_time_but_not_before_an_accused_row():
    for begun, is_careful in (({}, False), ({200: 1}, True)):
        columns = careful(0, begun)
        columns.now_ms += CAREFUL_MS
        columns.feed(Tick())
        assert (columns.take() is None) is is_careful


def test_first_rows_of_a_batch_are_taken_up_to_an_end():
    stored = deque([ClosedBatch(PulledRows(0, 10), [(2, 5), (7, 10)], 0)])
    assert take_part(stored, end=4).range == (2, 4)
    assert take_part(stored).range == (4, 5)
    assert take_part(stored).range == (7, 10)
    assert not stored


def test_parked_rows_are_sent_to_the_broker_when_their_part_is_taken():
    columns = Columns(Acquired(0, (), 2, False, (), 1))
    columns.feed(KeysListed(1, [ParkedKeyRow(b"0", ParkState.PARKED, 1)]))
    columns.pull(1)
    columns.feed(ColumnsWanted())
    assert columns.part is None
    assert any(isinstance(request, SendChanges) for request in columns.ready.requests)
