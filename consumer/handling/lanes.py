"""
Lanes, one per order key, which decide which message may be handled next. Pure.

    put_batch ─▶ stored, opened when nothing else waits
                   ▼
    put ───────▶ arrived ──take──▶ running ──finish──▶ the next message of its lane runs
                   ▲   │              ╰─ failed: waits in `Retries`, and blocks its lane ─▶ put_due
                   │   ╰─▶ lane of its key, if a message of that key is running or has failed
                   ╰─ release, drop: the lane is free again

    Message objects are created as late as possible, so that they are still in the CPU cache when
    they are handled; creating them early costs about twice as much for each message.

Invariants
    At most one message of a key runs at a time, and messages of a key run in the order in which
    they were added: a failed message that waits for its next attempt (`attempt` above 1) blocks its
    lane until `finish` or `release`. Messages without a key (b"") have no order and never wait for
    each other, except while the ack of one of them is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat, starmap
from operator import attrgetter
from typing import Any, Protocol

from ...protocol.message import Message

OPENED_MAX = 1_024
"""How many messages of several batches are opened together, so that small batches share the
overhead of a run.
"""
RUN_MIN = 16
"""The size of the first run after a handler that waited, for which only one batch is opened."""
_by_offset = attrgetter("offset")
_consume = deque[object](maxlen=0).extend


class UnopenedBatch(Protocol):
    """A batch whose messages are not created yet."""

    client: Any
    count: int
    has_only_first_attempts: bool
    """True if, once opened, all its messages are first attempts."""

    def messages(self) -> list[Message]:
        """Return the messages to handle, in offset order."""
        ...


class Run:
    """
    Messages of one pull client that a worker handles in succession, as long as no handler waits.

    Their lanes and outcomes are not registered yet. Any call that needs the lanes ends the run, and
    so does a handler that waits.

    Args:
        messages: the first arrived messages, whose keys are free.
        worker: the object whose `message` is set to the running message when the run ends with it.
    """

    __slots__ = ("client", "worker", "remaining", "messages")

    def __init__(self, messages: list[Message], worker: Any) -> None:
        self.messages = messages
        self.remaining: Any = iter(messages)
        self.client: Any = messages[0].delivery
        self.worker = worker

    @property
    def started(self) -> int:
        """The number of messages whose handlers were started."""
        remaining: int = self.remaining.__length_hint__()
        return len(self.messages) - remaining

    def report_handled(self) -> Message:
        """Report the handled messages to the pull client, and return the running message."""
        handled = self.started - 1
        running: Message = self.messages[handled]
        self.worker.message = running
        if handled:
            self.client.mark_all_handled(self.messages[:handled])
        return running


class Lanes:
    """
    Holds the waiting messages by key. All workers of an event loop take messages from it.

    Args:
        ordered: False: every message is treated as if it had no key.
    """

    def __init__(self, *, ordered: bool = True) -> None:
        self._ordered = ordered
        self.arrivals: deque[Message] = deque()
        """The messages that no worker has examined yet, in the order in which they were added."""
        self._run_client: Any = None
        """The pull client of all arrived messages if they can form runs: first attempts in offset
        order; otherwise None.
        """
        self._stored: dict[Any, deque[UnopenedBatch]] = {}
        """The batches pulled after all arrived messages, by pull client; the client whose turn is
        next comes first. Clients take turns, so that one partition does not wait for all messages
        pulled earlier from others, which would take minutes if handlers are slow.
        """
        self.due_retries: deque[Message] = deque()
        """The messages whose retry is due; they own their lanes and run before all others."""
        self.run: Run | None = None
        self.unregistered: Message | None = None
        """A running message whose lane is not registered yet, because nothing else was taken since.
        Calls that need the lanes register it first. A handler that never waits ends before that, so
        its message needs no lane.
        """
        self.busy_lanes: dict[bytes, deque[Message] | None] = {}
        """The messages that wait for each key with a running or failed message; None if none
        waits.
        """
        self._paused: dict[int, list[Message]] = {}
        """The waiting messages of each paused partition, in offset order."""
        self._refused_acks: dict[int, tuple[list[Message], list[Message]]] = {}
        """By partition: the messages without a key whose acks were refused, and those without a key
        that wait for these acks.
        """

    @property
    def has_waiting(self) -> bool:
        """True if `take` may return a message."""
        return bool(self.arrivals or self.due_retries or self._stored)

    @property
    def may_take_unregistered(self) -> bool:
        """True if a message has arrived and may run next without being registered."""
        return (
            self.unregistered is None
            and self.run is None
            and not self.due_retries
            and bool(self.arrivals)
        )

    @property
    def may_begin_run(self) -> bool:
        """True if `begin_run` may return a run."""
        if self.unregistered is not None or self.run is not None or self.due_retries:
            return False
        return self._run_client is not None if self.arrivals else bool(self._stored)

    def put(self, messages: Sequence[Message]) -> None:
        """
        Add messages of one partition, in offset order, ahead of the stored batches.

        A suspect goes ahead of all arrived messages, because all other suspects wait for it, and no
        message of its own partition does.
        """
        if messages and getattr(messages[0].delivery, "has_priority", False) and not self._paused:
            self.register_running()
            self._requeue_front(messages)
            return
        self._run_client = None if self.arrivals or self._paused else _find_run_client(messages)
        if self._paused:
            self._put_unless_paused(messages)
        else:
            self.arrivals.extend(messages)

    def put_batch(self, batch: UnopenedBatch) -> None:
        """Add a batch of one partition."""
        if batch.count:
            self._stored.setdefault(batch.client, deque()).append(batch)

    def _open(self, client: Any = None) -> None:
        """Open the next batch, or the next batch of `client`, whose turn is then over."""
        client = client or next(iter(self._stored))
        batches = self._stored.pop(client)
        batch = batches.popleft()
        if batches:
            self._stored[client] = batches
        messages = batch.messages()
        if self._paused:
            self._run_client = None
            self._put_unless_paused(messages)
        else:
            self._run_client = batch.client if batch.has_only_first_attempts else None
            self.arrivals.extend(messages)

    def take_single(self) -> Message | None:
        """
        Take the only waiting message, which then counts as running. Return None if there are
        several, or if the message is a retry or its key is busy.

        This avoids a run, whose callback costs an iteration of the event loop even if it is
        cancelled.
        """
        if self.unregistered is not None or self.run is not None or self.due_retries:
            return None
        arrivals = self.arrivals
        while not arrivals and self._stored:
            self._open()
        if (
            len(arrivals) != 1
            or self._stored
            or self._run_client is None
            or arrivals[0].key in self.busy_lanes
        ):
            return None
        self.unregistered = arrivals.popleft()
        return self.unregistered

    @property
    def _may_open_more(self) -> bool:
        """True if the next batch is from the pull client of all arrived messages, and both together
        have at most OPENED_MAX messages.
        """
        if self._run_client is None:
            return False
        batches = self._stored.get(self._run_client)
        return batches is not None and len(self.arrivals) + batches[0].count <= OPENED_MAX

    def begin_run(self, max_count: int, worker: Any) -> Run | None:
        """Start a run of up to `max_count` arrived messages whose keys are free. Return None if
        there are none.
        """
        while not self.arrivals and self._stored:
            self._open()
        while RUN_MIN < max_count > len(self.arrivals) and self._may_open_more:
            self._open(self._run_client)
        if self._run_client is None or not self.arrivals:
            return None
        messages = list(islice(self.arrivals, max_count))
        busy_lanes = self.busy_lanes
        if (
            busy_lanes
            and self._ordered
            and [message for message in messages if message.key in busy_lanes]
        ):
            self._discard_arrived(len(messages))
            messages = [message for message in messages if not self._queue_if_busy(message)]
            self.arrivals.extendleft(reversed(messages))
            if not messages:
                return None
        self.run = Run(messages, worker)
        return self.run

    def end_run(self, run: Run, handled: int) -> None:
        """End a run whose first `handled` messages were handled; no further message was started."""
        self.run = None
        self._discard_arrived(handled)

    def _discard_arrived(self, count: int) -> None:
        """Discard the first `count` arrived messages."""
        arrivals = self.arrivals
        if count == len(arrivals):
            arrivals.clear()
        else:
            _consume(starmap(arrivals.popleft, repeat((), count)))

    def _queue_if_busy(self, message: Message) -> bool:
        """If the message's key is busy, add it to the key's lane and return True."""
        key, busy_lanes = message.key, self.busy_lanes
        if key not in busy_lanes:
            return False
        lane = busy_lanes[key]
        if lane is None:
            busy_lanes[key] = deque((message,))
        else:
            lane.append(message)
        return True

    def _put_unless_paused(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._paused.get(leased_id_of(message), self.arrivals).append(message)

    def put_due(self, messages: Sequence[Message]) -> None:
        """Put messages whose retry is due ahead of all others; their lanes stay blocked."""
        self.due_retries.extendleft(reversed(messages))

    def collect(self, failed: Message, predicate: Callable[[Message], bool]) -> list[Message]:
        """Remove and return the messages that match the predicate and wait for a failed message of
        their key that is not retried here.
        """
        self.register_running()

        def is_behind(message: Message) -> bool:
            return message.key == failed.key and predicate(message)

        lane = self.busy_lanes[failed.key] or deque()
        waiting = [message for message in lane if is_behind(message)]
        self.busy_lanes[failed.key] = (
            deque(message for message in lane if not is_behind(message)) or None
        )
        arrivals = [message for message in self.arrivals if is_behind(message)]
        if arrivals:
            self.arrivals = deque(message for message in self.arrivals if not is_behind(message))
        for partition_id, paused in self._paused.items():
            waiting += [message for message in paused if is_behind(message)]
            self._paused[partition_id] = [message for message in paused if not is_behind(message)]
        self.release(failed)
        return sorted(waiting + arrivals, key=_by_offset)

    def register_running(self) -> None:
        """Register the lane of the running message, which ran alone or as the last one of a run."""
        message = self.unregistered
        self.unregistered = None
        run = self.run
        if run is not None:
            self.run = None
            self._discard_arrived(run.started)
            message = run.report_handled()
        if message is not None and message.key and self._ordered:
            self.busy_lanes[message.key] = None

    def take(self) -> Message | None:
        """Take the next message that may run, which then counts as running. Return None if there is
        none.
        """
        if self.unregistered is not None or self.run is not None:
            self.register_running()
        if self.due_retries:
            return self.due_retries.popleft()
        arrivals = self.arrivals
        busy_lanes = self.busy_lanes
        while True:
            while arrivals:
                message = arrivals.popleft()
                key = message.key
                if not key or not self._ordered:
                    if self._refused_acks and self._queue_if_ack_refused(message):
                        continue
                    return message
                if key in busy_lanes:
                    self._queue_if_busy(message)
                    continue
                busy_lanes[key] = None
                return message
            if not self._stored:
                return None
            self._open()

    def finish(self, key: bytes) -> Message | None:
        """Record that the running message of `key` has ended. Return the next message of its lane,
        which then counts as running, or None.
        """
        if self.unregistered is not None or self.run is not None:
            self.register_running()
        if not key or not self._ordered:
            return None
        lane = self.busy_lanes[key]
        if lane:
            return lane.popleft()
        del self.busy_lanes[key]
        return None

    def hold_for_ack(self, message: Message) -> None:
        """Block a message's lane until `release`. If the message has no key, block all messages of
        its partition without a key.
        """
        self.register_running()
        if not message.key and self._ordered:
            self._refused_acks.setdefault(leased_id_of(message), ([], []))[0].append(message)
            self.busy_lanes[b""] = None  # Without a run client, every message is checked.

    def _queue_if_ack_refused(self, message: Message) -> bool:
        refused = self._refused_acks.get(leased_id_of(message))
        if refused is None:
            return False
        refused[1].append(message)
        return True

    def _release_refused(self, message: Message) -> None:
        """Release the messages that waited for the ack of `message` once no refused ack is left."""
        leased_id = leased_id_of(message)
        refused, waiting = self._refused_acks.get(leased_id, ([], []))
        if message not in refused:
            return
        refused.remove(message)
        if refused:
            return
        del self._refused_acks[leased_id]
        if not self._refused_acks:
            del self.busy_lanes[b""]
        self._requeue_front(waiting)

    def release(self, message: Message) -> None:
        """Free the lane of a message that failed and is not retried, or whose ack has become
        durable.
        """
        self.register_running()
        if self._refused_acks and not message.key:
            self._release_refused(message)
            return
        lane = self.busy_lanes.pop(message.key, None) if self._ordered else None
        if lane:
            self._requeue_front(lane)

    def _requeue_front(self, messages: Sequence[Message]) -> None:
        """Put messages that were already waiting ahead of those that have just arrived."""
        self.arrivals.extendleft(reversed(messages))
        self._run_client = None

    def pause(self, partition_id: int) -> None:
        """Start no message of a partition until `resume`, except due retries; see `take_due`."""
        if partition_id in self._paused:
            return
        waiting = self._remove(lambda message: leased_id_of(message) == partition_id)
        self._paused[partition_id] = sorted(waiting, key=_by_offset)

    def take_due(self, partition_id: int) -> list[Message]:
        """Remove and return the due retries of a partition; they keep their lanes."""
        due_messages = [
            message for message in self.due_retries if leased_id_of(message) == partition_id
        ]
        self.due_retries = deque(
            message for message in self.due_retries if leased_id_of(message) != partition_id
        )
        return due_messages

    def resume(self, partition_id: int) -> bool:
        """Let the messages of a partition run again. Return True if there are any."""
        self.register_running()
        paused = self._paused.pop(partition_id, [])
        self._requeue_front(paused)
        return bool(paused)

    def drop(self, partition_id: int, predicate: Callable[[Message], bool]) -> list[Message]:
        """
        Remove and return the waiting messages that match the predicate; running messages are not
        affected.

        Args:
            partition_id: a partition that is no longer paused; the predicate may also match others.
        """
        paused = self._paused.pop(partition_id, [])
        removed = self._remove(predicate) + paused
        failed = [message for message in self.due_retries if predicate(message)]
        self.due_retries = deque(message for message in self.due_retries if not predicate(message))
        for message in failed:
            self.release(message)
        return failed + removed

    def drop_batches(self, client: Any) -> int:
        """Drop the unopened batches of a pull client, and return the number of messages in them."""
        return sum(batch.count for batch in self._stored.pop(client, ()))

    def _remove(self, predicate: Callable[[Message], bool]) -> list[Message]:
        """Remove and return the messages that match the predicate, from the queue and the lanes."""
        self.register_running()  # its worker may still use the old queue
        removed = [message for message in self.arrivals if predicate(message)]
        self.arrivals = deque(message for message in self.arrivals if not predicate(message))
        for _, waiting in self._refused_acks.values():
            removed += [message for message in waiting if predicate(message)]
            waiting[:] = [message for message in waiting if not predicate(message)]
        for key, lane in self.busy_lanes.items():
            if lane:
                kept_messages = deque(message for message in lane if not predicate(message))
                removed += [message for message in lane if predicate(message)]
                self.busy_lanes[key] = kept_messages or None
        return removed

    @property
    def runnable(self) -> int:
        """The number of messages of a shared group that wait for a worker."""
        return len(self.arrivals) + len(self.due_retries)

    def __len__(self) -> int:
        paused = sum(map(len, self._paused.values()))
        lanes = sum(len(lane) for lane in self.busy_lanes.values() if lane)
        stored = sum(batch.count for batches in self._stored.values() for batch in batches)
        unacked = sum(len(waiting) for _, waiting in self._refused_acks.values())
        return len(self.arrivals) + len(self.due_retries) + paused + lanes + unacked + stored


def leased_id_of(message: Message) -> int:
    """Return the id of the partition whose pull client handed out the message; a redriven message
    may itself belong to an ancestor of that partition.
    """
    delivery: Any = message.delivery
    leased_id: int = delivery.leased_id
    return leased_id


def _find_run_client(messages: Sequence[Message]) -> Any:
    """Return the pull client of the messages if all are first attempts from that client, otherwise
    None.
    """
    client: Any = messages[0].delivery if messages else None
    if not getattr(client, "reports_runs", False):
        return None
    is_run = all(message.delivery is client and message.attempt == 1 for message in messages)
    return client if is_run else None
