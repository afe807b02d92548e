"""Reads parked messages by offset from the brokers that store them, and filters them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..protocol import endpoints
from ..protocol.errors import CorruptBatchError, KeylaneError, OffsetOutOfRangeError
from ..protocol.frames import Batches, ParkedEdited, Read, ReadEdited
from ..protocol.message import Message
from ..protocol.parked import Failure, ParkedOffsets, ParkState
from ..protocol.routing import Partition
from ..protocol.text import MAYBE_OLDER_COPY
from ..rpc.client import BrokerClient
from .parked_views import ParkedFilter, ParkedKeyView, ParkedMessage

READ_BYTES = 1 << 16
_REMOVED = "it is no longer stored"
_MISSING = f"its broker does not store it, and {MAYBE_OLDER_COPY}"


class ParkedRow(NamedTuple):
    """Consecutive parked messages of one source partition with the same failure."""

    source: int
    start: int
    end: int
    since_ms: int | None = None
    """Time of parking, in milliseconds since 1970. None if it is unknown or the same as the
    key's.
    """
    failure: Failure | None = None
    next_ms: int | None = None
    edited_offsets: frozenset[tuple[int, int]] = frozenset()
    """Edited messages as (source partition, offset); some of them may belong to other rows."""

    @property
    def messages(self) -> int:
        """The number of messages in the row."""
        return self.end - self.start


async def fetch_rows(
    broker: BrokerClient, group: str, view: ParkedKeyView
) -> AsyncIterator[ParkedRow]:
    """Yield the rows of a key's parked messages, oldest first, fetching them page by page. Rows of
    unordered messages include their failures.
    """
    selector = {} if view.key is None else {"key": view.key.hex()}
    if view.tries is not None:
        is_redriven = view.tries > 0 and view.state is ParkState.REDRIVING
        selector = {"tries": str(-view.tries - 1 if is_redriven else view.tries)}
    after, has_more = "0:0", view.messages > 0
    while has_more:
        query = {"group": group, "after": after, **selector}
        page = await broker.control(endpoints.PARKED_OFFSETS, query=query, id=view.partition_id)
        for row in _parse_rows(page):
            yield row
            after = f"{row.source}:{row.end}"
        has_more = page.more


def narrow_view(view: ParkedKeyView, rows: Sequence[ParkedRow]) -> ParkedKeyView:
    """Return a copy of the view that contains only the given rows, with their latest failure."""
    failures = [row.failure for row in rows if row.failure is not None]
    retry_times = [row.next_ms for row in rows if row.next_ms is not None]
    return replace(
        view,
        messages=_count_messages(rows),
        since_ms=min(view.since_ms if row.since_ms is None else row.since_ms for row in rows),
        failure=max(failures, key=lambda failure: failure.at_ms, default=None),
        first_source=rows[0].source,
        first_offset=rows[0].start,
        next_ms=min(retry_times, default=None),
    )


def split_by_error(view: ParkedKeyView, rows: Sequence[ParkedRow]) -> list[ParkedKeyView]:
    """Return one view per failure type and text, sorted by number of messages in descending order.
    Messages with an unknown failure come last.
    """
    rows_by_error: dict[tuple[str, str] | None, list[ParkedRow]] = {}
    for row in rows:
        error = None if row.failure is None else (row.failure.kind, row.failure.text)
        rows_by_error.setdefault(error, []).append(row)
    rows_without_failure = rows_by_error.pop(None, [])
    if not rows_by_error:
        return [
            narrow_view(view, rows_without_failure)
            if view.messages > _count_messages(rows_without_failure)
            else view
        ]
    views = [narrow_view(view, error_rows) for error_rows in rows_by_error.values()]
    views.sort(key=lambda narrowed: -narrowed.messages)
    return views + ([narrow_view(view, rows_without_failure)] if rows_without_failure else [])


def _count_messages(rows: Sequence[ParkedRow]) -> int:
    return sum(row.messages for row in rows)


def _parse_rows(page: ParkedOffsets) -> list[ParkedRow]:
    edited_offsets = frozenset(page.edited)
    if not page.details:
        return [ParkedRow(*row, edited_offsets=edited_offsets) for row in page.rows]
    rows = []
    for row, (since_ms, at_ms, fault_index, next_ms) in zip(page.rows, page.details, strict=True):
        failure = None
        if fault_index >= 0:
            fault = page.faults[fault_index]
            failure = Failure(fault.kind, fault.text, fault.client, at_ms, fault.attempts)
        rows.append(ParkedRow(*row, since_ms or None, failure, next_ms or None, edited_offsets))
    return rows


class ParkedReader:
    """Reads messages by offset, and caches the most recent batches of one partition."""

    def __init__(
        self,
        subject: str,
        partitions: dict[int, Partition],
        find_broker: Callable[[Partition], BrokerClient],
    ) -> None:
        self._find_broker = find_broker
        self._subject = subject
        self._partitions = partitions
        self._cached_messages: dict[int, Message[bytes]] = {}
        self._cached_source = 0

    async def read(self, source: int, offset: int) -> ParkedMessage:
        """Return the message, or the reason why it cannot be read."""
        problem = ""
        if source != self._cached_source or offset not in self._cached_messages:
            self._cached_source = source
            self._cached_messages = {}
            try:
                problem = await self._fetch(source, offset)
            except KeylaneError as error:
                problem = error.message
        message = self._cached_messages.get(offset)
        return ParkedMessage(partition_id=source, offset=offset, message=message, problem=problem)

    async def _fetch(self, source: int, offset: int) -> str:
        """
        Read messages into the cache, starting at this offset.

        Returns:
            The reason why the message was not read, or "". The message counts as removed only if
            retention removed it or no broker serves its partition. A broker that lacks it for any
            other reason may be running on an older copy of its data folder that is about to be
            replaced.
        """
        partition = self._partitions.get(source)
        if partition is None:
            return _REMOVED
        broker = self._find_broker(partition)
        try:
            response, payload = await broker.call(Read(source, offset, READ_BYTES))
        except OffsetOutOfRangeError as error:
            return _REMOVED if offset < (error.first_offset or 0) else _MISSING
        assert isinstance(response, Batches)
        for message in _decode_messages(self._subject, source, bytes(payload)):
            self._cached_messages[message.offset] = message
        return "" if offset in self._cached_messages else _MISSING


def _decode_messages(subject: str, partition_id: int, payload: bytes) -> list[Message[bytes]]:
    # Imported late, because most calls of an admin read no batches.
    from ..protocol.batch import batch_starts, columns

    messages = []
    for start, header in batch_starts(payload):
        batch = columns(payload, header, start)
        for index in range(header.count):
            key, value, packed_properties = (
                bytes(batch.blob[edges[index] : edges[index + 1]])
                for edges in (batch.key_edges, batch.value_edges, batch.property_edges)
            )
            messages.append(
                Message(
                    subject,
                    key,
                    value,
                    header.base_offset + index,
                    partition_id,
                    batch.sent_at_ns[index],
                    packed_properties=packed_properties,
                )
            )
    return messages


async def select_rows(
    broker: BrokerClient,
    reader: ParkedReader,
    group: str,
    view: ParkedKeyView,
    key_filter: ParkedFilter,
) -> AsyncIterator[ParkedRow]:
    """Yield the rows of a view's messages that match the filter. A row may be split into single
    messages.
    """
    key = key_filter.dead_letter_key(view)
    async for row in fetch_rows(broker, group, view):
        if view.is_loose and not key_filter.selects(row.since_ms, row.failure):
            continue
        if key is None:
            yield row
            continue
        for offset in range(row.start, row.end):
            message = (await reader.read(row.source, offset)).message
            if message is not None and message.key == key:
                yield row._replace(start=offset, end=offset + 1)


async def apply_edit(
    broker: BrokerClient, group: str, view: ParkedKeyView, parked_message: ParkedMessage
) -> ParkedMessage:
    """Return a parked message with an operator's edit applied, if there is one. Raises
    NotFoundError.
    """
    request = ReadEdited(
        view.partition_id, group, view.key, parked_message.partition_id, parked_message.offset
    )
    response, value = await broker.call(request)
    assert isinstance(response, ParkedEdited)
    if response.properties is None:
        return parked_message
    return replace_content(parked_message, bytes(value), response.properties)


def replace_content(
    parked_message: ParkedMessage, value: bytes, packed_properties: bytes
) -> ParkedMessage:
    """Return a parked message with a new value and new properties, marked as edited."""
    if parked_message.message is None:
        return parked_message
    message = replace(parked_message.message, value=value, packed_properties=packed_properties)
    return replace(parked_message, message=message, edited=True)


def find_unchanged_properties(
    new_properties: Mapping[str, str | bytes], message: Message[bytes]
) -> list[str]:
    """Return the names of the new properties that the message already has with the same value."""
    try:
        stored_properties = message.properties
    except CorruptBatchError:
        return []
    return [name for name, value in new_properties.items() if stored_properties.get(name) == value]
