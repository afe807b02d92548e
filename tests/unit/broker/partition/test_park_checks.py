"""Which of the asked changes are written: what is made already is left out, the rest must fit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keylane.broker.partition import park_checks
from keylane.broker.partition.park_checks import count_dead, decide_park_changes
from keylane.broker.partition.parked import Parked
from keylane.protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    OverloadedError,
    Reason,
)
from keylane.protocol.ids import MAX_I64
from keylane.protocol.limits import ACK_RANGES_MAX, KEY_BYTES_MAX
from keylane.protocol.offsets import AckedOffsets
from keylane.protocol.parked import (
    PARKED_ROWS_MAX,
    Adopt,
    AdoptedKey,
    Clear,
    DeadLetterKey,
    EditedMessage,
    Failure,
    FailureMark,
    Fault,
    Free,
    Freeze,
    Park,
    ParkChange,
    ParkOrDeadLetter,
    ParkState,
    Redrive,
    RequestedChange,
    Shift,
    Unpark,
)
from support.raising import raises

FAILURE = Failure("ValueError", "no", "c", 5, 3)


class CheckedDesk:
    """A group's progress on a partition of 100 messages, and what it has parked."""

    def __init__(self, acked: AckedOffsets | None = None) -> None:
        self.parked = Parked(7)
        self.acked = acked or AckedOffsets(0)
        self.token = 1

    def ask(self, *changes: RequestedChange) -> list[ParkChange]:
        """Have the changes checked and made."""
        wanted = decide_park_changes(
            self.parked, changes, self.acked, next_offset=100, token=self.token
        )
        for change in wanted:
            self.parked.apply(change, at_ms=1, acked=self.acked)
        return wanted


def test_repeat_of_a_request_changes_nothing():
    desk = CheckedDesk()
    asked = [Park(b"k", ((2, 4),), FAILURE), Park(b"k", ((7, 8),)), Park(None, ((9, 10),), FAILURE)]
    assert desk.ask(*asked) == asked
    before = desk.parked.image()
    desk.ask(*asked)
    assert desk.parked.image() == before
    assert desk.ask(asked[1]) == []


@pytest.mark.parametrize("leaves", [Shift(1, 2, 7, ((2, 3),), FAILURE), Unpark(1, 7, ((2, 3),))])
def test_failure_of_a_message_that_is_acked_makes_no_key_of_its_tries_when_the_last_one_leaves_it(
    leaves: RequestedChange,
):
    """Retention has removed a message while it was with its handler, and so it counts as acked."""
    desk = CheckedDesk()
    desk.ask(Park(1, ((2, 3),), FAILURE))
    desk.acked.add(5, 6)
    assert desk.ask(leaves, Park(1, ((5, 6),), FAILURE)) == [leaves]
    assert desk.parked.get(1) is None


def test_repeat_parks_no_message_that_was_handled_since():
    """The request is late: the key was redriven, handled and freed, and parked anew."""
    desk = CheckedDesk()
    desk.ask(Park(b"k", ((2, 4),), FAILURE))
    desk.ask(Redrive(b"k"))
    desk.ask(Unpark(b"k", 7, ((2, 4),)), Free(b"k"))
    late = desk.ask(Park(b"k", ((2, 4), (6, 7)), FAILURE))
    assert late == [Park(b"k", ((6, 7),), FAILURE)]


def test_late_request_parks_no_key_when_all_was_handled():
    desk = CheckedDesk(AckedOffsets(10))
    assert desk.ask(Park(b"k", ((2, 4),), FAILURE)) == []
    assert not desk.parked


def test_acked_messages_are_not_parked():
    desk = CheckedDesk(AckedOffsets(3, [(5, 6)]))
    assert desk.ask(Park(b"k", ((0, 8),), FAILURE)) == [Park(b"k", ((3, 5), (6, 8)), FAILURE)]


def test_message_is_parked_under_one_key():
    desk = CheckedDesk()
    wanted = desk.ask(Park(b"a", ((0, 3),), FAILURE), Park(b"b", ((2, 5), (2, 5)), FAILURE))
    assert wanted[1] == Park(b"b", ((3, 5),), FAILURE)
    assert desk.parked.messages == 5


def test_key_is_redriven_and_freed_once():
    desk = CheckedDesk()
    desk.ask(Park(b"k", ((2, 4),), FAILURE))
    assert desk.ask(Redrive(b"k"), Redrive(b"k")) == [Redrive(b"k")]
    assert desk.ask(Redrive(b"k"), Redrive(b"other"), Free(b"other")) == []
    asked = (Unpark(b"k", 7, ((2, 3),)), Unpark(b"k", 7, ((2, 4),)), Free(b"k"), Free(b"k"))
    assert desk.ask(*asked) == list(asked[:3])
    assert desk.ask(*asked) == []


def test_key_with_messages_is_not_freed():
    desk = CheckedDesk()
    desk.ask(Park(b"k", ((2, 4),), FAILURE))
    for changes in (
        [Free(b"k")],
        [Unpark(b"k", 7, ((2, 3),)), Free(b"k")],
        [Unpark(b"k", 3, ((2, 4),)), Free(b"k")],
        [Unpark(b"k", 7, ((2, 4),)), Park(b"k", ((5, 6),)), Free(b"k")],
    ):
        with pytest.raises(InvalidRequestError, match="parked messages"):
            desk.ask(*changes)
    assert desk.parked.messages == 2


def test_key_is_redriving_when_its_last_message_is_skipped():
    """Its owner frees it; later messages of the key wait for no operator."""
    desk = CheckedDesk()
    desk.ask(Park(b"k", ((2, 4),), FAILURE), Park(b"", ((5, 6),), FAILURE))
    skips = [Unpark(b"k", 7, ((2, 3),)), Unpark(b"k", 7, ((3, 4),)), Unpark(b"", 7, ((5, 6),))]
    assert desk.ask(*skips) == [*skips, Redrive(b"k")]
    desk.ask(Park(b"k", ((8, 9),)))
    assert desk.parked.get(b"k").state is ParkState.REDRIVING


def test_key_whose_messages_are_skipped_in_part_waits_on():
    desk = CheckedDesk()
    desk.ask(Park(b"k", ((2, 4),), FAILURE))
    skip = Unpark(b"k", 7, ((2, 3),))
    assert desk.ask(skip, skip) == [skip, skip]
    assert desk.parked.get(b"k").state is ParkState.PARKED


@pytest.mark.parametrize(
    "change",
    [
        Park(b"k", ((2, 4),)),
        Park(b"k", ((4, 4),), FAILURE),
        Park(b"k", ((-1, 4),), FAILURE),
        Park(b"k", ((99, 101),), FAILURE),
        Park(b"k" * (KEY_BYTES_MAX + 1), ((1, 2),), FAILURE),
        Unpark(b"a", 7, ((5, 3),)),
        Unpark(b"a", 7, ((5, MAX_I64 + 1),)),
        Adopt(0, (), last=True),
        Adopt(7, (), last=True),
        Adopt(3, (AdoptedKey(b"k", ParkState.PARKED, 1, None, ((3, 2, 2),)),), last=True),
        Adopt(3, (AdoptedKey(b"k", ParkState.PARKED, 1, None, ((0, 2, 3),)),), last=True),
        Adopt(3, (AdoptedKey(b"k", ParkState.PARKED, 1, None, ((3, 2, 2**63),)),), last=True),
        Adopt(3, (AdoptedKey(b"k" * 1025, ParkState.PARKED, 1, None, ()),), last=True),
        Adopt(
            3,
            (AdoptedKey(b"k", ParkState.PARKED, 1, None, ((3, 2, 3),) * (PARKED_ROWS_MAX + 1)),),
            last=True,
        ),
    ],
)
def test_impossible_change_is_refused_with_its_request(change: ParkChange):
    desk = CheckedDesk()
    desk.ask(Park(b"a", ((50, 51),), FAILURE))
    before = desk.parked.image(), desk.acked.cursor
    with pytest.raises(InvalidRequestError):
        desk.ask(Redrive(b"a"), change)
    assert (desk.parked.image(), desk.acked.cursor) == before


def test_frozen_takes_no_change_but_a_clear():
    desk = CheckedDesk()
    desk.ask(Park(b"k", ((2, 4),), FAILURE), Freeze())
    for change in (
        Park(b"k", ((5, 6),)),
        Unpark(b"k", 7, ((2, 3),)),
        Free(b"k"),
        Redrive(b"k"),
        Adopt(3, (), last=True),
    ):
        with raises(Reason.PARK_MOVED) as caught:
            desk.ask(change)
        assert caught.value.partition_id == 7
    assert desk.ask(Freeze()) == []
    assert desk.ask(Clear()) == [Clear()]
    assert desk.ask(Clear()) == []


def test_parent_is_adopted_once():
    desk = CheckedDesk()
    key = AdoptedKey(b"k", ParkState.PARKED, 1, None, ((3, 0, 1),))
    change = Adopt(3, (key,), last=True)
    assert desk.ask(change) == [change]
    desk.ask(Redrive(b"k"))
    desk.ask(Unpark(b"k", 3, ((0, 1),)), Free(b"k"))
    assert desk.ask(change) == []
    assert len(desk.parked) == 0


EDITED = EditedMessage(3, 1, b"v", b"")
MARK = FailureMark(3, 0, 2, 1, 2, 0, 3)
FAULTS = (Fault("E", "text", "c", 1),)


@pytest.mark.parametrize("rows_first", [True, False], ids=["rows first", "rows with them"])
def test_marks_and_edits_are_adopted_with_the_messages_that_they_are_of(rows_first):
    """A page may have the rows of a key, and a later one what is known of its messages."""
    rows = AdoptedKey(b"", ParkState.PARKED, 1, None, ((3, 0, 2),))
    known = AdoptedKey(b"", ParkState.PARKED, 1, None, (), (EDITED,), FAULTS, (MARK,))
    pages = [(rows,), (known,)] if rows_first else [(rows, known)]
    desk = CheckedDesk()
    for page in pages:
        desk.ask(Adopt(3, page, last=False))
    assert desk.parked.find_edit(b"", (3, 1)) == EDITED
    (mark,) = [mark for *_, mark in desk.parked.get(b"").failure_marks(3, ((0, 2),))]
    assert (mark.since_ms, mark.at_ms) == (1, 2)


def test_marks_and_edits_are_left_out_when_their_messages_are_not_parked():
    """A start that folds the change a second time would find the messages."""
    known = AdoptedKey(b"", ParkState.PARKED, 1, None, ((3, 1, 2),), (EDITED,), FAULTS, (MARK,))
    elsewhere = replace(known, key=b"k", rows=())
    (wanted,) = CheckedDesk().ask(Adopt(3, (known, elsewhere), last=False))
    assert [(key.edits, key.marks) for key in wanted.keys] == [
        ((EDITED,), (replace(MARK, start=1),)),
        ((), ()),
    ]


def full(desk: CheckedDesk, error: type[KeylaneError], *changes: RequestedChange) -> None:
    before = desk.parked.image()
    with raises(error):
        desk.ask(*changes)
    assert desk.parked.image() == before


def test_keys_have_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(park_checks, "PARKED_KEYS_MAX", 2)
    desk = CheckedDesk()
    desk.ask(Park(b"a", ((0, 1),), FAILURE))
    full(desk, Reason.PARK_FULL, Park(b"b", ((1, 2),), FAILURE), Park(b"c", ((2, 3),), FAILURE))
    desk.ask(Park(b"b", ((1, 2),), FAILURE))
    desk.ask(Park(b"a", ((3, 4),)), Park(b"a", ((4, 5),), FAILURE))
    desk.ask(Park(None, ((2, 3),), FAILURE))


def test_dead_letters_have_a_limit_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(park_checks, "PARKED_MESSAGES_MAX", 3)
    desk = CheckedDesk()
    desk.ask(Park(b"a", ((0, 3),), FAILURE))
    desk.ask(Park(None, ((3, 6),), FAILURE))
    full(desk, Reason.PARK_FULL, Park(None, ((6, 7),), FAILURE))
    full(desk, Reason.PARK_FULL, Park(b"a", ((6, 7),)))


def test_key_without_room_is_buried_and_so_is_what_follows(monkeypatch: pytest.MonkeyPatch):
    """Its later messages need no word that it is dead."""
    monkeypatch.setattr(park_checks, "PARKED_KEYS_MAX", 1)
    desk = CheckedDesk()
    assert desk.ask(ParkOrDeadLetter(b"a", ((0, 1),), FAILURE)) == [Park(b"a", ((0, 1),), FAILURE)]
    asked = [ParkOrDeadLetter(b"b", ((1, 2), (4, 5)), FAILURE), ParkOrDeadLetter(b"b", ((6, 7),))]
    buried = [DeadLetterKey(b"b", ((1, 2), (4, 5)), FAILURE), Park(b"b", ((6, 7),))]
    assert desk.ask(*asked) == buried
    assert desk.ask(ParkOrDeadLetter(b"b", ((8, 9),))) == [Park(b"b", ((8, 9),))]
    assert desk.ask(*asked[1:]) == []
    assert desk.parked.get(b"b").state is ParkState.DEAD
    assert list(desk.parked.get(b"b").rows()) == [(7, 1, 2), (7, 4, 5), (7, 6, 7), (7, 8, 9)]
    full(desk, Reason.PARK_FULL, ParkOrDeadLetter(b"c", ((2, 3),), FAILURE))
    assert desk.ask(ParkOrDeadLetter(b"", ((2, 3),), FAILURE)) == [Park(None, ((2, 3),), FAILURE)]


def test_parked_key_is_buried_whole_when_its_tail_finds_no_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(park_checks, "PARKED_MESSAGES_MAX", 4)
    desk = CheckedDesk()
    desk.ask(ParkOrDeadLetter(b"a", ((0, 2),), FAILURE), ParkOrDeadLetter(b"b", ((2, 4),), FAILURE))
    assert desk.ask(ParkOrDeadLetter(b"a", ((4, 5),))) == [DeadLetterKey(b"a", ((4, 5),))]
    assert count_dead(desk.parked) == (1, 3)
    assert desk.ask(ParkOrDeadLetter(b"b", ((5, 7),))) == [Park(b"b", ((5, 7),))]
    full(desk, Reason.PARK_FULL, ParkOrDeadLetter(b"a", ((7, 9),)))
    full(desk, Reason.PARK_FULL, ParkOrDeadLetter(b"b", ((7, 9),)))


def test_redriven_key_stays_so_when_its_tail_finds_no_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(park_checks, "PARKED_MESSAGES_MAX", 2)
    desk = CheckedDesk()
    desk.ask(ParkOrDeadLetter(b"a", ((0, 2),), FAILURE))
    desk.ask(Redrive(b"a"))
    assert desk.ask(ParkOrDeadLetter(b"a", ((2, 3),))) == [Park(b"a", ((2, 3),))]
    assert desk.parked.get(b"a").state is ParkState.REDRIVING


def test_dead_key_is_redriven_and_freed_as_a_parked_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(park_checks, "PARKED_KEYS_MAX", 1)
    desk = CheckedDesk()
    desk.ask(ParkOrDeadLetter(b"b", ((2, 3),), FAILURE), ParkOrDeadLetter(b"a", ((0, 2),), FAILURE))
    assert desk.parked.get(b"a").state is ParkState.DEAD
    assert desk.ask(Redrive(b"a")) == [Redrive(b"a")]
    desk.ask(Unpark(b"a", 7, ((0, 2),)), Free(b"a"))
    assert desk.parked.get(b"a") is None


def test_dead_key_whose_messages_are_all_skipped_is_freed_by_its_owner(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(park_checks, "PARKED_KEYS_MAX", 1)
    desk = CheckedDesk()
    desk.ask(ParkOrDeadLetter(b"b", ((2, 3),), FAILURE), ParkOrDeadLetter(b"a", ((0, 2),), FAILURE))
    assert desk.parked.get(b"a").state is ParkState.DEAD
    assert desk.ask(Unpark(b"a", 7, ((0, 2),)))[-1] == Redrive(b"a")


def test_messages_have_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(park_checks, "PARKED_MESSAGES_MAX", 5)
    desk = CheckedDesk()
    desk.ask(Park(b"a", ((0, 4),), FAILURE))
    full(desk, Reason.PARK_FULL, Park(b"a", ((4, 6),)))
    desk.ask(Park(b"a", ((4, 5),)))
    desk.ask(Park(b"a", ((2, 5),)), Redrive(b"a"))


def test_ranges_above_the_cursor_have_a_limit():
    spread = [(2 * number + 1, 2 * number + 2) for number in range(ACK_RANGES_MAX)]
    acked = AckedOffsets(0, spread)
    with pytest.raises(OverloadedError):
        decide_park_changes(
            Parked(7),
            [Park(b"k", ((2 * ACK_RANGES_MAX + 1, 2 * ACK_RANGES_MAX + 2),), FAILURE)],
            acked,
            next_offset=1 << 20,
            token=1,
        )


def test_parent_is_adopted_again_by_a_later_owner_alone():
    """Which asks where the parent was reset alone since; a repeat of the same owner, and one of an
    old image, change nothing.
    """
    parked, again = Parked(7), Adopt(3, (), last=True)
    parked.apply(again, at_ms=1, token=5)
    acked = AckedOffsets(0)
    assert decide_park_changes(parked, [again], acked, next_offset=9, token=5) == []
    assert decide_park_changes(parked, [again], acked, next_offset=9, token=6) == [again]
    unknown = Parked(7)
    unknown.apply(again, at_ms=1)
    assert decide_park_changes(unknown, [again], acked, next_offset=9, token=6) == []


OLD = Failure("ValueError", "no", "c", 5, 3)
NEW = Failure("TypeError", "none", "d", 9, 1)


@pytest.mark.parametrize("key", [None, b"", b"k"])
@pytest.mark.parametrize("first", [0, 1])
def test_redrive_is_kept_when_a_second_parent_has_messages_of_the_same_key(key, first):
    """Two parents of a merge: dead letters, messages without a key, or a key whose order is broken
    already.
    """
    redriven = AdoptedKey(key, ParkState.REDRIVING, 3, OLD, ((3, 0, 2),))
    parked = AdoptedKey(key, ParkState.PARKED, 1, NEW, ((4, 5, 6),))
    desk = CheckedDesk()
    changes = [Adopt(3, (redriven,), last=True), Adopt(4, (parked,), last=True)]
    for change in changes[first:] + changes[:first]:
        desk.ask(change)
    known = desk.parked.get(key)
    assert known is not None
    assert (known.state, known.failure, known.since_ms) == (ParkState.REDRIVING, NEW, 1)
    assert list(known.rows()) == [(3, 0, 2), (4, 5, 6)]


def test_dead_key_stays_dead_when_a_second_parent_has_parked_it():
    desk = CheckedDesk()
    for parent, state in ((3, ParkState.DEAD), (4, ParkState.PARKED)):
        key = AdoptedKey(b"k", state, 1, OLD, ((parent, 0, 2),))
        desk.ask(Adopt(parent, (key,), last=True))
    assert desk.parked.get(b"k").state is ParkState.DEAD


def test_key_without_messages_takes_the_state_of_what_is_adopted():
    """The redrive of before is over: nothing says that what comes now is handled."""
    desk = CheckedDesk()
    desk.ask(Park(b"k", ((2, 3),), FAILURE))
    desk.ask(Unpark(b"k", 7, ((2, 3),)))
    assert desk.parked.get(b"k").state is ParkState.REDRIVING
    desk.ask(Adopt(3, (AdoptedKey(b"k", ParkState.PARKED, 1, OLD, ((3, 0, 2),)),), last=True))
    assert desk.parked.get(b"k").state is ParkState.PARKED
