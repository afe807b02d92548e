"""Messages that an iteration gave back come again in the order of their key."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keylane.consumer.handling.nacked import Nacked
from keylane.protocol.message import Message

KEYS = [b"", b"a", b"b"]
S = 1_000_000_000


class NackedMachine(RuleBasedStateMachine):
    """An iteration that takes, acks and gives back in any order; a model knows what is where."""

    def __init__(self) -> None:
        super().__init__()
        self.nacked = Nacked()
        self.now_ns = 0
        self.next_offset = 0
        self.out: dict[int, Message] = {}
        """With the user, by offset."""
        self.waits: dict[int, tuple[Message, int]] = {}
        """Given back or held, by offset; with the time at which it is due."""
        self.acked: set[int] = set()

    @rule(key=st.sampled_from(KEYS))
    def arrive(self, key: bytes) -> None:
        message = Message("s", key, b"", self.next_offset, 1, 0)
        self.next_offset += 1
        held = self.nacked.hold(message)
        if key and any(each.key == key for each, _ in self.waits.values()):
            assert held, "an earlier message of its key waits"
        if held:
            self.waits[message.offset] = message, 0
        else:
            self.out[message.offset] = message

    @precondition(lambda self: self.out)
    @rule(data=st.data(), wait_s=st.integers(0, 5))
    def give_back(self, data: st.DataObject, wait_s: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        message = self.out.pop(offset)
        self.nacked.nack(message, self.now_ns + wait_s * S)
        self.waits[offset] = message, self.now_ns + wait_s * S

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.out)))
        self.nacked.acked(self.out.pop(offset))
        self.acked.add(offset)

    @rule(seconds=st.integers(0, 5))
    def take(self, seconds: int) -> None:
        self.now_ns += seconds * S
        message = self.nacked.take(self.now_ns)
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
        """Acking all that comes, nothing is left behind."""
        while self.waits or self.out:
            for offset in sorted(self.out):
                self.nacked.acked(self.out.pop(offset))
                self.acked.add(offset)
            self.take(10)
        assert not self.nacked
        assert self.acked == set(range(self.next_offset))

    @rule()
    def drop(self) -> None:
        """A hand-over forgets the messages that wait, and counts them."""
        assert self.nacked.drop(2) == 0
        assert self.nacked.drop(1) == len(self.waits)
        self.acked |= self.waits.keys()
        self.waits.clear()
        assert not self.nacked

    @invariant()
    def count_is_right(self) -> None:
        assert self.nacked.waiting == len(self.waits)
        if any(due_ns <= self.now_ns for _, due_ns in self.waits.values()):
            blocked = self.out and self.nacked
            assert blocked or self.nacked.next_ns() is not None


TestNacked = NackedMachine.TestCase
