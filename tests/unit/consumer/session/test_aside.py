"""What waits for retry: when it is due, and what is held while a source cannot be read."""

from __future__ import annotations

import pytest

from keylane.consumer.session.parking import AsideMessages, DueRetry

PAUSE_MS = 100
DEAD, ALIVE = 1, 2


def pause_ms(failures: int) -> int:
    return PAUSE_MS * failures


def tries(*sources: int) -> AsideMessages:
    """Two messages of each source are due at 0."""
    due = AsideMessages()
    for source in sources:
        for offset in (10, 20):
            due.put(0, offset, source, (offset, offset + 1))  # of a number of tries each
    return due


def take(due: AsideMessages, now_ms: int, count: int = 10) -> DueRetry:
    taken = due.take_due(count, now_ms)
    assert taken is not None
    return taken


def fail(due: AsideMessages, taken: DueRetry, now_ms: int) -> None:
    due.put_back(taken, now_ms, pause_ms)


def test_take_gives_up_to_a_count_of_one_source_and_number_of_tries():
    due = AsideMessages()
    due.put(0, 1, ALIVE, (0, 3))
    due.put(0, 1, ALIVE, (3, 8))
    due.put(0, 2, ALIVE, (8, 9))
    assert take(due, 0, count=5) == (1, ALIVE, ((0, 5),), False)
    assert len(due) == 2
    assert take(due, 0) == (1, ALIVE, ((5, 8),), False)
    assert take(due, 0) == (2, ALIVE, ((8, 9),), False)
    assert due.take_due(1, 0) is None


def test_take_gives_nothing_before_it_is_due():
    due = AsideMessages()
    due.put(7, 1, ALIVE, (0, 1))
    assert due.waiting[0].due_ms == 7
    assert due.take_due(1, 6) is None
    assert len(due) == 1
    assert take(due, 7).ranges == ((0, 1),)


def test_failing_source_is_asked_by_one_take_at_a_time_after_longer_and_longer_pauses():
    due = tries(DEAD)
    fail(due, take(due, 0), 0)
    assert due.take_due(1, 0) is None  # the other message is held
    assert due.waiting[0].due_ms == PAUSE_MS
    probing = take(due, PAUSE_MS)
    assert probing.is_probe
    assert due.take_due(1, PAUSE_MS) is None
    assert not due.waiting
    fail(due, probing, PAUSE_MS)
    assert due.waiting[0].due_ms == PAUSE_MS + 2 * PAUSE_MS
    assert len(due) == 2


def test_reads_that_were_under_way_when_a_source_failed_are_one_failure():
    due = tries(DEAD)
    under_way = [take(due, 0), take(due, 0)]
    for taken in under_way:
        fail(due, taken, 0)
    assert len(due) == 2
    assert take(due, PAUSE_MS).is_probe
    assert due.take_due(1, 10 * PAUSE_MS) is None


def test_held_messages_are_due_when_their_source_answers():
    due = tries(DEAD)
    fail(due, take(due, 0), 0)
    assert due.take_due(1, 0) is None
    take(due, PAUSE_MS)
    due.note_read(DEAD)
    again = take(due, PAUSE_MS)
    assert again == (20, DEAD, ((20, 21),), False)
    fail(due, again, PAUSE_MS)
    assert due.waiting[0].due_ms == 2 * PAUSE_MS  # the failures before do not count


def test_other_sources_go_on_when_a_source_fails():
    due = tries(DEAD, ALIVE)
    fail(due, take(due, 0), 0)
    taken = [due.take_due(10, 0) for _ in range(3)]
    assert [each.ranges for each in taken if each is not None] == [((10, 11),), ((20, 21),)]


def test_messages_of_a_failing_source_ask_in_turn_when_its_broker_lacks_one_of_them():
    """A broker on an older copy of its data folder lacks the last messages; those that it has are
    tried.
    """
    due = tries(DEAD)
    due.put(0, 30, DEAD, (30, 31))
    lacked, now_ms = ((10, 11),), 0
    read: list[tuple[int, int]] = []
    for _ in range(12):
        taken = due.take_due(10, now_ms)
        if taken is None:
            assert due.waiting
            now_ms = due.waiting[0].due_ms
        elif taken.ranges == lacked:
            fail(due, taken, now_ms)
        else:
            due.note_read(DEAD)
            read += taken.ranges
    assert read == [(20, 21), (30, 31)]
    assert len(due) == 1


@pytest.mark.parametrize(
    ("upto", "asked"), [(None, [(10, 11), (11, 14)]), (12, [(10, 12), (12, 14)])]
)
def test_messages_behind_one_that_cannot_be_read_ask_in_turn(upto, asked):
    """A batch of a source is damaged: the messages behind it, which wait in the same range of
    offsets, are tried.
    """
    due = AsideMessages()
    due.put(0, 1, DEAD, (10, 14))
    due.put_back(take(due, 0), 0, pause_ms, upto=upto)
    first = take(due, PAUSE_MS)
    due.put_back(first, PAUSE_MS, pause_ms, upto=upto)
    assert due.waiting
    behind = take(due, due.waiting[0].due_ms)
    assert [first.ranges, behind.ranges] == [(each,) for each in asked]
    assert behind.is_probe


def test_failed_keeps_a_range_whole_when_none_of_it_can_be_read():
    due = AsideMessages()
    due.put(0, 1, DEAD, (10, 14))
    due.put_back(take(due, 0), 0, pause_ms, upto=20)
    assert take(due, PAUSE_MS).ranges == ((10, 14),)


def test_take_holds_all_that_is_due_of_failing_sources_at_once():
    """However many messages are due, the event loop goes round once for them."""
    due = tries(DEAD)
    fail(due, take(due, 0), 0)
    for offset in range(100, 200):
        due.put(0, offset, DEAD, (offset, offset + 1))
    due.put(1, 1, ALIVE, (0, 1))
    assert take(due, 1).source == ALIVE
    assert due.take_due(1, 1) is None
    assert due.waiting[0].due_ms == PAUSE_MS


def test_source_has_messages_until_all_of_them_are_taken():
    due = tries(DEAD, ALIVE)
    fail(due, take(due, 0), 0)
    for _ in range(3):
        due.take_due(10, 0)
    assert (due.has_any_of(DEAD), due.has_any_of(ALIVE)) == (True, False)
    due.put(0, 1, ALIVE, (0, 9))
    take(due, 0, count=5)
    assert due.has_any_of(ALIVE)
    take(due, 0)
    assert not due.has_any_of(ALIVE)
