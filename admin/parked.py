"""An admin's calls about parked messages: which there are, what is in them, redriven, skipped or edited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import islice
from types import EllipsisType

from msgspec import Struct
from msgspec.structs import replace

from ..protocol.batch import batch_starts, columns
from ..protocol.clock import SystemClock
from ..protocol.errors import (
    GroupUnknownError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    ParkedKeyUnknownError,
    ParkedMessageUnknownError,
    PartitionUnknownError,
)
from ..protocol.frames import Batches, EditParked, ParkedEdited, Read, ReadEdited
from ..protocol.ids import MAX_I64
from ..protocol.limits import KEY_BYTES_MAX
from ..protocol.message import Message, check_message_size, pack_properties
from ..protocol.parked import (
    PARKED_ROWS_MAX,
    ChangeParkedKey,
    Failure,
    ParkedView,
    ParkKey,
    ParkState,
)
from ..protocol.routing import Partition
from ..protocol.settings import is_within
from ..rpc.client import BrokerClient
from .calls import ClusterCalls

PASSES_MAX = 3
"""How often the pages of a partition are read while keys are parked and freed meanwhile."""
TOGETHER = 64
"""Keys that are redriven at once, which a broker makes durable together."""
READ_BYTES = 1 << 16
AnyKey = bytes | EllipsisType | None


class ParkedKeyView(Struct, frozen=True, kw_only=True):
    """A key that a consumer group has parked on a partition."""

    partition_id: int
    key: bytes | None
    """b"": messages without a key; None: dead letters, of any key."""
    state: ParkState
    messages: int
    since_ms: int
    """When its first message was parked, by the broker's calendar."""
    failure: Failure | None
    """The last one: type, text, consumer, time and number of tries."""
    first_source: int
    """The partition that has the first message: this one, or an ancestor of it."""
    first_offset: int
    """Its offset there; -1: no message is left, and the consumer will free the key."""


class ParkedMessage(Struct, frozen=True, kw_only=True):
    """A parked message, as the partition has it where it was stored."""

    partition_id: int
    offset: int
    message: Message[bytes] | None
    problem: str = ""
    """Why there is no message, as when retention has removed it."""
    edited: bool = False
    """An operator has edited it: value and properties are the new ones."""


class ParkedCalls(ClusterCalls):
    """The calls of an admin about parked messages."""

    async def parked(
        self,
        subject: str,
        group: str,
        *,
        key: bytes | EllipsisType | None = ...,
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
    ) -> AsyncIterator[ParkedKeyView]:
        """
        The keys that a consumer group has parked on the partitions of a subject; a key may be on two of them for a moment.

        Args:
            key: this key; b"": messages without a key; None: dead letters; `...`: all of these.
            older_than_ms: parked for at least this time.
            error: the last failure is of this type, by the name of its class.

        Raises:
            SubjectUnknownError, GroupUnknownError
            PartitionUnknownError: `partition_id` is none of this subject.
            UnreachableError: a broker does not answer, so that what it has parked is not known.
        """
        wanted = _Wanted(key, older_than_ms, error)
        for partition in await self._partitions(subject, group, partition_id):
            for view in await self._parked_on(partition, group):
                if wanted.matches(view):
                    yield view

    async def parked_messages(
        self,
        subject: str,
        group: str,
        key: bytes | None,
        *,
        partition_id: int | None = None,
        first: int | None = None,
    ) -> AsyncIterator[ParkedMessage]:
        """
        The parked messages of a key, the oldest first, read from the brokers that have them.

        Args:
            key: b"": messages without a key; None: dead letters.
            first: the number of messages, from the oldest on; None: all.

        Raises:
            ParkedKeyUnknownError: nothing of this key is parked.
            As `parked`.
        """
        left = _checked_count(first)
        views = await self._views(subject, group, key, partition_id)
        served: dict[int, Partition] = {
            partition.partition_id: partition
            for partition in await self._partitions(subject, group, None)
        }
        for view in views:
            broker = self._broker(served[view.partition_id])
            reader = _Reader(self, subject, served)
            async for source, start, end, edited in _rows(broker, group, view):
                for offset in range(start, end):
                    if not left:
                        return
                    left -= 1
                    read = await reader.read(source, offset)
                    if (source, offset) in edited:
                        read = await _with_edit(broker, group, view, read)
                    yield read

    async def redrive(
        self,
        subject: str,
        group: str,
        *,
        key: bytes | EllipsisType | None = ...,
        all: bool = False,  # noqa: A002 - what the caller says: all of them
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
    ) -> list[ParkedKeyView]:
        """
        Have the messages of parked keys handled again, the oldest first; a repeat is harmless.

        Args:
            key, partition_id, older_than_ms, error: as of `parked`.
            all: every parked key; needed if nothing else says which.

        Returns:
            The keys that were parked and are redriven now, as they were before.

        Raises:
            ParkedKeyUnknownError: nothing of `key` is parked.
            ParkMovedError: a partition was sealed, and its children have these messages since: ask again.
            As `parked`.
        """
        said = key is not ... or any(
            each is not None for each in (partition_id, older_than_ms, error)
        )
        if not (all or said):
            raise InvalidRequestError("say which keys are redriven, or all=True")
        if key is not ...:
            await self._views(subject, group, key, partition_id)
        asked = self.parked(
            subject, group, key=key, partition_id=partition_id,
            older_than_ms=older_than_ms, error=error,
        )  # fmt: skip
        parked = [view async for view in asked if view.state is ParkState.PARKED]
        partitions: dict[int, Partition] = {
            each.partition_id: each for each in await self._partitions(subject, group, None)
        }

        async def ask(view: ParkedKeyView) -> ParkedKeyView | None:
            broker = self._broker(partitions[view.partition_id])
            body = ChangeParkedKey(group=group, key_hex=_hex(view.key))
            try:
                await broker.change_parked(view.partition_id, body)
            except ParkedKeyUnknownError:  # skipped or redriven and handled since
                return None
            return view

        redriven: list[ParkedKeyView] = []
        for begin in range(0, len(parked), TOGETHER):
            some = islice(parked, begin, begin + TOGETHER)
            redriven += filter(None, await asyncio.gather(*map(ask, some)))
        return redriven

    async def skip(
        self,
        subject: str,
        group: str,
        partition_id: int,
        key: bytes | None,
        *,
        first: int | None = None,
    ) -> int:
        """
        Never handle parked messages of a key: they stay stored until retention removes them, and no consumer gets them.

        Args:
            partition_id: as `parked` says.
            first: the number of messages, from the oldest on; None: all that are parked now.

        Returns:
            The number of skipped messages.

        Raises:
            ParkedKeyUnknownError, ParkMovedError
            As `parked`.
        """
        _checked_key(key)
        left = before = _checked_count(first)
        (partition,) = await self._partitions(subject, group, partition_id)
        (view,) = await self._views(subject, group, key, partition_id)
        broker = self._broker(partition)
        rows: list[tuple[int, int, int]] = []
        async for source, start, end, _ in _rows(broker, group, view):
            if left > 0:
                rows.append((source, start, min(end, start + left)))
            left -= min(end - start, left)
        for begin in range(0, len(rows), PARKED_ROWS_MAX):
            some = rows[begin : begin + PARKED_ROWS_MAX]
            body = ChangeParkedKey(group=group, key_hex=_hex(key), skip=some)
            await broker.change_parked(partition_id, body)
        return before - left

    async def parked_message(
        self, subject: str, group: str, partition_id: int, offset: int
    ) -> ParkedMessage:
        """
        A parked message or dead letter, as consumers will get it.

        Raises:
            ParkedMessageUnknownError: it is not parked, or not stored any more.
            As `parked`.
        """
        return (await self._one_parked(subject, group, partition_id, offset))[0]

    async def edit_parked(
        self,
        subject: str,
        group: str,
        partition_id: int,
        offset: int,
        *,
        value: bytes | None = None,
        properties: Mapping[str, str | bytes] | None = None,
    ) -> ParkedMessage:
        """
        Put another value, or other properties, in the place of a parked message or a dead letter; its key stays.

        Consumers get the new ones, with the property "keylane.edited", which has the time.  The original stays in the log.

        Args:
            partition_id, offset: of the message, as `parked_messages` says.
            value: None: it stays.
            properties: in place of all of them; None: they stay.

        Returns:
            The message as consumers will get it.

        Raises:
            ParkedMessageUnknownError: it is not parked, or not stored any more.
            ParkedRedrivenError: messages of its key are being handled.
            MessageTooLargeError: it would be over the limit of the subject.
            EditsFullError: the group has too many edited messages.
            ParkMovedError: the partition was sealed, and its children have it since: ask again.
            As `parked`.
        """
        if value is None and properties is None:
            raise InvalidRequestError("give the new value, the new properties, or both")
        if not (value is None or isinstance(value, bytes)):
            raise InvalidRequestError(f"a value is bytes, not {value!r:.80}")
        packed = None if properties is None else pack_properties(properties)
        read, view = await self._one_parked(subject, group, partition_id, offset)
        message = read.message
        assert message is not None
        value = message.value if value is None else value
        packed = message.packed_properties if packed is None else packed
        limit = (await self._meta.subject(subject)).message_bytes_max
        check_message_size(len(message.key), len(value), len(packed), limit)
        (holder,) = await self._partitions(subject, group, view.partition_id)
        ask = EditParked(view.partition_id, group, view.key, partition_id, offset, packed)
        answer, _ = await self._broker(holder).call(ask, value)
        assert isinstance(answer, ParkedEdited)
        return _edited(read, value, answer.properties or b"")

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────
    async def _partitions(
        self, subject: str, group: str, partition_id: int | None
    ) -> Sequence[Partition]:
        """The partitions of a subject that have data, or one of them."""
        partitions = [owner.partition for owner in (await self._group(subject, group)).owners]
        if partition_id is None:
            return partitions
        if not is_within(partition_id, 1, MAX_I64):
            raise InvalidRequestError(f"not a partition id: {partition_id!r:.40}")
        only = [each for each in partitions if each.partition_id == partition_id]
        if not only:
            raise PartitionUnknownError(
                f"subject {subject!r} has no partition {partition_id}", partition_id=partition_id
            )
        return only

    def _broker(self, partition: Partition) -> BrokerClient:
        if partition.address is None:
            raise NotSentError(f"broker group {partition.broker_group!r} is not available now")
        return self._connections.broker_at(partition.address)

    async def _parked_on(self, partition: Partition, group: str) -> list[ParkedKeyView]:
        """What a group has parked on a partition; nothing where its children have adopted it."""
        broker, number = self._broker(partition), partition.partition_id
        views_by_key: dict[ParkKey, ParkedKeyView] = {}
        for _ in range(PASSES_MAX):
            known, pages, more = len(views_by_key), 0, True
            first = 0
            while more:
                try:
                    page = await broker.parked(number, group, first=first)
                except GroupUnknownError:  # it has not read this partition yet
                    return []
                if page.frozen:
                    return []
                views = [_view(number, view) for view in page.keys]
                views_by_key.update((view.key, view) for view in views)
                first += len(views)
                pages, more = pages + 1, page.more
            if pages == 1 or len(views_by_key) == known:
                break  # no key was freed between two pages, so that another one was passed over
        return list(views_by_key.values())

    async def _one_parked(
        self, subject: str, group: str, partition_id: int, offset: int
    ) -> tuple[ParkedMessage, ParkedKeyView]:
        """A parked message, with what was edited, and the key under which it is parked.  Raises ParkedMessageUnknownError."""
        if not is_within(offset, 0, MAX_I64):
            raise InvalidRequestError(f"not an offset: {offset!r:.40}")
        await self._partitions(subject, group, partition_id)
        served: dict[int, Partition] = {
            each.partition_id: each for each in await self._partitions(subject, group, None)
        }
        read = await _Reader(self, subject, served).read(partition_id, offset)
        unknown = ParkedMessageUnknownError(
            f"offset {offset} of partition {partition_id}: {read.problem or 'it is not parked'}",
            partition_id=partition_id,
            offset=offset,
        )
        if read.message is None:
            raise unknown
        for key in dict.fromkeys((read.message.key, None)):
            async for view in self.parked(subject, group, key=key):
                broker = self._broker(served[view.partition_id])
                with contextlib.suppress(ParkedMessageUnknownError):
                    return await _with_edit(broker, group, view, read), view
        raise unknown

    async def _views(
        self, subject: str, group: str, key: bytes | None, partition_id: int | None
    ) -> list[ParkedKeyView]:
        """A key where it is parked.  Raises ParkedKeyUnknownError."""
        _checked_key(key)
        views = [
            view async for view in self.parked(subject, group, key=key, partition_id=partition_id)
        ]
        if not views:
            raise ParkedKeyUnknownError(f"{_named(key)} of group {group!r}: nothing is parked")
        return views


class _Wanted:
    """Which keys a caller asks for."""

    def __init__(self, key: AnyKey, older_than_ms: int | None, error: str | None) -> None:
        if key is not ...:
            _checked_key(key)
        if older_than_ms is not None and not is_within(older_than_ms, 0, MAX_I64):
            raise InvalidRequestError(f"not a time in milliseconds: {older_than_ms!r:.40}")
        if error is not None and not (isinstance(error, str) and error):
            raise InvalidRequestError(f"not the name of an error's class: {error!r:.80}")
        self._key = key
        self._error = error
        self._until_ms = (
            MAX_I64 if older_than_ms is None else SystemClock().wall_ms() - older_than_ms
        )

    def matches(self, view: ParkedKeyView) -> bool:
        """True if the key is asked for."""
        if self._key is not ... and self._key != view.key:
            return False
        kind = "" if view.failure is None else view.failure.kind
        return (self._error is None or self._error == kind) and view.since_ms <= self._until_ms


class _Reader:
    """Reads messages by offset; those that came with the ones before are not read again."""

    def __init__(self, calls: ParkedCalls, subject: str, served: dict[int, Partition]) -> None:
        self._calls = calls
        self._subject = subject
        self._served = served
        self._read: dict[int, Message[bytes]] = {}
        self._source = 0

    async def read(self, source: int, offset: int) -> ParkedMessage:
        """A message, or why there is none."""
        problem = ""
        if source != self._source or offset not in self._read:
            self._source, self._read = source, {}
            try:
                await self._fetch(source, offset)
            except KeylaneError as error:
                problem = error.message
        message = self._read.get(offset)
        if message is None and not problem:
            problem = "it is not stored any more"
        return ParkedMessage(partition_id=source, offset=offset, message=message, problem=problem)

    async def _fetch(self, source: int, offset: int) -> None:
        partition = self._served.get(source)
        if partition is None:
            return
        broker = self._calls._broker(partition)
        answer, payload = await broker.call(Read(source, offset, READ_BYTES))
        assert isinstance(answer, Batches)
        for message in _messages(self._subject, source, bytes(payload)):
            self._read[message.offset] = message


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


async def _rows(
    broker: BrokerClient, group: str, view: ParkedKeyView
) -> AsyncIterator[tuple[int, int, int, frozenset[tuple[int, int]]]]:
    """Where the messages of a key are, the oldest first: source, start, end, and which are edited."""
    first, more = 0, view.messages > 0
    while more:
        page = await broker.parked_offsets(
            view.partition_id, group, key_hex=_hex(view.key), first=first
        )
        first += len(page.rows)
        more = len(page.rows) == PARKED_ROWS_MAX
        edited = frozenset(page.edited)
        for source, start, end in page.rows:
            yield source, start, end, edited


async def _with_edit(
    broker: BrokerClient, group: str, view: ParkedKeyView, read: ParkedMessage
) -> ParkedMessage:
    """A parked message with what an operator has put in its place.  Raises ParkedMessageUnknownError."""
    ask = ReadEdited(view.partition_id, group, view.key, read.partition_id, read.offset)
    answer, value = await broker.call(ask)
    assert isinstance(answer, ParkedEdited)
    return read if answer.properties is None else _edited(read, bytes(value), answer.properties)


def _edited(read: ParkedMessage, value: bytes, packed_properties: bytes) -> ParkedMessage:
    if read.message is None:
        return read
    message = replace(read.message, value=value, packed_properties=packed_properties)
    return replace(read, message=message, edited=True)


def _view(partition_id: int, view: ParkedView) -> ParkedKeyView:
    return ParkedKeyView(
        partition_id=partition_id,
        key=None if view.key_hex is None else bytes.fromhex(view.key_hex),
        state=view.state,
        messages=view.messages,
        since_ms=view.since_ms,
        failure=view.failure,
        first_source=view.first_source,
        first_offset=view.first_offset,
    )


def _checked_key(key: object) -> None:
    if key is not None and not isinstance(key, bytes):
        raise InvalidRequestError(f"a key is bytes, or None for dead letters, not {key!r:.80}")
    if key is not None and len(key) > KEY_BYTES_MAX:
        raise InvalidRequestError(f"a key of {len(key)} bytes: at most {KEY_BYTES_MAX}")


def _checked_count(first: int | None) -> int:
    if first is not None and not is_within(first, 1, MAX_I64):
        raise InvalidRequestError(f"first is a number from 1 on, not {first!r:.40}")
    return MAX_I64 if first is None else first


def _hex(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


def _named(key: ParkKey) -> str:
    if not key:
        return "dead letters" if key is None else "messages without a key"
    return f"key {key!r:.80}"
