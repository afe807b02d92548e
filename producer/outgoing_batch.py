"""A batch of messages of one message group: how it is filled and sent, and the outcome of each
message. Pure except for its futures.

    open ──roll──▶ queued ──pack──▶ in flight ──answer──▶ settled
                                      │ ▲
                                      └─┘ sent again, under the same sequence

Invariants
    A batch keeps its sequence and its bytes once it has been sent, so a repeat is the same batch. A
    message settles once, usually with all others of its batch. Messages that were moved to other
    batches, or were given up early, settle separately, and each `SendFuture` waits for its own
    message. The flags of a receipt (`reordered`, `duplicate`) are marked for each message, not for
    its batch.
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
from ..protocol.errors import KeylaneError
from ..protocol.frames import Appended
from ..protocol.message import Receipt
from ..protocol.record import Compression
from ..protocol.routing import Partition
from .given_up import GivenUpOutcome
from .placing import Destination

Outcome = Receipt | GivenUpOutcome
REORDERED = 1
"""Marks a keyed message that left its partition."""
POSSIBLE = 2
"""Marks a message that may be stored in a partition that it left, because its last attempt there
got no reply.
"""


class OutgoingBatch:
    """Holds the messages of a batch as columns, then their encoded bytes, then their outcomes."""

    __slots__ = (
        "_all_bound",
        "_future",
        "_reported",
        "_time_runs",
        "_message_waiters",
        "count",
        "data",
        "deadlines",
        "doubtful",
        "expired_count",
        "first_deadline_ms",
        "failed_at_ms",
        "full_size",
        "keys",
        "listeners",
        "loop",
        "send_early",
        "marks",
        "opened_at_ms",
        "origins",
        "outcome",
        "destinations",
        "plain_receipt",
        "properties",
        "remaining_bytes",
        "send_count",
        "sequence",
        "sent_at_ns",
        "is_notified",
        "tries",
        "turn_number",
        "values",
        "waiters",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        """The event loop in which the messages are awaited."""
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.sent_at_ns = -1
        """The send time of the next messages, in nanoseconds; set by `set_sent_at`."""
        self.turn_number = -1
        """The event loop turn in which the last message was added."""
        self._time_runs: list[tuple[int, int]] = []
        """Runs of messages with the same send time, as (index of the first message, time in
        nanoseconds).
        """
        self.properties: list[bytes] | None = None
        """The packed properties, up to the last message that has any; None if no message has
        properties. Use `properties_of` to read them.
        """
        self.count = 0
        """The number of messages, set when the batch is closed; `send` does not maintain it."""
        self.send_early: Callable[[], object] | None = None
        """A callback for the first time that a message is awaited; it may send the batch
        immediately.
        """
        self.remaining_bytes = 0
        """How many bytes, with overhead, plain messages may still use before the batch is checked
        again; see `grant`. Negative if messages have used more.
        """
        self.full_size = 0
        """The `size` of the batch once `remaining_bytes` is used up."""
        self.marks: bytearray | None = None
        """The marks, REORDERED and POSSIBLE, up to the last marked message; None if there is
        none.
        """
        self.destinations: dict[int, Destination] | None = None
        """The destinations chosen by senders, by message index; None if there are none."""
        self.deadlines: dict[int, tuple[int, int]] | None = None
        """The deadline (boot time) and the timeout of messages, in milliseconds, by index."""
        self.first_deadline_ms = 0
        """The earliest deadline, in milliseconds of boot time."""
        self.sequence = -1
        self.data: bytes | bytearray | None = None
        self.send_count = 0
        """How often the batch was sent to its current partition."""
        self.tries = 0
        """The number of failed attempts, including those in earlier partitions."""
        self.failed_at_ms: int | None = None
        """The boot time of the first failed attempt, in milliseconds."""
        self.doubtful = False
        """True if the batch may be stored in its current partition, because an attempt to send it,
        or an earlier batch, got no reply.
        """
        self.opened_at_ms = 0
        self._future: asyncio.Future[None] | None = None
        """The future of the batch, created on demand; most batches have only `waiters`, or
        nothing.
        """
        self.is_notified = False
        """True once all messages are settled, or the first of several separate outcomes is known.
        """
        self.outcome: Outcome | list[Outcome | None] | None = None
        """The first message's receipt, or the GivenUpOutcome of all messages; a list by index if
        messages settle separately.
        """
        self.plain_receipt: tuple[int, int, str, bool | Literal["possible"]] | None = None
        """The first four fields of the first message's receipt, set if all receipts can be derived
        from them.
        """
        self.origins: list[tuple[OutgoingBatch, int]] | None = None
        """The original batch and index of each adopted message, where its future waits; None if the
        messages are the batch's own.
        """
        self.expired_count = 0
        """The number of messages given up before the batch settled."""
        self._reported: set[int] | None = None
        self._message_waiters: dict[int, asyncio.Future[None]] | None = None
        self.waiters: dict[asyncio.Future[None], None] = {}
        """A future for each pending await, which completes together with `future`. Callbacks would
        take another turn of the event loop.
        """
        self.listeners: dict[tuple[int, object], int] = {}
        """How many times to call a done callback of a message, by index and callback."""
        self._all_bound = False

    def __len__(self) -> int:
        return len(self.values)

    # ── filling ───────────────────────────────────────────────────────────────────────────────────
    def set_sent_at(self, sent_at_ns: int) -> None:
        """Set the send time of the messages that are added next."""
        self.sent_at_ns = sent_at_ns
        self._time_runs.append((len(self.values), sent_at_ns))

    @property
    def size(self) -> int:
        """The bytes of keys, values and properties, including their overhead in the batch."""
        return self.full_size - self.remaining_bytes

    def grant(self, remaining_bytes: int) -> None:
        """Allow plain messages to use `remaining_bytes` bytes, in place of the previous grant; each
        message reduces it.
        """
        self.full_size += remaining_bytes - self.remaining_bytes
        self.remaining_bytes = remaining_bytes

    def add(self, key: bytes, value: bytes, packed_properties: bytes, sent_at_ns: int) -> int:
        """Append a message and return its index."""
        index = len(self.values)
        if sent_at_ns != self.sent_at_ns:
            self.set_sent_at(sent_at_ns)
        if packed_properties:
            self._add_properties(index, packed_properties)
        self.put(key, value, len(key) + len(value) + len(packed_properties) + BYTES_PER_MESSAGE)
        self.count = index + 1
        return index

    def put(self, key: bytes, value: bytes, size: int) -> int:
        """Append a message without properties, with the current send time, and return its index.
        `size` includes its overhead in the batch.
        """
        self.remaining_bytes -= size
        values = self.values
        index = len(values)
        values.append(value)
        self.keys.append(key)
        return index

    def extend(
        self, keys: list[bytes], values: list[bytes], size: int, packed_properties: bytes
    ) -> None:
        """Append several messages, as `put` does; all have the same properties."""
        self.remaining_bytes -= size
        if packed_properties:
            self._add_properties(len(self.values), packed_properties, len(keys))
        self.keys += keys
        self.values += values

    def _add_properties(self, index: int, packed_properties: bytes, count: int = 1) -> None:
        """Set the properties of the next `count` messages."""
        if self.properties is None:
            self.properties = []
        self.properties += [b""] * (index - len(self.properties))
        self.properties += [packed_properties] * count

    def properties_of(self, index: int) -> bytes:
        """Return the packed properties of message `index`."""
        properties = self.properties
        return properties[index] if properties is not None and index < len(properties) else b""

    def adopt(self, batch: OutgoingBatch, index: int) -> None:
        """Append message `index` of another batch. Its outcome is forwarded to the original
        batch.
        """
        assert not batch.doubtful, "mark a doubtful batch before its messages are moved"
        if self.origins is None:
            assert not len(self), "a batch holds either its own messages or adopted ones"
            self.origins = []
            self.tries = batch.tries
            self.failed_at_ms = batch.failed_at_ms
        elif batch.tries < self.tries or self.failed_at_ms is None:
            # Keep the fewest tries and the latest first failure, so that no message is given up too
            # early.
            self.tries = batch.tries
            self.failed_at_ms = batch.failed_at_ms
        elif batch.failed_at_ms is None or batch.failed_at_ms > self.failed_at_ms:
            self.failed_at_ms = batch.failed_at_ms
        new_index = len(self)
        self.expired_count += bool(batch.expired_count) and batch.is_settled(index)
        self.origins.append(batch.origins[index] if batch.origins else (batch, index))
        self.add(
            batch.keys[index],
            batch.values[index],
            batch.properties_of(index),
            batch.sent_at_of(index),
        )
        mark = batch.mark_of(index)
        if mark:
            self.mark(new_index, mark)
        destination = batch.destination_of(index)
        if destination is not None:
            self.set_destination(new_index, destination)
        if batch.deadlines is not None and index in batch.deadlines:
            self.set_deadline(new_index, *batch.deadlines[index])

    def split(
        self, predicate: Callable[[int], bool]
    ) -> tuple[OutgoingBatch | None, OutgoingBatch | None]:
        """Split the messages that are not withdrawn into two new batches: those that satisfy
        `predicate(index)`, and the others. An empty batch is None.
        """
        parts: list[OutgoingBatch | None] = [None, None]
        for index in range(len(self)):
            if self.expired_count and self.is_withdrawn(index):
                continue
            side = 0 if predicate(index) else 1
            part = parts[side]
            if part is None:
                part = parts[side] = OutgoingBatch(self.loop)
                part.opened_at_ms = self.opened_at_ms
            part.adopt(self, index)
        return parts[0], parts[1]

    def set_destination(self, index: int, destination: Destination) -> None:
        """Set the destination that the sender chose for message `index`."""
        if self.destinations is None:
            self.destinations = {}
        self.destinations[index] = destination

    def destination_of(self, index: int) -> Destination | None:
        """Return the destination chosen for message `index`, or None if its key decides."""
        return None if self.destinations is None else self.destinations.get(index)

    def iter_unsettled(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield the key, the size in bytes and the send time of each unsettled message."""
        return self._iter_unsettled(self.keys, self.values)

    def _iter_unsettled(
        self, keys: list[bytes], values: list[bytes]
    ) -> Iterator[tuple[bytes, int, int]]:
        times = chain.from_iterable(
            repeat(at_ns, count) for at_ns, count in self._iter_send_times()
        )
        for index, (key, value, sent_at_ns) in enumerate(zip(keys, values, times, strict=True)):
            if not (self.expired_count and self.is_settled(index)):
                size = len(key) + len(value) + len(self.properties_of(index))
                yield key, size, sent_at_ns

    @property
    def first_sent_at_ns(self) -> int:
        """The send time of the first message, in nanoseconds."""
        return self._time_runs[0][1]

    def sent_at_of(self, index: int) -> int:
        """Return the send time of message `index`, in nanoseconds."""
        return self._time_runs[bisect_right(self._time_runs, index, key=itemgetter(0)) - 1][1]

    def _iter_send_times(self) -> Iterator[tuple[int, int]]:
        """Yield the send times in order, each with the number of its messages."""
        edges = [first for first, _ in self._time_runs] + [len(self)]
        for (_, sent_at_ns), (start, end) in zip(self._time_runs, pairwise(edges), strict=True):
            yield sent_at_ns, end - start

    def size_of(self, index: int) -> int:
        """Return the size of key, value and properties of message `index`, in bytes."""
        packed = self.properties_of(index)
        return len(self.keys[index]) + len(self.values[index]) + len(packed)

    def set_deadline(self, index: int, deadline_ms: int, timeout_ms: int) -> None:
        """Give message `index` up at the boot time `deadline_ms`, which is `timeout_ms` after it
        was sent.
        """
        if self.deadlines is None:
            self.deadlines = {}
            self.first_deadline_ms = deadline_ms
        elif deadline_ms < self.first_deadline_ms:
            self.first_deadline_ms = deadline_ms
        self.deadlines[index] = deadline_ms, timeout_ms

    def drop_deadlines(self, indexes: list[int]) -> None:
        """Remove the deadlines of these messages."""
        assert self.deadlines is not None
        for index in indexes:
            del self.deadlines[index]
        if self.deadlines:
            self.first_deadline_ms = min(self.deadlines.values())[0]
        else:
            self.deadlines = None

    @property
    def has_unbound(self) -> bool:
        """True if any message may go to any partition. The result is cached, so use this only for
        closed batches.
        """
        if self._all_bound:
            return False
        self._all_bound = b"" not in self.keys or not any(map(self.is_unbound, range(len(self))))
        return not self._all_bound

    def is_unbound(self, index: int) -> bool:
        """Return True if message `index` has neither a key nor a chosen destination."""
        return not self.keys[index] and self.destination_of(index) is None

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
        """Encode the batch on the first call; later calls return the same bytes."""
        if self.data is None:
            self.sequence = sequence
            runs, properties = self._time_runs, self.properties
            first_sent_at_ns = runs[0][1]
            if runs[0] is runs[-1]:
                times = first_sent_at_ns.to_bytes(8, "little") * self.count
            else:
                times = b"".join(
                    sent_at_ns.to_bytes(8, "little") * count
                    for sent_at_ns, count in self._iter_send_times()
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
        """Discard the encoded bytes and the sequence; the next `pack` sets new ones."""
        self.data = None
        self.sequence = -1

    def record_failure(self, now_ms: int) -> None:
        """Count a failed attempt to send this batch or an earlier one."""
        self.tries += 1
        if self.failed_at_ms is None:
            self.failed_at_ms = now_ms

    def reset(self, *, refused: bool) -> None:
        """
        Reset the batch before it is sent to another partition, or under another sequence.

        Args:
            refused: True if no message of the batch is stored, according to the broker. Otherwise,
                if an attempt got no reply, each message is marked as POSSIBLE.
        """
        if self.doubtful and not refused:
            for index in range(len(self)):
                self.mark(index, POSSIBLE)
        self.doubtful = False
        self.send_count = 0
        self.unpack()

    # ── marks ─────────────────────────────────────────────────────────────────────────────────────
    def mark(self, index: int, mark: int) -> None:
        """Mark message `index` as REORDERED or POSSIBLE."""
        marks = self.marks
        if marks is None:
            marks = self.marks = bytearray()
        if len(marks) <= index:
            marks.extend(bytes(index + 1 - len(marks)))
        marks[index] |= mark

    def mark_reordered(self) -> None:
        """Mark all keyed messages as reordered; called when they leave their partition."""
        for index, key in enumerate(self.keys):
            if key:
                self.mark(index, REORDERED)

    def mark_of(self, index: int) -> int:
        """Return the marks of message `index`."""
        return self.marks[index] if self.marks is not None and index < len(self.marks) else 0

    def may_be_stored(self, index: int) -> bool:
        """Return True if message `index` may be stored although it is not acked."""
        return self.doubtful or bool(self.mark_of(index) & POSSIBLE)

    def count_unknown(self) -> int:
        """Return the number of unsettled messages that may be stored."""
        if not self.doubtful and self.marks is None:
            return 0
        return sum(
            self.may_be_stored(index) and not self.is_settled(index) for index in range(len(self))
        )

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────────
    def settle(self, outcome: Outcome) -> int:
        """
        Settle all messages as given up, or as stored at consecutive offsets from `outcome.offset`.

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
                    and outcome.copies == 1
                ):
                    self.plain_receipt = (
                        outcome.partition_id,
                        outcome.offset,
                        outcome.durable,
                        outcome.duplicate,
                    )
                self.is_notified = True
                if self.waiters or self._future is not None:
                    self._notify()
                return self.count
            return sum(self._settle_own(index, outcome, index) for index in range(len(self)))
        return sum(self._settle_origin(index, outcome, index) for index in range(len(self.origins)))

    def settle_message(self, index: int, outcome: Outcome) -> bool:
        """Settle message `index`. Return False if it was already settled."""
        if self.origins is None:
            return self._settle_own(index, outcome, 0)
        return self._settle_origin(index, outcome, 0)

    def _settle_origin(self, index: int, outcome: Outcome, distance: int) -> bool:
        assert self.origins is not None
        origin, origin_index = self.origins[index]
        mark = self.mark_of(index)
        if mark:
            origin.mark(origin_index, mark)
        return origin._settle_own(origin_index, outcome, distance)

    def _settle_own(self, index: int, outcome: Outcome, distance: int) -> bool:
        """Settle one of the batch's own messages; `outcome` belongs to the message `distance`
        places before it.
        """
        if self.outcome is None:
            self.outcome = [None] * len(self)
            self._message_waiters = {}
        if not isinstance(self.outcome, list) or self.outcome[index] is not None:
            return False
        self.outcome[index] = (
            outcome if isinstance(outcome, GivenUpOutcome) else _receipt_at(outcome, distance)
        )
        if not self.is_notified:
            self._notify()  # each SendFuture now waits for its own message
        assert self._message_waiters is not None
        waiter = self._message_waiters.pop(index, None)
        if waiter is not None:
            waiter.set_result(None)
        return True

    def _notify(self) -> None:
        self.is_notified = True
        if self._future is not None:
            self._future.set_result(None)
        if self.waiters:
            waiters = self.waiters
            self.waiters = {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    @property
    def future(self) -> asyncio.Future[None]:
        """The future that is done once `is_notified` is True."""
        if self._future is None:
            self._future = self.loop.create_future()
            if self.is_notified:
                self._future.set_result(None)
        return self._future

    @property
    def settles_separately(self) -> bool:
        """True once a message was settled before others; from then on, each message has its own
        `message_future`.
        """
        return self._message_waiters is not None

    def is_settled(self, index: int) -> bool:
        """Return True once message `index` has an outcome, which is stored in the original batch if
        the message was adopted.
        """
        if self.origins is not None:
            origin, origin_index = self.origins[index]
            return origin.is_settled(origin_index)
        outcome = self.outcome
        if isinstance(outcome, list):
            return outcome[index] is not None
        return outcome is not None

    def is_withdrawn(self, index: int) -> bool:
        """
        Return True if message `index` is settled and will not be sent again.

        A keyed message that was given up in flight is still sent with its batch, because newer
        messages of its key that were in flight behind it must not be stored without it.
        """
        origin, origin_index = (self, index) if self.origins is None else self.origins[index]
        outcome = (
            origin.outcome[origin_index] if isinstance(origin.outcome, list) else origin.outcome
        )
        is_still_sent = (
            isinstance(outcome, GivenUpOutcome) and outcome.doubtful and not self.is_unbound(index)
        )
        return outcome is not None and not is_still_sent

    def message_future(self, index: int) -> asyncio.Future[None]:
        """Return a future that is done when message `index` is settled, or when the caller must
        call this method again.
        """
        if self._message_waiters is None:
            return self.future
        waiter = self._message_waiters.get(index)
        if waiter is None:
            waiter = self._message_waiters[index] = self.loop.create_future()
        return waiter

    def outcome_of(self, index: int) -> Receipt | KeylaneError:
        """Return the receipt of a settled message of the batch's own, or the error for which it was
        given up. Unlike `receipt`, this does not count as a report of the error.
        """
        outcome = self.outcome
        if isinstance(outcome, list):
            outcome, index = outcome[index], 0
        assert outcome is not None
        return _receipt_at(outcome, index) if isinstance(outcome, Receipt) else outcome.cause

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of a settled message. If it was given up, raise a new error."""
        outcome = self.outcome
        mark = self.marks[index] if self.marks is not None and index < len(self.marks) else 0
        if type(outcome) is Receipt and not mark:
            return _receipt_at(outcome, index)
        own_outcome = outcome[index] if isinstance(outcome, list) else outcome
        assert own_outcome is not None
        if isinstance(own_outcome, GivenUpOutcome):
            unknown = own_outcome.doubtful or bool(mark & POSSIBLE)
            if self._reported is None:
                self._reported = set()
            if index not in self._reported:
                self._reported.add(index)
                own_outcome.mark_reported(unknown=unknown)
            raise own_outcome.copy_error(unknown=unknown)
        return msgspec.structs.replace(
            _receipt_at(own_outcome, index if own_outcome is outcome else 0),
            duplicate="possible" if mark & POSSIBLE else own_outcome.duplicate,
            reordered=bool(mark & REORDERED),
        )


def first_receipt(answer: Appended, partition: Partition, *, static: bool) -> Receipt:
    """Return the receipt of the first message of a batch that `partition` has stored."""
    offset = answer.base_offset
    if not static and answer.copies == 1:
        return Receipt(partition.partition_id, offset, answer.durable, answer.duplicate)
    return Receipt(
        partition.partition_id,
        offset,
        answer.durable,
        answer.duplicate,
        queue=partition.queue if static else None,
        logic_offset=partition.logic_start + offset if static and offset >= 0 else None,
        copies=answer.copies,
    )


def _receipt_at(first: Receipt, distance: int) -> Receipt:
    """Return the receipt of the message stored `distance` offsets after the first one."""
    if not distance or first.offset < 0:
        return first
    logic_offset = None if first.logic_offset is None else first.logic_offset + distance
    return Receipt(
        first.partition_id,
        first.offset + distance,
        first.durable,
        first.duplicate,
        False,
        first.queue,
        logic_offset,
        first.copies,
    )
