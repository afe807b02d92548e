"""An admin's calls about parked messages: which there are, what is in them, redriven, skipped or edited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from itertools import islice
from types import EllipsisType
from typing import Any

from msgspec.structs import replace

from ..protocol.errors import (
    CorruptBatchError,
    GroupUnknownError,
    InvalidRequestError,
    NotSentError,
    ParkedKeyUnknownError,
    ParkedMessageUnknownError,
    PartitionUnknownError,
)
from ..protocol.frames import EditParked, ParkedEdited, ReadEdited
from ..protocol.ids import MAX_I64
from ..protocol.message import Message, check_message_size, pack_properties
from ..protocol.parked import (
    ChangeParkedKey,
    ParkKey,
    ParkState,
)
from ..protocol.routing import Partition
from ..protocol.settings import flag_problems, is_within, refuse_call
from ..rpc.client import BrokerClient
from ..rpc.environment import environment_of
from ..rpc.race import outlives_cancel
from .calls import ClusterCalls
from .parked_reading import ParkedReader, ParkedRow, rows_of, view_of_rows, views_by_error
from .parked_views import (
    AnyKey,
    ParkedKeyView,
    ParkedMessage,
    Row,
    WantedKeys,
    first_in_lineage,
    in_parts,
    view_of,
)

PASSES_MAX = 3
"""How often the pages of a partition are read while keys are parked and freed meanwhile."""
ADOPTION_S = 1.0
"""How long what is parked is looked for again, where a sealed partition has passed it on and its children do not have it yet."""
ADOPTION_PAUSE_S = 0.05
TOGETHER = 64
"""Keys that are redriven at once, which a broker makes durable together."""


class ParkedCalls(ClusterCalls):
    """The calls of an admin about parked messages."""

    @outlives_cancel
    async def parked(
        self,
        subject: str,
        group: str,
        *,
        key: bytes | EllipsisType | None = ...,
        dead: bool | None = None,
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        retrying: bool = False,
        by_error: bool = False,
    ) -> AsyncGenerator[ParkedKeyView, None]:
        """
        The keys that a consumer group has parked on the partitions of a subject; a key may be on two of them for a moment.

        Args:
            key: this key; b"": messages without a key, also dead letters; None: dead letters of any key; `...`: all of these.
            dead: True: dead letters alone; with a key also those of it among dead letters of any key, which are read to
                find them; False: all but dead letters.
            older_than_ms: parked for at least this time; dead letters of any key, and messages without one, each for itself.
            error: a text in the type or the text of the last failure, in the same way.
            retrying: with what waits for retry: see `ParkedKeyView.tries`.
            by_error: of dead letters of any key, messages without a key, and what waits for retry, a view for each type and
                text of their failures, the most messages first.

        Raises:
            SubjectUnknownError, GroupUnknownError
            PartitionUnknownError: `partition_id` is none of this subject.
            UnreachableError: a broker does not answer, so that what it has parked is not known.
        """
        refuse_call(flag_problems(retrying=retrying, by_error=by_error))
        wanted = _wanted(key, dead=dead, older_than_ms=older_than_ms, error=error)
        async for view in self._listed(
            subject,
            group,
            wanted,
            partition_id,
            retrying=retrying,
            by_error=by_error,
            passed_on=set(),
        ):
            yield view

    async def _listed(
        self,
        subject: str,
        group: str,
        wanted: WantedKeys,
        partition_id: int | None,
        *,
        passed_on: set[int],
        retrying: bool = False,
        by_error: bool = False,
    ) -> AsyncIterator[ParkedKeyView]:
        """The keys of `parked`; `passed_on` gets the sealed partitions whose children have what they had, or take it now."""
        for partition in await self._partitions(subject, group, partition_id):
            views = await self._parked_on(partition, group, retrying=retrying)
            if views is None:
                passed_on.add(partition.partition_id)
            for view in views or ():
                if not wanted.matches(view):
                    continue
                if not (wanted.picks(view) or (by_error and view.is_loose)):
                    yield view
                    continue
                rows = await self._selected(subject, group, view, wanted)
                if rows:
                    for each in (
                        views_by_error(view, rows) if by_error else [view_of_rows(view, rows)]
                    ):
                        yield each

    @outlives_cancel
    async def parked_messages(
        self,
        subject: str,
        group: str,
        key: bytes | EllipsisType | None = ...,
        *,
        dead: bool | None = None,
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        first: int | None = None,
    ) -> AsyncGenerator[ParkedMessage, None]:
        """
        The parked messages of a key, or of all keys asked for, the oldest of each first, read from the brokers that have them.

        Args:
            key, dead, partition_id, older_than_ms, error: as of `parked`.
            first: the number of messages of each key on a partition, from the oldest on; None: all.

        Raises:
            ParkedKeyUnknownError: nothing of this key is parked.
            As `parked`.
        """
        most = _checked_count(first)
        asked = {"dead": dead, "older_than_ms": older_than_ms, "error": error}
        wanted = _wanted(key, dead=dead, older_than_ms=older_than_ms, error=error)
        for view in await self._views(subject, group, key, partition_id, **asked):
            left = most
            # What ends while it is read is passed over, as if it had ended before the call.
            with contextlib.suppress(ParkedKeyUnknownError):
                async for read in self._messages_of(subject, group, view, wanted):
                    if not left:
                        break
                    left -= 1
                    yield read

    async def redrive(
        self,
        subject: str,
        group: str,
        *,
        key: bytes | EllipsisType | None = ...,
        dead: bool | None = None,
        all: bool = False,  # noqa: A002 - what the caller says: all of them
        partition_id: int | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
    ) -> list[ParkedKeyView]:
        """
        Have the messages of parked keys handled again, the oldest first; a repeat is harmless.

        Args:
            key, dead, partition_id, older_than_ms, error: as of `parked`.
            all: every parked key; needed if nothing else says which.

        Returns:
            The keys that were parked and are redriven now, as they were before.

        Raises:
            ParkedKeyUnknownError: nothing of `key` is parked.
            ParkMovedError: a partition was sealed, and its children have these messages since: ask again.
            As `parked`.
        """
        refuse_call(flag_problems(all=all))
        said = _said(key, dead, partition_id, older_than_ms, error)
        if not (all or said):
            raise InvalidRequestError("say which keys are redriven, or all=True")
        if key is not ...:
            await self._views(subject, group, key, partition_id, dead=dead)
        wanted = _wanted(key, dead=dead, older_than_ms=older_than_ms, error=error)
        asked = self.parked(
            subject, group, key=key, dead=dead, partition_id=partition_id,
            older_than_ms=older_than_ms, error=error,
        )  # fmt: skip
        parked = [view async for view in asked if view.state is not ParkState.REDRIVING]
        partitions: dict[int, Partition] = {
            each.partition_id: each for each in await self._partitions(subject, group, None)
        }

        async def ask(view: ParkedKeyView) -> ParkedKeyView | None:
            broker = self._broker(partitions[view.partition_id])
            return await self._redrive(broker, subject, group, view, wanted)

        redriven: list[ParkedKeyView] = []
        for begin in range(0, len(parked), TOGETHER):
            some = islice(parked, begin, begin + TOGETHER)
            redriven += filter(None, await asyncio.gather(*map(ask, some)))
        return redriven

    async def _redrive(
        self,
        broker: BrokerClient,
        subject: str,
        group: str,
        view: ParkedKeyView,
        wanted: WantedKeys,
    ) -> ParkedKeyView | None:
        """Have a broker redrive what is wanted of a key; None if it was skipped, or redriven and handled, since."""
        bodies = [ChangeParkedKey(group=group, key_hex=_hex(view.key))]
        if wanted.picks(view):
            rows = await self._selected(subject, group, view, wanted)
            bodies = [
                ChangeParkedKey(group=group, key_hex=_hex(view.key), retry=some)
                for some in in_parts([row[:3] for row in rows])
            ]
        try:
            for body in bodies:
                await broker.change_parked(view.partition_id, body)
        except ParkedKeyUnknownError:
            return None
        return view

    async def skip(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        key: bytes | EllipsisType | None = ...,
        *,
        dead: bool | None = None,
        older_than_ms: int | None = None,
        error: str | None = None,
        first: int | None = None,
    ) -> int:
        """
        Never handle parked messages of a key: they stay stored until retention removes them, and no consumer gets them.

        Args:
            partition_id: as `parked` says; None: of all partitions.
            key, dead, older_than_ms, error: as of `parked`; at least one of them, or `partition_id`.
            first: the number of messages of each key on a partition, from the oldest on; None: all that are parked now.

        Returns:
            The number of skipped messages.

        Raises:
            ParkedKeyUnknownError, ParkMovedError
            As `parked`.
        """
        if not _said(key, dead, partition_id, older_than_ms, error):
            raise InvalidRequestError("say which keys are skipped")
        most, skipped = _checked_count(first), 0
        asked = {"dead": dead, "older_than_ms": older_than_ms, "error": error}
        wanted = _wanted(key, dead=dead, older_than_ms=older_than_ms, error=error)
        for view in await self._views(subject, group, key, partition_id, **asked):
            (partition,) = await self._partitions(subject, group, view.partition_id)
            broker = self._broker(partition)
            left, rows = most, list[Row]()
            for row in await self._selected(subject, group, view, wanted):
                if left > 0:
                    rows.append((row.source, row.start, min(row.end, row.start + left)))
                left -= min(row.messages, left)
            for some in in_parts(rows):
                body = ChangeParkedKey(group=group, key_hex=_hex(view.key), skip=some)
                await broker.change_parked(view.partition_id, body)
            skipped += most - left
        return skipped

    async def parked_message(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        offset: int | None = None,
        *,
        key: bytes | None = None,
        dead: bool | None = None,
    ) -> ParkedMessage:
        """
        A parked message or dead letter, as consumers will get it.

        Args:
            partition_id, offset, key, dead: as of `edit_parked`.

        Raises:
            ParkedMessageUnknownError: it is not parked, or not stored any more.
            ParkedKeyUnknownError, ParkedKeyAmbiguousError: as of `edit_parked`.
            As `parked`.
        """
        place = await self._place(subject, group, partition_id, offset, key=key, dead=dead)
        return (await self._one_parked(subject, group, *place))[0]

    async def edit_parked(
        self,
        subject: str,
        group: str,
        partition_id: int | None = None,
        offset: int | None = None,
        *,
        key: bytes | None = None,
        dead: bool | None = None,
        value: bytes | None = None,
        properties: Mapping[str, str | bytes] | None = None,
    ) -> ParkedMessage:
        """
        Put another value, or other properties, in the place of a parked message or a dead letter; its key stays.

        Consumers get the new ones, with the property "keylane.edited", which has the time.  The original stays in the log.

        Args:
            partition_id, offset: of the message, as `parked_messages` says.
            key: in their place: the oldest parked message of this order key, the one that fails.  It may be parked on a
                partition and on one that continues it; then the former has the oldest.  With `partition_id`: of those
                that this partition has parked.
            dead: with a key: as of `parked`.
            value: None: it stays.
            properties: in place of all of them; None: they stay.

        Returns:
            The message as consumers will get it.

        Raises:
            ParkedMessageUnknownError: it is not parked, or not stored any more.
            ParkedKeyUnknownError: nothing of `key` is parked.
            ParkedKeyAmbiguousError: partitions that do not follow each other have it: say `partition_id`.
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
        if properties is not None:  # wrong ones are refused before anything is asked
            pack_properties(properties, kept=properties)
        source, offset = await self._place(subject, group, partition_id, offset, key=key, dead=dead)
        read, view = await self._one_parked(subject, group, source, offset)
        message = read.message
        assert message is not None
        value = message.value if value is None else value
        packed = message.packed_properties
        if properties is not None:
            packed = pack_properties(properties, kept=_same(properties, message))
        limit = (await self._meta.subject(subject)).message_bytes_max
        check_message_size(len(message.key), len(value), len(packed), limit)
        (holder,) = await self._partitions(subject, group, view.partition_id)
        ask = EditParked(view.partition_id, group, view.key, source, offset, packed)
        answer, _ = await self._broker(holder).call(ask, value)
        assert isinstance(answer, ParkedEdited)
        return _edited(read, value, answer.properties or b"")

    # ── inside ────────────────────────────────────────────────────────────────────────────────────────
    async def _place(
        self,
        subject: str,
        group: str,
        partition_id: int | None,
        offset: int | None,
        *,
        key: bytes | None,
        dead: bool | None,
    ) -> tuple[int, int]:
        """The partition and the offset of a message that is named by them, or by its key."""
        refuse_call([] if dead is None else flag_problems(dead=dead))
        if key is None:
            if partition_id is None or offset is None:
                raise InvalidRequestError(
                    "name a message by its partition and its offset, or its key"
                )
            return partition_id, offset
        if offset is not None or not key:
            raise InvalidRequestError(
                "an offset names a message by itself" if key
                else "messages without a key have no order: name one by its partition and its offset"
            )  # fmt: skip
        views = await self._views(subject, group, key, partition_id, dead=dead)
        partitions = await self._partitions(subject, group, None)
        parents = {int(each.partition_id): [*map(int, each.parents)] for each in partitions}
        first = first_in_lineage(views, parents)
        return first.first_source, first.first_offset

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
            raise NotSentError.of_group(partition.broker_group)
        return self._connections.broker_at(partition.address)

    async def _broker_of(
        self, subject: str, group: str, view: ParkedKeyView, served: Mapping[int, Partition]
    ) -> BrokerClient:
        """The broker that has a view; one of a partition that was opened since `served` was read is asked for."""
        partition = served.get(view.partition_id)
        if partition is None:
            (partition,) = await self._partitions(subject, group, view.partition_id)
        return self._broker(partition)

    async def _parked_on(
        self, partition: Partition, group: str, *, retrying: bool = False
    ) -> list[ParkedKeyView] | None:
        """What a group has parked on a partition; None where its children have adopted it, or do so now."""
        broker, number = self._broker(partition), partition.partition_id
        views_by_key: dict[tuple[ParkKey, int | None], ParkedKeyView] = {}
        for _ in range(PASSES_MAX):
            known, pages, more = len(views_by_key), 0, True
            first = 0
            while more:
                try:
                    page = await broker.parked(number, group, first=first, retrying=retrying)
                except GroupUnknownError:  # it has not read this partition yet
                    return []
                if page.frozen:
                    return None
                views = [view_of(number, view) for view in page.keys]
                views_by_key.update(((view.key, view.tries), view) for view in views)
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
        read = await ParkedReader(subject, served, self._broker).read(partition_id, offset)
        unknown = ParkedMessageUnknownError(
            f"offset {offset} of partition {partition_id}: {read.problem or 'it is not parked'}",
            partition_id=partition_id,
            offset=offset,
        )
        if read.message is None:
            raise unknown
        for key in dict.fromkeys((read.message.key, None)):
            async for view in self.parked(subject, group, key=key):
                broker = await self._broker_of(subject, group, view, served)
                with contextlib.suppress(ParkedMessageUnknownError):
                    return await _with_edit(broker, group, view, read), view
        raise unknown

    async def _views(
        self,
        subject: str,
        group: str,
        key: bytes | EllipsisType | None,
        partition_id: int | None,
        **asked: Any,
    ) -> list[ParkedKeyView]:
        """The keys that are asked for, where they are parked.  Raises ParkedKeyUnknownError."""
        wanted = _wanted(key, **{"dead": None, "older_than_ms": None, "error": None} | asked)
        until_s = asyncio.get_running_loop().time() + ADOPTION_S
        while True:
            passed_on: set[int] = set()
            views = self._listed(subject, group, wanted, partition_id, passed_on=passed_on)
            parked = [view async for view in views]
            if parked:
                return parked
            if not passed_on or asyncio.get_running_loop().time() >= until_s:
                break
            await asyncio.sleep(ADOPTION_PAUSE_S)
        what = "these keys" if isinstance(key, EllipsisType) else _named(key)
        raise ParkedKeyUnknownError(f"{what} of group {group!r}: nothing is parked")

    async def _messages_of(
        self, subject: str, group: str, view: ParkedKeyView, wanted: WantedKeys
    ) -> AsyncIterator[ParkedMessage]:
        """The messages of a view that are asked for."""
        broker, reader = await self._reader(subject, group, view)
        async for row in _chosen(broker, reader, group, view, wanted):
            for offset in range(row.start, row.end):
                read = await reader.read(row.source, offset)
                if (row.source, offset) in row.edited:
                    try:
                        read = await _with_edit(broker, group, view, read)
                    except ParkedMessageUnknownError:
                        continue  # it has ended since
                yield replace(read, failure=row.failure, since_ms=row.since_ms, next_ms=row.next_ms)

    async def _selected(
        self, subject: str, group: str, view: ParkedKeyView, wanted: WantedKeys
    ) -> list[ParkedRow]:
        """Where the messages of a view are that are asked for."""
        broker, reader = await self._reader(subject, group, view)
        return [row async for row in _chosen(broker, reader, group, view, wanted)]

    async def _reader(
        self, subject: str, group: str, view: ParkedKeyView
    ) -> tuple[BrokerClient, ParkedReader]:
        """The broker that has a view, and what reads its messages."""
        served: dict[int, Partition] = {
            partition.partition_id: partition
            for partition in await self._partitions(subject, group, None)
        }
        broker = await self._broker_of(subject, group, view, served)
        return broker, ParkedReader(subject, served, self._broker)


async def _chosen(
    broker: BrokerClient, reader: ParkedReader, group: str, view: ParkedKeyView, wanted: WantedKeys
) -> AsyncIterator[ParkedRow]:
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


async def _with_edit(
    broker: BrokerClient, group: str, view: ParkedKeyView, read: ParkedMessage
) -> ParkedMessage:
    """A parked message with what an operator has put in its place.  Raises ParkedMessageUnknownError."""
    ask = ReadEdited(view.partition_id, group, view.key, read.partition_id, read.offset)
    answer, value = await broker.call(ask)
    assert isinstance(answer, ParkedEdited)
    return read if answer.properties is None else _edited(read, bytes(value), answer.properties)


def _same(given: Mapping[str, str | bytes], message: Message[bytes]) -> list[str]:
    """The names of properties that a message has already, with these values."""
    try:
        stored = message.properties
    except CorruptBatchError:
        return []
    return [name for name, value in given.items() if stored.get(name) == value]


def _edited(read: ParkedMessage, value: bytes, packed_properties: bytes) -> ParkedMessage:
    if read.message is None:
        return read
    message = replace(read.message, value=value, packed_properties=packed_properties)
    return replace(read, message=message, edited=True)


def _checked_count(first: int | None) -> int:
    if first is not None and not is_within(first, 1, MAX_I64):
        raise InvalidRequestError(f"first is a number from 1 on, not {first!r:.40}")
    return MAX_I64 if first is None else first


def _hex(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


def _named(key: ParkKey) -> str:
    if not key:
        return "dead letters" if key is None else "messages without a key"
    return f"key {key if isinstance(key, int) else key.decode(errors='backslashreplace')!s:.80}"


def _wanted(
    key: AnyKey, *, dead: bool | None, older_than_ms: int | None, error: str | None
) -> WantedKeys:
    now_ms = environment_of(None).clock.wall_ms()
    return WantedKeys(key, dead=dead, older_than_ms=older_than_ms, error=error, now_ms=now_ms)


def _said(key: AnyKey, *others: object) -> bool:
    """True if anything says which keys."""
    return key is not ... or any(each is not None for each in others)
