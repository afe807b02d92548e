"""Reads parked messages for a session: the keys of its partition, windows of a key, and what its
parents have parked.

    Acquired ─▶ adopt: AdoptParked, page by page ─▶ ChangeParked
    ListParked ─▶ ListParked, page by page
    ReadWindow ─▶ ReadParked ─▶ Read from where the messages are stored ─▶ ReadEdited
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from msgspec.structs import replace

from ..protocol.batch import batch_starts, check_batch, column_views
from ..protocol.control import Grant
from ..protocol.errors import (
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
)
from ..protocol.ids import MAX_I64
from ..protocol.message import Message
from ..protocol.offsets import Range
from ..protocol.parked import (
    ParkedKeyRow,
    ParkKey,
    RequestedChange,
    decode_key_rows,
    encode_parked,
    is_loose,
)
from ..protocol.routing import PartitionState
from ..protocol.text import MAYBE_OLDER_COPY
from ..rpc.client import BrokerClient
from ..rpc.connections import Connections
from .delivery.copied import copied_delivery
from .delivery.decode import decode_messages
from .delivery.user_acks import check_not_in_handler
from .parking.ancestors import Ancestors
from .pulling.pull_owner import PullOwner
from .session.events import KeysListed, WindowRead
from .session.ready import ReadWindow

log = logging.getLogger("keylane.consumer")
READ_BYTES = 1 << 18


class ReadingShell(Protocol):
    """What these reads need of the shell of a partition."""

    partition_id: int
    group: str
    subject: str
    token: int
    grant: Grant
    lease: tuple[int, str, str, int]
    owner: PullOwner
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
        self.codec = shell.codec
        self.group = shell.group
        self.leased_id = shell.partition_id
        self.exclusive = shell.exclusive

    def __reduce_ex__(self, _protocol: object) -> Any:
        return copied_delivery(self)

    def ack(self, message: Message) -> Any:
        """Raise InvalidRequestError: a handler has the message."""
        check_not_in_handler(message)

    def nack(self, message: Message, _after_s: float) -> Any:
        """Raise InvalidRequestError: a handler has the message."""
        check_not_in_handler(message)

    def report_failure(self, message: Message, failure: Any) -> None:
        """Report a message's failed attempt to the broker."""
        self.client.report_failure(message, failure)

    def report_hang(self, message: Message, failure: Any, running_ms: int) -> None:
        """Report a hanging message to the broker."""
        self.client.report_hang(message, failure, running_ms)


class ParkedReads:
    """Reads the parked messages of one partition."""

    def __init__(self, shell: ReadingShell) -> None:
        self.grant = shell.grant
        self._shell = shell
        self._has_listed = False
        self._sources: dict[int, tuple[str | None, int]] = {}
        """The broker's address and the logic start of each ancestor."""
        context: Any = self
        self._ancestors = Ancestors(context, context, self._list_ancestors)

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
    def owner(self) -> PullOwner:
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

    def spawn(self, body: Any, _activity: str) -> Any:
        """Run `body` in a task of the shell."""
        shell: Any = self._shell
        work: Coroutine[Any, Any, None] = body()
        return shell.start(work)

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
        """Fetch the parked keys, and, the first time, what waits for a retry."""
        version, rows = await self._list()
        aside = [] if self._has_listed else await self._list_aside(rows)
        self._has_listed = True
        if self._ancestors.unneeded_ancestors:
            self._ancestors.notify_unneeded_ancestors()
        return KeysListed(version, rows, aside)

    async def _list(self) -> tuple[int, list[ParkedKeyRow]]:
        rows: list[ParkedKeyRow] = []
        version, first = 0, 0
        while True:
            answer, payload = await self._shell.broker.call(ListParked(*self.lease, first))
            assert isinstance(answer, ParkedKeys)
            rows += decode_key_rows(payload)
            version = answer.parked_version
            self._ancestors.unneeded_ancestors = answer.unneeded_ancestors
            if answer.following is None:
                return version, rows
            first = answer.following

    async def _list_ancestors(self) -> None:
        await self._list()

    async def _list_aside(self, rows: list[ParkedKeyRow]) -> list[tuple[int, int, int, int]]:
        return [
            (row.key, *parked)
            for row in rows
            if isinstance(row.key, int) and row.key
            for parked in (await self._read_rows(row.key, MAX_I64)).rows
        ]

    async def _read_rows(self, key: ParkKey, count: int) -> ParkedRows:
        answer, _ = await self._shell.broker.call(ReadParked(*self.lease, key, count))
        assert isinstance(answer, ParkedRows)
        return answer

    # ── windows ───────────────────────────────────────────────────────────────────────────────────
    async def read_window(self, request: ReadWindow) -> WindowRead:
        """Read the messages of a window. Raises KeylaneError."""
        edited: tuple[tuple[int, int], ...] = ()
        if request.ranges:
            source, ranges = request.source, list(request.ranges)
        else:
            rows = await self._read_rows(request.key, request.count)
            if not rows.rows:
                return WindowRead(request.number, [])
            source = rows.rows[0][0]
            ranges = [(low, high) for each, low, high in rows.rows if each == source]
            edited = tuple(rows.edited)
        start = ranges[0][0]
        try:
            messages, upto = await self._read(request.key, source, ranges)
        except PartitionUnknownError:
            return self._gone(request.number, source, ranges)
        except OffsetOutOfRangeError as error:
            first = error.first_offset or 0
            if first <= start:
                raise _missing_error(source, start) from error
            return self._gone(
                request.number, source, [(low, min(high, first)) for low, high in ranges]
            )
        except KeylaneError:
            self._sources.clear()
            raise
        await self._apply_edits(request.key, edited, messages)
        left = [(max(low, upto), high) for low, high in ranges if high > upto]
        return WindowRead(request.number, messages, (), left if request.ranges else ())

    def _gone(self, number: int, source: int, ranges: list[Range]) -> WindowRead:
        gone = [(source, low, high) for low, high in ranges if low < high]
        for _, low, high in gone:
            log.warning(
                "%s: parked messages [%d, %d) of partition %d were removed by "
                "retention, and are given up",
                self.log_name,
                low,
                high,
                source,
            )
        return WindowRead(number, [], gone)

    async def _read(
        self, key: ParkKey, source: int, ranges: list[Range]
    ) -> tuple[list[Message], int]:
        """Read the first messages of a source that are in the ranges, and return up to where."""
        shell = self._shell
        broker, logic_start = await self._locate(source)
        start = ranges[0][0]
        answer, payload = await broker.call(Read(source, start, READ_BYTES))
        assert isinstance(answer, Batches)
        if not payload:
            raise _missing_error(source, start)
        delivery: Any = SourceDelivery(shell, logic_start, is_loose=is_loose(key))
        messages: list[Message] = []
        upto = start
        for position, header in batch_starts(payload):
            check_batch(payload, position)
            columns = column_views(payload, header, position)
            opened = decode_messages(columns, header, shell.subject, source, shell.token, delivery)
            base, upto = header.base_offset, header.next_offset
            for low, high in ranges:
                messages += opened[max(low - base, 0) : max(high - base, 0)]
        return messages, upto

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
        self, key: ParkKey, edited: tuple[tuple[int, int], ...], messages: list[Message]
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
