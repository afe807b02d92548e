"""Reads a subject by partition, offset, time and key, over all its partitions; no group, no locks,
no acks.

open ─▶ the lineage, and where each partition begins and ends ─▶ chunks of readable partitions
             ▲                                                        │ one is read to its end
             ╰── follow: its children ◀───────────────────────────────╯
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, Self

from ...protocol import endpoints
from ...protocol.address import addresses_of
from ...protocol.backoff import Backoff, Pauses
from ...protocol.codecs.codec import Codec, V
from ...protocol.control import TimeBound
from ...protocol.errors import (
    FilterError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
    UnreachableError,
)
from ...protocol.frames import Batches, Read
from ...protocol.http.tls_settings import TlsSettings
from ...protocol.ids import check_name
from ...protocol.limits import READ_GIVE_UP_MS
from ...protocol.message import Message
from ...protocol.operations import PartitionHistory
from ...protocol.routing import Partition
from ...protocol.settings import whole
from ...protocol.text import counted
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.connections import Connections, clean_up, in_turns
from ...rpc.environment import Environment, environment_of
from ...rpc.home import LoopBoundClient
from ..delivery.filter import MessageFilter
from .arguments import check_arguments
from .bounds import (
    Bound,
    BoundKind,
    LookedUp,
    Start,
    Stop,
    ranges_to_read,
    start_bound,
    stop_bound,
)
from .lineage_order import LineageOrder
from .open_reads import LOOK_MS, OpenReads
from .patience import WAITED_FOR, Failures, Patience
from .read_messages import read_messages
from .replacing_rows import ReplacingRows

log = logging.getLogger("keylane.consumer")

CHUNK_BYTES = 1 << 20
CHUNKS_MAX = 8
"""The number of partitions that are read at once; each answers with about CHUNK_BYTES."""


@dataclass(slots=True)
class _Place:
    """The place of the reader in a partition."""

    partition: Partition
    next_offset: int
    end: int | None
    """The offset after the last one to read; None: everything that is stored."""
    gives: bool = True
    """True if the last read brought messages, or there was no read yet: its broker may have
    more.
    """
    at_end: bool = False
    """True if the last read reached the end of the stored messages, and more may be stored
    later.
    """

    def learn(self, past: PartitionHistory) -> None:
        """Take the latest state of the partition; one whose messages are gone is read at its old
        place, while that broker answers.
        """
        if not past.is_gone or past.partition.address is not None:
            self.partition = past.partition


class Reader(LoopBoundClient, Generic[V]):
    """
    Reads messages of a subject, without a group.

        async with Reader("127.0.0.1:7000", "orders", start="-1h", key=b"customer-7") as reader:
            async for message in reader:
                print(message.partition_id, message.offset, message.value)

    Messages of a partition are read in the order of their offsets, and a partition after those that
    it continues, so messages of a key are in order, through resizes and moves. Others are
    interleaved.

    Where rows of a job replace messages (`keylane subject publish --replace` after a cut), a row is
    left out if its message was already read, according to `positions`.
    """

    _chunk_bytes = CHUNK_BYTES

    def __init__(
        self,
        meta: str | Iterable[str],
        subject: str,
        *,
        start: Start = "earliest",
        stop: Stop | None = None,
        key: bytes | None = None,
        partition: int | None = None,
        tags: Collection[str] | None = None,
        where: Callable[[Message[V]], bool] | None = None,
        follow: bool = False,
        codec: Codec[V] | None = None,
        call_timeout_ms: int = 5_000,
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
        _environment: Environment | None = None,
    ) -> None:
        """
        Make a reader; `async with` opens it.

        Args:
            meta, codec, call_timeout_ms, wait_s, tls, token: see QueueReader.
            subject: an existing subject, static or not.
            start: "earliest", "latest", a datetime with a time zone or its text, how long ago (a
                negative timedelta, or a text such as "-1h"), an offset of `partition`, or a mapping
                from partition id to offset, as `positions` has it. An instant means the first
                message stored at or after it, by its broker's calendar, and all that continues it.
            stop: a value like `start`, for the first message that is not read any more. None: the
                end at the time when the reader is opened; with `follow`, there is no end.
            key: only messages of this key; only partitions are asked whose range has, or had, its
                logical partition. In a best_tried subject that is not static, every partition is
                asked. Messages that a producer placed itself (`queue=`, `partitioner=`) may lie
                elsewhere: find these with `where`.
            partition: only the partition with this id.
            tags, where: only messages with one of these tags, and for which `where` returns True,
                in the event loop.
            follow: continue with messages that are stored later, through later resizes and moves.

        Raises:
            ConfigError, InvalidRequestError: an argument that cannot work.
            InvalidRequestError: `start` or `stop` is not such a value, or is in the future.
        """
        check_name("subject", subject)
        self._addresses = addresses_of(meta)
        partition = partition if (number := whole(partition)) is None else number
        check_arguments(key=key, partition=partition, where=where, follow=follow, codec=codec)
        self._environment = environment_of(_environment)
        now_ms = self._environment.clock.wall_ms()
        self._start = start_bound(start, partition=partition, now_ms=now_ms)
        self._follow = follow and stop is None
        self._stop = stop_bound(
            "latest" if stop is None else stop, partition=partition, now_ms=now_ms
        )
        self._subject = subject
        self._key = key
        self._partition = partition
        self._tags = None if tags is None else MessageFilter(tags)
        self._where = where
        self._codec = codec
        self._timeout_ms = call_timeout_ms
        self._connections = Connections(
            self._environment.network,
            timeout_ms=call_timeout_ms,
            what="reader",
            wait_s=wait_s,
            tls=tls,
            token=token,
        )
        self._pauses: Pauses = Backoff(first_ms=LOOK_MS).pauses(self._environment.new_rng())
        self._reset()

    def _reset(self) -> None:
        self._lineage = LineageOrder()
        self._rows = ReplacingRows()
        self._row_ids = self._rows.ids
        self._places: dict[int, _Place] = {}
        self._buffer: deque[Message[V]] = deque()
        self._positions: dict[int, int] = {}
        self._patience = Patience(self._subject, follows=self._follow)
        self._waits = OpenReads(self._environment.clock)

    def __repr__(self) -> str:
        where, state = ", ".join(self._addresses), self._connections.home.state
        return f"<Reader of {self._subject} at {where}, {state}>"

    async def __aenter__(self) -> Self:
        """
        Open the reader, and find out where each partition begins and ends.

        Raises:
            SubjectUnknownError
            PartitionUnknownError: the subject has no such partition, or its data is gone.
            OffsetOutOfRangeError: an offset is not stored, or beyond the end; `error.first_offset`
            and `error.next_offset` say what is. Both errors pass where a broker runs on an older
                copy of its data folder for a while.
            NotSentError, OutcomeUnknownError: after `wait_s` no metaserver answers, or not the
                broker of a partition.
            UsageError: the reader is open, or was before a fork.
        """
        network = self._connections.open()
        try:
            self._reset()
            self._meta = MetaClient(network, self._addresses, timeout_ms=self._timeout_ms)
            await self._connections.wait_for(self._meta, self._begin)
        except BaseException:
            await clean_up(self._connections.close)
            raise
        return self

    async def close(self) -> None:
        """Close every connection; a cancellation is raised when that is done."""
        self._connections.wait_no_more()
        await clean_up(self._close)

    async def _close(self) -> None:
        try:
            await self._connections.close()
        finally:
            await (
                self._waits.end()
            )  # last: an iteration in another task that this ends begins no others

    @property
    def positions(self) -> dict[int, int]:
        """
        Return the next offset of each partition, after the messages that were handed out or left
        out by `where`, as a copy.

        A later reader continues there: `Reader(…, start=positions)`, even if they were stored as
        JSON.
        """
        return dict(self._positions)

    # ── iteration ─────────────────────────────────────────────────────────────────────────────────
    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return self

    async def __anext__(self) -> Message[V]:
        """
        Return the next message.

        Raises:
            StopAsyncIteration: everything is read.
            FilterError: `where` failed; the next call continues after that message.
            UnreachableError: for ten seconds the broker of a partition, or every metaserver that
                was asked about one, has not answered. With `follow` the reader waits for them for
                ever, and logs it.
            OffsetOutOfRangeError, PartitionUnknownError: for ten seconds the broker of a partition
                has lacked messages that were read there: it runs on an older copy of its data
                folder.
            SubjectDeletedError, SubjectUnknownError: the subject was deleted meanwhile; a later one
                of the same name is a different subject.
            PartitionUnknownError: all messages of `partition` are gone.
            ClosedError, UsageError: the reader is not open, or not open in this process and event
                loop.
        """
        self._connections.home.check()
        while True:
            while self._buffer:
                message = self._buffer.popleft()
                self._positions[message.partition_id] = message.offset + 1
                if self._passes(message):
                    return message
            if not await self._fill():
                raise StopAsyncIteration

    def _passes(self, message: Message[V]) -> bool:
        if self._key is not None and message.key != self._key:
            return False
        if self._row_ids and self._rows.needs_no(message, self._had):
            return False
        if self._tags is not None and self._tags.rejects(message):
            return False
        if self._where is None:
            return True
        try:
            kept: object = self._where(message)
        except Exception as error:
            raise self._filter_error(message, f"{type(error).__name__}: {error}") from error
        if inspect.isawaitable(kept):
            if inspect.iscoroutine(kept):
                kept.close()
            raise self._filter_error(message, "it is async")
        return bool(kept)

    def _had(self, partition_id: int, _start: int, end: int) -> bool:
        return end <= self._positions.get(partition_id, 0)

    @staticmethod
    def _filter_error(message: Message[V], why: str) -> FilterError:
        return FilterError(
            Reason.READER_WHERE,
            f"the reader's `where` failed for message {message.offset} of partition "
            f"{message.partition_id}: {why:.200}",
            partition_id=message.partition_id,
            offset=message.offset,
        )

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    async def _begin(self) -> None:
        """
        Find the places in all partitions that are known now, and start again if one of them
        disappears meanwhile.

        Raises:
            PartitionUnknownError: for READ_GIVE_UP_MS a partition has disappeared each time.
            As `_find_places`.
        """
        until_ms = self._environment.clock.boot_ms() + READ_GIVE_UP_MS
        while isinstance(places := await self._find_places(), PartitionUnknownError):
            if self._environment.clock.boot_ms() >= until_ms:
                raise places
            await asyncio.sleep(self._pauses.next_ms() / 1000)
        self._pauses.reset()
        self._places = {int(place.partition.partition_id): place for place in places}
        self._positions = {number: place.next_offset for number, place in self._places.items()}
        self._positions |= {
            number: offset
            for number, offset in self._start.offsets.items()
            if number not in self._places
        }  # of those whose messages are gone: rows may have replaced them
        if not self._follow:
            self._finish_ended()

    async def _find_places(self) -> list[_Place] | PartitionUnknownError:
        """Return the places in all partitions that are known now, or the error of one that has
        disappeared since they were requested.
        """
        route = await self._meta.route(self._subject)
        key = None if route.may_leave else self._key
        self._lineage = LineageOrder(key=key, partition=self._partition)
        history = (await self._meta.call(endpoints.HISTORY, subject=self._subject)).partitions
        ids = {int(past.partition.partition_id) for past in history}
        named = set(self._start.offsets) | set(self._stop.offsets) | ({self._partition} - {None})
        unknown = [number for number in named if number is not None and number not in ids]
        for partition_id in sorted(unknown):
            raise PartitionUnknownError(
                f"subject {self._subject!r} has no partition {partition_id}",
                partition_id=partition_id,
                subject=self._subject,
            )
        self._learn(history)
        wanted = [
            past.partition for past in history if past.partition.partition_id in self._lineage.left
        ]
        try:
            looked = await in_turns(self._look_at, wanted)
        except PartitionUnknownError as error:
            if error.partition_id is None:
                raise
            history = (await self._meta.call(endpoints.HISTORY, subject=self._subject)).partitions
            if any(
                past.partition.partition_id == error.partition_id and not past.is_gone
                for past in history
            ):
                raise
            return error
        ranges = ranges_to_read(self._start, self._stop, looked, self._lineage.parents)
        return [
            _Place(each.partition, begin, None if self._follow else end)
            for each, (begin, end) in zip(looked, ranges, strict=True)
        ]

    def _learn(self, history: list[PartitionHistory]) -> None:
        """
        Take the partitions that are known now.

        Raises:
            SubjectDeletedError: they belong to a later subject of the same name.
            PartitionUnknownError: the messages of `partition` are gone.
        """
        self._lineage.check_subject(self._subject, history)
        self._rows.learn(filter(self._lineage.wants, history))
        self._note_gone(self._lineage.learn(history))

    def _note_gone(self, gone: list[PartitionHistory]) -> None:
        for past in gone:
            partition_id = past.partition.partition_id
            if self._partition is not None:
                raise self._gone_error(int(partition_id))
            if past.lost:
                log.warning(
                    "partition %d of %s was on a lost disk; its messages are left out",
                    partition_id,
                    self._subject,
                )

    def _gone_error(self, partition_id: int) -> PartitionUnknownError:
        return PartitionUnknownError(
            f"the messages of partition {partition_id} are gone",
            partition_id=partition_id,
            subject=self._subject,
        )

    async def _look_at(self, partition: Partition) -> LookedUp:
        """Return the stored offsets of a partition, which is checked before times are looked up."""
        partition_id = int(partition.partition_id)
        broker = self._broker(partition)
        status = await broker.control(endpoints.PARTITION, id=partition_id)

        async def at_time(bound: Bound) -> int | None:
            if bound.kind is not BoundKind.TIME:
                return None
            found_offset = await broker.control(
                endpoints.OFFSET_AT,
                query={"at_ms": bound.at_ms, "bound": TimeBound.LOWER},
                id=partition_id,
            )
            return found_offset.offset

        start_at, stop_at = await at_time(self._start), await at_time(self._stop)
        return LookedUp(partition, status.first_offset, status.next_offset, start_at, stop_at)

    def _finish_ended(self) -> None:
        """Finish the partitions of which nothing is left to read."""
        for partition_id, place in list(self._places.items()):
            if place.end is not None and place.next_offset >= place.end:
                self._finish(partition_id)

    def _finish(self, partition_id: int) -> None:
        del self._places[partition_id]
        self._lineage.finish(partition_id)

    async def _look_for_children(self) -> UnreachableError | None:
        """
        Fetch the children of the partitions that were read to their end; a new partition is read
        from its first message.

        Returns:
            The reason why this is not possible now; known partitions are read meanwhile.
        """
        if not (self._follow and self._lineage.lacks_children):
            return None
        try:
            history = (await self._meta.call(endpoints.HISTORY, subject=self._subject)).partitions
        except UnreachableError as error:
            return error
        self._take(history)
        return None

    def _take(self, history: list[PartitionHistory]) -> None:
        """Begin the partitions that were not known, at their first message. Raises the errors of
        `_learn`.
        """
        self._learn(history)
        for past in history:
            partition = past.partition
            partition_id = int(partition.partition_id)
            if partition_id in self._lineage.left:
                place = self._places.setdefault(partition_id, _Place(partition, 0, None))
                place.learn(past)
                self._positions.setdefault(partition_id, 0)

    def _broker(self, partition: Partition) -> BrokerClient:
        if partition.address is None:
            raise NotSentError.of_group(partition.broker_group)
        return self._connections.broker_at(partition.address)

    # ── chunks ────────────────────────────────────────────────────────────────────────────────────
    async def _fill(self) -> bool:
        """Read a chunk of each partition that may be read, until there are messages; return False
        if everything is read.
        """
        while not self._buffer:
            self._connections.check()  # another task may close it
            unlearnt = await self._look_for_children()
            readable = self._readable()
            if not readable and not (self._follow and self._lineage.lacks_children):
                return False
            failures = await self._read_chunks(readable)
            if unlearnt is not None:
                failures[None] = unlearnt
            now_ms = self._environment.clock.boot_ms()
            self._patience.note(failures, now_ms)
            if failures:
                await self._wait_for_servers(now_ms)
                continue
            self._pauses.reset()
            if self._follow and not self._buffer:
                await self._wait_for_news()
        return True

    def _readable(self) -> list[int]:
        return [int(past.partition.partition_id) for past in self._lineage.readable()]

    async def _wait_for_news(self) -> None:
        """Wait until a partition may be read, or the children of one may be known."""
        readable, lacks_children = self._readable(), self._lineage.lacks_children
        if not self._begin_waits(readable) and (readable or lacks_children):
            await self._waits.wait(LOOK_MS if lacks_children else None)

    def _begin_waits(self, readable: list[int]) -> list[int]:
        """Let the brokers of partitions that were read to their end wait for messages, and return
        the others, which may be read now.
        """
        places = {number: self._places[number] for number in readable if number in self._places}
        self._waits.keep({number: place.partition.address for number, place in places.items()})
        bytes_max = max(self._chunk_bytes * CHUNKS_MAX // max(len(places), CHUNKS_MAX), 1)
        for number, place in places.items():
            if place.at_end and place.partition.address is not None:
                self._waits.begin(
                    self._broker(place.partition), number, place.next_offset, bytes_max=bytes_max
                )
        return self._waits.due(places)

    async def _read_chunks(self, readable: list[int]) -> Failures:
        """
        Read a chunk of each partition for which no read waits, CHUNKS_MAX at once; chunks that were
        read stay, whatever happens to others.

        Returns:
            The errors that may pass. Any other one is raised.
        """
        failures: Failures = {}
        others: list[BaseException] = []
        due = self._begin_waits(readable)
        for first in range(0, len(due), CHUNKS_MAX):
            numbers = due[first : first + CHUNKS_MAX]
            done = await asyncio.gather(*map(self._chunk, numbers), return_exceptions=True)
            for number, failed in zip(numbers, done, strict=True):
                if isinstance(failed, WAITED_FOR):
                    failures[number] = failed
                elif failed is not None:
                    others.append(failed)
        if others:
            raise others[0]
        return failures

    async def _wait_for_servers(self, now_ms: int) -> None:
        """
        Check the partitions again, and pause: brokers may have new addresses, and messages may be
        gone.

        The check is first, so that a program that gives up waiting during the pause, and asks
        again, also finds the broker.

        Raises:
            KeylaneError: an error was noted, and has lasted for too long at `now_ms` of the boot
                clock.
            SubjectDeletedError, SubjectUnknownError: the subject was deleted.
            PartitionUnknownError: the messages of `partition` are gone.
        """
        unasked: UnreachableError | None = None
        try:
            history = (await self._meta.call(endpoints.HISTORY, subject=self._subject)).partitions
        except UnreachableError as error:
            unasked = error  # messages that a broker lacks may be gone: none reports it
        else:
            self._lineage.check_subject(self._subject, history)
            if self._follow:
                self._take(history)  # rows may have replaced messages that are gone
            if self._look_anew(history):
                return
        self._patience.check(now_ms, unasked)
        if not self._buffer:  # messages that others have brought, or bring meanwhile, do not wait
            await self._waits.wait(self._pauses.next_ms())

    def _look_anew(self, history: Iterable[PartitionHistory]) -> bool:
        """
        Take the addresses of brokers, and finish partitions whose messages are gone.

        The broker of a lost partition may still answer, and another partition may have failed: it
        is read as far as it gives messages.

        Returns:
            Whether the next try differs: there are such partitions, or a broker has a new address.
        """
        differs = False
        for past in history:
            partition_id = int(past.partition.partition_id)
            place = self._places.get(partition_id)
            if place is None:
                continue
            address = past.partition.address
            differs |= address is not None and address != place.partition.address
            place.learn(past)
            if past.is_gone and not (place.gives and not self._waits.pending(partition_id)):
                self._leave_out(place, past)
                differs = True
        return differs

    def _leave_out(self, place: _Place, past: PartitionHistory) -> None:
        """Finish a partition whose messages are gone. Raises PartitionUnknownError if some were
        left, and no others are wanted.
        """
        partition_id = int(past.partition.partition_id)
        if past.end_offset is None or place.next_offset < past.end_offset:
            if self._partition is not None:
                raise self._gone_error(partition_id)
            log.warning(
                "partition %d of %s %s: what was left from offset %d on is not read",
                partition_id,
                self._subject,
                "was on a disk that is lost" if past.lost else "has expired",
                place.next_offset,
            )
        self._finish(partition_id)

    async def _chunk(self, partition_id: int) -> None:
        """Buffer messages of a partition from its place on."""
        place = self._places[partition_id]
        offset = place.next_offset
        place.gives = False
        place.at_end = False
        try:
            answer, payload = await (
                self._waits.take(partition_id)
                or self._broker(place.partition).call(Read(partition_id, offset, self._chunk_bytes))
            )
        except OffsetOutOfRangeError as error:
            self._skip_removed(place, error)
            return
        assert isinstance(answer, Batches)
        if payload:
            messages: list[Message[V]] = read_messages(
                payload, offset, subject=self._subject, partition=place.partition, codec=self._codec
            )
            self._buffer.extend(
                messages if place.end is None else messages[: max(place.end - offset, 0)]
            )
            place.next_offset = answer.upto
            place.gives = True
        if place.end is None:
            at_end = place.next_offset >= answer.next_offset
            ended = answer.sealed and at_end
            place.at_end = at_end and not ended
        else:
            ended = place.next_offset >= place.end
            if not payload:  # everything up to the end was stored when the reader was opened
                raise OffsetOutOfRangeError(
                    partition_id=partition_id,
                    offset=offset,
                    first_offset=answer.first_offset,
                    next_offset=answer.next_offset,
                )
        if ended:
            self._finish(partition_id)

    def _skip_removed(self, place: _Place, error: OffsetOutOfRangeError) -> None:
        """Continue after messages that retention has removed. Raises OffsetOutOfRangeError,
        `error`, if there are none.
        """
        first = error.first_offset or 0
        if place.next_offset >= first:
            raise error
        log.warning(
            "partition %d of %s: %s removed before the reader got to them",
            place.partition.partition_id,
            self._subject,
            counted(first - place.next_offset, "message was", "messages were"),
        )
        place.next_offset = self._positions[int(place.partition.partition_id)] = first
        if place.end is not None and first >= place.end:
            self._finish(int(place.partition.partition_id))
