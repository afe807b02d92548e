"""Lanes, one for each order key: they decide which message may be handled next. Pure.

    put_batch ─▶ stored, opened once nothing else waits
                   ▼
    put ───────▶ arrived ──take──▶ running ──finish──▶ the next of its lane runs
                   ▲   │              ╰─ failed: waits in `Retries` for its next try, and blocks
                   │   │                   its lane ─▶ put_first
                   │   ╰─▶ lane of its key, if a message of that key runs or failed
                   ╰─ release, drop: the lane is free again

    A batch is opened as late as possible, because messages that were just made are in the
    processor's cache: making them early costs about as much again for each.

Invariants
    At most one message of a key runs at a time, and messages of a key run in the order they were
    put: a message that failed and waits for its next try (`attempt` above 1) blocks its lane until
    `finish` or `release`. Messages without a key (b"") have no order and never wait for each other,
    except for the ack of one that was refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat, starmap
from operator import attrgetter
from typing import Any, Protocol

from ...protocol.message import Message

OPENED_MAX = 1_024
"""The number of messages of several batches that are opened together, so that small batches share
the cost of a run.
"""
RUN_MIN = 16
"""The number of messages in the first run after a handler that waited; it opens only one batch."""
_by_offset = attrgetter("offset")
_consume = deque[object](maxlen=0).extend


class UnopenedBatch(Protocol):
    """A batch of messages that is not opened."""

    client: Any
    count: int
    is_plain: bool
    """True if all its messages are first tries, once it is opened."""

    def messages(self) -> list[Message]:
        """Return the messages to be handled, by offset."""
        ...


class Run:
    """
    Messages of one pull client that a worker handles one after another: none of their handlers has
    waited yet.

    No lane is noted for them, and handled ones are not reported yet. A call that checks lanes ends
    the run, and so does a handler that waits.

    Args:
        messages: the first of the messages that have arrived, with free keys.
        holder: the object whose `message` is the running one, once the run has ended with it.
    """

    __slots__ = ("client", "holder", "left", "messages")

    def __init__(self, messages: list[Message], holder: Any) -> None:
        self.messages = messages
        self.left: Any = iter(messages)
        self.client: Any = messages[0].delivery
        self.holder = holder

    @property
    def begun(self) -> int:
        """Return the number of messages whose handlers were begun."""
        left: int = self.left.__length_hint__()
        return len(self.messages) - left

    def tell(self) -> Message:
        """Report the handled messages to the pull client, and return the message that runs."""
        before = self.begun - 1
        running: Message = self.messages[before]
        self.holder.message = running
        if before:
            self.client.done_all(self.messages[:before])
        return running


class Lanes:
    """
    The waiting messages by key; any number of workers of one event loop take from them.

    Args:
        ordered: False: every message is treated as one without a key.
    """

    def __init__(self, *, ordered: bool = True) -> None:
        self._ordered = ordered
        self.arrived: deque[Message] = deque()
        """The messages that no worker has examined yet, in the order in which they were put."""
        self._plain: Any = None
        """The pull client whose first tries all of `arrived` are, by offset; None if they are of
        several kinds.
        """
        self._stored: dict[Any, deque[UnopenedBatch]] = {}
        """The batches that were pulled after all arrived messages, by pull client, with the one
        whose turn is next first. Pull clients take turns, so that a partition does not wait for all
        messages pulled earlier from the others, which takes minutes where handlers are slow.
        """
        self.due: deque[Message] = deque()
        """The messages whose next try is due: they own their lanes, and precede all others."""
        self.run: Run | None = None
        self.alone: Message | None = None
        """A running message whose lane is not noted yet: nothing was taken since, so none can run
        beside it. A call that checks lanes notes it first; a handler that never waits ends before
        that, and costs no lane.
        """
        self.busy: dict[bytes, deque[Message] | None] = {}
        """The messages that wait for each key of which a message runs or waits for its next try;
        None if none waits.
        """
        self._paused: dict[int, list[Message]] = {}
        """The waiting messages of each paused partition, by offset."""
        self._unacked: dict[int, tuple[list[Message], list[Message]]] = {}
        """The messages without a key whose acks were refused, and those without a key that wait for
        these acks, by partition.
        """

    @property
    def has_waiting(self) -> bool:
        """Return True if a message may be available."""
        return bool(self.arrived or self.due or self._stored)

    @property
    def may_be_alone(self) -> bool:
        """Return True if a message has arrived, and none would be passed over if it is taken."""
        return self.alone is None and self.run is None and not self.due and bool(self.arrived)

    @property
    def may_run(self) -> bool:
        """Return True if `begin_run` may find messages."""
        if self.alone is not None or self.run is not None or self.due:
            return False
        return self._plain is not None if self.arrived else bool(self._stored)

    def put(self, messages: Sequence[Message]) -> None:
        """
        Add messages of one partition, in the order of their offsets, before the stored batches.

        A suspect is put before all arrived messages, because nothing of its partition waits and all
        other suspects wait for it.
        """
        if messages and getattr(messages[0].delivery, "goes_first", False) and not self._paused:
            self.note_alone()
            self._put_back(messages)
            return
        self._plain = None if self.arrived or self._paused else _plain_client(messages)
        if self._paused:
            self._put_beside_paused(messages)
        else:
            self.arrived.extend(messages)

    def put_batch(self, batch: UnopenedBatch) -> None:
        """Add a batch of one partition."""
        if batch.count:
            self._stored.setdefault(batch.client, deque()).append(batch)

    def _open(self, client: Any = None) -> None:
        """Open the next batch, or the next one of a pull client, while nothing else has arrived;
        after it the other clients have their turn.
        """
        client = client or next(iter(self._stored))
        batches = self._stored.pop(client)
        batch = batches.popleft()
        if batches:
            self._stored[client] = batches
        messages = batch.messages()
        if self._paused:
            self._plain = None
            self._put_beside_paused(messages)
        else:
            self._plain = batch.client if batch.is_plain else None
            self.arrived.extend(messages)

    def take_only(self) -> Message | None:
        """
        Take the only waiting message, which counts as running, or return None if it is not plain or
        not the only one.

        It needs no run, whose callback would cost a turn of the event loop even if it is cancelled.
        """
        if self.alone is not None or self.run is not None or self.due:
            return None
        arrived = self.arrived
        while not arrived and self._stored:
            self._open()
        if len(arrived) != 1 or self._stored or self._plain is None or arrived[0].key in self.busy:
            return None
        self.alone = arrived.popleft()
        return self.alone

    @property
    def _goes_on(self) -> bool:
        """Return True if the next batch is of the pull client of all arrived messages, and both
        together are few messages.
        """
        if self._plain is None:
            return False
        batches = self._stored.get(self._plain)
        return batches is not None and len(self.arrived) + batches[0].count <= OPENED_MAX

    def begin_run(self, most: int, holder: Any) -> Run | None:
        """Begin a run of up to `most` messages that have arrived and whose keys are free, or return
        None if there are none.
        """
        while not self.arrived and self._stored:
            self._open()
        while RUN_MIN < most > len(self.arrived) and self._goes_on:
            self._open(self._plain)
        if self._plain is None or not self.arrived:
            return None
        messages = list(islice(self.arrived, most))
        busy = self.busy
        if busy and self._ordered and [each for each in messages if each.key in busy]:
            self._drop_first(len(messages))
            messages = [message for message in messages if not self._waits(message)]
            self.arrived.extendleft(reversed(messages))
            if not messages:
                return None
        self.run = Run(messages, holder)
        return self.run

    def end_run(self, run: Run, handled: int) -> None:
        """End a run whose first messages were handled: none of the others was begun."""
        self.run = None
        self._drop_first(handled)

    def _drop_first(self, count: int) -> None:
        arrived = self.arrived
        if count == len(arrived):
            arrived.clear()
        else:
            _consume(starmap(arrived.popleft, repeat((), count)))

    def _waits(self, message: Message) -> bool:
        """Put a message into the lane of its key, if that is busy, and return whether it is."""
        key, lanes = message.key, self.busy
        if key not in lanes:
            return False
        lane = lanes[key]
        if lane is None:
            lanes[key] = deque((message,))
        else:
            lane.append(message)
        return True

    def _put_beside_paused(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._paused.get(leased_id_of(message), self.arrived).append(message)

    def put_first(self, messages: Sequence[Message]) -> None:
        """Put messages whose next try is due at the front; their lanes are blocked for others."""
        self.due.extendleft(reversed(messages))

    def collect(self, failed: Message, ours: Callable[[Message], bool]) -> list[Message]:
        """Take out the messages that are `ours` and wait for a failed one of their key, which is
        not tried again here.
        """
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
        """Note the lane of the running message that was alone, or the last one of a run."""
        message = self.alone
        self.alone = None
        run = self.run
        if run is not None:
            self.run = None
            self._drop_first(run.begun)
            message = run.tell()
        if message is not None and message.key and self._ordered:
            self.busy[message.key] = None

    def take(self) -> Message | None:
        """Take the next message that may run, which counts as running, or return None if there is
        none.
        """
        if self.alone is not None or self.run is not None:
            self.note_alone()
        if self.due:
            return self.due.popleft()
        arrived = self.arrived
        lanes = self.busy
        while True:
            while arrived:
                message = arrived.popleft()
                key = message.key
                if not key or not self._ordered:
                    if self._unacked and self._waits_for_acks(message):
                        continue
                    return message
                if key in lanes:
                    self._waits(message)
                    continue
                lanes[key] = None
                return message
            if not self._stored:
                return None
            self._open()

    def finish(self, key: bytes) -> Message | None:
        """Note that the running message of `key` ended, and return the next of its lane, if any,
        which counts as running.
        """
        if self.alone is not None or self.run is not None:
            self.note_alone()
        if not key or not self._ordered:
            return None
        lane = self.busy[key]
        if lane:
            return lane.popleft()
        del self.busy[key]
        return None

    def hold_for_ack(self, message: Message) -> None:
        """Let messages of its key wait until `release`; without a key, the messages of its
        partition that have none.
        """
        self.note_alone()
        if not message.key and self._ordered:
            self._unacked.setdefault(leased_id_of(message), ([], []))[0].append(message)
            self.busy[b""] = None  # so that each message is checked

    def _waits_for_acks(self, message: Message) -> bool:
        unacked = self._unacked.get(leased_id_of(message))
        if unacked is None:
            return False
        unacked[1].append(message)
        return True

    def _release_unacked(self, message: Message) -> None:
        leased_id = leased_id_of(message)
        refused, waiting = self._unacked.get(leased_id, ([], []))
        if message not in refused:
            return
        refused.remove(message)
        if refused:
            return
        del self._unacked[leased_id]
        if not self._unacked:
            del self.busy[b""]
        self._put_back(waiting)

    def release(self, message: Message) -> None:
        """Free the lane of a message that failed and is not tried again, or whose ack is finally
        durable.
        """
        self.note_alone()
        if self._unacked and not message.key:
            self._release_unacked(message)
            return
        lane = self.busy.pop(message.key, None) if self._ordered else None
        if lane:
            self._put_back(lane)

    def _put_back(self, messages: Sequence[Message]) -> None:
        """Put messages that waited before those that have arrived."""
        self.arrived.extendleft(reversed(messages))
        self._plain = None

    def pause(self, partition_id: int) -> None:
        """Let no message of a partition run until `resume`, except those that are due again, see
        `take_due`.
        """
        if partition_id in self._paused:
            return
        waiting = self._take_out(lambda message: leased_id_of(message) == partition_id)
        self._paused[partition_id] = sorted(waiting, key=_by_offset)

    def take_due(self, partition_id: int) -> list[Message]:
        """Take out the messages of a partition whose next try is due; they keep their lanes."""
        taken = [message for message in self.due if leased_id_of(message) == partition_id]
        self.due = deque(each for each in self.due if leased_id_of(each) != partition_id)
        return taken

    def resume(self, partition_id: int) -> bool:
        """Let the messages of a partition run again, and return True if any waits."""
        self.note_alone()
        held = self._paused.pop(partition_id, [])
        self._put_back(held)
        return bool(held)

    def drop(self, partition_id: int, ours: Callable[[Message], bool]) -> list[Message]:
        """
        Forget and return the waiting messages that are `ours`; running messages are not affected.

        Args:
            partition_id: a partition that is no longer paused; `ours` may also include others.
        """
        held = self._paused.pop(partition_id, [])
        dropped = self._take_out(ours) + held
        failed = [message for message in self.due if ours(message)]
        self.due = deque(message for message in self.due if not ours(message))
        for message in failed:
            self.release(message)
        return failed + dropped

    def drop_batches(self, client: Any) -> int:
        """Forget the unopened batches of a pull client, and return how many messages they have."""
        return sum(batch.count for batch in self._stored.pop(client, ()))

    def _take_out(self, ours: Callable[[Message], bool]) -> list[Message]:
        """Take the waiting messages that are `ours` out of the queue and the lanes."""
        self.note_alone()  # its worker continues with the queue as it was
        dropped = [message for message in self.arrived if ours(message)]
        self.arrived = deque(message for message in self.arrived if not ours(message))
        for _, waiting in self._unacked.values():
            dropped += [message for message in waiting if ours(message)]
            waiting[:] = [message for message in waiting if not ours(message)]
        for key, lane in self.busy.items():
            if lane:
                kept = deque(message for message in lane if not ours(message))
                dropped += [message for message in lane if ours(message)]
                self.busy[key] = kept or None
        return dropped

    @property
    def runnable(self) -> int:
        """Return the number of messages of a shared group that wait for a worker."""
        return len(self.arrived) + len(self.due)

    def __len__(self) -> int:
        paused = sum(map(len, self._paused.values()))
        lanes = sum(len(lane) for lane in self.busy.values() if lane)
        stored = sum(batch.count for batches in self._stored.values() for batch in batches)
        unacked = sum(len(waiting) for _, waiting in self._unacked.values())
        return len(self.arrived) + len(self.due) + paused + lanes + unacked + stored


def leased_id_of(message: Message) -> int:
    """Return the partition whose pull client handed a message out, which may have a redriven one
    from an ancestor.
    """
    delivery: Any = message.delivery
    leased_id: int = delivery.leased_id
    return leased_id


def _plain_client(messages: Sequence[Message]) -> Any:
    """Return the pull client whose first tries all these messages are; None if they are not."""
    client: Any = messages[0].delivery if messages else None
    if not getattr(client, "runs", False):
        return None
    plain = all(message.delivery is client and message.attempt == 1 for message in messages)
    return client if plain else None
