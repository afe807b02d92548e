"""
Lanes for batches, which decide which messages a handler gets together next. Pure.

    put_batch ─▶ stored, opened when less than a batch is ready
                   ▼
    put ─▶ ready, by partition ──take──▶ a running batch ──finish─▶ held messages are ready again
             ▲        │                        ╰─ fail: waits in `Retries`, and its keys stay busy
             │        │                             ─▶ put_due
             │        ╰─▶ held, if their key is in a running or failed batch
             ╰─ finish, release, drop: the keys are free again

Invariants
    No two batches have messages of the same key, and messages of a key run in the order in which
    they were added: the keys of a batch are busy from `take` until `finish` or `release`. A batch
    has messages of one partition, in offset order, and at most `max_records` of them. Redriven
    messages are in separate batches. Messages without a key (b"") have no order and never wait for
    each other. While a batch's worth of messages is held for a partition's running batches, no
    further batch of that partition is started; messages held for failed batches do not count. A
    batch whose keys are all free costs no Python code per message. The keys of a batch that ends
    before anything else is taken are not checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from ...protocol.message import Message
from .batch import Batch, BatchKey
from .lanes import UnopenedBatch

_QueueKey = tuple[int, Any]
"""The partition id, and the delivery of redriven messages; the latter is None for all other
messages.
"""
_by_offset = attrgetter("offset")

WHOLE_TRIES = 2
"""The number of failures after which a batch is halved."""
PART_BITS = 4
"""By how many bits batches shrink if their messages failed that often under earlier owners: to 1/16
of their size, after another attempt to 1/256, and so on.
"""


class _Queue:
    """The messages of one partition that are not in a batch and not held for a busy key. Redriven
    messages have separate queues.
    """

    __slots__ = (
        "acks_per_delivery",
        "held",
        "leased_id",
        "accepts_more",
        "linger_id",
        "partition_id",
        "put_count",
        "ready",
        "has_lingered",
        "stored",
        "stored_count",
        "unsorted",
        "linger_upto",
        "is_lingering",
    )

    def __init__(self, partition_id: int, *, accepts_more: bool) -> None:
        self.partition_id = self.leased_id = partition_id
        """`leased_id` is the id of the partition whose pull client hands the messages out: redriven
        ones may belong to an ancestor.
        """
        self.accepts_more = accepts_more
        """True if messages may still be added; False: the queue is removed when it is empty."""
        self.acks_per_delivery = False
        """True if a message may have a delivery other than its pull client."""
        self.ready: list[Message] = []
        self.stored: deque[UnopenedBatch] = deque()
        """The batches that were pulled after all ready messages."""
        self.stored_count = 0
        self.held = 0
        """The number of messages that wait for running batches."""
        self.has_lingered = False
        """True if a batch may have fewer than `max_records` messages, because the oldest one has
        waited long enough.
        """
        self.linger_id = 0
        """Identifies the latest wait for a full batch, so that the timers of earlier ones are
        ignored.
        """
        self.is_lingering = False
        """True until the latest wait for a full batch has ended."""
        self.linger_upto = 0
        """The value of `put_count` at the start of the wait: the wait is for the messages added
        before it.
        """
        self.put_count = 0
        self.unsorted = False
        """True if some messages are ahead of older ones."""

    @property
    def count(self) -> int:
        """The number of messages that are not in a batch and not held."""
        return len(self.ready) + self.stored_count

    def put(self, messages: list[Message]) -> None:
        """Add messages ahead of all stored batches."""
        self.add(messages)
        self.put_count += len(messages)

    def add(self, messages: list[Message]) -> None:
        """Add messages, in offset order, to those that are ready."""
        ready = self.ready
        if ready and messages and ready[-1].offset > messages[0].offset:
            self.unsorted = True
        ready += messages

    def put_batch(self, batch: UnopenedBatch) -> None:
        """Add a batch after all others."""
        self.stored.append(batch)
        self.stored_count += batch.count
        self.put_count += batch.count

    def begin_linger(self) -> int:
        """Start waiting for more messages to join those in the queue, and return the wait's id."""
        self.linger_id += 1
        self.is_lingering = True
        self.linger_upto = self.put_count
        return self.linger_id

    def end_linger(self) -> int:
        """End the wait, so that the queued messages may form a smaller batch. If none of the
        messages that it was for are left, start the next wait and return its id.
        """
        self.is_lingering = False
        if not self.count:
            return 0
        if self.put_count - self.count >= self.linger_upto:
            return self.begin_linger()
        self.has_lingered = True
        return 0

    def open(self, count: int) -> None:
        """Open batches until `count` messages are ready or all batches are open; skip messages of
        parked keys.
        """
        while self.stored and len(self.ready) < count:
            batch = self.stored.popleft()
            self.stored_count -= batch.count
            self.add(batch.messages())

    def keep(self, predicate: Callable[[Message], bool]) -> int:
        """Remove the ready messages that do not match the predicate, and return their number."""
        count_before = len(self.ready)
        self.ready = [message for message in self.ready if predicate(message)]
        return count_before - len(self.ready)

    def drop_batches(self, client: Any) -> int:
        """Drop the stored batches of a pull client, and return the number of messages in them."""
        count_before = self.stored_count
        self.stored = deque(batch for batch in self.stored if batch.client is not client)
        self.stored_count = sum(batch.count for batch in self.stored)
        return count_before - self.stored_count


class BatchLanes:
    """
    Holds the waiting messages by partition and key. All workers of an event loop take batches from
    it.

    Args:
        max_records: the maximum number of messages in a batch.
        lingers: True: a smaller batch is taken only after `end_linger`.
        ordered: False: every message is treated as if it had no key.
        wake: called when freed keys may let other workers take batches too.
    """

    def __init__(
        self,
        *,
        max_records: int,
        lingers: bool = False,
        ordered: bool = True,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.unregistered = self
        self.may_begin_run = self.may_take_unregistered = False
        """Always False: workers have no faster way to take batches; see `Lanes`."""
        self._wake = wake
        self._max_records = max_records
        self._lingers = lingers
        self._ordered = ordered
        self._queues: dict[_QueueKey, _Queue] = {}
        self._round_robin: deque[_QueueKey] = deque()
        """The keys of the queues; the queue whose turn is next comes first."""
        self._paused: set[int] = set()
        """The ids of paused partitions."""
        self._due_batches: deque[Batch] = deque()
        """The failed batches whose retry is due."""
        self._busy_keys: set[bytes] = set()
        """The keys of running and failed batches."""
        self._failed_keys: set[bytes] = set()
        """The keys of failed batches, until `finish` or `release`."""
        self._held: dict[bytes, list[Message]] = {}
        """The messages that wait for a busy key, by key."""
        self._unregistered: Batch | None = None
        """A running batch whose keys are not in `_busy_keys` yet: nothing has been taken since, and
        no other batch has keys.
        """

    def take_single(self) -> None:
        """Return None: there is no shortcut for a single batch; see `Lanes`."""

    def register_running(self) -> None:
        """Do nothing: a batch is registered when it is taken."""

    @property
    def arrivals(self) -> bool:
        """True if a batch may be available."""
        return bool(self._due_batches) or any(map(self._is_due, self._queues.values()))

    @property
    def has_waiting(self) -> bool:
        """True if a batch may be available."""
        return self.arrivals

    def _is_due(self, queue: _Queue) -> bool:
        """Return True if a batch may be taken from the queue now."""
        count = queue.count
        is_complete = queue.has_lingered or count >= self._max_records
        is_allowed = queue.held < self._max_records and queue.leased_id not in self._paused
        return count > 0 and is_complete and is_allowed

    def put(self, messages: list[Message]) -> int:
        """
        Add messages of one partition, in offset order, ahead of the stored batches.

        Returns:
            The id of a wait for a full batch that starts now, for `end_linger`; 0 if none starts.
        """
        if not messages:
            return 0
        queue = self._queue(messages[0])
        queue.put(messages)
        acks_per_delivery = self._ordered and not _is_from_client(messages[0])
        queue.acks_per_delivery |= acks_per_delivery
        return self._maybe_linger(queue, has_lingered=acks_per_delivery)

    def put_batch(self, batch: UnopenedBatch) -> int:
        """Add a batch that is opened when its messages are next. Returns the same as `put`."""
        if not batch.count:
            return 0
        partition_id: int = batch.client.partition_id
        queue = self._queue_of((partition_id, None), partition_id)
        queue.put_batch(batch)
        return self._maybe_linger(queue)

    def _maybe_linger(self, queue: _Queue, *, has_lingered: bool = False) -> int:
        if has_lingered or not self._lingers:
            queue.has_lingered = True
        elif not queue.is_lingering:
            return queue.begin_linger()
        return 0

    def _queue_key(self, message: Message) -> _QueueKey:
        delivery: Any = message.delivery
        is_redriven = self._ordered and delivery.is_apart
        return message.partition_id, delivery if is_redriven else None

    def _queue(self, message: Message) -> _Queue:
        return self._queue_of(self._queue_key(message), message.partition_id)

    def _queue_of(self, key: _QueueKey, partition_id: int) -> _Queue:
        """Return the queue with this key, creating it if needed."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(partition_id, accepts_more=key[1] is None)
            if key[1] is not None:
                queue.leased_id = key[1].leased_id
            self._round_robin.append(key)
        return queue

    def end_linger(self, partition_id: int, linger_id: int) -> int:
        """
        End a partition's wait for a full batch: the messages that it was for may be taken now,
        however few there are.

        Returns:
            The id of a wait that starts now, for messages that arrived later; 0 if none starts.
        """
        queue = self._queues.get((partition_id, None))
        return 0 if queue is None or queue.linger_id != linger_id else queue.end_linger()

    def pause(self, partition_id: int) -> None:
        """Start no message of a partition until `resume`, except due retries; see `take_due`."""
        self._paused.add(partition_id)

    def take_due(self, partition_id: int) -> list[Batch]:
        """Remove and return the due retries of a partition; their keys stay busy."""
        due_batches = [batch for batch in self._due_batches if batch.leased_id == partition_id]
        self._due_batches = deque(
            batch for batch in self._due_batches if batch.leased_id != partition_id
        )
        return due_batches

    def resume(self, partition_id: int) -> bool:
        """Let the messages of a partition run again. Return True if there are any."""
        self._paused.discard(partition_id)
        return any(
            queue.count for queue in self._queues.values() if queue.leased_id == partition_id
        )

    def put_due(self, batches: Iterable[Batch]) -> None:
        """Put failed batches whose retry is due ahead of everything else; their keys are busy."""
        self._due_batches.extend(batches)

    def take(self) -> Batch | None:
        """Take the next batch, which then counts as running. Return None if there is none."""
        self._register_batch()
        if self._due_batches:
            return self._due_batches.popleft()
        for _ in range(len(self._round_robin)):
            key = self._round_robin[0]
            queue = self._queues[key]
            self._round_robin.rotate(-1)
            if not (queue.accepts_more or queue.count or queue.held):
                del self._queues[key]
                self._round_robin.pop()
                continue
            while self._is_due(queue):
                batch = self._next_batch(queue)
                if batch is not None:
                    return batch
        return None

    def _next_batch(self, queue: _Queue) -> Batch | None:
        """Return a batch of ready messages; None if all examined messages are parked or have busy
        keys.
        """
        queue.open(self._max_records)
        size = self._next_size(queue)
        chunk, unsorted = queue.ready[:size], queue.unsorted
        del queue.ready[:size]
        if not queue.count:
            queue.has_lingered = not self._lingers
        if not queue.ready:
            queue.unsorted = False
        if unsorted:
            chunk.sort(key=_by_offset)
        if not chunk:
            return None
        if not self._ordered:
            return Batch(chunk, set(), one_delivery=False)
        keys = None
        if self._busy_keys:
            keys = {message.key for message in chunk}
            if not keys.isdisjoint(self._busy_keys):
                chunk = self._hold_busy(chunk, queue)
                if not chunk:
                    return None
                keys = {message.key for message in chunk}
            keys.discard(b"")
            self._busy_keys |= keys
        per_delivery = queue.acks_per_delivery
        queue.acks_per_delivery = per_delivery and bool(
            queue.ready or queue.held or not queue.accepts_more
        )
        batch = Batch(chunk, keys, one_delivery=not per_delivery, acks_per_delivery=per_delivery)
        if keys is None:
            self._unregistered = batch
        return batch

    def _next_size(self, queue: _Queue) -> int:
        """
        Return the maximum size of the next batch, which is smaller if the first message failed
        under earlier owners.

        Otherwise a batch that kills its consumer every time would never be halved.
        """
        if not queue.ready or self._queue_key(queue.ready[0])[1] is not None:  # redriven
            return self._max_records
        extra = queue.ready[0].attempt - 1 - WHOLE_TRIES
        return (
            self._max_records if extra < 0 else max(1, self._max_records >> (extra + 1) * PART_BITS)
        )

    def _register_batch(self) -> None:
        """Mark the keys of the unregistered batch as busy."""
        batch = self._unregistered
        self._unregistered = None
        if batch is not None:
            self._busy_keys |= batch.keys

    def _hold_busy(self, messages: list[Message], queue: _Queue) -> list[Message]:
        """Hold the messages whose keys are busy, and return the others."""
        free = []
        busy, held, failed = self._busy_keys, self._held, self._failed_keys
        for message in messages:
            key = message.key
            if key not in busy:
                free.append(message)
                continue
            queue.held += key not in failed
            if key in held:
                held[key].append(message)
            else:
                held[key] = [message]
        return free

    def finish(self, key: bytes) -> None:
        """Record that the batch of `key` has ended: messages held for its keys become ready
        again.
        """
        assert isinstance(key, BatchKey)
        if key.batch is self._unregistered:
            self._unregistered = None
        else:
            self.release(key.batch)

    def hold_for_ack(self, batch: Batch) -> None:
        """Do nothing: the keys of a batch stay busy until `release` anyway."""

    def release(self, batch: Batch) -> None:
        """Free the keys of a batch that has ended or is not retried."""
        self._register_batch()
        self._busy_keys -= batch.keys
        if self._held and batch.keys:
            released: list[Message] = []
            for key in batch.keys & self._held.keys():
                lane = self._held.pop(key)
                if key not in self._failed_keys:
                    self._adjust_held(lane, -1)
                released += lane
            if released:
                self._requeue_front(released)
                self._wake()
        self._failed_keys -= batch.keys

    def _adjust_held(self, messages: list[Message], sign: int) -> None:
        """Add `sign` (1 or -1) to the held count of each message's queue."""
        for message in messages:
            self._queue(message).held += sign

    def _requeue_front(self, messages: list[Message]) -> None:
        """Put messages that were held ahead of everything that is ready."""
        messages.sort(key=_by_offset)
        released: dict[_QueueKey, list[Message]] = {}
        for message in messages:
            released.setdefault(self._queue_key(message), []).append(message)
        for group in released.values():
            queue = self._queue(group[0])
            queue.ready[:0] = group
            queue.has_lingered = queue.unsorted = True
            queue.acks_per_delivery |= not all(map(_is_from_client, group))

    def fail(self, batch: Batch) -> None:
        """Record that a batch failed: its keys stay busy until it is handled; other keys do not
        wait for it.
        """
        self._register_batch()
        for key in batch.keys - self._failed_keys:
            self._adjust_held(self._held.get(key, []), -1)
        self._failed_keys |= batch.keys

    def split(self, batch: Batch) -> Batch | None:
        """Halve a failed batch, and return the other half if its keys differ, so that both can be
        retried at the same time.
        """
        self._register_batch()
        other_half = batch.split()
        if not other_half:
            return None
        keys = {message.key for message in other_half if message.key} if self._ordered else set()
        if keys & batch.keys:  # the only key
            (key,) = batch.keys
            self._held[key] = other_half + self._held.get(key, [])
            if key not in self._failed_keys:
                self._adjust_held(other_half, 1)
            return None
        per_delivery = batch.acks_per_delivery
        return Batch(
            other_half,
            keys,
            one_delivery=self._ordered and not per_delivery,
            acks_per_delivery=per_delivery,
            attempt=batch.attempt,
        )

    def collect(self, failed: Batch, predicate: Callable[[Message], bool]) -> list[Message]:
        """Remove and return the messages that match the predicate and wait for a failed single-key
        batch that is not retried here.
        """
        self._register_batch()
        (key,) = failed.keys

        def is_behind(message: Message) -> bool:
            return message.key == key and predicate(message)

        lane = self._held.get(key, [])
        waiting = [message for message in lane if is_behind(message)]
        if waiting and key not in self._failed_keys:
            self._adjust_held(waiting, -1)
        self._held[key] = [message for message in lane if not is_behind(message)]
        for queue in self._queues.values():
            if any(is_behind(message) for message in queue.ready):
                waiting += [message for message in queue.ready if is_behind(message)]
                queue.keep(lambda message: not is_behind(message))
        self.release(failed)
        return sorted(waiting, key=_by_offset)

    def drop(
        self, partition_id: int, predicate: Callable[[Message], bool]
    ) -> tuple[int, list[Batch]]:
        """
        Remove the waiting messages that match the predicate; running batches are not affected.

        Args:
            partition_id: a partition that is no longer paused; the predicate may also match others.

        Returns:
            The number of messages that were not in a batch, and the failed batches that were due.
        """
        count = 0
        self._paused.discard(partition_id)
        for queue in self._queues.values():
            count += queue.keep(lambda message: not predicate(message))
            if queue.partition_id == partition_id:
                queue.accepts_more = False
        for key, lane in list(self._held.items()):
            dropped = [message for message in lane if predicate(message)]
            count += len(dropped)
            if key not in self._failed_keys:
                self._adjust_held(dropped, -1)
            remaining = [message for message in lane if not predicate(message)]
            if remaining:
                self._held[key] = remaining
            else:
                del self._held[key]
        due_batches = [batch for batch in self._due_batches if predicate(batch.messages[0])]
        self._due_batches = deque(
            batch for batch in self._due_batches if not predicate(batch.messages[0])
        )
        for batch in due_batches:
            self.release(batch)
        return count, due_batches

    def drop_batches(self, client: Any) -> int:
        """Drop the unopened batches of a pull client, and return the number of messages in them."""
        return sum(queue.drop_batches(client) for queue in self._queues.values())

    @property
    def runnable(self) -> int:
        """The number of messages that wait for a worker; see `Lanes`."""
        queues = (each for each in self._queues.values() if each.partition_id not in self._paused)
        return sum(queue.count for queue in queues) + sum(map(len, self._due_batches))

    def __len__(self) -> int:
        ready = sum(queue.count for queue in self._queues.values())
        return ready + sum(map(len, self._held.values())) + sum(map(len, self._due_batches))


def _is_from_client(message: Message) -> bool:
    """Return True if the message's delivery is its pull client itself."""
    delivery: Any = message.delivery
    return delivery.client is delivery
