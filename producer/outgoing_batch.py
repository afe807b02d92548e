"""A batch of messages of one message group: how it is gathered and sent, and the outcome of each
message. Pure except for its futures.

    open ──roll──▶ queued ──pack──▶ in flight ──answer──▶ settled
                                      │ ▲
                                      └─┘ sent again, under the same sequence

Invariants
    A batch keeps its sequence and its bytes once it is first sent, so that a repeat is the same
    batch. A message settles once, usually with all others of its batch. Messages that were moved
    into other batches, or are given up early, settle separately, and each `SendFuture` waits for
    its own message. The declarations of a receipt (`reordered`, `duplicate`) are marked for each
    message, not for its batch.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import chain, pairwise, repeat
from operator import itemgetter
from typing import Literal

import msgspec

from ..protocol.batch import BYTES_PER_MESSAGE, encode_columns
from ..protocol.frames import Appended
from ..protocol.message import Receipt
from ..protocol.record import Compression
from ..protocol.routing import Partition
from .given_up import GivenUp
from .placing import Place

Outcome = Receipt | GivenUp
REORDERED = 1
"""The mark of a keyed message that left its partition."""
POSSIBLE = 2
"""The mark of a message that may be stored in a partition that it left, because the last try there
had no answer.
"""


class OutgoingBatch:
    """The columns of messages while they are gathered, then their packed bytes, then their
    outcomes.
    """

    __slots__ = (
        "_all_bound",
        "_future",
        "_reported",
        "_runs",
        "_waiters",
        "count",
        "data",
        "deadlines",
        "doubtful",
        "expired",
        "first_deadline_ms",
        "failed_at_ms",
        "full_size",
        "keys",
        "listeners",
        "loop",
        "hurry",
        "marks",
        "opened_at_ms",
        "origins",
        "outcome",
        "places",
        "plain",
        "properties",
        "room",
        "sends",
        "sequence",
        "sent_at_ns",
        "told",
        "tries",
        "turn",
        "values",
        "waiting",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        """The event loop in which the messages are awaited."""
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.sent_at_ns = -1
        """The sending time, in nanoseconds, of the messages that are added next; `at` sets it."""
        self.turn = -1
        """The number of the turn of the event loop in which the last message was added."""
        self._runs: list[tuple[int, int]] = []
        """Runs of messages with the same sending time: the index of the first message, and that
        time in nanoseconds.
        """
        self.properties: list[bytes] | None = None
        """The packed properties, up to the last message that has some; None if no message has any.
        `properties_of` answers for every index.
        """
        self.count = 0
        """The number of messages, once the batch is closed: `send` does not count them one by one.
        """
        self.hurry: Callable[[], object] | None = None
        """A callable that the first wait for one of the messages calls; it may send the batch at
        once.
        """
        self.room = 0
        """The bytes that plain messages may take, with their overhead, before the batch is checked
        again; see `grant`. It is below 0 if messages took more.
        """
        self.full_size = 0
        """The `size` that the batch will have once all of `room` is taken."""
        self.marks: bytearray | None = None
        """The marks REORDERED and POSSIBLE by index, up to the last marked message; None if no
        message is marked.
        """
        self.places: dict[int, Place] | None = None
        """The places that senders chose, by the index of the message; None if no message has one.
        """
        self.deadlines: dict[int, tuple[int, int]] | None = None
        """The deadlines by the index of the message: the boot time in milliseconds at which it is
        given up, and its time-out in milliseconds.
        """
        self.first_deadline_ms = 0
        """The earliest boot time in `deadlines`, in milliseconds."""
        self.sequence = -1
        self.data: bytes | bytearray | None = None
        self.sends = 0
        """The number of times that it was sent to its present partition."""
        self.tries = 0
        """The number of failed tries, in this partition and in earlier ones."""
        self.failed_at_ms: int | None = None
        """The boot time of the first failed try, in milliseconds."""
        self.doubtful = False
        """True once a try of this batch, or of an earlier one, ended without an answer: this batch
        may be stored in its present partition.
        """
        self.opened_at_ms = 0
        self._future: asyncio.Future[None] | None = None
        """The future of the batch, made on demand; most batches are awaited by `waiting` alone, or
        not at all.
        """
        self.told = False
        """True once all messages are settled, or the first of several outcomes is known."""
        self.outcome: Outcome | list[Outcome | None] | None = None
        """The receipt of the first message, or the GivenUp of all messages; a list by index if
        messages settle separately.
        """
        self.plain: tuple[int, int, str, bool | Literal["possible"]] | None = None
        """The first four fields of the first message's receipt, once all receipts follow from it
        and have no other field.
        """
        self.origins: list[tuple[OutgoingBatch, int]] | None = None
        """The batch and index, by the index of an adopted message, at which its future looks; None
        if no message is adopted.
        """
        self.expired = 0
        """The number of messages that were given up early."""
        self._reported: set[int] | None = None
        self._waiters: dict[int, asyncio.Future[None]] | None = None
        self.waiting: dict[asyncio.Future[None], None] = {}
        """Futures that are done together with `future`, one for each await, which saves a turn of
        the event loop compared with callbacks.
        """
        self.listeners: dict[tuple[int, object], int] = {}
        """The number of times that a callback is to be called once the message is stored or given
        up, by index and callback.
        """
        self._all_bound = False

    def __len__(self) -> int:
        return len(self.values)

    # ── filling ───────────────────────────────────────────────────────────────────────────────────
    def at(self, sent_at_ns: int) -> None:
        """Set the sending time of the messages that are added from here on."""
        self.sent_at_ns = sent_at_ns
        self._runs.append((len(self.values), sent_at_ns))

    @property
    def size(self) -> int:
        """Return the bytes of keys, values and properties, with their overhead in the batch."""
        return self.full_size - self.room

    def grant(self, room: int) -> None:
        """Let plain messages take `room` bytes, which replaces the previous grant; `send` lowers it
        with each message.
        """
        self.full_size += room - self.room
        self.room = room

    def add(self, key: bytes, value: bytes, packed_properties: bytes, sent_at_ns: int) -> int:
        """Append a message, and return its index."""
        index = len(self.values)
        if sent_at_ns != self.sent_at_ns:
            self.at(sent_at_ns)
        if packed_properties:
            self._add_properties(index, packed_properties)
        self.put(key, value, len(key) + len(value) + len(packed_properties) + BYTES_PER_MESSAGE)
        self.count = index + 1
        return index

    def put(self, key: bytes, value: bytes, size: int) -> int:
        """Append a message without properties, with the sending time of the last one, and return
        its index; `size` is its share of the batch's `size`.
        """
        self.room -= size
        values = self.values
        index = len(values)
        values.append(value)
        self.keys.append(key)
        return index

    def extend(self, keys: list[bytes], values: list[bytes], size: int) -> None:
        """Append several messages, as `put` does."""
        self.room -= size
        self.keys += keys
        self.values += values

    def _add_properties(self, index: int, packed_properties: bytes) -> None:
        """Set the properties of the next message."""
        if self.properties is None:
            self.properties = []
        self.properties += [b""] * (index - len(self.properties))
        self.properties.append(packed_properties)

    def properties_of(self, index: int) -> bytes:
        """Return the packed properties of message `index`."""
        properties = self.properties
        return properties[index] if properties is not None and index < len(properties) else b""

    def adopt(self, batch: OutgoingBatch, index: int) -> None:
        """Append message `index` of another batch; its outcome here is passed on to its first
        batch.
        """
        assert not batch.doubtful, "a doubtful batch is marked before its messages are moved"
        if self.origins is None:
            assert not len(self), "a batch holds either its own messages or adopted ones"
            self.origins = []
            self.tries = batch.tries
            self.failed_at_ms = batch.failed_at_ms
        elif batch.tries < self.tries or self.failed_at_ms is None:
            # The fewest tries and the latest first failure are kept, so that no message is given up
            # before its time.
            self.tries = batch.tries
            self.failed_at_ms = batch.failed_at_ms
        elif batch.failed_at_ms is None or batch.failed_at_ms > self.failed_at_ms:
            self.failed_at_ms = batch.failed_at_ms
        here = len(self)
        self.expired += bool(batch.expired) and batch.settled(index)
        self.origins.append(batch.origins[index] if batch.origins else (batch, index))
        self.add(
            batch.keys[index], batch.values[index], batch.properties_of(index), batch.time_of(index)
        )
        mark = batch.mark_of(index)
        if mark:
            self.mark(here, mark)
        place = batch.place_of(index)
        if place is not None:
            self.set_place(here, place)
        if batch.deadlines is not None and index in batch.deadlines:
            self.set_deadline(here, *batch.deadlines[index])

    def divided(
        self, takes: Callable[[int], bool]
    ) -> tuple[OutgoingBatch | None, OutgoingBatch | None]:
        """Return two new batches of the messages that are not withdrawn: those for which
        `takes(index)` is True, and the others. An empty batch is None.
        """
        parts: list[OutgoingBatch | None] = [None, None]
        for index in range(len(self)):
            if self.expired and self.is_withdrawn(index):
                continue
            side = 0 if takes(index) else 1
            part = parts[side]
            if part is None:
                part = parts[side] = OutgoingBatch(self.loop)
                part.opened_at_ms = self.opened_at_ms
            part.adopt(self, index)
        return parts[0], parts[1]

    def set_place(self, index: int, place: Place) -> None:
        """Note the place that the sender of message `index` chose."""
        if self.places is None:
            self.places = {}
        self.places[index] = place

    def place_of(self, index: int) -> Place | None:
        """Return the place that the sender of message `index` chose; None if the key decides."""
        return None if self.places is None else self.places.get(index)

    def unsettled(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield the key, the size in bytes and the sending time of each unsettled message."""
        return self._unsettled(self.keys, self.values)

    def _unsettled(
        self, keys: list[bytes], values: list[bytes]
    ) -> Iterator[tuple[bytes, int, int]]:
        times = chain.from_iterable(repeat(at_ns, count) for at_ns, count in self._times())
        for index, (key, value, sent_at_ns) in enumerate(zip(keys, values, times, strict=True)):
            if not (self.expired and self.settled(index)):
                size = len(key) + len(value) + len(self.properties_of(index))
                yield key, size, sent_at_ns

    @property
    def first_sent_at_ns(self) -> int:
        """Return the time at which the first message was sent, in nanoseconds."""
        return self._runs[0][1]

    def time_of(self, index: int) -> int:
        """Return the time at which message `index` was sent, in nanoseconds."""
        return self._runs[bisect_right(self._runs, index, key=itemgetter(0)) - 1][1]

    def _times(self) -> Iterator[tuple[int, int]]:
        """Yield the sending times in order, each with the number of messages that have it."""
        edges = [first for first, _ in self._runs] + [len(self)]
        for (_, sent_at_ns), (start, end) in zip(self._runs, pairwise(edges), strict=True):
            yield sent_at_ns, end - start

    def size_of(self, index: int) -> int:
        """Return the bytes of key, value and properties of message `index`."""
        packed = self.properties_of(index)
        return len(self.keys[index]) + len(self.values[index]) + len(packed)

    def set_deadline(self, index: int, at_ms: int, timeout_ms: int) -> None:
        """Set the deadline of message `index`: it is given up at the boot time `at_ms`,
        `timeout_ms` after it was sent.
        """
        if self.deadlines is None:
            self.deadlines = {}
            self.first_deadline_ms = at_ms
        elif at_ms < self.first_deadline_ms:
            self.first_deadline_ms = at_ms
        self.deadlines[index] = at_ms, timeout_ms

    def drop_deadlines(self, indexes: list[int]) -> None:
        """Forget the deadlines of these messages."""
        assert self.deadlines is not None
        for index in indexes:
            del self.deadlines[index]
        if self.deadlines:
            self.first_deadline_ms = min(self.deadlines.values())[0]
        else:
            self.deadlines = None

    @property
    def free(self) -> bool:
        """Return True if any message may go to any partition; call it for closed batches only,
        because the answer is kept.
        """
        if self._all_bound:
            return False
        self._all_bound = b"" not in self.keys or not any(map(self.is_free, range(len(self))))
        return not self._all_bound

    def is_free(self, index: int) -> bool:
        """Return True if message `index` has neither a key nor a chosen place."""
        return not self.keys[index] and self.place_of(index) is None

    # ── sending ───────────────────────────────────────────────────────────────────────────────────
    def pack(
        self,
        *,
        partition_id: int,
        producer_id: int,
        producer_epoch: int,
        sequence: int,
        compression: Compression = Compression.NONE,
    ) -> bytes | bytearray:
        """Return the bytes of the batch, which are encoded at the first call and kept."""
        if self.data is None:
            self.sequence = sequence
            runs, properties = self._runs, self.properties
            first_sent_at_ns = runs[0][1]
            if runs[0] is runs[-1]:
                times = first_sent_at_ns.to_bytes(8, "little") * self.count
            else:
                times = b"".join(
                    sent_at_ns.to_bytes(8, "little") * count for sent_at_ns, count in self._times()
                )
            if properties is not None:
                properties = properties + [b""] * (self.count - len(properties))
            self.data = encode_columns(
                times,
                self.keys,
                self.values,
                properties or (),
                compression=compression,
                partition_id=partition_id,
                first_sent_at_ns=first_sent_at_ns,
                last_sent_at_ns=runs[-1][1],
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                sequence=sequence,
            )
        return self.data

    def unpack(self) -> None:
        """Forget the bytes and the sequence, so that the batch is numbered again."""
        self.data = None
        self.sequence = -1

    def failed(self, now_ms: int) -> None:
        """Count a failed try of this batch, or of an earlier one."""
        self.tries += 1
        if self.failed_at_ms is None:
            self.failed_at_ms = now_ms

    def leave(self, *, refused: bool) -> None:
        """
        Prepare the batch for another partition or another sequence.

        Args:
            refused: the broker reported that no message of the batch is stored. Otherwise, if a try
                had no answer, each message is marked as POSSIBLE.
        """
        if self.doubtful and not refused:
            for index in range(len(self)):
                self.mark(index, POSSIBLE)
        self.doubtful = False
        self.sends = 0
        self.unpack()

    # ── marks ─────────────────────────────────────────────────────────────────────────────────────
    def mark(self, index: int, mark: int) -> None:
        """Add REORDERED or POSSIBLE to the marks of message `index`."""
        marks = self.marks
        if marks is None:
            marks = self.marks = bytearray()
        if len(marks) <= index:
            marks.extend(bytes(index + 1 - len(marks)))
        marks[index] |= mark

    def mark_reordered(self) -> None:
        """Mark all keyed messages as reordered, because they leave their partition."""
        for index, key in enumerate(self.keys):
            if key:
                self.mark(index, REORDERED)

    def mark_of(self, index: int) -> int:
        """Return the marks of message `index`."""
        return self.marks[index] if self.marks is not None and index < len(self.marks) else 0

    def may_be_stored(self, index: int) -> bool:
        """Return True if message `index` may be stored although it is not acked."""
        return self.doubtful or bool(self.mark_of(index) & POSSIBLE)

    def unknown_count(self) -> int:
        """Return the number of unsettled messages that may be stored."""
        if not self.doubtful and self.marks is None:
            return 0
        return sum(
            self.may_be_stored(index) and not self.settled(index) for index in range(len(self))
        )

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────────
    def settle(self, outcome: Outcome) -> int:
        """
        Settle all messages: they are stored one after another from `outcome.offset` on, or given
        up.

        Returns:
            The number of messages that were not settled before.
        """
        if self.origins is None:
            if self.outcome is None:
                self.outcome = outcome
                if (
                    type(outcome) is Receipt
                    and self.marks is None
                    and outcome.logic_offset is None
                    and outcome.offset >= 0
                ):
                    self.plain = (
                        outcome.partition_id,
                        outcome.offset,
                        outcome.durable,
                        outcome.duplicate,
                    )
                self.told = True
                if self.waiting or self._future is not None:
                    self._tell()
                return self.count
            return sum(self._settle_one(index, outcome, index) for index in range(len(self)))
        return sum(self._settle_origin(index, outcome, index) for index in range(len(self.origins)))

    def settle_message(self, index: int, outcome: Outcome) -> bool:
        """Settle message `index`, and return False if it was settled before."""
        if self.origins is None:
            return self._settle_one(index, outcome, 0)
        return self._settle_origin(index, outcome, 0)

    def _settle_origin(self, index: int, outcome: Outcome, further: int) -> bool:
        assert self.origins is not None
        origin, origin_index = self.origins[index]
        mark = self.mark_of(index)
        if mark:
            origin.mark(origin_index, mark)
        return origin._settle_one(origin_index, outcome, further)

    def _settle_one(self, index: int, outcome: Outcome, further: int) -> bool:
        """Settle a message of this batch itself; `outcome` is that of the message with the index
        `index - further`.
        """
        if self.outcome is None:
            self.outcome = [None] * len(self)
            self._waiters = {}
        if not isinstance(self.outcome, list) or self.outcome[index] is not None:
            return False
        self.outcome[index] = (
            outcome if isinstance(outcome, GivenUp) else _of_message(outcome, further)
        )
        if not self.told:
            self._tell()  # from here on each SendFuture waits for its own message
        assert self._waiters is not None
        waiter = self._waiters.pop(index, None)
        if waiter is not None:
            waiter.set_result(None)
        return True

    def _tell(self) -> None:
        self.told = True
        if self._future is not None:
            self._future.set_result(None)
        if self.waiting:
            waiting = self.waiting
            self.waiting = {}
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    @property
    def future(self) -> asyncio.Future[None]:
        """Return the future that is done once the batch is `told`."""
        if self._future is None:
            self._future = self.loop.create_future()
            if self.told:
                self._future.set_result(None)
        return self._future

    @property
    def settles_apart(self) -> bool:
        """Return True once a message was settled before others; `waited_for` then has a future for
        each message.
        """
        return self._waiters is not None

    def settled(self, index: int) -> bool:
        """Return True once the outcome of message `index` is known; the first batch of an adopted
        message knows it.
        """
        if self.origins is not None:
            origin, origin_index = self.origins[index]
            return origin.settled(origin_index)
        outcome = self.outcome
        if isinstance(outcome, list):
            return outcome[index] is not None
        return outcome is not None

    def is_withdrawn(self, index: int) -> bool:
        """
        Return True if message `index` was given up and is not sent any more.

        A message with a key that was given up in flight still goes wherever its batch goes: newer
        messages of its key that were in flight after it may not be stored without it.
        """
        origin, at = (self, index) if self.origins is None else self.origins[index]
        outcome = origin.outcome[at] if isinstance(origin.outcome, list) else origin.outcome
        sent_on = isinstance(outcome, GivenUp) and outcome.doubtful and not self.is_free(index)
        return outcome is not None and not sent_on

    def waited_for(self, index: int) -> asyncio.Future[None]:
        """Return an asyncio future that is done when message `index` is settled, or when it must be
        requested again.
        """
        if self._waiters is None:
            return self.future
        waiter = self._waiters.get(index)
        if waiter is None:
            waiter = self._waiters[index] = self.loop.create_future()
        return waiter

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of a settled message; raise a new error if it was given up."""
        outcome = self.outcome
        mark = self.marks[index] if self.marks is not None and index < len(self.marks) else 0
        if type(outcome) is Receipt and not mark:
            return _of_message(outcome, index)
        own = outcome[index] if isinstance(outcome, list) else outcome
        assert own is not None
        if isinstance(own, GivenUp):
            unknown = own.doubtful or bool(mark & POSSIBLE)
            if self._reported is None:
                self._reported = set()
            if index not in self._reported:
                self._reported.add(index)
                own.reported(unknown=unknown)
            raise own.error(unknown=unknown)
        return msgspec.structs.replace(
            _of_message(own, index if own is outcome else 0),
            duplicate="possible" if mark & POSSIBLE else own.duplicate,
            reordered=bool(mark & REORDERED),
        )


def first_receipt(answer: Appended, partition: Partition, *, static: bool) -> Receipt:
    """Return the receipt of the first message of a batch that `partition` has stored."""
    offset = answer.base_offset
    if not static:
        return Receipt(partition.partition_id, offset, answer.durable, answer.duplicate)
    return Receipt(
        partition.partition_id,
        offset,
        answer.durable,
        answer.duplicate,
        queue=partition.queue,
        logic_offset=partition.logic_start + offset if offset >= 0 else None,
    )


def _of_message(first: Receipt, further: int) -> Receipt:
    """Return the receipt of message `further`, counted from the first message, which is 0."""
    if not further or first.offset < 0:
        return first
    logic = None if first.logic_offset is None else first.logic_offset + further
    return Receipt(
        first.partition_id,
        first.offset + further,
        first.durable,
        first.duplicate,
        False,
        first.queue,
        logic,
    )
