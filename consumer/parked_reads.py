"""Reads parked messages for a session: the keys of its partition, windows of a key, and what its
parents have parked.

    Acquired ─▶ AdoptParked, page by page ─▶ Adopt ─▶ the last page: adopted
    ListParked ─▶ ListParked, page by page
    ReadWindow ─▶ ReadParked ─▶ Read from where the messages are stored ─▶ ReadEdited
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from ..protocol.batch import check_batch, column_views
from ..protocol.control import Grant
from ..protocol.errors import (
    CorruptBatchError,
    CorruptLogError,
    FencedError,
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    UnreachableError,
)
from ..protocol.frames import (
    Acquired,
    AdoptParked,
    Batches,
    ChangeParked,
    ListParked,
    ParkedChanged,
    ParkedEdited,
    ParkedKeys,
    ParkedRows,
    ParkedToAdopt,
    Read,
    ReadEdited,
    ReadParked,
    ReleaseParked,
)
from ..protocol.ids import MAX_I64
from ..protocol.message import Delivery, Message
from ..protocol.offsets import AckedOffsets, Range
from ..protocol.operations import SubjectHistory
from ..protocol.parked import (
    RETRIED,
    Adopt,
    ParkedKeyRow,
    ParkKey,
    RequestedChange,
    decode_adopted,
    decode_key_rows,
    encode_parked,
    is_loose,
)
from ..protocol.record import Header, read_header
from ..protocol.routing import Partition, PartitionState
from ..protocol.text import MAYBE_OLDER_COPY
from ..rpc.client import BrokerClient
from ..rpc.connections import Connections
from .decode import decode_messages
from .log_names import partition_name
from .session.events import AncestorLeft, KeysListed, ReadWindow, SourceUnreadable, WindowRead
from .session.state import Tenure

log = logging.getLogger("keylane.consumer")
READ_BYTES = 1 << 18
Row = tuple[int, int, int]
"""A source, and the offsets `[start, end)` in it."""


class PartitionBrokers(Protocol):
    """Where the broker of a partition is, and those of its ancestors."""

    broker: BrokerClient
    connections: Connections


class ParkedReads:
    """
    Reads the parked messages of one partition.

    Args:
        brokers: the partition's broker, which may change, and the connections to others.
        delivery: what the partition's own messages have in common.
        grant: names the parents whose parked messages are adopted.
        history: asks the metaserver for the subject's partitions, past and present.
    """

    def __init__(
        self,
        brokers: PartitionBrokers,
        tenure: Tenure,
        delivery: Delivery,
        grant: Grant,
        *,
        history: Callable[[], Coroutine[Any, Any, SubjectHistory]],
    ) -> None:
        self.grant = grant
        self.lease = tenure.lease
        self.log_name = partition_name(delivery.subject, self.lease.partition_id, delivery.group)
        self.history = history
        self.brokers = brokers
        self._tenure = tenure
        self._delivery = delivery
        self._sources: dict[int, tuple[str | None, int]] = {}
        """The broker's address and the logic start of each ancestor."""
        self._ancestors = Ancestors(self)

    async def send_now(self, changes: Iterable[RequestedChange]) -> int:
        """Have the broker store changes, and return its version. Raises KeylaneError."""
        request = ChangeParked(*self.lease, ())
        answer, _ = await self.brokers.broker.call(request, encode_parked(list(changes)))
        assert isinstance(answer, ParkedChanged)
        return answer.parked_version

    def update_grant(self, grant: Grant) -> None:
        """Use a newer grant of the same lease, unless all ancestors have been adopted."""
        if not self._ancestors.are_adopted:
            self.grant = grant

    async def adopt(self, answer: Acquired) -> Acquired:
        """Adopt the parents' parked messages, unless that is already done. Return the answer with
        the broker's version after it. Raises KeylaneError.
        """
        version = await self._ancestors.adopt_all(answer)
        return (
            answer if version == answer.parked_version else replace(answer, parked_version=version)
        )

    # ── keys ──────────────────────────────────────────────────────────────────────────────────────
    async def list_keys(self) -> KeysListed:
        """Fetch the parked keys, and, at the acquisition, what waits for a retry. Raises
        KeylaneError.
        """
        rows: list[ParkedKeyRow] = []
        first = 0
        while True:
            answer, payload = await self.brokers.broker.call(ListParked(*self.lease, first))
            assert isinstance(answer, ParkedKeys)
            rows += decode_key_rows(payload)
            if answer.following is None:
                break
            first = answer.following
        # Later, what waits for a retry is what this session has set aside itself.
        is_first = not self._tenure.is_acquired
        aside = await self._list_aside(rows) if is_first else []
        return KeysListed(answer.parked_version, rows, aside, answer.unneeded_ancestors)

    async def _list_aside(self, rows: list[ParkedKeyRow]) -> list[tuple[int, int, int, int]]:
        return [
            (row.key, *parked)
            for row in rows
            if isinstance(row.key, int) and row.key
            for parked in (await self._read_rows(row.key, MAX_I64, 0)).rows
        ]

    async def _read_rows(self, key: ParkKey, count: int, first: int) -> ParkedRows:
        answer, _ = await self.brokers.broker.call(ReadParked(*self.lease, key, count, first))
        assert isinstance(answer, ParkedRows)
        return answer

    async def leave_ancestor(self, source: int) -> AncestorLeft:
        """Tell an ancestor that none of its parked messages is needed. Raises KeylaneError; a
        FencedError of the ancestor does not affect the lease of this partition.
        """
        history = await self.history()
        address = self._ancestors.find_address(source, history)
        if address is not None:
            partition = self.grant.partition
            request = ReleaseParked(
                source,
                self.lease.group,
                partition.range_start,
                partition.range_end,
                self.lease.token,
                inherits_loose(history, source, self.lease.partition_id),
            )
            await self.brokers.connections.broker_at(address).call(request)
        return AncestorLeft(source)

    # ── windows ───────────────────────────────────────────────────────────────────────────────────
    async def read_window(self, request: ReadWindow) -> WindowRead | SourceUnreadable:
        """Read the messages of a window. Raises KeylaneError."""
        edited: Collection[tuple[int, int]] = ()
        first_row = request.first_row
        if request.ranges:
            source, ranges = request.source, list(request.ranges)
        else:
            rows, edited, first_row = await self._next_rows(request)
            if not rows:
                return WindowRead(request.number, [], first_row=first_row)
            source = rows[0][0]
            ranges = [(low, high) for each, low, high in rows if each == source]
        try:
            messages, upto, gone = await self._read(request.key, source, ranges)
        except FencedError:
            raise
        except KeylaneError as error:
            self._sources.clear()
            log.info("%s: parked messages: %s", self.log_name, error.message)
            is_damaged = isinstance(error, CorruptLogError | CorruptBatchError)
            upto_damaged = getattr(error, "end_offset", None) if is_damaged else None
            return SourceUnreadable(request.number, source, upto_damaged, first_row)
        if not isinstance(request.key, int) or request.key == RETRIED:
            await self._apply_edits(request.key, edited, messages)
        left = [(max(low, upto), high) for low, high in ranges if high > upto]
        return WindowRead(request.number, messages, gone, left if request.ranges else (), first_row)

    async def _next_rows(
        self, request: ReadWindow
    ) -> tuple[Sequence[Row], Collection[tuple[int, int]], int]:
        """Return the first parked messages of a key that are not passed over, which of them an
        operator has edited, and how many rows come before.
        """
        below, first = dict(request.passed_over), request.first_row
        if not below:
            parked = await self._read_rows(request.key, request.count, 0)
            return parked.rows, parked.edited, 0
        while True:
            parked = await self._read_rows(request.key, MAX_I64, first)
            rows = _not_passed_over(parked.rows, below, request.count)
            if rows or not parked.rows:
                return rows, parked.edited, first
            first += len(parked.rows)

    async def _read(
        self, key: ParkKey, source: int, ranges: list[Range]
    ) -> tuple[list[Message], int, list[Row]]:
        """
        Read the first messages of a source that are in the ranges.

        Returns:
            The messages, the offset up to which the ranges are read, and the rows of messages that
            retention has removed.

        Raises:
            KeylaneError: the source cannot be read now; CorruptBatchError names what is damaged.
        """
        start, end = ranges[0][0], ranges[-1][1]
        try:
            broker, logic_start = await self._locate(source)
        except PartitionUnknownError:
            return [], end, self._give_up(source, ranges)
        try:
            answer, payload = await broker.call(Read(source, start, READ_BYTES))
        except OffsetOutOfRangeError as error:
            first = error.first_offset or 0
            if start >= first:
                raise _missing_error(source, start) from error
            end = min(end, first)
            gone = [(low, min(high, end)) for low, high in ranges if low < end]
            return [], end, self._give_up(source, gone)
        assert isinstance(answer, Batches)
        if not payload:
            raise _missing_error(source, start)
        delivery = replace(
            self._delivery, logic_start=logic_start, is_loose=is_loose(key), acked=AckedOffsets()
        )
        messages: list[Message] = []
        upto, position = start, 0
        while position < len(payload):
            try:
                header = check_batch(payload, position)
                base, end_offset = header.base_offset, header.next_offset
                overlapping = [pair for pair in ranges if pair[0] < end_offset and base < pair[1]]
                columns = column_views(payload, header, position) if overlapping else None
            except CorruptBatchError as error:
                if messages:
                    break  # return the readable messages before it
                _add_offsets(error, payload, position, start=start)
                raise
            if columns is not None:
                opened = decode_messages(columns, header, source, self.lease.token, delivery)
                for low, high in overlapping:
                    messages += opened[max(low - base, 0) : max(high - base, 0)]
            upto, position = end_offset, position + header.length
        return messages, upto, []

    def _give_up(self, source: int, ranges: list[Range]) -> list[Row]:
        for low, high in ranges:
            log.warning(
                "%s: parked messages [%d, %d) of partition %d were removed by "
                "retention, and are given up",
                self.log_name,
                low,
                high,
                source,
            )
        return [(source, low, high) for low, high in ranges]

    async def _locate(self, source: int) -> tuple[BrokerClient, int]:
        """
        Return the broker and the logic start of a source.

        Raises:
            PartitionUnknownError: its messages are gone.
            KeylaneError: no metaserver replied, or the broker is down.
        """
        if source == self.lease.partition_id:
            return self.brokers.broker, self._delivery.logic_start
        if source not in self._sources:
            history = await self.history()
            self._sources = {
                int(past.partition.partition_id): (
                    past.partition.address,
                    past.partition.logic_start,
                )
                for past in history.partitions
                if not past.lost and past.partition.state is not PartitionState.EXPIRED
            }
        if source not in self._sources:
            raise PartitionUnknownError(partition_id=source)
        address, logic_start = self._sources[source]
        if address is None:
            del self._sources[source]
            raise UnreachableError(f"the broker of partition {source} is down")
        return self.brokers.connections.broker_at(address), logic_start

    async def _apply_edits(
        self, key: ParkKey, edited: Collection[tuple[int, int]], messages: list[Message]
    ) -> None:
        """Put in the values with which an operator has replaced those of parked messages."""
        for message in messages:
            if (message.partition_id, message.offset) not in edited:
                continue
            request = ReadEdited(
                self.lease.partition_id,
                self.lease.group,
                key,
                message.partition_id,
                message.offset,
            )
            answer, value = await self.brokers.broker.call(request)
            assert isinstance(answer, ParkedEdited)
            if answer.properties is not None:
                message.value = bytes(value)
                message.packed_properties = answer.properties


def _missing_error(source: int, offset: int) -> NotSentError:
    return NotSentError(
        f"the broker of partition {source} stores nothing at offset {offset}, and "
        f"{MAYBE_OLDER_COPY}",
        partition_id=source,
    )


def _not_passed_over(rows: Iterable[Row], below: Mapping[int, int], count: int) -> list[Row]:
    """Return the first `count` messages that are not passed over; `rows` are sorted by source and
    offset.
    """
    remaining: list[Row] = []
    for source, start, end in rows:
        low = max(start, below.get(source, 0))
        high = min(end, low + count)
        if low < high:
            remaining.append((source, low, high))
            count -= high - low
    return remaining


def _add_offsets(
    error: CorruptBatchError, payload: memoryview, position: int, *, start: int
) -> None:
    """Add the offsets of a damaged batch to the error, so that messages after it can be read. They
    are known if the header, which has its own checksum, is intact.
    """
    header = read_header(payload, position)
    if isinstance(header, Header) and header.next_offset > start:
        error.details |= {
            "partition_id": header.partition_id,
            "offset": header.base_offset,
            "end_offset": header.next_offset,
        }


class Ancestors:
    """
    The parents whose parked messages one partition adopts.

    A child pulls nothing before it has adopted the parked messages of its range from each parent.
    Messages are given up only if the metaserver reports that they are gone: a broker that does not
    have an ancestor may run on an older copy of its data folder. A parent that was lost after the
    grant is given up only under a later grant, which names the messages to adopt from its
    ancestors.
    """

    def __init__(self, reads: ParkedReads) -> None:
        self.are_adopted = False
        self._reads = reads
        self._called: set[int] = set()
        """The parents that were called at the address given in the grant."""
        self._lost: set[int] = set()
        """The parents whose loss was accepted."""

    async def adopt_all(self, answer: Acquired) -> int:
        """Adopt the parked messages of all parents that have not been adopted yet. Return the
        broker's version.
        """
        version = answer.parked_version
        grant, adopted_under = self._reads.grant, dict(answer.adopted_under)
        tokens = grant.parked_tokens or (0,) * len(grant.parked_parents)
        parts = grant.parked_ranges or ((),) * len(grant.parked_parents)
        for parent, token, ranges in zip(grant.parked_parents, tokens, parts, strict=True):
            parent_id = int(parent.partition_id)
            # A parent that was reset since then may have parked messages again, under tokens above
            # that of the last adoption.
            if parent_id not in answer.adopted or token > adopted_under.get(parent_id, token):
                version = await self._adopt(parent, ranges)
        self.are_adopted = True
        return version

    async def _adopt(self, parent: Partition, ranges: Sequence[tuple[int, int]] = ()) -> int:
        """Adopt the messages that an ancestor has parked for `ranges` of logical partitions; ()
        means those of this partition.
        """
        reads = self._reads
        parent_id, address = int(parent.partition_id), parent.address
        if address is None or parent_id in self._called:
            address = await self.address_of(parent_id)
        self._called.add(parent_id)
        if address is None:
            if parent_id in self._lost and parent.state is not PartitionState.EXPIRED:
                raise UnreachableError(
                    f"parent {parent_id} was lost after the grant: the next grant says what to "
                    f"adopt in its place"
                )
            log.warning(
                "%s: messages parked at parent partition %d were removed by "
                "retention, and are given up",
                reads.log_name,
                parent_id,
            )
            return await reads.send_now([Adopt(parent_id, (), True)])
        broker = reads.brokers.connections.broker_at(address)
        partition = reads.grant.partition
        pending = list(ranges) or [(partition.range_start, partition.range_end)]
        version, first_row, message_count = 0, 0, 0
        while pending:
            request = AdoptParked(parent_id, reads.lease.group, *pending[0], first_row)
            answer, payload = await broker.call(request)
            assert isinstance(answer, ParkedToAdopt)
            keys = tuple(decode_adopted(payload))
            message_count += sum(end - start for key in keys for _, start, end in key.rows)
            first_row = answer.following or 0
            if answer.following is None:
                pending.pop(0)
            adopt = Adopt(parent_id, keys, not pending, answer.sources)
            version = await reads.send_now([adopt])
        if message_count:
            log.info(
                "%s adopts %d parked messages of parent partition %d",
                reads.log_name,
                message_count,
                parent_id,
            )
        return version

    async def address_of(self, partition_id: int) -> str | None:
        """
        Return the current address of a partition's broker, or None if its messages are gone.

        Raises:
            UnreachableError: the broker is down.
            KeylaneError: no metaserver replied.
        """
        return self.find_address(partition_id, await self._reads.history())

    def find_address(self, partition_id: int, history: SubjectHistory) -> str | None:
        """Return the same as `address_of`, given the subject's history."""
        for past in history.partitions:
            if past.partition.partition_id != partition_id:
                continue
            if past.is_gone:
                if past.lost:
                    self._lost.add(partition_id)
                return None
            if past.partition.address:
                return past.partition.address
            raise UnreachableError(
                f"the broker of partition {partition_id}, which has parked messages of the "
                f"group, is down"
            )
        return None


def inherits_loose(history: SubjectHistory, ancestor_id: int, partition_id: int) -> bool:
    """
    Return True if loose and displaced messages that are parked on an ancestor pass to this
    partition.

    Each time a partition is replaced, they pass to the child that contains its first logical
    partition, which need not contain that of the ancestor. Through a partition that was lost they
    may have passed or not, so nobody inherits them for certain, and the ancestor keeps them.
    """
    passed = [
        past.partition for past in history.partitions if past.partition.partition_id == ancestor_id
    ]
    while passed:
        parent = passed.pop()
        for past in history.partitions:
            child = past.partition
            is_child = parent.partition_id in child.parents
            if is_child and child.range_start <= parent.range_start < child.range_end:
                if child.partition_id == partition_id:
                    return True
                if not past.lost:
                    passed.append(child)
    return False
