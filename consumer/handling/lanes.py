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
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from ...protocol.message import Message

_by_offset = attrgetter("offset")


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
        self._due: set[int] = set()
        """`id` of each message in `arrived` whose next try is due: its lane is its own."""
        self.alone: Message | None = None
        """
        A running message whose lane is not noted yet: nothing was taken since, so none can run beside it.  A call that looks
        at lanes notes it first; a handler that never waits ends before, and costs no lane.
        """
        self.busy: dict[bytes, deque[Message] | None] = {}
        """For each key of which a message runs or waits for its next try: the messages behind it; None if none."""
        self._paused: dict[int, list[Message]] = {}
        """By partition that is paused: its waiting messages, by offset."""

    @property
    def is_idle(self) -> bool:
        """True if messages have arrived, and none runs or waits for its next try."""
        return self.alone is None and not self.busy and bool(self.arrived)

    def put(self, messages: Iterable[Message]) -> None:
        """Add messages of one partition, in the order of their offsets."""
        if self._paused:
            self._put_beside_paused(messages)
        else:
            self.arrived.extend(messages)

    def _put_beside_paused(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._paused.get(message.partition_id, self.arrived).append(message)

    def put_first(self, messages: Sequence[Message]) -> None:
        """Put messages whose next try is due at the front; their lanes are blocked for others."""
        self.arrived.extendleft(reversed(messages))
        if self._ordered:
            self._due.update(id(message) for message in messages if message.key)

    def collect(self, failed: Message, ours: Callable[[Message], bool]) -> list[Message]:
        """Take out the messages that are `ours` and wait behind a failed one of their key, which is not tried again here."""
        self.note_alone()

        def behind(message: Message) -> bool:
            return message.key == failed.key and ours(message)

        lane = self.busy[failed.key] or deque()
        waiting = [message for message in lane if behind(message)]
        self.busy[failed.key] = deque(message for message in lane if not behind(message)) or None
        arrived = [message for message in self.arrived if behind(message)]
        if arrived:
            self.arrived = deque(message for message in self.arrived if not behind(message))
        for partition_id, held in self._paused.items():
            waiting += [message for message in held if behind(message)]
            self._paused[partition_id] = [message for message in held if not behind(message)]
        self.release(failed)
        return sorted(waiting + arrived, key=_by_offset)

    def note_alone(self) -> None:
        """Note the lane of the running message that was alone."""
        message, self.alone = self.alone, None
        if message is not None and message.key and self._ordered:
            self.busy[message.key] = None

    def take(self) -> Message | None:
        """Take the next message that may run; it counts as running.  None if there is none."""
        if self.alone is not None:
            self.note_alone()
        arrived = self.arrived
        lanes = self.busy
        while arrived:
            message = arrived.popleft()
            key = message.key
            if not key or not self._ordered:
                return message
            if key in lanes:
                if message.attempt != 1 and id(message) in self._due:
                    self._due.discard(id(message))
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
        if self.alone is not None:
            self.note_alone()
        if not key or not self._ordered:
            return None
        lane = self.busy[key]
        if lane:
            return lane.popleft()
        del self.busy[key]
        return None

    def release(self, message: Message) -> None:
        """Free the lane of a failed message that is not tried again."""
        self.note_alone()
        lane = self.busy.pop(message.key, None) if self._ordered else None
        if lane:
            self.arrived.extendleft(reversed(lane))

    def pause(self, partition_id: int) -> None:
        """Let no message of a partition run until `resume`, but for those that failed."""
        if partition_id in self._paused:
            return
        waiting = self._take_out(lambda message: message.partition_id == partition_id)
        self.arrived.extendleft(reversed([each for each in waiting if id(each) in self._due]))
        held = [message for message in waiting if id(message) not in self._due]
        self._paused[partition_id] = sorted(held, key=_by_offset)

    def resume(self, partition_id: int) -> bool:
        """Let the messages of a partition run again; True if any waits."""
        held = self._paused.pop(partition_id, [])
        self.arrived.extendleft(reversed(held))
        return bool(held)

    def drop(self, partition_id: int, ours: Callable[[Message], bool]) -> list[Message]:
        """
        Forget and return the waiting messages that are `ours`; running messages are not affected.

        Args:
            partition_id: a partition that is paused no longer; `ours` may be of others as well.
        """
        held = self._paused.pop(partition_id, [])
        dropped = self._take_out(ours) + held
        failed = [message for message in dropped if id(message) in self._due]
        self._due.difference_update(map(id, failed))
        for message in failed:
            self.release(message)
        return dropped

    def _take_out(self, ours: Callable[[Message], bool]) -> list[Message]:
        """Take the waiting messages that are `ours` out of the queue and the lanes."""
        self.note_alone()  # whose worker goes on with the queue as it was
        dropped = [message for message in self.arrived if ours(message)]
        self.arrived = deque(message for message in self.arrived if not ours(message))
        for key, lane in self.busy.items():
            if lane:
                kept = deque(message for message in lane if not ours(message))
                dropped += [message for message in lane if ours(message)]
                self.busy[key] = kept or None
        return dropped

    def __len__(self) -> int:
        paused = sum(map(len, self._paused.values()))
        return len(self.arrived) + paused + sum(len(lane) for lane in self.busy.values() if lane)
