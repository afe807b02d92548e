"""A batch: messages of one message group that travel as one batch, and what became of each.  Pure but for its futures.

    open ──roll──▶ queued ──pack──▶ in flight ──answer──▶ settled
                                      │ ▲
                                      └─┘ sent again, under the same sequence

Invariants
    A batch keeps its sequence and its bytes from the first sending on: a repeat is the same batch.
    A message settles once; usually all of a batch do at once.  When messages went on in other batches, or are given
    up early, each future is woken by the fate of its own message.
    What a receipt declares (`reordered`, `duplicate`) is marked for each message, not for its batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..protocol.batch import BYTES_PER_MESSAGE, encode_batch
from ..protocol.message import Receipt
from .given_up import GivenUp

Outcome = Receipt | GivenUp
REORDERED = 1
"""Mark of a keyed message that left its partition."""
POSSIBLE = 2
"""Mark of a message that may be stored where it was before: it left without a last answer."""


class OutgoingBatch:
    """Columns of messages while they gather; then their bytes; then their fate."""

    __slots__ = (
        "_all_keyed",
        "_told",
        "_waiters",
        "data",
        "deadlines",
        "doubtful",
        "expired",
        "first_deadline_ms",
        "failed_at_ms",
        "future",
        "keys",
        "marks",
        "opened_at_ms",
        "origins",
        "outcome",
        "properties",
        "sends",
        "sequence",
        "size",
        "times",
        "tries",
        "values",
    )

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.times: list[int] = []
        self.properties: list[bytes] | None = None
        self.size = 0
        """Bytes of keys, values and properties, and of their columns."""
        self.marks: bytearray | None = None
        """REORDERED and POSSIBLE of each message, as far as any is marked."""
        self.deadlines: dict[int, tuple[int, int]] | None = None
        """Boot milliseconds at which messages are given up, and their time-outs, by index, of those that have one."""
        self.first_deadline_ms = 0
        """The earliest of them."""
        self.sequence = -1
        self.data: bytes | None = None
        self.sends = 0
        """How often it was sent to the partition it is for."""
        self.tries = 0
        """Failures it met, there and elsewhere."""
        self.failed_at_ms: int | None = None
        """Boot milliseconds of the first of them."""
        self.doubtful = False
        """True once a try ended without an answer: it may be stored there, whatever later tries say."""
        self.opened_at_ms = 0
        self.future = future
        """Done when all messages are settled, or when the first of several fates is known."""
        self.outcome: Outcome | list[Outcome | None] | None = None
        """One for all (the receipt of the first message, from which the others follow), or one of each."""
        self.origins: list[tuple[OutgoingBatch, int]] | None = None
        """Where each message's future looks, when these messages came out of other batches."""
        self.expired = 0
        """Messages given up before the batch was settled."""
        self._told: set[int] | None = None
        self._waiters: dict[int, asyncio.Future[None]] | None = None
        self._all_keyed = False

    def __len__(self) -> int:
        return len(self.values)

    # ── filling ──────────────────────────────────────────────────────────────────────────────────────
    def add(self, key: bytes, value: bytes, packed_properties: bytes, sent_at_ns: int) -> int:
        """Put a message at the end; returns its index."""
        index = len(self.values)
        self.keys.append(key)
        self.values.append(value)
        self.times.append(sent_at_ns)
        if packed_properties or self.properties is not None:
            self.add_properties(index, packed_properties)
        self.size += len(key) + len(value) + len(packed_properties) + BYTES_PER_MESSAGE
        return index

    def add_properties(self, index: int, packed_properties: bytes) -> None:
        """The properties of the message just added; the column begins with the first that has any."""
        if self.properties is None:
            self.properties = [b""] * index
        self.properties.append(packed_properties)

    def adopt(self, batch: OutgoingBatch, index: int) -> None:
        """Put message `index` of another batch at the end; its future learns its fate from here."""
        assert not batch.doubtful, "what may be stored is marked before it goes elsewhere"
        if self.origins is None:
            assert not len(self), "a batch holds either its own messages or adopted ones"
            self.origins = []
            self.tries, self.failed_at_ms = batch.tries, batch.failed_at_ms
        elif batch.tries < self.tries or self.failed_at_ms is None:
            # Together none is given up before its own time.
            self.tries, self.failed_at_ms = batch.tries, batch.failed_at_ms
        elif batch.failed_at_ms is None or batch.failed_at_ms > self.failed_at_ms:
            self.failed_at_ms = batch.failed_at_ms
        here = len(self)
        self.origins.append(batch.origins[index] if batch.origins else (batch, index))
        properties = batch.properties[index] if batch.properties else b""
        self.add(batch.keys[index], batch.values[index], properties, batch.times[index])
        mark = batch.mark_of(index)
        if mark:
            self.mark(here, mark)
        if batch.deadlines is not None and index in batch.deadlines:
            self.set_deadline(here, *batch.deadlines[index])

    def divided(
        self, takes: Callable[[int], bool]
    ) -> tuple[OutgoingBatch | None, OutgoingBatch | None]:
        """Its unsettled messages in two new batches, of those taken and of the rest; None for one without any."""
        loop = self.future.get_loop()
        parts: list[OutgoingBatch | None] = [None, None]
        for index in range(len(self)):
            if self.expired and self.settled(index):
                continue
            which = 0 if takes(index) else 1
            part = parts[which]
            if part is None:
                part = parts[which] = OutgoingBatch(loop.create_future())
                part.opened_at_ms = self.opened_at_ms
            part.adopt(self, index)
        return parts[0], parts[1]

    def set_deadline(self, index: int, at_ms: int, timeout_ms: int) -> None:
        """Give message `index` up at this boot time, `timeout_ms` after it was sent."""
        if self.deadlines is None:
            self.deadlines = {}
            self.first_deadline_ms = at_ms
        elif at_ms < self.first_deadline_ms:
            self.first_deadline_ms = at_ms
        self.deadlines[index] = at_ms, timeout_ms

    def drop_deadlines(self, indexes: list[int]) -> None:
        """These messages have none any more."""
        assert self.deadlines is not None
        for index in indexes:
            del self.deadlines[index]
        if self.deadlines:
            self.first_deadline_ms = min(self.deadlines.values())[0]
        else:
            self.deadlines = None

    @property
    def keyless(self) -> bool:
        """True if any message has no key; asked of a closed batch."""
        if self._all_keyed:
            return False
        self._all_keyed = b"" not in self.keys
        return not self._all_keyed

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────
    def pack(
        self, *, partition_id: int, producer_id: int, producer_epoch: int, sequence: int
    ) -> bytes:
        """The batch's bytes, made at the first call and kept."""
        if self.data is None:
            self.sequence = sequence
            self.data = encode_batch(
                partition_id=partition_id,
                sent_at_ns=self.times,
                keys=self.keys,
                values=self.values,
                properties=self.properties or (),
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                sequence=sequence,
            )
        return self.data

    def unpack(self) -> None:
        """Forget bytes and sequence: it is numbered anew."""
        self.data = None
        self.sequence = -1

    def failed(self, now_ms: int) -> None:
        """A try failed while it was first in the queue, or behind."""
        self.tries += 1
        if self.failed_at_ms is None:
            self.failed_at_ms = now_ms

    def leave(self, *, refused: bool) -> None:
        """
        It goes elsewhere, or is numbered anew.  `refused`: nothing of it is stored where it was, as that broker said;
        else it may be, if a try is without an answer.
        """
        if self.doubtful and not refused:
            for index in range(len(self)):
                self.mark(index, POSSIBLE)
        self.doubtful = False
        self.sends = 0
        self.unpack()

    # ── marks ────────────────────────────────────────────────────────────────────────────────────────
    def mark(self, index: int, mark: int) -> None:
        """Declare something of message `index`."""
        marks = self.marks
        if marks is None:
            marks = self.marks = bytearray()
        if len(marks) <= index:
            marks.extend(bytes(index + 1 - len(marks)))
        marks[index] |= mark

    def mark_reordered(self) -> None:
        """All keyed messages leave their partition."""
        for index, key in enumerate(self.keys):
            if key:
                self.mark(index, REORDERED)

    def mark_of(self, index: int) -> int:
        """What is declared of message `index`."""
        return self.marks[index] if self.marks is not None and index < len(self.marks) else 0

    def may_be_stored(self, index: int) -> bool:
        """True if message `index` may be stored, though it is not acked."""
        return self.doubtful or bool(self.mark_of(index) & POSSIBLE)

    def unknown_count(self) -> int:
        """How many messages that are not settled may be stored."""
        if not self.doubtful and self.marks is None:
            return 0
        return sum(
            self.may_be_stored(index) and not self.settled(index) for index in range(len(self))
        )

    # ── fates ────────────────────────────────────────────────────────────────────────────────────────
    def settle(self, outcome: Outcome) -> int:
        """
        All messages met this fate: stored one after another from `outcome.offset` on, or given up.

        Returns:
            Of how many messages it is the fate: of all but those that had one already.
        """
        if self.origins is None:
            if self.outcome is None:
                self.outcome = outcome
                self.future.set_result(None)
                return len(self)
            return sum(self._settle_one(index, outcome, index) for index in range(len(self)))
        return sum(self._settle_origin(index, outcome, index) for index in range(len(self.origins)))

    def settle_message(self, index: int, outcome: Outcome) -> bool:
        """Message `index` met this fate; False if it had one already."""
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
        """`outcome` is that of the message `further` before this one."""
        if self.outcome is None:
            self.outcome = [None] * len(self)
            self._waiters = {}
        if not isinstance(self.outcome, list) or self.outcome[index] is not None:
            return False
        self.outcome[index] = (
            outcome if isinstance(outcome, GivenUp) else _of_message(outcome, further)
        )
        if not self.future.done():
            self.future.set_result(None)  # from here on each waits for its own
        assert self._waiters is not None
        waiter = self._waiters.pop(index, None)
        if waiter is not None:
            waiter.set_result(None)
        return True

    def settled(self, index: int) -> bool:
        """True once the fate of message `index` is known; its origin may know of an adopted one."""
        if self.origins is not None:
            origin, origin_index = self.origins[index]
            return origin.settled(origin_index)
        outcome = self.outcome
        if isinstance(outcome, list):
            return outcome[index] is not None
        return outcome is not None

    def waited_for(self, index: int) -> asyncio.Future[None]:
        """A future for whoever waits for message `index`: done when its fate may be known."""
        if self._waiters is None:
            return self.future
        waiter = self._waiters.get(index)
        if waiter is None:
            waiter = self._waiters[index] = self.future.get_loop().create_future()
        return waiter

    def receipt(self, index: int) -> Receipt:
        """The receipt of a settled message; raises a new error if it was given up."""
        outcome = self.outcome
        mark = self.marks[index] if self.marks is not None and index < len(self.marks) else 0
        if type(outcome) is Receipt and not mark:
            return _of_message(outcome, index)
        own = outcome[index] if isinstance(outcome, list) else outcome
        assert own is not None
        if isinstance(own, GivenUp):
            unknown = own.doubtful or bool(mark & POSSIBLE)
            if self._told is None:
                self._told = set()
            if index not in self._told:
                self._told.add(index)
                own.told(unknown=unknown)
            raise own.error(unknown=unknown)
        step = index if own is outcome and own.offset >= 0 else 0
        return Receipt(
            own.partition_id,
            own.offset + step,
            own.durable,
            "possible" if mark & POSSIBLE else own.duplicate,
            bool(mark & REORDERED),
        )


def _of_message(first: Receipt, further: int) -> Receipt:
    """The receipt of the message so much further on in the batch."""
    if not further or first.offset < 0:
        return first
    return Receipt(first.partition_id, first.offset + further, first.durable, first.duplicate)
