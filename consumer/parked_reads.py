"""Reads parked messages for a session: the keys of its partition, windows of a key, and what its
parents have parked.

    Acquired ─▶ adopt: AdoptParked, page by page ─▶ ChangeParked
    ListParked ─▶ ListParked, page by page
    ReadWindow ─▶ ReadParked ─▶ Read from where the messages are stored ─▶ ReadEdited
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

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
    Batches,
    ChangeParked,
    ListParked,
    ParkedChanged,
    ParkedEdited,
    ParkedKeys,
    ParkedRows,
    Read,
    ReadEdited,
    ReadParked,
    ReleaseParked,
)
from ..protocol.ids import MAX_I64
from ..protocol.message import Message
from ..protocol.offsets import Range
from ..protocol.parked import (
    RETRIED,
    ParkedKeyRow,
    ParkKey,
    RequestedChange,
    decode_key_rows,
    encode_parked,
    is_loose,
)
from ..protocol.record import Header, read_header
from ..protocol.routing import PartitionState
from ..protocol.text import MAYBE_OLDER_COPY
from ..rpc.client import BrokerClient
from ..rpc.connections import Connections
from .ancestors import Ancestors, inherits_loose
from .delivery.copied import copied_delivery
from .delivery.decode import decode_messages
from .session.events import AncestorLeft, KeysListed, ReadWindow, SourceUnreadable, WindowRead
from .session.state import PartitionSession
from .shell_owner import ShellOwner

log = logging.getLogger("keylane.consumer")
READ_BYTES = 1 << 18
Row = tuple[int, int, int]
"""A source, and the offsets `[start, end)` in it."""


class ReadingShell(Protocol):
    """What these reads need of the shell of a partition."""

    partition_id: int
    group: str
    subject: str
    token: int
    grant: Grant
    lease: tuple[int, str, str, int]
    owner: ShellOwner
    state: PartitionSession
    connections: Connections
    broker: BrokerClient

    @property
    def log_name(self) -> str:
        """The subject, partition and group, for log lines."""
        ...


class SourceDelivery:
    """The `Delivery` of redriven messages, which come from one source."""

    cursor = 0
    """0, because parked messages are below the partition's cursor although they are not handled."""
    is_apart = True
    is_copied = False

    def __init__(self, shell: Any, logic_start: int, *, is_loose: bool) -> None:
        self.client = shell
        self.logic_start = logic_start
        self.is_loose = is_loose
        self.queue = shell.queue
        self.cluster_id = shell.cluster_id
        self.codec = shell.codec
        self.group = shell.group
        self.leased_id = shell.partition_id
        self.exclusive = shell.exclusive

    def __reduce_ex__(self, _protocol: object) -> Any:
        return copied_delivery(self)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def ack(self, message: Message) -> Any:
        """Ack a message for the program. Raises InvalidRequestError if a handler has it."""
        return self.client.ack(message)

    def nack(self, message: Message, after_s: float) -> Any:
        """Give a message back for the program. Raises InvalidRequestError if a handler has it."""
        return self.client.nack(message, after_s)

    def report_hang(
        self, message: Message, failure: Any, running_ms: int, *, is_failed_try: bool = False
    ) -> None:
        """Report a hanging message to the broker, and whether that is a failed try."""
        self.client.report_hang(message, failure, running_ms, is_failed_try=is_failed_try)


class ParkedReads:
    """Reads the parked messages of one partition."""

    def __init__(self, shell: ReadingShell) -> None:
        self.grant = shell.grant
        self._shell = shell
        self._sources: dict[int, tuple[str | None, int]] = {}
        """The broker's address and the logic start of each ancestor."""
        self._ancestors = Ancestors(self)

    # ── what adopting needs ───────────────────────────────────────────────────────────────────────
    @property
    def lease(self) -> tuple[int, str, str, int]:
        """The partition id, group, session and token, as in requests."""
        return self._shell.lease

    @property
    def log_name(self) -> str:
        """The subject, partition and group, for log lines."""
        return self._shell.log_name

    @property
    def owner(self) -> ShellOwner:
        """The consumer, which asks the metaserver."""
        return self._shell.owner

    def broker_at(self, address: str) -> BrokerClient:
        """Return the client of a broker."""
        return self._shell.connections.broker_at(address)

    async def send_now(self, changes: Iterable[RequestedChange]) -> int:
        """Have the broker store changes, and return its version. Raises KeylaneError."""
        request = ChangeParked(*self.lease, ())
        answer, _ = await self._shell.broker.call(request, encode_parked(list(changes)))
        assert isinstance(answer, ParkedChanged)
        return answer.parked_version

    def update_grant(self, grant: Grant) -> None:
        """Use a newer grant of the same lease, unless all ancestors have been adopted."""
        self._ancestors.update_grant(grant)

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
            answer, payload = await self._shell.broker.call(ListParked(*self.lease, first))
            assert isinstance(answer, ParkedKeys)
            rows += decode_key_rows(payload)
            if answer.following is None:
                break
            first = answer.following
        # Later, what waits for a retry is what this session has set aside itself.
        is_first = not self._shell.state.tenure.is_acquired
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
        answer, _ = await self._shell.broker.call(ReadParked(*self.lease, key, count, first))
        assert isinstance(answer, ParkedRows)
        return answer

    async def leave_ancestor(self, source: int) -> AncestorLeft:
        """Tell an ancestor that none of its parked messages is needed. Raises KeylaneError; a
        FencedError of the ancestor does not affect the lease of this partition.
        """
        history = await self.owner.history()
        address = self._ancestors.find_address(source, history)
        if address is not None:
            _, group, _, token = self.lease
            partition = self.grant.partition
            request = ReleaseParked(
                source,
                group,
                partition.range_start,
                partition.range_end,
                token,
                inherits_loose(history, source, int(partition.partition_id)),
            )
            await self.broker_at(address).call(request)
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
        shell = self._shell
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
        delivery: Any = SourceDelivery(shell, logic_start, is_loose=is_loose(key))
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
                opened = decode_messages(
                    columns, header, shell.subject, source, shell.token, delivery
                )
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
        shell = self._shell
        if source == shell.partition_id:
            return shell.broker, shell.grant.partition.logic_start
        if source not in self._sources:
            history = await shell.owner.history()
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
        return self.broker_at(address), logic_start

    async def _apply_edits(
        self, key: ParkKey, edited: Collection[tuple[int, int]], messages: list[Message]
    ) -> None:
        """Put in the values with which an operator has replaced those of parked messages."""
        partition_id, group, *_ = self.lease
        for message in messages:
            if (message.partition_id, message.offset) not in edited:
                continue
            request = ReadEdited(partition_id, group, key, message.partition_id, message.offset)
            answer, value = await self._shell.broker.call(request)
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
