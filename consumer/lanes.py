"""One lane per order key: which message may be handled next.  Pure.

    put ─▶ arrived ──take──▶ running        a message whose key runs already waits in that key's lane
                     ╰─▶ lane of its key ──finish──▶ running

Invariants
    At most one message of a key runs at a time, and they run in the order they were put.
    Messages without a key (b"") have no order and never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..protocol.message import Message


class Lanes:
    """Messages waiting, by key; any number of workers take from it, on one event loop."""

    def __init__(self, *, ordered: bool = True) -> None:
        self._ordered = ordered
        """Without it every message is as one without a key."""
        self.arrived: deque[Message] = deque()
        """What no worker has looked at yet."""
        self._lanes: dict[bytes, deque[Message] | None] = {}
        """Keys that run now; the messages waiting behind, if any."""

    def put(self, messages: Iterable[Message]) -> None:
        """Add messages of one partition, in the order of their offsets."""
        self.arrived.extend(messages)

    def take(self) -> Message | None:
        """The next message that may run, which now does; None if there is none."""
        arrived = self.arrived
        lanes = self._lanes
        while arrived:
            message = arrived.popleft()
            key = message.order_key
            if not key or not self._ordered:
                return message
            if key in lanes:
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
        """The running message of `key` ended; the next of its lane, which runs now, if there is one."""
        if not key or not self._ordered:
            return None
        lane = self._lanes[key]
        if lane:
            return lane.popleft()
        del self._lanes[key]
        return None

    def drop(self, partition_id: int) -> int:
        """Forget what waits of a partition; what runs goes on.  Returns how many were forgotten."""
        before = len(self)
        self.arrived = deque(one for one in self.arrived if one.partition_id != partition_id)
        for key, lane in self._lanes.items():
            if lane:
                kept = deque(one for one in lane if one.partition_id != partition_id)
                self._lanes[key] = kept or None
        return before - len(self)

    def __len__(self) -> int:
        return len(self.arrived) + sum(len(lane) for lane in self._lanes.values() if lane)
