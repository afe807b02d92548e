"""Messages that an iteration gave back, and the later messages of their keys, which wait behind them.  Pure.

    nack ─▶ lane of the key, by offset ─▶ take, once it is due ─▶ handed out ─acked─▶ the next of the lane
               ▲ hold: later messages                                  ╰─ nack: first of its lane again

Invariants
    Of a key that has a lane, one message at a time is handed out, the lowest offset first.
    A lane ends when its last message is acked.
"""

from __future__ import annotations

import heapq
from bisect import insort
from operator import attrgetter

from ...protocol.message import Message

_Key = bytes | tuple[int, int]
_by_offset = attrgetter("offset")


class _Lane:
    __slots__ = ("due_ns", "messages", "out")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        """Waiting, by offset."""
        self.due_ns: dict[int, int] = {}
        """By offset of a message that was given back: when it is handed out again, at the earliest."""
        self.out: Message | None = None
        """Handed out, and neither acked nor given back."""


class Nacked:
    """The lanes of one iteration; every time is nanoseconds of the boot clock."""

    def __init__(self) -> None:
        self._lanes: dict[_Key, _Lane] = {}
        self._due: list[tuple[int, int, _Key]] = []
        self._number = 0
        self.waiting = 0
        """Messages in the lanes that are not handed out."""

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def nack(self, message: Message, due_ns: int) -> None:
        """Take a message back; it is handed out again at `due_ns` at the earliest, before later ones of its key."""
        key = _key(message)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
        elif lane.out is message:
            lane.out = None
        insort(lane.messages, message, key=_by_offset)
        lane.due_ns[message.offset] = due_ns
        self.waiting += 1
        self._push(key, lane)

    def hold(self, message: Message) -> bool:
        """Take a message that arrived if an earlier one of its key waits here; True if it did."""
        lane = self._lanes.get(_key(message))
        if lane is None:
            return False
        insort(lane.messages, message, key=_by_offset)
        self.waiting += 1
        return True

    def take(self, now_ns: int) -> Message | None:
        """The next message that is due; None if there is none.  It counts as handed out until `acked` or `nack`."""
        while self._due and self._due[0][0] <= now_ns:
            key = heapq.heappop(self._due)[2]
            lane = self._lanes.get(key)
            if lane is None or lane.out is not None or not lane.messages:
                continue
            if self._due_ns(lane) > now_ns:
                self._push(key, lane)
                continue
            lane.out = message = lane.messages.pop(0)
            lane.due_ns.pop(message.offset, None)
            self.waiting -= 1
            return message
        return None

    def next_ns(self) -> int | None:
        """When to call `take` again; None while nothing waits to be due."""
        return self._due[0][0] if self._due else None

    def acked(self, message: Message) -> bool:
        """Note that a message that was handed out is acked, or will not be; True if its lane has another one."""
        key = _key(message)
        lane = self._lanes.get(key)
        if lane is None or lane.out is not message:
            return False
        lane.out = None
        if lane.messages:
            self._push(key, lane)
            return True
        del self._lanes[key]
        return False

    def drop(self, partition_id: int) -> int:
        """Forget the lanes of a partition; returns how many messages waited in them."""
        gone = {
            key: lane
            for key, lane in self._lanes.items()
            if (lane.out or lane.messages[0]).partition_id == partition_id
        }
        for key in gone:
            del self._lanes[key]
        dropped = sum(len(lane.messages) for lane in gone.values())
        self.waiting -= dropped
        return dropped

    def _push(self, key: _Key, lane: _Lane) -> None:
        if lane.out is None:
            self._number += 1
            heapq.heappush(self._due, (self._due_ns(lane), self._number, key))

    @staticmethod
    def _due_ns(lane: _Lane) -> int:
        return lane.due_ns.get(lane.messages[0].offset, 0)


def _key(message: Message) -> _Key:
    """The lane of a message: that of its key, or one of its own if it has none."""
    return message.key or (message.partition_id, message.offset)
