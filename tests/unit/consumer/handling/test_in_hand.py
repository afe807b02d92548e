"""Messages that an iteration gave back are handed out again in the order of their key."""

from __future__ import annotations

from collections import deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.consumer.handling.in_hand import UnackedMessages
from keylane.protocol.message import Message

KEYS = [b"", b"a", b"b"]
S = 1_000_000_000


class InHandMachine(RuleBasedStateMachine):
    """Takes, acks and gives back in any order; a model tracks each message."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = UnackedMessages()
        self.now_ns = 0
        self.next_offset = 0
        self.out: dict[int, Message] = {}
        """The messages that the user has, by offset."""
        self.waits: dict[int, tuple[Message, int]] = {}
        """The messages that were given back or are held, by offset, with their due times."""
        self.acked: set[int] = set()

    @rule(key=st.sampled_from(KEYS))
    def arrive(self, key: bytes) -> None:
        message = Message("s", key, b"", self.next_offset, 1, 0)
        self.next_offset += 1
        held = self.lanes.take_first(deque([message]), -1, ordered=False) is None
        if key and any(each.key == key for each, _ in self.waits.values()):
            assert held, "an earlier message of its key waits"
        if held:
            self.waits[message.offset] = message, 0
        else:
            self.out[message.offset] = message

    @precondition(lambda self: self.out)
    @rule(data=st.data(), wait_s=st.integers(0, 5))
    def requeue(self, data: st.DataObject, wait_s: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        due_ns = self.now_ns + wait_s * S
        for back in self.lanes.requeue(self.out[offset], due_ns):
            self.waits[back.offset] = (
                self.out.pop(back.offset),
                due_ns if back.offset == offset else 0,
            )

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        self.lanes.record_ack(self.out.pop(offset))
        self.acked.add(offset)

    @rule(seconds=st.integers(0, 5))
    def take(self, seconds: int) -> None:
        self.now_ns += seconds * S
        message = self.lanes.take(self.now_ns)
        if message is None:
            return
        _, due_ns = self.waits.pop(message.offset)
        assert due_ns <= self.now_ns
        if message.key:
            earlier = [at for at, (each, _) in self.waits.items() if each.key == message.key]
            assert all(at > message.offset for at in earlier)
        self.out[message.offset] = message

    @rule()
    def drain(self) -> None:
        """Check that nothing is left when everything that is handed out is acked."""
        while self.waits or self.out:
            for offset in sorted(self.out):
                self.lanes.record_ack(self.out.pop(offset))
                self.acked.add(offset)
            self.take(10)
        assert not self.lanes
        assert self.acked == set(range(self.next_offset))

    @rule()
    def drop(self) -> None:
        """Check that a hand-over drops the waiting messages and counts them."""
        assert self.lanes.drop(lambda message: message.partition_id == 2) == 0
        assert self.lanes.drop(lambda message: message.partition_id == 1) == len(self.waits)
        self.acked |= self.waits.keys()
        self.waits.clear()
        assert not self.lanes

    @invariant()
    def count_is_right(self) -> None:
        assert self.lanes.waiting == len(self.waits)
        if any(due_ns <= self.now_ns for _, due_ns in self.waits.values()):
            blocked = self.out and self.lanes
            assert blocked or self.lanes.next_ns() is not None


class CollectMachine(RuleBasedStateMachine):
    """A program of an exclusive group that takes several messages at once, and acks and gives back
    in any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lanes = UnackedMessages()
        self.arrivals: deque[Message] = deque()
        self.now_ns = 0
        self.next_offset = 0
        self.out: dict[int, Message] = {}
        self.calls: dict[int, int] = {}
        """The call of `collect` that last handed each offset out."""
        self.call = 0
        self.keys: list[bytes] = []
        self.acked: set[int] = set()

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
    def arrive(self, keys: list[bytes]) -> None:
        for key in keys:
            self.arrivals.append(Message("s", key, b"", self.next_offset, 1, 0))
            self.keys.append(key)
            self.next_offset += 1

    @rule(count=st.integers(1, 5), seconds=st.integers(0, 3))
    def collect(self, count: int, seconds: int) -> None:
        self.now_ns += seconds * S
        self.call += 1
        for message in self.lanes.collect(self.arrivals, count, self.now_ns, ordered=True):
            assert message.offset not in self.out
            for at in range(message.offset):
                if message.key and self.keys[at] == message.key and at not in self.acked:
                    assert self.calls.get(at) == self.call, "it comes past an earlier one"
                    assert at in self.out
            self.out[message.offset] = message
            self.calls[message.offset] = self.call

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        self.lanes.record_ack(self.out.pop(offset))
        self.acked.add(offset)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), wait_s=st.integers(0, 3))
    def requeue(self, data: st.DataObject, wait_s: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        message = self.out[offset]
        back = {each.offset for each in self.lanes.requeue(message, self.now_ns + wait_s * S)}
        later = {at for at, each in self.out.items() if each.key == message.key and at > offset}
        assert back == {offset} | (later if message.key else set())
        for each in back:
            del self.out[each]

    @rule()
    def drain(self) -> None:
        for _ in range(1_000):
            for offset in sorted(self.out):
                self.lanes.record_ack(self.out.pop(offset))
                self.acked.add(offset)
            if self.acked == set(range(self.next_offset)):
                break
            self.collect(5, 3)
        assert self.acked == set(range(self.next_offset))
        assert not self.lanes
        assert self.lanes.waiting == 0

    @invariant()
    def message_in_the_way_is_in_hand(self) -> None:
        stuck = self.lanes.blocking_message()
        assert stuck is None or self.out[stuck.offset] is stuck


TestCollect = CollectMachine.TestCase
TestInHand = InHandMachine.TestCase


def test_pause_of_a_message_is_its_own_when_another_partition_has_its_offset():
    """A dead letter of an earlier partition has the same key, and may have the same offset."""
    lanes = UnackedMessages()
    here, earlier = (Message("s", b"a", b"", 7, partition_id, 0) for partition_id in (2, 1))
    assert lanes.collect(deque([here, earlier]), 2, 0, ordered=True) == [here, earlier]
    lanes.requeue(earlier, 0)
    lanes.requeue(here, 5 * S)
    assert lanes.take(0) is earlier
    lanes.record_ack(earlier)
    assert lanes.take(4 * S) is None
    assert lanes.take(5 * S) is here
