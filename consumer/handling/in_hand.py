"""Tracks the keys of messages that the user has in hand or gave back, and the later messages that
wait for them. Pure.

    collect ─▶ in hand ─acked─▶ the next of the lane
                   ╰─ give_back: with the later ones in hand
                        ─▶ lane of the key, by offset ◀─ later messages that arrive
                               ╰─▶ take: once it is due, and nothing of its lane is in hand

Invariants
    While a message of a lane is in hand, no later one is handed out, unless both are handed out in
    one call of `collect`. Messages of a lane are handed out by offset; a message that is given back
    is handed out again before all later ones. When a message is given back or set aside, the user
    no longer has any that was handed out after it: a dead letter that is redriven may follow a
    message with a higher offset. A lane ends when its last message is acked.
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
from ..delivery.hand import UnregisteredMessages

_Key = bytes | tuple[int, int]
_by_offset = attrgetter("offset")
_delivery = attrgetter("delivery")
_consume = deque[object](maxlen=0).extend


class _Lane:
    __slots__ = ("due_ns", "messages", "out")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        """The waiting messages, by offset."""
        self.due_ns: dict[tuple[int, int], int] = {}
        """The earliest time at which a message that was given back is handed out again, by
        partition and offset.
        """
        self.out: dict[int, Message] = {}
        """The messages, by `id`, that are handed out and neither acked nor given back, in the order
        of their hand-out.
        """


class InHand:
    """The lanes of one consumer without a handler; every time is nanoseconds of the boot clock."""

    def __init__(self, *, ordered: bool = True) -> None:
        self._lanes: dict[_Key, _Lane | Message] = {}
        """The lanes by key; a message stands for a lane in which it alone is in hand and none
        waits, the usual case.
        """
        self._due: list[tuple[int, int, _Key]] = []
        self._number = 0
        self.waiting = 0
        """The number of messages in the lanes that are not handed out."""
        self.unregistered = UnregisteredMessages(self._note_all)
        """The hand with messages that are alone in hand, without a lane; every other method spreads
        it first.
        """
        self._ordered = ordered

    def __bool__(self) -> bool:
        return bool(self._lanes)

    @property
    def is_free(self) -> bool:
        """Return True if nothing is in hand, and nothing waits to be handed out again."""
        unregistered = self.unregistered
        return not (
            self._lanes or self._due or unregistered.message is not None or unregistered.messages
        )

    def take_alone(self, arrived: deque[Message], boot_ns: Callable[[], int]) -> Message | None:
        """Take the first message that arrived into the hand, or return None if something else is in
        hand or it needs more than that.
        """
        unregistered = self.unregistered
        if (
            self._lanes
            or self._due
            or unregistered.message is not None
            or unregistered.messages
            or not arrived
        ):
            return None
        message = arrived[0]
        delivery: Any = message.delivery
        if not delivery.may_be_unregistered or boot_ns() >= delivery.deadline_ns:
            return None
        delivery.unregistered = unregistered
        unregistered.message = arrived.popleft()
        return message

    def take_many_unregistered(
        self, arrived: deque[Message], count: int, now_ns: int
    ) -> list[Message] | None:
        """Take up to `count` messages, which arrived by offset within each partition, as
        `take_alone` does for one.
        """
        if not arrived or not self.is_free:
            return None
        messages = list(islice(arrived, count))
        runs: list[tuple[Any, list[Message]]] = [(messages[0].delivery, messages)]
        if len(set(map(_delivery, messages))) > 1:
            runs = _runs(messages)
        if not all(each.may_be_unregistered and now_ns < each.deadline_ns for each, _ in runs):
            return None
        if len(messages) == len(arrived):
            arrived.clear()
        else:
            _consume(starmap(arrived.popleft, repeat((), len(messages))))
        for delivery, _ in runs:
            delivery.unregistered = self.unregistered
        self.unregistered.messages = messages
        self.unregistered.runs = runs
        return messages.copy()

    def ack_hand(self, messages: list[Message]) -> bool:
        """Ack the messages that were taken together, if they are these; return False if they must
        be acked in another way.
        """
        unregistered = self.unregistered
        if unregistered.messages is None or unregistered.messages != messages:
            return False
        try:
            for delivery, run in unregistered.runs:
                delivery.check_takes_acks(run[0].offset)
        except LeaseLostError:
            return False
        if any(delivery.acks_each for delivery, _ in unregistered.runs):
            return False
        runs = unregistered.runs
        unregistered.runs = []
        unregistered.messages = None
        for delivery, run in runs:
            delivery.done_all(run)
        return True

    def close(self) -> None:
        """Forget the messages in hand: the consumer is closed, and no ack is taken any more."""
        self._lanes.clear()
        self._due.clear()
        self.unregistered.clear()

    def _note_all(self, messages: list[Message]) -> None:
        """Note in lanes the messages of the hand, which alone are in hand."""
        lanes = self._lanes
        for message in messages if self._ordered else ():
            key = message.key
            if not key:
                continue
            if key in lanes:
                self._lane(key).out[id(message)] = message
            else:
                lanes[key] = message

    def _lane(self, key: _Key) -> _Lane:
        """Return the lane of a key, which is made if there is none."""
        lane = self._lanes.get(key)
        if type(lane) is _Lane:
            return lane
        made = self._lanes[key] = _Lane()
        if lane is not None:
            made.out[id(lane)] = lane  # type: ignore[assignment]
        return made

    def give_back(self, message: Message, due_ns: int) -> list[Message]:
        """
        Take a message back; it is handed out again at `due_ns` at the earliest, before later ones
        of its key.

        Returns:
            The message, and those of its key that were handed out after it, which are given back
            with it.
        """
        self.unregistered.register()
        key = _key(message)
        lane = self._lane(key)
        back = [message, *_behind(lane, message)]
        lane.out.pop(id(message), None)
        self._take_back(lane, back)
        lane.due_ns[_place(message)] = due_ns
        self._push(key, lane)
        return back

    def give_back_behind(self, failed: Message) -> list[Message]:
        """Take back the messages of its key that were handed out after `failed`; they are handed
        out again once it has ended.
        """
        self.unregistered.register()
        key = _key(failed)
        lane = self._lanes.get(key)
        if type(lane) is not _Lane:
            return []
        back = _behind(lane, failed)
        self._take_back(lane, back)
        if back:
            self._push(key, lane)
        return back

    def take_out(
        self, failed: Message, ours: Callable[[Message], bool]
    ) -> tuple[list[Message], list[Message], list[Message]]:
        """
        Take out a message that is not handed out again, with the later ones of its lane that are
        `ours`.

        Returns:
            Those that are in hand, the failed one first; others that were handed out after it,
            which are given back; and those that wait and are `ours`.
        """
        self.unregistered.register()
        key = _key(failed)
        if key not in self._lanes:
            return [failed], [], []
        lane = self._lane(key)
        behind = _behind(lane, failed)
        later = [each for each in behind if ours(each)]
        others = [each for each in behind if not ours(each)]
        for each in (failed, *later):
            lane.out.pop(id(each), None)
        waiting = [each for each in lane.messages if ours(each)]
        lane.messages = [each for each in lane.messages if not ours(each)]
        self.waiting -= len(waiting)
        self._take_back(lane, others)
        self._go_on(key, lane)
        return [failed, *later], others, waiting

    def _take_back(self, lane: _Lane, back: list[Message]) -> None:
        """Let messages wait that were in hand."""
        for each in back:
            lane.out.pop(id(each), None)
            insort(lane.messages, each, key=_by_offset)
        self.waiting += len(back)

    def _go_on(self, key: _Key, lane: _Lane) -> None:
        """Hand out the waiting messages of a lane, which ends if it is empty."""
        if lane.messages:
            self._push(key, lane)
        elif not lane.out:
            del self._lanes[key]

    def take(self, now_ns: int) -> Message | None:
        """Take the next message that is due, or None if there is none. It counts as in hand until
        `acked` or `give_back`.
        """
        self.unregistered.register()
        while self._due and self._due[0][0] <= now_ns:
            key = heapq.heappop(self._due)[2]
            lane = self._lanes.get(key)
            if type(lane) is not _Lane or lane.out or not lane.messages:
                continue
            if self._due_ns(lane) > now_ns:
                self._push(key, lane)
                continue
            return self._take_first(lane)
        return None

    def _take_first(self, lane: _Lane) -> Message:
        message = lane.messages.pop(0)
        lane.due_ns.pop(_place(message), None)
        lane.out[id(message)] = message
        self.waiting -= 1
        return message

    def collect(
        self, arrived: deque[Message], count: int, now_ns: int, *, ordered: bool
    ) -> list[Message]:
        """
        Take up to `count` messages that may be in hand together: those that are due, and then those
        that arrived.

        Args:
            arrived: by offset within each partition; messages that must wait move from here to
                their lanes.
            ordered: whether keys have an order; False: only messages that were given back make
                others of their key wait.
        """
        self.unregistered.register()
        taken = self._collect_due(count, now_ns)
        together: set[bytes] | None = None
        """The keys of `taken`, once a second message of a key arrives."""
        lanes = self._lanes
        while arrived and len(taken) < count:
            message = arrived.popleft()
            key = message.key
            lane = lanes.get(key or _place(message)) if lanes else None
            if lane is None:
                if ordered and key:
                    lanes[key] = message
                if together is not None:
                    together.add(key)
            else:
                if together is None:
                    together = {each.key for each in taken}
                if not key or key not in together or (type(lane) is _Lane and lane.messages):
                    self._hold(message)
                    continue
                if ordered:
                    self._lane(key).out[id(message)] = message
            taken.append(message)
        return taken

    def _collect_due(self, count: int, now_ns: int) -> list[Message]:
        """Take up to `count` messages that are due, several of a key together."""
        taken: list[Message] = []
        while len(taken) < count and (message := self.take(now_ns)) is not None:
            lane = self._lane(_key(message))
            taken.append(message)
            while lane.messages and len(taken) < count and self._due_ns(lane) <= now_ns:
                taken.append(self._take_first(lane))
        return taken

    def first(self, arrived: deque[Message], now_ns: int, *, ordered: bool) -> Message | None:
        """Take one message as `collect` does, or return None if there is none."""
        self.unregistered.register()
        if self._due and self._due[0][0] <= now_ns and (message := self.take(now_ns)) is not None:
            return message
        lanes = self._lanes
        while arrived:
            message = arrived.popleft()
            key = message.key
            if lanes and (key or _place(message)) in lanes:
                self._hold(message)
                continue
            if ordered and key:
                lanes[key] = message
            return message
        return None

    def _hold(self, message: Message) -> None:
        """Put a message that arrived into its lane, after an earlier one of its key that waits or
        is in hand.
        """
        insort(self._lane(_key(message)).messages, message, key=_by_offset)
        self.waiting += 1

    def hold(self, messages: list[Message]) -> list[Message]:
        """Put paused messages into the lanes of their keys, where later ones may be, and return
        those whose key has no lane.
        """
        self.unregistered.register()
        free = []
        for message in messages:
            key = _key(message)
            if key not in self._lanes:
                free.append(message)
                continue
            self._hold(message)
            self._push(key, self._lane(key))
        return free

    def next_ns(self) -> int | None:
        """Return the time to call `take` again; None while nothing waits to be due."""
        return self._due[0][0] if self._due else None

    def lying(self, now_ns: int) -> Message | None:
        """Return the message that `take` would return: the same message at two checks was not
        requested between them.
        """
        while self._due and self._due[0][0] <= now_ns:
            lane = self._lanes.get(self._due[0][2])
            if type(lane) is _Lane and lane.messages and not lane.out:
                return lane.messages[0]
            heapq.heappop(self._due)
        return None

    def acked(self, message: Message) -> bool:
        """Note that a message that was handed out is acked, or will not be, and return True if its
        lane has another one.
        """
        self.unregistered.register()
        key = message.key or _place(message)
        lane = self._lanes.get(key)
        if lane is message:
            del self._lanes[key]
            return False
        if type(lane) is not _Lane or lane.out.pop(id(message), None) is None:
            return False
        if lane.messages:
            self._push(key, lane)
            return not lane.out
        if not lane.out:
            del self._lanes[key]
        return False

    def acked_all(self, messages: Iterable[Message]) -> bool:
        """Note the acks of several messages, and return True if any lane has another message."""
        self.unregistered.register()
        lanes, more = self._lanes, False
        for message in messages:
            if lanes.get(message.key) is message:
                del lanes[message.key]
            else:
                more |= self.acked(message)
        return more

    def in_the_way(self) -> Message | None:
        """Return the message in hand for whose ack the most others wait; None if none waits."""
        self.unregistered.register()
        lanes = [
            lane
            for lane in self._lanes.values()
            if type(lane) is _Lane and lane.out and lane.messages
        ]
        longest = max(lanes, key=lambda lane: len(lane.messages), default=None)
        return None if longest is None else next(iter(longest.out.values()))

    def out(self) -> Iterator[Message]:
        """Yield the messages in hand that have a key, or were given back, about in the order in
        which they were handed out.
        """
        self.unregistered.register()
        for lane in self._lanes.values():
            if type(lane) is not _Lane:
                yield lane  # type: ignore[misc]
            else:
                yield from lane.out.values()

    def drop(self, ours: Callable[[Message], bool]) -> int:
        """Forget the messages that are `ours`, and return how many of them waited in lanes."""
        self.unregistered.register()
        dropped = 0
        for key, lane in list(self._lanes.items()):
            if type(lane) is not _Lane:
                if ours(lane):  # type: ignore[arg-type]
                    del self._lanes[key]
                continue
            kept = [each for each in lane.messages if not ours(each)]
            out = {number: each for number, each in lane.out.items() if not ours(each)}
            if len(kept) == len(lane.messages) and len(out) == len(lane.out):
                continue
            dropped += len(lane.messages) - len(kept)
            lane.messages = kept
            lane.out = out
            self._go_on(key, lane)
        self.waiting -= dropped
        return dropped

    def _push(self, key: _Key, lane: _Lane) -> None:
        if not lane.out:
            self._number += 1
            heapq.heappush(self._due, (self._due_ns(lane), self._number, key))

    @staticmethod
    def _due_ns(lane: _Lane) -> int:
        return lane.due_ns.get(_place(lane.messages[0]), 0)


def _runs(messages: list[Message]) -> list[tuple[Any, list[Message]]]:
    """Return the messages by delivery, each by offset."""
    by_delivery: dict[Any, list[Message]] = {}
    for message in messages:
        by_delivery.setdefault(message.delivery, []).append(message)
    return list(by_delivery.items())


def _behind(lane: _Lane, message: Message) -> list[Message]:
    """Return the messages of the lane that were handed out after a message; if it is in no lane, as
    in a shared group, those with a higher offset.
    """
    out = list(lane.out.values())
    if id(message) not in lane.out:
        return [each for each in out if each.offset > message.offset]
    return out[list(lane.out).index(id(message)) + 1 :]


def _key(message: Message) -> _Key:
    """Return the lane of a message: that of its key, or one of its own if it has no key."""
    return message.key or _place(message)


def _place(message: Message) -> tuple[int, int]:
    return message.partition_id, message.offset
