"""Reads parked messages by offset from the brokers that store them, and filters them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..protocol import endpoints
from ..protocol.batch import batch_starts, columns
from ..protocol.errors import CorruptBatchError, KeylaneError, OffsetOutOfRangeError
from ..protocol.frames import Batches, ParkedEdited, Read, ReadEdited
from ..protocol.message import Message
from ..protocol.parked import Failure, ParkedOffsets, ParkState
from ..protocol.routing import Partition
from ..protocol.text import MAYBE_OLDER_COPY
from ..rpc.client import BrokerClient
from .parked_views import ParkedKeyView, ParkedMessage, WantedKeys

READ_BYTES = 1 << 16
_GONE = "it is no longer stored"
_LACKING = f"its broker does not store it, and {MAYBE_OLDER_COPY}"


class ParkedRow(NamedTuple):
    """Consecutive parked messages of one source partition that failed in the same way."""

    source: int
    start: int
    end: int
    since_ms: int | None = None
    """Time of parking, milliseconds since 1970; None: the same as the key's, or unknown."""
    failure: Failure | None = None
    next_ms: int | None = None
    edited: frozenset[tuple[int, int]] = frozenset()
    """(source partition, offset) of edited messages, some of which may be in other rows."""

    @property
    def messages(self) -> int:
        """Number of messages in the row."""
        return self.end - self.start


async def rows_of(
    broker: BrokerClient, group: str, view: ParkedKeyView
) -> AsyncIterator[ParkedRow]:
    """Yield the places of a key's parked messages, the oldest first; rows of messages without an
    order also have their failures.
    """
    asked = {} if view.key is None else {"key": view.key.hex()}
    if view.tries is not None:
        begun = view.tries > 0 and view.state is ParkState.REDRIVING
        asked = {"tries": str(-view.tries - 1 if begun else view.tries)}
    after, more = "0:0", view.messages > 0
    while more:
        query = {"group": group, "after": after, **asked}
        page = await broker.control(endpoints.PARKED_OFFSETS, query=query, id=view.partition_id)
        for row in _rows(page):
            yield row
            after = f"{row.source}:{row.end}"
        more = page.more


def view_of_rows(view: ParkedKeyView, rows: Sequence[ParkedRow]) -> ParkedKeyView:
    """Narrow a view to some of its messages, with the latest failure among them."""
    failures = [row.failure for row in rows if row.failure is not None]
    tries = [row.next_ms for row in rows if row.next_ms is not None]
    return replace(
        view,
        messages=_count(rows),
        since_ms=min(view.since_ms if row.since_ms is None else row.since_ms for row in rows),
        failure=max(failures, key=lambda failure: failure.at_ms, default=None),
        first_source=rows[0].source,
        first_offset=rows[0].start,
        next_ms=min(tries, default=None),
    )


def views_by_error(view: ParkedKeyView, rows: Sequence[ParkedRow]) -> list[ParkedKeyView]:
    """Return one view for each type and text of failure, the most messages first; a view of
    messages whose failure is unknown comes last.
    """
    by_error: dict[tuple[str, str] | None, list[ParkedRow]] = {}
    for row in rows:
        known = row.failure
        by_error.setdefault(None if known is None else (known.kind, known.text), []).append(row)
    unknown = by_error.pop(None, [])
    if not by_error:
        return [view_of_rows(view, unknown) if view.messages > _count(unknown) else view]
    views = [view_of_rows(view, some) for some in by_error.values()]
    views.sort(key=lambda each: -each.messages)
    return views + ([view_of_rows(view, unknown)] if unknown else [])


def _count(rows: Sequence[ParkedRow]) -> int:
    return sum(row.messages for row in rows)


def _rows(page: ParkedOffsets) -> list[ParkedRow]:
    edited = frozenset(page.edited)
    if not page.details:
        return [ParkedRow(*row, edited=edited) for row in page.rows]
    rows = []
    for row, (since_ms, at_ms, place, next_ms) in zip(page.rows, page.details, strict=True):
        failure = None
        if place >= 0:
            fault = page.faults[place]
            failure = Failure(fault.kind, fault.text, fault.client, at_ms, fault.attempts)
        rows.append(ParkedRow(*row, since_ms or None, failure, next_ms or None, edited))
    return rows


class ParkedReader:
    """Reads messages by offset, and keeps the last batches that it read of one partition."""

    def __init__(
        self,
        subject: str,
        served: dict[int, Partition],
        broker_of: Callable[[Partition], BrokerClient],
    ) -> None:
        self._broker_of = broker_of
        self._subject = subject
        self._served = served
        self._read: dict[int, Message[bytes]] = {}
        self._source = 0

    async def read(self, source: int, offset: int) -> ParkedMessage:
        """Return the message, or the reason why it cannot be read."""
        problem = ""
        if source != self._source or offset not in self._read:
            self._source = source
            self._read = {}
            try:
                problem = await self._fetch(source, offset)
            except KeylaneError as error:
                problem = error.message
        message = self._read.get(offset)
        return ParkedMessage(partition_id=source, offset=offset, message=message, problem=problem)

    async def _fetch(self, source: int, offset: int) -> str:
        """
        Read messages from this offset on into `_read`.

        Returns:
            The reason why the message was not read, or "". A message counts as gone only if
            retention removed it or no broker serves its partition; a broker that lacks other
            messages may be an older copy that is about to be replaced.
        """
        partition = self._served.get(source)
        if partition is None:
            return _GONE
        broker = self._broker_of(partition)
        try:
            answer, payload = await broker.call(Read(source, offset, READ_BYTES))
        except OffsetOutOfRangeError as error:
            return _GONE if offset < (error.first_offset or 0) else _LACKING
        assert isinstance(answer, Batches)
        for message in _messages(self._subject, source, bytes(payload)):
            self._read[message.offset] = message
        return "" if offset in self._read else _LACKING


def _messages(subject: str, partition_id: int, payload: bytes) -> list[Message[bytes]]:
    messages = []
    for start, header in batch_starts(payload):
        cut = columns(payload, header, start)
        for index in range(header.count):
            key, value, packed = (
                bytes(cut.blob[edges[index] : edges[index + 1]])
                for edges in (cut.key_edges, cut.value_edges, cut.property_edges)
            )
            messages.append(
                Message(
                    subject,
                    key,
                    value,
                    header.base_offset + index,
                    partition_id,
                    cut.sent_at_ns[index],
                    packed_properties=packed,
                )
            )
    return messages


async def chosen_rows(
    broker: BrokerClient, reader: ParkedReader, group: str, view: ParkedKeyView, wanted: WantedKeys
) -> AsyncIterator[ParkedRow]:
    """Yield the places of those messages of a view that the caller asks for."""
    inside = wanted.inside(view)
    async for row in rows_of(broker, group, view):
        if view.is_loose and not wanted.chooses(row.since_ms, row.failure):
            continue
        if inside is None:
            yield row
            continue
        for offset in range(row.start, row.end):
            message = (await reader.read(row.source, offset)).message
            if message is not None and message.key == inside:
                yield row._replace(start=offset, end=offset + 1)


async def with_edit(
    broker: BrokerClient, group: str, view: ParkedKeyView, read: ParkedMessage
) -> ParkedMessage:
    """Return a parked message with the edit that an operator made, if there is one. Raises
    NotFoundError.
    """
    ask = ReadEdited(view.partition_id, group, view.key, read.partition_id, read.offset)
    answer, value = await broker.call(ask)
    assert isinstance(answer, ParkedEdited)
    return read if answer.properties is None else edited(read, bytes(value), answer.properties)


def edited(read: ParkedMessage, value: bytes, packed_properties: bytes) -> ParkedMessage:
    """Return a parked message with another value and other properties."""
    if read.message is None:
        return read
    message = replace(read.message, value=value, packed_properties=packed_properties)
    return replace(read, message=message, edited=True)


def kept_properties(given: Mapping[str, str | bytes], message: Message[bytes]) -> list[str]:
    """Return the names of the given properties that the message already has with the same value."""
    try:
        stored = message.properties
    except CorruptBatchError:
        return []
    return [name for name, value in given.items() if stored.get(name) == value]
