"""Acks of successive owners, in whatever order handlers end, with a broker that keeps few
ranges.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.broker.partition import acks as partition_acks
from keylane.broker.partition.acks import apply_ack, decide_ack
from keylane.consumer.session.offsets import HandledOffsets, PullOffsets
from keylane.protocol.errors import OverloadedError
from keylane.protocol.offsets import AckedOffsets

KEPT = 3
"""Ranges that the broker keeps above a cursor."""
BUFFER = 20

steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["pull", "end", "end", "end", "end", "ack", "ack", "lost ack", "lost answer", "go"]
        ),
        st.integers(0, 1_000),
    ),
    max_size=200,
)


class GroupProgress:
    """The group's progress on a partition of `end` messages."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.acked = AckedOffsets()

    def ack(self, ranges: tuple[tuple[int, int], ...]) -> None:
        decide_ack(self.acked, ranges, next_offset=self.end)
        apply_ack(self.acked, ranges)


class Owner:
    """What a session does with a partition, without its I/O."""

    def __init__(self, broker: GroupProgress) -> None:
        self.broker = broker
        self.offsets = PullOffsets()
        self.offsets.begin(broker.acked.cursor, tuple(broker.acked.ranges))
        self.acks = HandledOffsets()
        self.waiting: list[int] = []
        self.handled: set[int] = set()

    def pull(self, count: int) -> bool:
        """Pull more messages if there is capacity; returns True if any were pulled."""
        start = self.offsets.next_offset
        if self.acks.is_refused or len(self.waiting) >= BUFFER or start >= self.broker.end:
            return False
        end = min(self.broker.end, start + 1 + count % (2 * BUFFER))
        known = self.broker.acked
        self.waiting += [offset for offset in range(start, end) if offset not in known]
        self.offsets.next_offset = end
        return True

    def end_handler(self, number: int) -> None:
        """The handler at index `number`, modulo the running ones, ends."""
        if self.waiting:
            offset = self.waiting.pop(number % len(self.waiting))
            self.handled.add(offset)
            self.acks.add(offset, offset + 1)

    def send_acks(self, *, heard: bool = True, answered: bool = True) -> bool:
        """Send one request; returns False if the broker takes no ranges now."""
        ranges = self.acks.take()
        try:
            if heard:
                self.broker.ack(ranges)
        except OverloadedError:
            return self.acks.retract(is_refused=True)
        if heard and ranges:
            older = {offset for offset in self.handled if offset < ranges[-1][1]}
            assert all(offset in self.broker.acked for offset in older)
        if heard and answered:
            self.acks.confirm()
        else:
            self.acks.retract()
        return True

    def flush(self) -> None:
        """Send all acks, as a hand-over does."""
        for _ in range(2 * self.broker.end + 20):
            if not self.acks or not self.send_acks():
                return
        raise AssertionError("a hand-over that never ends")


@given(end=st.integers(1, 120), steps=steps, order=st.randoms(use_true_random=False))
def test_every_message_is_acked_in_whatever_order_handlers_end(end, steps, order):
    """Handlers end in any order, acks and answers get lost, owners change: the last owner acks
    everything.
    """
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(partition_acks, "ACK_RANGES_MAX", KEPT)
        broker = GroupProgress(end)
        owner = Owner(broker)
        for step, number in steps:
            match step:
                case "pull":
                    owner.pull(number)
                case "end":
                    owner.end_handler(number)
                case "ack":
                    owner.send_acks()
                case "lost ack":
                    owner.send_acks(heard=False)
                case "lost answer":
                    owner.send_acks(answered=False)
                case "go":
                    owner.flush()
                    owner = Owner(broker)
        while broker.acked.cursor < end:
            before = (owner.offsets.next_offset, len(owner.waiting), broker.acked.cursor)
            owner.pull(order.randrange(1_000))
            while owner.waiting:
                owner.end_handler(order.randrange(1_000))
                if order.random() < 0.5:
                    owner.send_acks()
            owner.flush()
            after = (owner.offsets.next_offset, len(owner.waiting), broker.acked.cursor)
            assert after != before, "nothing moves any more"
        assert not owner.acks.is_refused or owner.acks


@given(end=st.integers(1, 60), before=st.sets(st.integers(0, 119), max_size=KEPT))
def test_cursor_follows_a_slow_key_at_the_range_limit(end, before):
    """Every second message ends last, one by one: the cursor rises with each, whatever former
    owners acked.
    """
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(partition_acks, "ACK_RANGES_MAX", KEPT)
        broker = GroupProgress(2 * end)
        broker.ack(tuple((offset, offset + 1) for offset in sorted(before) if offset < 2 * end))
        owner = Owner(broker)
        while owner.offsets.next_offset < broker.end:
            owner.pull(7)
            quick = [index for index, offset in enumerate(owner.waiting) if offset % 2]
            for index in reversed(quick):
                owner.end_handler(index)
                owner.send_acks()
            while owner.waiting and (owner.acks.is_refused or len(owner.waiting) >= BUFFER):
                oldest = owner.waiting[0]
                owner.end_handler(0)
                owner.flush()
                assert broker.acked.cursor > oldest
        assert broker.acked.range_count <= KEPT
