"""The messages of a partition that wait for a worker, and the keys that are busy. Pure.

    store ─▶ stored, not opened ─▶ opened ─┬─ take_run: all to one worker, in order
                                           │     ╰─ spread: all in hand, one by one
                                           ╰─ claim ─▶ in hand, its key is busy ─▶ finish
                                                ╰─ key busy: waits in the queue of its key

Invariants
    At most one message of a key is in hand, or waits for its next try; later ones wait in the queue
    of the key, in the order of their offsets. Messages without a key never wait for each other.
    Messages of a key that one call has handed out together are in hand together; the key is free
    when all of them have ended, and what fails of them waits for the earlier ones.
    A message costs nothing while its batch is stored. A key has a queue only while a message waits
    for another one of it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from ...protocol.message import Message
from ...protocol.parked import Failure
from .batches import PartitionBatches, Ref
from .stored import ClosedBatch, PartitionColumns

by_offset = attrgetter("offset")


class Waiting(NamedTuple):
    """A failed message that waits for its next try."""

    due_ms: int
    sequence: int
    message: Message


class KeyLanes:
    """
    The waiting messages of one partition.

    Args:
        is_ordered: False: no message waits for another, as if none had a key.
        batches: for a handler of batches; None: messages are handed out one by one.
        columns: for a program that takes columns; None: it takes messages.
    """

    __slots__ = (
        "_sequence",
        "again",
        "batches",
        "busy",
        "columns",
        "extra",
        "given_back",
        "held_keyless",
        "in_hand",
        "is_ordered",
        "last_failures",
        "not_before_ms",
        "opened",
        "retries",
        "run",
        "stored",
        "together",
    )

    def __init__(
        self,
        *,
        is_ordered: bool,
        batches: PartitionBatches | None = None,
        columns: PartitionColumns | None = None,
    ) -> None:
        self.is_ordered = is_ordered
        self.batches = batches
        self.columns = columns
        self.stored: deque[ClosedBatch] = deque()
        self.opened: deque[Message] = deque()
        """The messages of opened batches; all stored ones come after them."""
        self.extra: deque[Message] = deque()
        """Messages that come before the opened ones: redriven ones, and those of a freed key."""
        self.held_keyless: deque[Message] | None = None
        """Messages without a key that wait for acks that were refused; None: they need not wait."""
        self.again: deque[Message] = deque()
        """Messages that own their keys, and come before all others."""
        self.busy: dict[bytes, deque[Message] | None] = {}
        """The messages that wait for each busy key; None if none does."""
        self.in_hand: dict[tuple[int, int], Message] = {}
        """What workers have, by (partition that stores it, offset), except the run."""
        self.run: list[Message] = []
        """What a worker handles one after another, while nothing else is in hand."""
        self.retries: list[Waiting] = []
        """A heap of messages whose keys are busy."""
        self.together: dict[bytes, list[Message]] = {}
        """What is in hand of the keys of which several messages were handed out at once, in
        order.
        """
        self.not_before_ms: dict[Ref, int] = {}
        """When the next try is due of failed messages that wait for earlier ones of their keys."""
        self.given_back: dict[bytes, Ref] = {}
        """In a shared group, the message of a key that its program has given back: later ones wait
        for it.
        """
        self.last_failures: dict[Ref, Failure] = {}
        """Why messages are parked as soon as earlier ones of their keys have ended."""
        self._sequence = 0

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

    def spread(self, done: int) -> list[Message]:
        """End the run, of which `done` messages are handled and all others are in hand. Return the
        handled ones.
        """
        run, busy, in_hand = self.run, self.busy, self.in_hand
        self.run = []
        firsts: dict[bytes, Message] = {}
        for message in run[done:]:
            key = message.key
            if key and self.is_ordered:
                if key in firsts:
                    self.join(firsts[key], message)
                else:
                    firsts[key] = message
                    busy[key] = None
            in_hand[message.partition_id, message.offset] = message
        return run[:done]

    # ── several messages of a key ─────────────────────────────────────────────────────────────────
    def join(self, first: Message, message: Message) -> None:
        """Note that a message is handed out together with `first`, an earlier one of its key."""
        self.together.setdefault(message.key, [first]).append(message)

    def take_behind(self, message: Message) -> Message | None:
        """Take the message that waits behind one of its key which is handed out now; None if there
        is none that may be in hand together with it.
        """
        queue = self.busy.get(message.key)
        if not queue or (queue[0].partition_id, queue[0].offset) in self.not_before_ms:
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
        due_ms = None
        if self.not_before_ms:
            due_ms = self.not_before_ms.pop((message.partition_id, message.offset), None)
        if due_ms is None:
            self.again.append(message)
        else:
            self.wait(message, due_ms)

    def wait(self, message: Message, due_ms: int) -> None:
        """Keep a failed message, whose key stays busy, until `due_ms`, and until earlier messages
        of its key that are in hand have ended.
        """
        if message.key in self.together:
            self.not_before_ms[message.partition_id, message.offset] = due_ms
            self.queue_in_order(message.key, [message])
            return
        self._sequence += 1
        heapq.heappush(self.retries, Waiting(due_ms, self._sequence, message))

    def hold_key(self, message: Message) -> None:
        """Let later messages of a key wait for one of a shared group that was given back."""
        if message.key and message.key not in self.given_back:
            self.given_back[message.key] = message.partition_id, message.offset
            self.busy[message.key] = None

    def take_due(self, now_ms: int) -> Message | None:
        """Take a failed message whose next try is due; None if there is none."""
        if not self.retries or self.retries[0].due_ms > now_ms:
            return None
        return heapq.heappop(self.retries).message

    def reopen(self) -> None:
        """Put the messages that own their keys, and those that wait for them, back among the opened
        ones, in the order of their offsets. Nothing is in hand.
        """
        if not self.again:
            return
        back = list(self.again)
        for message in self.again:
            if message.key:
                back += self.busy.pop(message.key) or ()
        self.again.clear()
        self.put_back(back)

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
            self.not_before_ms.pop((message.partition_id, message.offset), None)
            self.last_failures.pop((message.partition_id, message.offset), None)
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
        self.not_before_ms.clear()
        self.last_failures.clear()
        self.busy = dict.fromkeys(self.busy)
        if self.batches is not None:
            self.batches.clear()
        if self.columns is not None:
            self.columns.clear()
