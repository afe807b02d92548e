"""
Tracks the keys of messages that the user has in hand or nacked, and the later messages that wait
for them. Pure.

    collect ─▶ in hand ─acked─▶ the next message of the lane
                   ╰─ requeue: with the later messages in hand
                        ─▶ lane of the key, by offset ◀─ later messages that arrive
                               ╰─▶ take: when due, and no message of the lane is in hand

Invariants
    While a message of a lane is in hand, no later one is handed out, unless one call of `collect`
    hands out both. Messages of a lane are handed out in offset order, and a nacked message is
    handed out again before all later ones. When a message is nacked or set aside, the user no
    longer has any that was handed out after it. Such a message does not always have a higher
    offset, because a redriven dead letter may follow newer messages. A lane ends when its last
    message is acked.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat, starmap
from operator import attrgetter
from typing import Any

from ...protocol.errors import LeaseLostError
from ...protocol.message import Message
from ..delivery.unregistered_messages import UnregisteredMessages

_Key = bytes | tuple[int, int]
_by_offset = attrgetter("offset")
_delivery = attrgetter("delivery")
_consume = deque[object](maxlen=0).extend


class _Lane:
    """The messages of one key that are waiting or in hand."""

    __slots__ = ("due_ns", "messages", "unacked")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        """The waiting messages, in offset order."""
        self.due_ns: dict[tuple[int, int], int] = {}
        """When a nacked message may be handed out again, by message id."""
        self.unacked: dict[int, Message] = {}
        """The messages that are neither acked nor nacked, by `id`, in the order in which they were
        handed out.
        """


class UnackedMessages:
    """Tracks the unacked messages of a consumer that has no handler, with one lane per key. All
    times are in nanoseconds on the boot clock.
    """

    def __init__(self, *, ordered: bool = True) -> None:
        self._lanes: dict[_Key, _Lane | Message] = {}
        """The lanes by key. In the usual case, where only one message is in hand and none waits,
        the message itself stands for its lane.
        """
        self._due_lanes: list[tuple[int, int, _Key]] = []
        self._sequence = 0
        self.waiting = 0
        """The number of messages that wait in lanes."""
        self.unregistered = UnregisteredMessages(self._register_all)
        """Messages in hand that have no lane, because nothing else is in hand. All other methods
        register them first.
        """
        self._ordered = ordered

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def is_free(self) -> bool:
        """True if no message is in hand or waits to be handed out again."""
        unregistered = self.unregistered
        return not (
            self._lanes
            or self._due_lanes
            or unregistered.message is not None
            or unregistered.messages
        )

    def take_unregistered(
        self, arrivals: deque[Message], boot_ns: Callable[[], int]
    ) -> Message | None:
        """Take the first arrived message without registering it. Return None if others are in hand
        or if it must be registered.
        """
        unregistered = self.unregistered
        if (
            self._lanes
            or self._due_lanes
            or unregistered.message is not None
            or unregistered.messages
            or not arrivals
        ):
            return None
        message = arrivals[0]
        delivery: Any = message.delivery
        if not delivery.may_be_unregistered or boot_ns() >= delivery.deadline_ns:
            return None
        delivery.unregistered = unregistered
        unregistered.message = arrivals.popleft()
        return message

    def take_many_unregistered(
        self, arrivals: deque[Message], count: int, now_ns: int
    ) -> list[Message] | None:
        """Take up to `count` messages, which arrived in offset order within each partition, without
        registering them. Return None as in `take_unregistered`.
        """
        if not arrivals or not self.is_free:
            return None
        messages = list(islice(arrivals, count))
        runs: list[tuple[Any, list[Message]]] = [(messages[0].delivery, messages)]
        if len(set(map(_delivery, messages))) > 1:
            runs = _group_by_delivery(messages)
        if not all(
            delivery.may_be_unregistered and now_ns < delivery.deadline_ns for delivery, _ in runs
        ):
            return None
        if len(messages) == len(arrivals):
            arrivals.clear()
        else:
            _consume(starmap(arrivals.popleft, repeat((), len(messages))))
        for delivery, _ in runs:
            delivery.unregistered = self.unregistered
        self.unregistered.messages = messages
        self.unregistered.runs = runs
        return messages.copy()

    def ack_unregistered(self, messages: list[Message]) -> bool:
        """Ack the unregistered messages if they are exactly `messages`. Otherwise return False:
        they must be acked in another way.
        """
        unregistered = self.unregistered
        if unregistered.messages is None or unregistered.messages != messages:
            return False
        try:
            for delivery, run in unregistered.runs:
                delivery.check_can_ack(run[0].offset)
        except LeaseLostError:
            return False
        if any(delivery.acks_each for delivery, _ in unregistered.runs):
            return False
        runs = unregistered.runs
        unregistered.runs = []
        unregistered.messages = None
        for delivery, run in runs:
            delivery.mark_all_handled(run)
        return True

    def close(self) -> None:
        """Drop the messages in hand: the consumer is closed, and acks are no longer accepted."""
        self._lanes.clear()
        self._due_lanes.clear()
        self.unregistered.clear()

    def _register_all(self, messages: list[Message]) -> None:
        """Register messages, the only ones in hand, in the lanes of their keys."""
        lanes = self._lanes
        for message in messages if self._ordered else ():
            key = message.key
            if not key:
                continue
            if key in lanes:
                self._lane_of(key).unacked[id(message)] = message
            else:
                lanes[key] = message

    def _lane_of(self, key: _Key) -> _Lane:
        """Return the lane of a key, creating it if needed."""
        lane = self._lanes.get(key)
        if type(lane) is _Lane:
            return lane
        new_lane = self._lanes[key] = _Lane()
        if lane is not None:
            new_lane.unacked[id(lane)] = lane  # type: ignore[assignment]
        return new_lane

    def requeue(self, message: Message, due_ns: int) -> list[Message]:
        """
        Take a message back. It is handed out again at `due_ns` at the earliest, before later
        messages of its key.

        Returns:
            The message, and the messages of its key that were handed out after it and are taken
            back with it.
        """
        self.unregistered.register()
        key = _key(message)
        lane = self._lane_of(key)
        returned = [message, *_handed_out_after(lane, message)]
        lane.unacked.pop(id(message), None)
        self._move_to_waiting(lane, returned)
        lane.due_ns[_message_id(message)] = due_ns
        self._schedule(key, lane)
        return returned

    def requeue_after(self, failed: Message) -> list[Message]:
        """Take back the messages of the key that were handed out after `failed`. They are handed
        out again once `failed` has ended.
        """
        self.unregistered.register()
        key = _key(failed)
        lane = self._lanes.get(key)
        if type(lane) is not _Lane:
            return []
        returned = _handed_out_after(lane, failed)
        self._move_to_waiting(lane, returned)
        if returned:
            self._schedule(key, lane)
        return returned

    def remove_failed(
        self, failed: Message, predicate: Callable[[Message], bool]
    ) -> tuple[list[Message], list[Message], list[Message]]:
        """
        Remove a message that will not be handed out again, and the later messages of its lane that
        match the predicate.

        Returns:
            Three lists: the removed messages that were in hand, the failed one first; other
            messages that were handed out after it and are taken back; and the waiting messages that
            match the predicate.
        """
        self.unregistered.register()
        key = _key(failed)
        if key not in self._lanes:
            return [failed], [], []
        lane = self._lane_of(key)
        waiting_behind = _handed_out_after(lane, failed)
        later_unacked = [other for other in waiting_behind if predicate(other)]
        others_unacked = [other for other in waiting_behind if not predicate(other)]
        for message in (failed, *later_unacked):
            lane.unacked.pop(id(message), None)
        waiting = [other for other in lane.messages if predicate(other)]
        lane.messages = [other for other in lane.messages if not predicate(other)]
        self.waiting -= len(waiting)
        self._move_to_waiting(lane, others_unacked)
        self._resume_lane(key, lane)
        return [failed, *later_unacked], others_unacked, waiting

    def _move_to_waiting(self, lane: _Lane, returned: list[Message]) -> None:
        """Move messages in hand back to the waiting ones."""
        for message in returned:
            lane.unacked.pop(id(message), None)
            insort(lane.messages, message, key=_by_offset)
        self.waiting += len(returned)

    def _resume_lane(self, key: _Key, lane: _Lane) -> None:
        """Schedule the waiting messages of a lane, or end the lane if it is empty."""
        if lane.messages:
            self._schedule(key, lane)
        elif not lane.unacked:
            del self._lanes[key]

    def take(self, now_ns: int) -> Message | None:
        """Take the next due message, which counts as in hand until `record_ack` or `requeue`.
        Return None if there is none.
        """
        self.unregistered.register()
        while self._due_lanes and self._due_lanes[0][0] <= now_ns:
            key = heapq.heappop(self._due_lanes)[2]
            lane = self._lanes.get(key)
            if type(lane) is not _Lane or lane.unacked or not lane.messages:
                continue
            if self._due_ns(lane) > now_ns:
                self._schedule(key, lane)
                continue
            return self._pop_first(lane)
        return None

    def _pop_first(self, lane: _Lane) -> Message:
        message = lane.messages.pop(0)
        lane.due_ns.pop(_message_id(message), None)
        lane.unacked[id(message)] = message
        self.waiting -= 1
        return message

    def collect(
        self, arrivals: deque[Message], count: int, now_ns: int, *, ordered: bool
    ) -> list[Message]:
        """
        Take up to `count` messages that may be in hand together: due messages first, then arrived
        ones.

        Args:
            arrivals: the arrived messages, in offset order within each partition; messages that
                must wait are moved from here to their lanes.
            ordered: True if the messages of a key are ordered; False: only nacked messages make
                others of their key wait.
        """
        self.unregistered.register()
        messages = self._collect_due(count, now_ns)
        keys: set[bytes] | None = None
        """The keys of `messages`; computed when a second message of a key arrives."""
        lanes = self._lanes
        while arrivals and len(messages) < count:
            message = arrivals.popleft()
            key = message.key
            lane = lanes.get(key or _message_id(message)) if lanes else None
            if lane is None:
                if ordered and key:
                    lanes[key] = message
                if keys is not None:
                    keys.add(key)
            else:
                if keys is None:
                    keys = {other.key for other in messages}
                if not key or key not in keys or (type(lane) is _Lane and lane.messages):
                    self._queue(message)
                    continue
                if ordered:
                    self._lane_of(key).unacked[id(message)] = message
            messages.append(message)
        return messages

    def _collect_due(self, count: int, now_ns: int) -> list[Message]:
        """Take up to `count` due messages, possibly several of one key."""
        messages: list[Message] = []
        while len(messages) < count and (message := self.take(now_ns)) is not None:
            lane = self._lane_of(_key(message))
            messages.append(message)
            while lane.messages and len(messages) < count and self._due_ns(lane) <= now_ns:
                messages.append(self._pop_first(lane))
        return messages

    def take_first(self, arrivals: deque[Message], now_ns: int, *, ordered: bool) -> Message | None:
        """Take one message as `collect` does, or return None if there is none."""
        self.unregistered.register()
        if (
            self._due_lanes
            and self._due_lanes[0][0] <= now_ns
            and (message := self.take(now_ns)) is not None
        ):
            return message
        lanes = self._lanes
        while arrivals:
            message = arrivals.popleft()
            key = message.key
            if lanes and (key or _message_id(message)) in lanes:
                self._queue(message)
                continue
            if ordered and key:
                lanes[key] = message
            return message
        return None

    def _queue(self, message: Message) -> None:
        """Put an arrived message into the lane of its key, behind an earlier one that waits or is
        in hand.
        """
        insort(self._lane_of(_key(message)).messages, message, key=_by_offset)
        self.waiting += 1

    def add_resumed(self, messages: list[Message]) -> list[Message]:
        """Put messages of a resumed partition into the lanes of their keys, which may contain later
        ones. Return those without a lane.
        """
        self.unregistered.register()
        unblocked = []
        for message in messages:
            key = _key(message)
            if key not in self._lanes:
                unblocked.append(message)
                continue
            self._queue(message)
            self._schedule(key, self._lane_of(key))
        return unblocked

    def next_ns(self) -> int | None:
        """Return when to call `take` again; None if nothing is scheduled."""
        return self._due_lanes[0][0] if self._due_lanes else None

    def ready_message(self, now_ns: int) -> Message | None:
        """Return the message that `take` would return. If two calls return the same one, the user
        took nothing in between.
        """
        while self._due_lanes and self._due_lanes[0][0] <= now_ns:
            lane = self._lanes.get(self._due_lanes[0][2])
            if type(lane) is _Lane and lane.messages and not lane.unacked:
                return lane.messages[0]
            heapq.heappop(self._due_lanes)
        return None

    def record_ack(self, message: Message) -> bool:
        """Record that a message in hand is acked, or never will be. Return True if its lane has
        another message.
        """
        self.unregistered.register()
        key = message.key or _message_id(message)
        lane = self._lanes.get(key)
        if lane is message:
            del self._lanes[key]
            return False
        if type(lane) is not _Lane or lane.unacked.pop(id(message), None) is None:
            return False
        if lane.messages:
            self._schedule(key, lane)
            return not lane.unacked
        if not lane.unacked:
            del self._lanes[key]
        return False

    def record_acks(self, messages: Iterable[Message]) -> bool:
        """Record the acks of several messages; return True if a lane has another message."""
        self.unregistered.register()
        lanes, is_any_ready = self._lanes, False
        for message in messages:
            if lanes.get(message.key) is message:
                del lanes[message.key]
            else:
                is_any_ready |= self.record_ack(message)
        return is_any_ready

    def blocking_message(self) -> Message | None:
        """Return the message in hand whose ack the largest number of others wait for, or None if
        none waits.
        """
        self.unregistered.register()
        lanes = [
            lane
            for lane in self._lanes.values()
            if type(lane) is _Lane and lane.unacked and lane.messages
        ]
        longest = max(lanes, key=lambda lane: len(lane.messages), default=None)
        return None if longest is None else next(iter(longest.unacked.values()))

    def messages(self) -> Iterator[Message]:
        """Yield the messages in hand that have a key or were nacked before, roughly in the order in
        which they were handed out.
        """
        self.unregistered.register()
        for lane in self._lanes.values():
            if type(lane) is not _Lane:
                yield lane  # type: ignore[misc]
            else:
                yield from lane.unacked.values()

    def drop(self, predicate: Callable[[Message], bool]) -> int:
        """Remove the messages that match the predicate, and return how many of them were waiting in
        lanes.
        """
        self.unregistered.register()
        removed = 0
        for key, lane in list(self._lanes.items()):
            if type(lane) is not _Lane:
                if predicate(lane):  # type: ignore[arg-type]
                    del self._lanes[key]
                continue
            kept_messages = [other for other in lane.messages if not predicate(other)]
            unacked = {
                number: message
                for number, message in lane.unacked.items()
                if not predicate(message)
            }
            if len(kept_messages) == len(lane.messages) and len(unacked) == len(lane.unacked):
                continue
            removed += len(lane.messages) - len(kept_messages)
            lane.messages = kept_messages
            lane.unacked = unacked
            self._resume_lane(key, lane)
        self.waiting -= removed
        return removed

    def _schedule(self, key: _Key, lane: _Lane) -> None:
        if not lane.unacked:
            self._sequence += 1
            heapq.heappush(self._due_lanes, (self._due_ns(lane), self._sequence, key))

    @staticmethod
    def _due_ns(lane: _Lane) -> int:
        return lane.due_ns.get(_message_id(lane.messages[0]), 0)


def _group_by_delivery(messages: list[Message]) -> list[tuple[Any, list[Message]]]:
    """Return the messages grouped by delivery, each group in offset order."""
    by_delivery: dict[Any, list[Message]] = {}
    for message in messages:
        by_delivery.setdefault(message.delivery, []).append(message)
    return list(by_delivery.items())


def _handed_out_after(lane: _Lane, message: Message) -> list[Message]:
    """Return the lane's messages that were handed out after a message. If the message is not in the
    lane, as in a shared group, return those with a higher offset.
    """
    unacked = list(lane.unacked.values())
    if id(message) not in lane.unacked:
        return [other for other in unacked if other.offset > message.offset]
    return unacked[list(lane.unacked).index(id(message)) + 1 :]


def _key(message: Message) -> _Key:
    """Return the lane's key for a message: its own key, or its id if it has none."""
    return message.key or _message_id(message)


def _message_id(message: Message) -> tuple[int, int]:
    return message.partition_id, message.offset
