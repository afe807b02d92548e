"""What waits for retry: when it is due, and what is held while a source cannot be read."""

from __future__ import annotations

import pytest

from keylane.consumer.parking.retry_schedule import DueTry, RetrySchedule

PAUSE_NS = 100
DEAD, ALIVE = 1, 2


def pause_ns(failures: int) -> int:
    return PAUSE_NS * failures


def tries(*sources: int) -> RetrySchedule:
    """Two messages of each source are due at 0."""
    due = RetrySchedule()
    for source in sources:
        for offset in (10, 20):
            due.add(offset, source, (offset, offset + 1), 0)  # of a number of tries each
    return due


def take(due: RetrySchedule, now_ns: int, count: int = 10) -> DueTry:
    taken = due.take(count, now_ns)
    assert taken is not None
    return taken


def fail(due: RetrySchedule, taken: DueTry, now_ns: int) -> None:
    due.requeue_failed(taken, now_ns, pause_ns)


def test_take_gives_up_to_a_count_of_one_source_and_number_of_tries():
    due = RetrySchedule()
    due.add(1, ALIVE, (0, 3), 0)
    due.add(1, ALIVE, (3, 8), 0)
    due.add(2, ALIVE, (8, 9), 0)
    assert take(due, 0, count=5) == (1, ALIVE, [(0, 5)], False)
    assert len(due) == 2
    assert take(due, 0) == (1, ALIVE, [(5, 8)], False)
    assert take(due, 0) == (2, ALIVE, [(8, 9)], False)
    assert due.take(1, 0) is None


def test_take_gives_nothing_before_it_is_due():
    due = RetrySchedule()
    due.add(1, ALIVE, (0, 1), 7)
    assert due.next_ns == 7
    assert due.take(1, 6) is None
    assert len(due) == 1
    assert take(due, 7).ranges == [(0, 1)]


def test_failing_source_is_asked_by_one_take_at_a_time_after_longer_and_longer_pauses():
    due = tries(DEAD)
    fail(due, take(due, 0), 0)
    assert due.take(1, 0) is None  # the other message is held
    assert due.next_ns == PAUSE_NS
    probing = take(due, PAUSE_NS)
    assert probing.is_probe
    assert due.take(1, PAUSE_NS) is None
    assert due.next_ns is None
    fail(due, probing, PAUSE_NS)
    assert due.next_ns == PAUSE_NS + 2 * PAUSE_NS
    assert len(due) == 2


def test_reads_that_were_under_way_when_a_source_failed_are_one_failure():
    due = tries(DEAD)
    under_way = [take(due, 0), take(due, 0)]
    for taken in under_way:
        fail(due, taken, 0)
    assert len(due) == 2
    assert take(due, PAUSE_NS).is_probe
    assert due.take(1, 10 * PAUSE_NS) is None


def test_held_messages_are_due_when_their_source_answers():
    due = tries(DEAD)
    fail(due, take(due, 0), 0)
    assert due.take(1, 0) is None
    take(due, PAUSE_NS)
    due.on_success(DEAD)
    again = take(due, PAUSE_NS)
    assert again == (20, DEAD, [(20, 21)], False)
    fail(due, again, PAUSE_NS)
    assert due.next_ns == 2 * PAUSE_NS  # the failures before do not count


def test_other_sources_go_on_when_a_source_fails():
    due = tries(DEAD, ALIVE)
    fail(due, take(due, 0), 0)
    taken = [due.take(10, 0) for _ in range(3)]
    assert [each.ranges for each in taken if each is not None] == [[(10, 11)], [(20, 21)]]


def test_messages_of_a_failing_source_ask_in_turn_when_its_broker_lacks_one_of_them():
    """A broker on an older copy of its data folder lacks the last messages; those that it has are
    tried.
    """
    due = tries(DEAD)
    due.add(30, DEAD, (30, 31), 0)
    lacked, now_ns = [(10, 11)], 0
    read: list[tuple[int, int]] = []
    for _ in range(12):
        taken = due.take(10, now_ns)
        if taken is None:
            assert due.next_ns is not None
            now_ns = due.next_ns
        elif taken.ranges == lacked:
            fail(due, taken, now_ns)
        else:
            due.on_success(DEAD)
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
    due = RetrySchedule()
    due.add(1, DEAD, (10, 14), 0)
    due.requeue_failed(take(due, 0), 0, pause_ns, upto=upto)
    first = take(due, PAUSE_NS)
    due.requeue_failed(first, PAUSE_NS, pause_ns, upto=upto)
    assert due.next_ns is not None
    behind = take(due, due.next_ns)
    assert [first.ranges, behind.ranges] == [[each] for each in asked]
    assert behind.is_probe


def test_failed_keeps_a_range_whole_when_none_of_it_can_be_read():
    due = RetrySchedule()
    due.add(1, DEAD, (10, 14), 0)
    due.requeue_failed(take(due, 0), 0, pause_ns, upto=20)
    assert take(due, PAUSE_NS).ranges == [(10, 14)]


def test_take_holds_all_that_is_due_of_failing_sources_at_once():
    """However many messages are due, the event loop goes round once for them."""
    due = tries(DEAD)
    fail(due, take(due, 0), 0)
    for offset in range(100, 200):
        due.add(offset, DEAD, (offset, offset + 1), 0)
    due.add(1, ALIVE, (0, 1), 1)
    assert take(due, 1).source == ALIVE
    assert due.take(1, 1) is None
    assert due.next_ns == PAUSE_NS
