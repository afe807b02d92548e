"""Lanes, one for each order key, decide which message may be handled next.  Pure.

    put ─▶ arrived ──take──▶ running ──finish──▶ the next of its lane runs
            ▲        │            ╰─ failed: waits in `Retries` for its next try, and blocks its lane ─▶ put_first
            │        ╰─▶ lane of its key, if a message of that key runs or failed
            ╰─ release, drop: the lane is free again

Invariants
    At most one message of a key runs at a time, and messages of a key run in the order they were put: a message that
    failed and waits for its next try (`attempt` above 1) blocks its lane until `finish` or `release`.
    Messages without a key (b"") have no order and never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ...protocol.message import Message


class Lanes:
    """
    Messages waiting, by key; any number of workers of one event loop take from them.

    Args:
        ordered: False: every message is treated as one without a key.
    """

    def __init__(self, *, ordered: bool = True) -> None:
        self._ordered = ordered
        self.arrived: deque[Message] = deque()
        """Messages that no worker has looked at yet, in the order they were put."""
        self._lanes: dict[bytes, deque[Message] | None] = {}
        """For each key of which a message runs or waits for its next try: the messages behind it; None if none."""

    def put(self, messages: Iterable[Message]) -> None:
        """Add messages of one partition, in the order of their offsets."""
        self.arrived.extend(messages)

    def put_first(self, messages: Sequence[Message]) -> None:
        """Put messages whose next try is due at the front; their lanes are blocked for others."""
        self.arrived.extendleft(reversed(messages))

    def take(self) -> Message | None:
        """Take the next message that may run; it counts as running.  None if there is none."""
        arrived = self.arrived
        lanes = self._lanes
        while arrived:
            message = arrived.popleft()
            key = message.key
            if not key or not self._ordered:
                return message
            if key in lanes:
                if message.attempt != 1:
                    return message
                lane = lanes[key]
                if lane is None:
                    lanes[key] = deque((message,))
                else:
                    lane.append(message)
                continue
            lanes[key] = None
            return message
        return None

    def finish(self, key: bytes) -> Message | None:
        """Note that the running message of `key` ended; returns the next of its lane, if any, which counts as running."""
        if not key or not self._ordered:
            return None
        lane = self._lanes[key]
        if lane:
            return lane.popleft()
        del self._lanes[key]
        return None

    def release(self, message: Message) -> None:
        """Free the lane of a failed message that is not tried again."""
        lane = self._lanes.pop(message.key, None) if self._ordered else None
        if lane:
            self.arrived.extendleft(reversed(lane))

    def drop(self, partition_id: int) -> list[Message]:
        """Forget and return the waiting messages of a partition; running messages are not affected."""
        dropped = [message for message in self.arrived if message.partition_id == partition_id]
        self.arrived = deque(
            message for message in self.arrived if message.partition_id != partition_id
        )
        failed = [message for message in dropped if message.attempt != 1]
        for key, lane in self._lanes.items():
            if lane:
                kept = deque(message for message in lane if message.partition_id != partition_id)
                dropped += [message for message in lane if message.partition_id == partition_id]
                self._lanes[key] = kept or None
        for message in failed:
            self.release(message)
        return dropped

    def __len__(self) -> int:
        return len(self.arrived) + sum(len(lane) for lane in self._lanes.values() if lane)
