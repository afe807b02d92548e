"""Which failed message is retried when: by due time, on few workers, within a share of the workers'
time.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.consumer.handling.retries import LONG_NS, PAUSE_MAX_NS, RETRY_TIME_DIVISOR, Retries
from keylane.protocol.message import Message

SECOND_NS = 1_000_000_000


def message(offset: int, partition_id: int = 1) -> Message:
    return Message("s", b"%d" % offset, b"", offset, partition_id, 0)


def test_tries_are_taken_by_time():
    """In whatever order messages fail, they are retried by due time, and none early."""
    retries = Retries(100)
    for offset, due_ns in enumerate((30, 10, 20, 40)):
        retries.add(message(offset), due_ns)
    assert retries.next_ns(0, first_attempts_wait=False) == 10
    assert retries.take_due(5, first_attempts_wait=False) == []
    assert [failed.offset for failed in retries.take_due(30, first_attempts_wait=False)] == [
        1,
        2,
        0,
    ]
    assert retries.next_ns(30, first_attempts_wait=False) == 40
    assert len(retries) == 1


def test_quarter_of_the_workers_retries_at_once():
    """The other workers are free for other messages; the next retry may start when one ends."""
    for concurrency, places in ((1, 1), (4, 1), (16, 4), (100, 25)):
        retries = Retries(concurrency)
        for offset in range(200):
            retries.add(message(offset), 0)
        taken = retries.take_due(1, first_attempts_wait=False)
        assert len(taken) == places
        assert retries.next_ns(1, first_attempts_wait=False) is None, "only an end makes room"
        retries.end(taken[0], 2)
        assert len(retries.take_due(2, first_attempts_wait=False)) == 1


def test_hanging_try_does_not_delay_other_tries():
    """After ten seconds it is no longer counted."""
    retries = Retries(4)
    for offset in range(3):
        retries.add(message(offset), 0)
    (hanging,) = retries.take_due(1, first_attempts_wait=False)
    retries.begin(hanging, 5)
    assert retries.next_ns(6, first_attempts_wait=False) == 5 + LONG_NS
    assert retries.take_due(4 + LONG_NS, first_attempts_wait=False) == []
    assert len(retries.take_due(5 + LONG_NS, first_attempts_wait=False)) == 1


def test_retries_get_their_share_of_the_time_while_first_tries_wait():
    """On one worker, half a second of retries is followed by first attempts; without those there is
    no pause.
    """
    retries = Retries(1)
    for offset in range(3):
        retries.add(message(offset), 0)
    (first,) = retries.take_due(SECOND_NS, first_attempts_wait=True)
    retries.begin(first, SECOND_NS * 3 // 2)
    retries.end(first, 2 * SECOND_NS)
    next_ns = retries.next_ns(2 * SECOND_NS, first_attempts_wait=True)
    assert next_ns is not None
    assert (
        (RETRY_TIME_DIVISOR / 2 + 1.4) * SECOND_NS
        < next_ns
        < (RETRY_TIME_DIVISOR / 2 + 1.6) * SECOND_NS
    )
    assert retries.take_due(next_ns - 1, first_attempts_wait=True) == []
    assert retries.next_ns(2 * SECOND_NS, first_attempts_wait=False) == 0
    assert len(retries.take_due(2 * SECOND_NS, first_attempts_wait=False)) == 1


def test_slow_retries_pause_no_longer_than_the_limit():
    """An attempt that times out after a minute is retried half a minute later, not forty
    minutes.
    """
    retries = Retries(1)
    for offset in range(2):
        retries.add(message(offset), 0)
    (first,) = retries.take_due(SECOND_NS, first_attempts_wait=True)
    retries.begin(first, SECOND_NS)
    retries.end(first, 60 * SECOND_NS)
    next_ns = retries.next_ns(60 * SECOND_NS, first_attempts_wait=True)
    assert next_ns is not None
    assert next_ns <= 60 * SECOND_NS + PAUSE_MAX_NS


def test_drop_leaves_other_partitions():
    """The partition's waiting messages are returned; the order of the others is unchanged."""
    retries = Retries(100)
    for offset in range(10):
        retries.add(message(offset, 1 + offset % 2), 10 - offset)
    assert {
        failed.offset for failed in retries.drop(lambda message: message.partition_id == 1)
    } == {0, 2, 4, 6, 8}
    assert [failed.offset for failed in retries.take_due(10, first_attempts_wait=False)] == [
        9,
        7,
        5,
        3,
        1,
    ]
    assert retries.drop(lambda message: message.partition_id == 1) == []


class RetriesMachine(RuleBasedStateMachine):
    """No message is lost or retried twice at the same time, for any order of calls."""

    def __init__(self):
        super().__init__()
        self.retries = Retries(8)
        self.now_ns = 1
        self.waiting = {}
        self.under_way = []
        self.offset = 0

    @rule(wait_ns=st.integers(0, 5 * SECOND_NS), partition_id=st.integers(1, 3))
    def wait(self, wait_ns, partition_id):
        failed = message(self.offset, partition_id)
        self.offset += 1
        self.waiting[failed.offset] = (self.now_ns + wait_ns, failed)
        self.retries.add(failed, self.now_ns + wait_ns)

    @rule(ns=st.integers(0, 30 * SECOND_NS))
    def time_passes(self, ns):
        self.now_ns += ns

    @rule(first_attempts_wait=st.booleans())
    def take(self, first_attempts_wait):
        for failed in self.retries.take_due(self.now_ns, first_attempts_wait=first_attempts_wait):
            due_ns, _ = self.waiting.pop(failed.offset)
            assert due_ns <= self.now_ns
            self.under_way.append(failed)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def begin(self, data):
        self.retries.begin(data.draw(st.sampled_from(self.under_way)), self.now_ns)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), again=st.booleans())
    def end(self, data, again):
        failed = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove(failed)
        if again:
            self.waiting[failed.offset] = (self.now_ns + 7, failed)
            self.retries.add(failed, self.now_ns + 7)
        self.retries.end(failed, self.now_ns)

    @rule(partition_id=st.integers(1, 3))
    def drop(self, partition_id):
        for failed in self.retries.drop(lambda message: message.partition_id == partition_id):
            assert failed.partition_id == partition_id
            del self.waiting[failed.offset]
        assert all(failed.partition_id != partition_id for _, failed in self.waiting.values())

    @invariant()
    def counted(self):
        assert len(self.retries) == len(self.waiting)

    @invariant()
    def something_can_happen(self):
        """Check that while messages wait, the next due time is known or a retry must end first."""
        if self.waiting:
            next_ns = self.retries.next_ns(self.now_ns, first_attempts_wait=True)
            assert next_ns is not None or self.under_way


TestRetriesMachine = RetriesMachine.TestCase
