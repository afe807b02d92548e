"""Lanes for batches: they decide which messages a handler gets together next. Pure.

    put_batch ─▶ stored, opened once less than a batch is ready
                   ▼
    put ─▶ ready, by partition ──take──▶ a running batch ──finish─▶ held messages are ready again
             ▲        │                        ╰─ fail: waits in `Retries`, and its keys stay busy
             │        │                             ─▶ put_first
             │        ╰─▶ held, if their key is in a running or failed batch
             ╰─ finish, release, drop: the keys are free again

Invariants
    Two batches never have messages of the same key, and messages of a key run in the order they
    were put: the keys of a batch are busy from `take` until `finish` or `release`. A batch has
    messages of one partition, by offset, and at most `max_records` of them. Redriven ones are in
    batches of their own. Messages without a key (b"") have no order and never wait for each other.
    While a batch's worth of messages is held for running batches of a partition, no further batch
    of it is begun; messages held for failed batches do not count. A batch whose keys are all free
    costs no Python code for each message. The keys of a batch that ends before anything else is
    taken are not checked.
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
"""The partition, and the delivery of redriven messages; None for all other messages."""
_by_offset = attrgetter("offset")

WHOLE_TRIES = 2
"""The number of failures after which a batch is halved."""
PART_BITS = 4
"""The bits by which a batch is split whose messages failed so often under earlier owners: into 16
parts, after one more try into 256, and so on.
"""


class _Queue:
    """The messages of one partition that no batch has and no busy key holds back; redriven ones
    have queues of their own.
    """

    __slots__ = (
        "acked_each",
        "held",
        "leased_id",
        "lasts",
        "number",
        "partition_id",
        "put_count",
        "ready",
        "ripe",
        "stored",
        "stored_count",
        "unsorted",
        "wait_upto",
        "waits",
    )

    def __init__(self, partition_id: int, *, lasts: bool) -> None:
        self.partition_id = self.leased_id = partition_id
        """`leased_id` is the id of the partition whose pull client hands the messages out: redriven
        ones may belong to an ancestor.
        """
        self.lasts = lasts
        """True if more messages will be added; False: the queue ends when it is empty."""
        self.acked_each = False
        """True if some messages may have a delivery other than their pull client."""
        self.ready: list[Message] = []
        self.stored: deque[UnopenedBatch] = deque()
        """The batches that were pulled after all ready messages."""
        self.stored_count = 0
        self.held = 0
        """The number of messages that wait for running batches."""
        self.ripe = False
        """True if a batch may be smaller than `max_records`, because the oldest message has waited
        for long enough.
        """
        self.number = 0
        """The number of waits so far, which distinguishes the end of an earlier one."""
        self.waits = False
        """True while the last of them has not ended."""
        self.wait_upto = 0
        """The end of the messages for which the wait is: those that were put before this number of
        them.
        """
        self.put_count = 0
        self.unsorted = False
        """True if some messages lie before older ones."""

    @property
    def count(self) -> int:
        """Return the number of messages that no batch has, and that wait for none."""
        return len(self.ready) + self.stored_count

    def put(self, messages: list[Message]) -> None:
        """Add messages before all stored batches."""
        self.add(messages)
        self.put_count += len(messages)

    def add(self, messages: list[Message]) -> None:
        """Add messages, by offset, to those that are ready."""
        ready = self.ready
        if ready and messages and ready[-1].offset > messages[0].offset:
            self.unsorted = True
        ready += messages

    def put_batch(self, batch: UnopenedBatch) -> None:
        """Add a batch after all others."""
        self.stored.append(batch)
        self.stored_count += batch.count
        self.put_count += batch.count

    def begin_wait(self) -> int:
        """Begin a wait for others beside the messages that are here, and return its number."""
        self.number += 1
        self.waits = True
        self.wait_upto = self.put_count
        return self.number

    def end_wait(self) -> int:
        """End the wait: the messages here may form a smaller batch; or, if all that it was for are
        gone, begin the next one.
        """
        self.waits = False
        if not self.count:
            return 0
        if self.put_count - self.count >= self.wait_upto:
            return self.begin_wait()
        self.ripe = True
        return 0

    def open(self, count: int) -> None:
        """Open batches until `count` messages are ready, or all are; messages of parked keys are
        left out.
        """
        while self.stored and len(self.ready) < count:
            batch = self.stored.popleft()
            self.stored_count -= batch.count
            self.add(batch.messages())

    def keep(self, kept: Callable[[Message], bool]) -> int:
        """Leave out the messages that are not `kept`, except those of stored batches, and return
        how many were left out.
        """
        before = len(self.ready)
        self.ready = [message for message in self.ready if kept(message)]
        return before - len(self.ready)

    def drop_batches(self, client: Any) -> int:
        """Forget the stored batches of a pull client, and return how many messages they have."""
        before = self.stored_count
        self.stored = deque(batch for batch in self.stored if batch.client is not client)
        self.stored_count = sum(batch.count for batch in self.stored)
        return before - self.stored_count


class BatchLanes:
    """
    Messages waiting, by partition and key; any number of workers of one event loop take batches of
    them.

    Args:
        max_records: the most messages of a batch.
        waits: whether a batch of fewer messages is taken only after `ripen`.
        ordered: False: every message is treated as one without a key.
        wake: called when more batches may be available than the one for the worker that freed the
            keys.
    """

    def __init__(
        self,
        *,
        max_records: int,
        waits: bool = False,
        ordered: bool = True,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.alone = self
        self.may_run = self.may_be_alone = False
        """False, see `Lanes`: workers take batches in no shorter way."""
        self._wake = wake
        self._max = max_records
        self._waits = waits
        self._ordered = ordered
        self._queues: dict[_QueueKey, _Queue] = {}
        self._turns: deque[_QueueKey] = deque()
        """The keys of the queues, with the one whose turn is next first."""
        self._paused: set[int] = set()
        """The partitions whose messages do not run."""
        self._again: deque[Batch] = deque()
        """The failed batches whose next try is due."""
        self._busy: set[bytes] = set()
        """The keys of running and failed batches."""
        self._failed: set[bytes] = set()
        """The keys of failed batches, until `finish` or `release`."""
        self._held: dict[bytes, list[Message]] = {}
        """The messages that wait for busy keys, by key."""
        self._lone: Batch | None = None
        """A running batch whose keys are not among the busy ones yet: nothing was taken since, and
        no other batch has keys.
        """

    def take_only(self) -> None:
        """Return None; see `Lanes`."""

    def note_alone(self) -> None:
        """Do nothing: a batch is noted when it is taken."""

    @property
    def arrived(self) -> bool:
        """Return True if a batch may be available."""
        return bool(self._again) or any(map(self._is_due, self._queues.values()))

    @property
    def has_waiting(self) -> bool:
        """Return True if a batch may be available."""
        return self.arrived

    def _is_due(self, queue: _Queue) -> bool:
        count = queue.count
        enough = queue.ripe or count >= self._max
        may = queue.held < self._max and queue.leased_id not in self._paused
        return count > 0 and enough and may

    def put(self, messages: list[Message]) -> int:
        """
        Add messages of one partition, in the order of their offsets, before the stored batches.

        Returns:
            The number of a wait that begins now and that `ripen` should end; 0 if none begins.
        """
        if not messages:
            return 0
        queue = self._queue(messages[0])
        queue.put(messages)
        alone = self._ordered and not _is_plain(messages[0])
        queue.acked_each |= alone
        return self._wait(queue, ripe=alone)

    def put_batch(self, batch: UnopenedBatch) -> int:
        """Add a batch that is opened when its messages are next, and return as `put` does."""
        if not batch.count:
            return 0
        partition_id: int = batch.client.partition_id
        queue = self._queue_of((partition_id, None), partition_id)
        queue.put_batch(batch)
        return self._wait(queue)

    def _wait(self, queue: _Queue, *, ripe: bool = False) -> int:
        if ripe or not self._waits:
            queue.ripe = True
        elif not queue.waits:
            return queue.begin_wait()
        return 0

    def _key(self, message: Message) -> _QueueKey:
        delivery: Any = message.delivery
        apart = self._ordered and delivery.is_apart
        return message.partition_id, delivery if apart else None

    def _queue(self, message: Message) -> _Queue:
        return self._queue_of(self._key(message), message.partition_id)

    def _queue_of(self, key: _QueueKey, partition_id: int) -> _Queue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(partition_id, lasts=key[1] is None)
            if key[1] is not None:
                queue.leased_id = key[1].leased_id
            self._turns.append(key)
        return queue

    def ripen(self, partition_id: int, number: int) -> int:
        """
        End a wait: the messages that its partition has had since it began may be taken now, however
        few they are.

        Returns:
            The number of a wait that begins now, for messages that arrived later; 0 if none begins.
        """
        queue = self._queues.get((partition_id, None))
        return 0 if queue is None or queue.number != number else queue.end_wait()

    def pause(self, partition_id: int) -> None:
        """Let no message of a partition run until `resume`, except batches that are due again, see
        `take_due`.
        """
        self._paused.add(partition_id)

    def take_due(self, partition_id: int) -> list[Batch]:
        """Take out the batches of a partition whose next try is due; their keys stay busy."""
        taken = [batch for batch in self._again if batch.leased_id == partition_id]
        self._again = deque(each for each in self._again if each.leased_id != partition_id)
        return taken

    def resume(self, partition_id: int) -> bool:
        """Let the messages of a partition run again, and return True if any waits."""
        self._paused.discard(partition_id)
        return any(
            queue.count for queue in self._queues.values() if queue.leased_id == partition_id
        )

    def put_first(self, batches: Iterable[Batch]) -> None:
        """Put failed batches whose next try is due before everything else; their keys are busy."""
        self._again.extend(batches)

    def take(self) -> Batch | None:
        """Take the next batch, which counts as running, or return None if there is none."""
        self._note_lone()
        if self._again:
            return self._again.popleft()
        for _ in range(len(self._turns)):
            key = self._turns[0]
            queue = self._queues[key]
            self._turns.rotate(-1)
            if not (queue.lasts or queue.count or queue.held):
                del self._queues[key]
                self._turns.pop()
                continue
            while self._is_due(queue):
                batch = self._fill(queue)
                if batch is not None:
                    return batch
        return None

    def _fill(self, queue: _Queue) -> Batch | None:
        """Return a batch of ready messages; None if all that were checked are parked, or their keys
        are busy.
        """
        queue.open(self._max)
        most = self._most(queue)
        chunk, unsorted = queue.ready[:most], queue.unsorted
        del queue.ready[:most]
        if not queue.count:
            queue.ripe = not self._waits
        if not queue.ready:
            queue.unsorted = False
        if unsorted:
            chunk.sort(key=_by_offset)
        if not chunk:
            return None
        if not self._ordered:
            return Batch(chunk, set(), one_delivery=False)
        keys = None
        if self._busy:
            keys = {message.key for message in chunk}
            if not keys.isdisjoint(self._busy):
                chunk = self._free_of(chunk, queue)
                if not chunk:
                    return None
                keys = {message.key for message in chunk}
            keys.discard(b"")
            self._busy |= keys
        each = queue.acked_each
        queue.acked_each = each and bool(queue.ready or queue.held or not queue.lasts)
        batch = Batch(chunk, keys, one_delivery=not each, acked_each=each)
        if keys is None:
            self._lone = batch
        return batch

    def _most(self, queue: _Queue) -> int:
        """
        Return the most messages of the next batch; fewer if the first one failed under earlier
        owners.

        Otherwise a batch that ends its consumer each time would never be halved.
        """
        if not queue.ready or self._key(queue.ready[0])[1] is not None:  # none, or redriven ones
            return self._max
        more = queue.ready[0].attempt - 1 - WHOLE_TRIES
        return self._max if more < 0 else max(1, self._max >> (more + 1) * PART_BITS)

    def _note_lone(self) -> None:
        """Note the keys of the batch that ran alone."""
        lone = self._lone
        self._lone = None
        if lone is not None:
            self._busy |= lone.keys

    def _free_of(self, messages: list[Message], queue: _Queue) -> list[Message]:
        """Hold the messages whose keys are busy, and return the others."""
        free = []
        busy, held, failed = self._busy, self._held, self._failed
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
        """Note that the batch of `key` ended: messages held for its keys are ready again."""
        assert isinstance(key, BatchKey)
        if key.batch is self._lone:
            self._lone = None
        else:
            self.release(key.batch)

    def hold_for_ack(self, batch: Batch) -> None:
        """Do nothing: the keys of a batch are busy until `release`."""

    def release(self, batch: Batch) -> None:
        """Free the keys of a batch that ended, or is not tried again."""
        self._note_lone()
        self._busy -= batch.keys
        if self._held and batch.keys:
            back: list[Message] = []
            for key in batch.keys & self._held.keys():
                lane = self._held.pop(key)
                if key not in self._failed:
                    self._count_held(lane, -1)
                back += lane
            if back:
                self._put_back(back)
                self._wake()
        self._failed -= batch.keys

    def _count_held(self, messages: list[Message], sign: int) -> None:
        for message in messages:
            self._queue(message).held += sign

    def _put_back(self, messages: list[Message]) -> None:
        """Put messages that were held before all that is ready."""
        messages.sort(key=_by_offset)
        back: dict[_QueueKey, list[Message]] = {}
        for message in messages:
            back.setdefault(self._key(message), []).append(message)
        for group in back.values():
            queue = self._queue(group[0])
            queue.ready[:0] = group
            queue.ripe = queue.unsorted = True
            queue.acked_each |= not all(map(_is_plain, group))

    def fail(self, batch: Batch) -> None:
        """Note that a batch failed: its keys are busy until it is handled, and other keys do not
        wait for it.
        """
        self._note_lone()
        for key in batch.keys - self._failed:
            self._count_held(self._held.get(key, []), -1)
        self._failed |= batch.keys

    def split(self, batch: Batch) -> Batch | None:
        """Halve a failed batch, and return the other half if its keys differ, so that it may be
        tried beside this one.
        """
        self._note_lone()
        rest = batch.split()
        if not rest:
            return None
        keys = {message.key for message in rest if message.key} if self._ordered else set()
        if keys & batch.keys:  # the only key
            (key,) = batch.keys
            self._held[key] = rest + self._held.get(key, [])
            if key not in self._failed:
                self._count_held(rest, 1)
            return None
        each = batch.acked_each
        alike = self._ordered and not each
        return Batch(rest, keys, one_delivery=alike, acked_each=each, attempt=batch.attempt)

    def collect(self, failed: Batch, ours: Callable[[Message], bool]) -> list[Message]:
        """Take out the messages that are `ours` and wait for a failed batch of one key, which is
        not tried again here.
        """
        self._note_lone()
        (key,) = failed.keys

        def behind(message: Message) -> bool:
            return message.key == key and ours(message)

        lane = self._held.get(key, [])
        waiting = [message for message in lane if behind(message)]
        if waiting and key not in self._failed:
            self._count_held(waiting, -1)
        self._held[key] = [message for message in lane if not behind(message)]
        for queue in self._queues.values():
            if any(behind(message) for message in queue.ready):
                waiting += [message for message in queue.ready if behind(message)]
                queue.keep(lambda message: not behind(message))
        self.release(failed)
        return sorted(waiting, key=_by_offset)

    def drop(self, partition_id: int, ours: Callable[[Message], bool]) -> tuple[int, list[Batch]]:
        """
        Forget the waiting messages that are `ours`; running batches are not affected.

        Args:
            partition_id: a partition that is no longer paused; `ours` may also include others.

        Returns:
            The number of messages that no batch had, and the failed batches that were due.
        """
        count = 0
        self._paused.discard(partition_id)
        for queue in self._queues.values():
            count += queue.keep(lambda message: not ours(message))
            if queue.partition_id == partition_id:
                queue.lasts = False
        for key, lane in list(self._held.items()):
            ending = [message for message in lane if ours(message)]
            count += len(ending)
            if key not in self._failed:
                self._count_held(ending, -1)
            left = [message for message in lane if not ours(message)]
            if left:
                self._held[key] = left
            else:
                del self._held[key]
        due = [batch for batch in self._again if ours(batch.messages[0])]
        self._again = deque(batch for batch in self._again if not ours(batch.messages[0]))
        for batch in due:
            self.release(batch)
        return count, due

    def drop_batches(self, client: Any) -> int:
        """Forget the unopened batches of a pull client, and return how many messages they have."""
        return sum(queue.drop_batches(client) for queue in self._queues.values())

    @property
    def runnable(self) -> int:
        """Return the number of runnable messages; see `Lanes`."""
        queues = (each for each in self._queues.values() if each.partition_id not in self._paused)
        return sum(queue.count for queue in queues) + sum(map(len, self._again))

    def __len__(self) -> int:
        ready = sum(queue.count for queue in self._queues.values())
        return ready + sum(map(len, self._held.values())) + sum(map(len, self._again))


def _is_plain(message: Message) -> bool:
    """Return True if the message's delivery is its pull client."""
    delivery: Any = message.delivery
    return delivery.client is delivery
