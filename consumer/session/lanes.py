"""The messages of a partition that wait for a worker, and the keys that are busy. Pure.

    store ─▶ stored, not opened ─▶ opened ─┬─ take_run: all to one worker, in order
                 │                         │     ╰─ spread: all in hand, one by one
                 │                         ├─ claim ─▶ in hand, its key is busy ─▶ finish
                 │                         │    ╰─ key busy: waits in the queue of its key
                 │                         ╰─ PartitionBatches: several to one handler, one outcome
                 ╰─ PartitionColumns: consecutive rows, as columns

    batch in hand ─┬─ handled ─▶ its keys are free
                   ├─ failed ─▶ waits as a whole ─▶ fails again ─▶ two halves, by key ─▶ … ─▶ one
                   │                message, which is tried as a handler of one has it
                   ╰─ acked first, or each: waits for the ack
    part in hand   ─┬─ acked ─▶ the next part
                    ├─ given back: the same again
                    ╰─ cut: the rest goes back

Invariants
    At most one message of a key is in hand, or waits for its next try; later ones wait in the queue
    of the key, in the order of their offsets. Messages without a key never wait for each other.
    Messages of a key that one call has handed out together are in hand together; the key is free
    when all of them have ended, and what fails of them waits for the earlier ones.
    A message costs nothing while its batch is stored. A key has a queue only while a message waits
    for another one of it.

    No two batches have messages of the same key: all keys of a batch are busy until it has ended.
    The messages of a batch are in the order of their offsets, and of one partition. Redriven ones
    are in batches of their own.
    While as many messages as fit into a batch wait for the keys of batches in hand, no other batch
    is begun. Those that wait for a failed batch do not count.
    A batch whose keys are all free costs nothing by message: its keys are not looked at until
    something else is taken, or it fails.

    While a part is in hand, or waits for its next try, no later row of the partition is handed out.
    Only a row that is alone in its part is accused of having ended a process: a larger part is
    handed out in up to PARTS smaller ones by the next owner.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from ...protocol.message import Message
from ...protocol.offsets import Range
from ...protocol.parked import Failure
from .offsets import NEVER, Ref

PART_BYTES_MAX = 2 << 20
"""The largest size of stored batches that are handed out together: they are copied, and larger
copies would need memory from the system.
"""
PARTS = 16
"""The number of smaller parts of a part that has ended its process. With 100,000 rows, the one that
does it is alone after at most five ends.
"""


class Unopened(Protocol):
    """A batch whose messages are not made yet."""

    start: int
    end: int
    """The offset after the last message."""
    size: int
    """How many bytes it has as it is stored."""

    def open(self) -> list[Message]:
        """Make and return all messages, in the order of their offsets."""
        ...


class ClosedBatch(NamedTuple):
    """A pulled batch, with the offsets that are to be handed out."""

    batch: Unopened
    ranges: list[Range]
    begin_until_ms: int
    """In a shared group, the time until which its messages may begin."""

    def open(self) -> list[Message]:
        """Return the messages to hand out."""
        messages, base, ranges = self.batch.open(), self.batch.start, self.ranges
        if ranges == [(base, self.batch.end)]:
            return messages
        return [message for start, end in ranges for message in messages[start - base : end - base]]


class ColumnPart:
    """Consecutive rows, of one stored batch or several.

    Attributes:
        crashes: how many processes have ended while this row was alone in hand; 0 if there are
            several rows.
        attempt: how often it was handed out.
        batches: what was pulled, until `built` is made of it.
        built: what the dispatch has made of it.
        range: the offsets of the rows, half-open.
    """

    __slots__ = ("attempt", "batches", "built", "crashes", "range")

    def __init__(self, batches: list[ClosedBatch], crashes: int = 0) -> None:
        self.batches = batches
        self.range: Range = batches[0].ranges[0][0], batches[-1].ranges[-1][1]
        self.crashes = crashes
        self.attempt = 0
        self.built: Any = None

    def keep_built(self, built: Any) -> None:
        """Keep what the dispatch has made of the part, in place of what was pulled."""
        self.built = built
        self.batches = []

    @property
    def offset(self) -> int:
        """The offset of the last row, under which the begin of the part is recorded."""
        return self.range[1] - 1

    @property
    def count(self) -> int:
        """The number of rows."""
        start, end = self.range
        return end - start


@dataclass(slots=True, eq=False)
class PartitionColumns:
    """The part of one partition that is in hand, or comes next."""

    in_hand: ColumnPart | None = None
    awaited: ColumnPart | None = None
    """A part that is acked, while the next one waits for its ack to be durable."""
    again: ColumnPart | None = None
    """A part that comes before all others, from `due_ms` on."""
    due_ms: int = 0

    def begin(self, part: ColumnPart) -> None:
        """Give a part to the program."""
        self.again = None
        self.in_hand = part
        part.attempt += 1

    def wait(self, part: ColumnPart, due_ms: int) -> None:
        """Hand a part out before all others, from `due_ms` on."""
        self.in_hand = None
        self.again = part
        self.due_ms = due_ms

    def clear(self) -> None:
        """Drop what the program does not have."""
        self.again = self.awaited = None


def take_part(
    stored: deque[ClosedBatch], *, bytes_max: int = PART_BYTES_MAX, end: int | None = None
) -> ColumnPart:
    """Take the first rows of the stored batches: up to a gap in the offsets, to `end`, or to a
    batch with which they are larger than `bytes_max`.
    """
    batches: list[ClosedBatch] = []
    size, upto = 0, stored[0].ranges[0][0]
    while stored:
        batch = stored[0]
        start, stop = batch.ranges[0]
        size += batch.batch.size
        if start != upto or (batches and size > bytes_max) or (end is not None and start >= end):
            break
        upto = stop if end is None else min(stop, end)
        batches.append(batch._replace(ranges=[(start, upto)]))
        stored.popleft()
        rest = ([(upto, stop)] if upto < stop else []) + batch.ranges[1:]
        if rest:
            stored.appendleft(batch._replace(ranges=rest))
            break
    return ColumnPart(batches)


def cut_part(part: ColumnPart, end: int, stored: deque[ClosedBatch]) -> None:
    """Leave the rows below `end` in a part, and put the others back."""
    kept: list[ClosedBatch] = []
    rest: list[ClosedBatch] = []
    for batch in part.batches:
        ((start, stop),) = batch.ranges
        if start < end:
            kept.append(batch._replace(ranges=[(start, min(stop, end))]))
        if stop > end:
            rest.append(batch._replace(ranges=[(max(start, end), stop)]))
    part.batches = kept
    part.range = part.range[0], end
    stored.extendleft(reversed(rest))


WHOLE_TRIES = 2
"""After so many failures a batch is halved."""
PART_BITS = 4
"""A batch shrinks by so many bits if its first message failed that often under earlier owners, and
again after each further failure.
"""


@dataclass(slots=True, eq=False)
class MessageBatch:
    """At least one message."""

    messages: list[Message]
    keys: set[bytes] | None
    """The distinct keys except b""; None: not looked at yet."""
    attempt: int = 1
    """The number of the batch's next try; messages may have had more."""

    @property
    def ref(self) -> Ref:
        """What a batch is known by while it is in hand: its first message."""
        first = self.messages[0]
        return first.partition_id, first.offset

    def count_try(self, count: int = 1) -> None:
        """Count a try of each message."""
        self.attempt += count
        for message in self.messages:
            message.attempt += count

    def split(self) -> list[Message]:
        """
        Keep the first half, and return the other one, which may be empty.

        The messages of a key stay together, unless there is no other key: then the older half is
        kept.
        """
        keys = self.keys
        units = [(keys and message.key) or message.offset for message in self.messages]
        distinct = list(dict.fromkeys(units))
        if len(distinct) == 1:
            middle = (len(self.messages) + 1) // 2
            first_half, other_half = self.messages[:middle], self.messages[middle:]
        else:
            first = set(distinct[: (len(distinct) + 1) // 2])
            pairs = list(zip(self.messages, units, strict=True))
            first_half = [message for message, unit in pairs if unit in first]
            other_half = [message for message, unit in pairs if unit not in first]
        self.messages = first_half
        self.keys = keys and {message.key for message in first_half if message.key}
        return other_half


class WaitingBatch(NamedTuple):
    """A failed batch that waits for its next try; its keys are busy."""

    due_ms: int
    sequence: int
    batch: MessageBatch


class BatchFill:
    """
    How long messages wait until a batch is full.

    Args:
        wait_ms: 0: they do not wait.
    """

    __slots__ = ("_arrived", "_upto", "is_over", "until_ms", "wait_ms")

    def __init__(self, wait_ms: int) -> None:
        self.wait_ms = wait_ms
        self.is_over = not wait_ms
        """True if a batch may be smaller."""
        self.until_ms = NEVER
        """When the present wait ends."""
        self._arrived = 0
        self._upto = 0
        """How many messages had arrived when the wait began: it is for them."""

    def arrive(self, count: int, now_ms: int) -> None:
        """Record messages that have arrived; they wait for others."""
        self._arrived += count
        if self.wait_ms and self.until_ms == NEVER:
            self._begin(now_ms)

    def _begin(self, now_ms: int) -> None:
        self.until_ms = now_ms + self.wait_ms
        self._upto = self._arrived

    def expire(self, waiting: int, now_ms: int) -> None:
        """End the wait if its time is over; `waiting` messages are left."""
        if now_ms < self.until_ms:
            return
        self.until_ms = NEVER
        if waiting and self._arrived - waiting >= self._upto:  # later ones have their own wait
            self._begin(now_ms)
        elif waiting:
            self.is_over = True

    def empty(self) -> None:
        """Record that no message is left."""
        self.is_over = not self.wait_ms


@dataclass(slots=True, eq=False)
class PartitionBatches:
    """The batches of one partition."""

    count_max: int
    """The largest number of messages in a batch."""
    fill: BatchFill
    in_hand: dict[Ref, MessageBatch] = field(default_factory=dict)
    running: set[bytes] = field(default_factory=set)
    """The keys of batches that have not failed, and have not ended."""
    held: int = 0
    """How many messages wait for these keys."""
    unregistered: MessageBatch | None = None
    """The batch in hand whose keys are not busy yet, because nothing else is in hand."""
    awaited: dict[Ref, MessageBatch] = field(default_factory=dict)
    """Batches that wait for their acks: handled ones (ack "each"), or one that was taken (ack
    "before").
    """
    waiting: list[WaitingBatch] = field(default_factory=list)
    """A heap of failed batches."""
    is_unsorted: bool = False
    """True if opened messages are before older ones."""
    _sequence: int = 0

    @property
    def count_in_hand(self) -> int:
        """The number of messages in hand."""
        return sum(len(batch.messages) for batch in self.in_hand.values())

    @property
    def count_awaited(self) -> int:
        """The number of messages that wait for their acks."""
        return sum(len(batch.messages) for batch in self.awaited.values())

    def wait(self, batch: MessageBatch, due_ms: int) -> None:
        """Keep a failed batch until `due_ms`."""
        self._sequence += 1
        heapq.heappush(self.waiting, WaitingBatch(due_ms, self._sequence, batch))

    def is_due(self, now_ms: int) -> bool:
        """Return True if a failed batch is to be tried now."""
        return bool(self.waiting) and self.waiting[0].due_ms <= now_ms

    def take_due(self, now_ms: int) -> MessageBatch | None:
        """Take a failed batch whose next try is due; None if there is none."""
        return heapq.heappop(self.waiting).batch if self.is_due(now_ms) else None

    def size_beginning_with(self, message: Message) -> int:
        """
        Return how many messages the next batch has at most, if it begins with this one.

        If its tries under earlier owners did not count, a batch that ends every process would never
        be halved.
        """
        extra = message.attempt - 1 - WHOLE_TRIES
        return self.count_max if extra < 0 else max(1, self.count_max >> (extra + 1) * PART_BITS)

    def discard(self, ref: Ref) -> int:
        """Remove a message from the failed batches that wait, and return how many it was."""
        count = 0
        for waiting in self.waiting:
            messages = waiting.batch.messages
            kept = [each for each in messages if (each.partition_id, each.offset) != ref]
            count += len(messages) - len(kept)
            waiting.batch.messages = kept
        if count:
            self.waiting = [waiting for waiting in self.waiting if waiting.batch.messages]
            heapq.heapify(self.waiting)
        return count

    def clear(self) -> None:
        """Drop everything that no worker has."""
        self.waiting.clear()
        self.held = 0


def take_first(messages: deque[Message], count: int) -> list[Message]:
    """Remove and return the first `count` messages."""
    if count >= len(messages):
        taken = list(messages)
        messages.clear()
        return taken
    taken = list(islice(messages, count))
    for _ in taken:
        messages.popleft()
    return taken


by_offset = attrgetter("offset")


class Waiting(NamedTuple):
    """A failed message that waits for its next try."""

    due_ms: int
    sequence: int
    message: Message
    last: Failure | None
    """Why its key is parked instead of another try."""


@dataclass(slots=True, eq=False, kw_only=True)
class KeyLanes:
    """The waiting messages of one partition."""

    is_ordered: bool
    """False: no message waits for another, as if none had a key."""
    batches: PartitionBatches | None = None
    """For a handler of batches; None: messages are handed out one by one."""
    columns: PartitionColumns | None = None
    """For a program that takes columns; None: it takes messages."""
    stored: deque[ClosedBatch] = field(default_factory=deque)
    opened: deque[Message] = field(default_factory=deque)
    """The messages of opened batches; all stored ones come after them."""
    extra: deque[Message] = field(default_factory=deque)
    """Messages that come before the opened ones: redriven ones, and those of a freed key."""
    held_keyless: deque[Message] | None = None
    """Messages without a key that wait for acks that were refused; None: they need not wait."""
    again: deque[Message] = field(default_factory=deque)
    """Messages that own their keys, and come before all others."""
    busy: dict[bytes, deque[Message] | None] = field(default_factory=dict)
    """The messages that wait for each busy key; None if none does."""
    in_hand: dict[tuple[int, int], Message] = field(default_factory=dict)
    """What workers have, by (partition that stores it, offset), except the run."""
    run: list[Message] = field(default_factory=list)
    """What a worker handles one after another, while nothing else is in hand."""
    retries: list[Waiting] = field(default_factory=list)
    """A heap of messages whose keys are busy."""
    together: dict[bytes, list[Message]] = field(default_factory=dict)
    """What is in hand of the keys of which several messages were handed out at once, in order."""
    behind_earlier: dict[Ref, tuple[int, Failure | None]] = field(default_factory=dict)
    """When the next try is due of failed messages that wait for earlier ones of their keys, or why
    the key is parked in its place.
    """
    given_back: dict[bytes, Ref] = field(default_factory=dict)
    """In a shared group, the message of a key that its program has given back: later ones wait for
    it.
    """
    _sequence: int = 0

    def may_have_more(self, now_ms: int) -> bool:
        """Return True if a worker that asks may get something."""
        if self.opened or self.stored or self.again or self.extra:
            return True
        return bool(self.retries) and self.retries[0].due_ms <= now_ms

    @property
    def is_idle(self) -> bool:
        """True if no worker has a message."""
        if self.columns is not None:
            return self.columns.in_hand is None
        return not (self.in_hand or self.run or (self.batches is not None and self.batches.in_hand))

    @property
    def count_in_hand(self) -> int:
        """The number of messages that workers have."""
        if self.columns is not None:
            return 0 if self.columns.in_hand is None else self.columns.in_hand.count
        count = len(self.in_hand) + len(self.run)
        if self.batches is not None and self.is_ordered:  # others are in `in_hand` too
            count += self.batches.count_in_hand
        return count

    @property
    def count_retrying(self) -> int:
        """The number of failed messages that wait for their next try, and, in a shared group, of
        those that wait for them.
        """
        batches = () if self.batches is None else self.batches.waiting
        behind = sum(len(self.busy[key] or ()) for key in self.given_back)
        return len(self.retries) + behind + sum(len(each.batch.messages) for each in batches)

    def has_in_hand(self, ref: Ref) -> bool:
        """Return True if a worker has the message, alone or as the first one of a batch."""
        return ref in self.in_hand or (self.batches is not None and ref in self.batches.in_hand)

    # ── runs ──────────────────────────────────────────────────────────────────────────────────────
    def take_run(self, count: int) -> list[Message]:
        """Take up to `count` opened messages for one worker; nothing is in hand."""
        opened = self.opened
        if count >= len(opened):
            run = list(opened)
            opened.clear()
        else:
            run = list(islice(opened, count))
            for _ in range(count):
                opened.popleft()
        busy = self.busy
        if busy and self.is_ordered and not busy.keys().isdisjoint([each.key for each in run]):
            run = [message for message in run if not self.queue_if_busy(message)]
        self.run = run
        return run

    def end_run(self, done: int, *, has_next: bool) -> list[Message]:
        """
        End the run, of which `done` messages are handled.

        Args:
            has_next: the next message is in a handler that waits or has failed.

        Returns:
            The handled messages.
        """
        run = self.run
        self.run = []
        if has_next:
            message = run[done]
            if message.key and self.is_ordered:
                self.busy[message.key] = None
            self.in_hand[message.partition_id, message.offset] = message
        self.opened.extendleft(reversed(run[done + has_next :]))
        return run[:done]

    def spread(self) -> None:
        """End the run; all its messages are in hand."""
        run, busy, in_hand = self.run, self.busy, self.in_hand
        self.run = []
        firsts: dict[bytes, Message] = {}
        for message in run:
            key = message.key
            if key and self.is_ordered:
                if key in firsts:
                    self.join(firsts[key], message)
                else:
                    firsts[key] = message
                    busy[key] = None
            in_hand[message.partition_id, message.offset] = message

    # ── several messages of a key ─────────────────────────────────────────────────────────────────
    def join(self, first: Message, message: Message) -> None:
        """Note that a message is handed out together with `first`, an earlier one of its key."""
        self.together.setdefault(message.key, [first]).append(message)

    def take_behind(self, message: Message) -> Message | None:
        """Take the message that waits behind one of its key which is handed out now; None if there
        is none that may be in hand together with it.
        """
        queue = self.busy.get(message.key)
        if not queue or (queue[0].partition_id, queue[0].offset) in self.behind_earlier:
            return None
        behind = queue.popleft()
        if not queue:
            self.busy[message.key] = None
        return behind

    def leave(self, message: Message) -> bool:
        """Note that a message is not in hand any more. Return True if others of its key are."""
        key, together = message.key, self.together
        if key not in together:
            return False
        others = [other for other in together[key] if other is not message]
        if others:
            together[key] = others
        else:
            del together[key]
        return bool(others)

    def take_back(self, failed: Message) -> list[Message]:
        """Take back the messages that were handed out together with one that has failed, and after
        it. They wait for it; return them.
        """
        key, in_hand = failed.key, self.in_hand
        others = self.together.get(key)
        if others is None:
            return []
        place = next(place for place, other in enumerate(others) if other is failed)
        # Others are handled, and their acks are awaited.
        later = [
            each for each in others[place + 1 :] if (each.partition_id, each.offset) in in_hand
        ]
        for message in later:
            del in_hand[message.partition_id, message.offset]
            self.leave(message)
        self.leave(failed)
        self.queue_in_order(key, later)
        return later

    def queue_in_order(self, key: bytes, messages: list[Message]) -> None:
        """Put messages that were in hand into the queue of their key."""
        if messages:
            self.busy[key] = deque(sorted([*messages, *(self.busy[key] or ())], key=by_offset))

    # ── one message at a time ─────────────────────────────────────────────────────────────────────
    def claim(self, message: Message) -> bool:
        """Make the message's key busy, and return True; if it is, queue the message."""
        key, busy = message.key, self.busy
        if self.given_back and key in self.given_back:
            is_itself = self.given_back[key] == (message.partition_id, message.offset)
            return is_itself or not self.queue_if_busy(message)
        if not key or not self.is_ordered:
            if self.held_keyless is None or key:
                return True
            self.held_keyless.append(message)
            return False
        if key in busy:
            return not self.queue_if_busy(message)
        busy[key] = None
        return True

    def queue_if_busy(self, message: Message) -> bool:
        """Queue the message and return True if its key is busy."""
        key = message.key
        if key not in self.busy:
            return False
        queue = self.busy[key]
        if queue is None:
            self.busy[key] = deque((message,))
        else:
            queue.append(message)
        return True

    def hold_keyless(self) -> None:
        """Let the next messages without a key wait for acks that were refused."""
        if self.held_keyless is None:
            self.held_keyless = deque()

    def release_keyless(self) -> None:
        """Hand messages without a key out again."""
        if self.held_keyless is not None:
            self.extra.extendleft(reversed(self.held_keyless))
            self.held_keyless = None

    def finish(self, message: Message) -> None:
        """Free the key of a message that has ended; the next one of it comes before all others."""
        key = message.key
        if self.given_back and self.given_back.get(key) == (message.partition_id, message.offset):
            del self.given_back[key]
            self.again.extend(self.busy.pop(key) or ())
        if not key or not self.is_ordered:
            return
        if self.together and self.leave(message):
            return
        if self.busy[key] is None:
            del self.busy[key]
        else:
            self.pass_on(key)

    def pass_on(self, key: bytes) -> None:
        """Let the next message that waits for a key own it."""
        queue = self.busy[key]
        assert queue
        message = queue.popleft()
        if not queue:
            self.busy[key] = None
        waiting = None
        if self.behind_earlier:
            waiting = self.behind_earlier.pop((message.partition_id, message.offset), None)
        if waiting is None:
            self.again.append(message)
        else:
            self.wait(message, *waiting)

    def wait(self, message: Message, due_ms: int, last: Failure | None = None) -> None:
        """Keep a failed message, whose key stays busy, until `due_ms`, and until earlier messages
        of its key that are in hand have ended.
        """
        if message.key in self.together:
            self.behind_earlier[message.partition_id, message.offset] = due_ms, last
            self.queue_in_order(message.key, [message])
            return
        self._sequence += 1
        heapq.heappush(self.retries, Waiting(due_ms, self._sequence, message, last))

    def hold_key(self, message: Message) -> None:
        """Let later messages of a key wait for one of a shared group that was given back."""
        if message.key and message.key not in self.given_back:
            self.given_back[message.key] = message.partition_id, message.offset
            self.busy[message.key] = None

    def take_due(self, now_ms: int) -> Waiting | None:
        """Take a failed message whose next try is due; None if there is none."""
        if not self.retries or self.retries[0].due_ms > now_ms:
            return None
        return heapq.heappop(self.retries)

    def take_owned(self) -> list[Message]:
        """Take the messages that own their keys, and those that wait for them. Their keys are
        free.
        """
        owned = list(self.again)
        for message in self.again:
            owned += self.busy.pop(message.key, None) or ()
        self.again.clear()
        return owned

    def put_back(self, messages: list[Message]) -> None:
        """Put messages among the opened ones, in the order of their offsets."""
        self.opened = deque(sorted([*messages, *self.opened], key=by_offset))

    # ── removals ──────────────────────────────────────────────────────────────────────────────────
    def remove_key(self, key: bytes, matches: Callable[[Message], bool]) -> list[Message]:
        """Free a key, and remove and return the made messages of it that match, in order. Others
        that waited for the key come before all opened ones. While earlier messages of it are in
        hand, it stays busy.
        """
        queued = list(self.busy.pop(key, None) or ())
        if key in self.together:
            self.busy[key] = None
        for message in queued:
            self.behind_earlier.pop((message.partition_id, message.offset), None)
        removed = [message for message in queued if matches(message)]
        for name in ("extra", "opened"):
            part: deque[Message] = getattr(self, name)
            found = [message for message in part if message.key == key and matches(message)]
            if found:
                gone = {(message.partition_id, message.offset) for message in found}
                kept = (each for each in part if (each.partition_id, each.offset) not in gone)
                setattr(self, name, deque(kept))
                removed += found
        self.extra.extendleft(reversed([each for each in queued if not matches(each)]))
        return sorted(removed, key=by_offset)

    def remove(self, matches: Callable[[Message], bool]) -> list[Message]:
        """Remove and return the messages of `extra` and of queues that match."""
        removed = [message for message in self.extra if matches(message)]
        self.extra = deque(message for message in self.extra if not matches(message))
        for key, queue in self.busy.items():
            if queue:
                removed += [message for message in queue if matches(message)]
                self.busy[key] = deque(each for each in queue if not matches(each)) or None
        if self.batches is not None:
            running = self.batches.running
            self.batches.held = sum(len(self.busy[key] or ()) for key in running)
        return removed

    def discard(self, ref: tuple[int, int]) -> int:
        """Remove the copies of a message of a shared group that no worker has, and return how many
        they were.
        """
        before = len(self.opened) + len(self.again) + len(self.retries)
        discarded = 0 if self.batches is None else self.batches.discard(ref)
        self.opened, self.again = (
            deque(each for each in part if (each.partition_id, each.offset) != ref)
            for part in (self.opened, self.again)
        )
        self.retries = [
            each for each in self.retries if (each.message.partition_id, each.message.offset) != ref
        ]
        heapq.heapify(self.retries)
        for key in self.given_back:
            queue = self.busy[key]
            kept = [each for each in queue or () if (each.partition_id, each.offset) != ref]
            discarded += len(queue or ()) - len(kept)
            self.busy[key] = deque(kept) or None
        return discarded + before - len(self.opened) - len(self.again) - len(self.retries)

    def clear(self) -> None:
        """Drop everything that no worker has."""
        for part in (self.stored, self.opened, self.extra, self.again, self.retries):
            part.clear()
        self.held_keyless = None
        self.given_back.clear()
        self.behind_earlier.clear()
        self.busy = dict.fromkeys(self.busy)
        if self.batches is not None:
            self.batches.clear()
        if self.columns is not None:
            self.columns.clear()
