"""
Reads a subject by partition, offset, time and key, across all its partitions, without a group,
locks or acks.

open ─▶ the lineage, and the offsets to read of each partition ─▶ chunks of readable partitions
             ▲                                                        │ one is read to its end
             ╰── follow: its children ◀───────────────────────────────╯
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, Self

from ...protocol import endpoints
from ...protocol.address import parse_addresses
from ...protocol.backoff import Backoff, Pauses
from ...protocol.codecs.codec import Codec, V, check_codec
from ...protocol.control import TimeBound
from ...protocol.errors import (
    ConfigError,
    FilterError,
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
    UnreachableError,
    WrongBrokerError,
)
from ...protocol.frames import Batches
from ...protocol.http.tls_settings import TlsSettings
from ...protocol.ids import check_name
from ...protocol.limits import READ_GIVE_UP_MS
from ...protocol.message import Message, encode_key
from ...protocol.operations import PartitionHistory
from ...protocol.routing import Partition
from ...protocol.settings import check_no_problems, flag_problems, is_within, whole
from ...protocol.text import counted
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.connections import Connections, clean_up, gather_limited
from ...rpc.copied_reads import CopiedReads
from ...rpc.environment import Environment, environment_of
from ...rpc.loop_binding import LoopBoundClient
from ..decode import read_messages
from ..filter import MessageFilter
from ..predicate import call_predicate, check_predicate
from .bounds import (
    Bound,
    BoundKind,
    OffsetLookup,
    Start,
    Stop,
    ranges_to_read,
    start_bound,
    stop_bound,
)
from .lineage_order import LineageOrder, ReplacingRows
from .patience import TRANSIENT_ERRORS, Failures, FailureTracker
from .reads import POLL_MS, OpenReads

log = logging.getLogger("keylane.consumer")

CHUNK_BYTES = 1 << 20
CHUNKS_MAX = 8
"""The number of partitions that are read at once; each replies with about CHUNK_BYTES."""


def check_arguments(
    *,
    key: object,
    partition: object,
    where: object,
    follow: object,
    from_copies: object = False,
    codec: Codec[V] | None,
) -> None:
    """Check a reader's arguments other than `start` and `stop`. Raises ConfigError."""
    check_no_problems(flag_problems(follow=follow, from_copies=from_copies))
    if codec is not None:
        check_codec(codec)
    if key is not None and (not isinstance(key, bytes | str) or not key):
        raise ConfigError(f"key must be non-empty bytes or text, not {key!r:.40}")
    if partition is not None and not is_within(partition, 1, 2**63 - 1):
        raise ConfigError(f"partition must be a partition id, 1 or higher, not {partition!r:.40}")
    if where is not None:
        check_predicate(where, "where is a plain function of a message")


@dataclass(frozen=True, slots=True)
class _Wanted(Generic[V]):
    """What a program wants to read."""

    subject: str
    start: Bound
    stop: Bound
    follows: bool
    key: bytes | None
    partition: int | None
    tags: MessageFilter | None
    where: Callable[[Message[V]], bool] | None

    def matches(self, message: Message[V]) -> bool:
        """Return True if a message is wanted. Raises FilterError."""
        if self.key is not None and message.key != self.key:
            return False
        if self.tags is not None and self.tags.rejects(message):
            return False
        return self.where is None or call_predicate(self.where, message, _filter_error)


def _filter_error(message: Message[V], why: str) -> FilterError:
    return FilterError(
        Reason.READER_WHERE,
        f"the reader's `where` failed for message {message.offset} of partition "
        f"{message.partition_id}: {why:.200}",
        partition_id=message.partition_id,
        offset=message.offset,
    )


@dataclass(slots=True)
class _ReadState:
    """How far a reader has read a partition."""

    partition: Partition
    next_offset: int
    end: int | None
    """One past the offset of the last message to read; None: no end."""
    may_have_more: bool = True
    """True if the last read returned messages, or nothing has been read yet."""
    at_end: bool = False
    """True if the last read reached the last stored message, although more may follow."""

    def update(self, entry: PartitionHistory) -> None:
        """Apply the partition's current state. If its data is gone, keep the old address: that
        broker may still reply.
        """
        if not entry.is_gone or entry.partition.address is not None:
            self.partition = entry.partition


class Reader(LoopBoundClient, Generic[V]):
    """
    Reads the messages of a subject without a consumer group.

        async with Reader("127.0.0.1:7000", "orders", start="-1h", key=b"customer-7") as reader:
            async for message in reader:
                print(message.partition_id, message.offset, message.value)

    Messages of one partition come in offset order, and a partition comes after those that it
    continues. Messages of one key are therefore in order, even across resizes and moves; other
    messages are interleaved.

    If rows of a job replace messages (`keylane subject publish --replace` after a cut), a row is
    skipped when, according to `positions`, the original message was already read.
    """

    _chunk_bytes = CHUNK_BYTES

    def __init__(
        self,
        meta: str | Iterable[str],
        subject: str,
        *,
        start: Start = "earliest",
        stop: Stop | None = None,
        key: bytes | str | None = None,
        partition: int | None = None,
        tags: Collection[str] | None = None,
        where: Callable[[Message[V]], bool] | None = None,
        follow: bool = False,
        from_copies: bool = False,
        codec: Codec[V] | None = None,
        call_timeout_ms: int = 5_000,
        wait_s: float = 0,
        tls: TlsSettings | None = None,
        token: str | None = None,
        _environment: Environment | None = None,
        _left_out: Collection[int] = (),
    ) -> None:
        """
        Create a reader; `async with` opens it.

        Args:
            meta, codec, call_timeout_ms, wait_s, tls, token: see `QueueReader`.
            subject: an existing subject, static or not.
            start: "earliest", "latest", a timezone-aware datetime or its ISO text, how long ago (a
                negative timedelta, or a string such as "-1h"), an offset in `partition`, or a
                mapping from partition ids to offsets, such as `positions`. A time means the first
                message stored at or after it, by its broker's clock, and everything after that
                message.
            stop: a value like `start`: the first message that is not read. None: the end of the
                subject when the reader is opened; with `follow`, there is no end.
            key: only messages of this key, given as bytes or a string. Only partitions whose ranges
                contain the key's logical partition are read, except in a best_tried subject that is
                not static, where every partition is. Messages that a producer placed explicitly
                (`queue=`, `partitioner=`) may be in other partitions: find them with `where`.
            partition: only the partition with this id.
            tags: only messages with at least one of these tags.
            where: only messages for which this function returns True; it runs in the event loop.
            follow: continue with messages that are stored later, across later resizes and moves.
            from_copies: read from copies of the brokers' data folders that serve reads, and from a
                broker only what they do not have yet.

        Raises:
            ConfigError, InvalidRequestError: an argument is invalid; for example, `start` or `stop`
                is in the future.
        """
        check_name("subject", subject)
        self._addresses = parse_addresses(meta)
        partition = partition if (partition_id := whole(partition)) is None else partition_id
        check_arguments(
            key=key,
            partition=partition,
            where=where,
            follow=follow,
            from_copies=from_copies,
            codec=codec,
        )
        self._environment = environment_of(_environment)
        now_ms = self._environment.clock.wall_ms()
        self._wanted: _Wanted[V] = _Wanted(
            subject=subject,
            start=start_bound(start, partition=partition, now_ms=now_ms),
            stop=stop_bound("latest" if stop is None else stop, partition=partition, now_ms=now_ms),
            follows=follow and stop is None,
            key=None if key is None else encode_key(key),
            partition=partition,
            tags=None if tags is None else MessageFilter(tags),
            where=where,
        )
        self._codec = codec
        self._left_out = frozenset(_left_out)
        """The partitions that are not read, because their brokers do not answer."""
        self._call_timeout_ms = call_timeout_ms
        self._connections = Connections(
            self._environment.network,
            timeout_ms=call_timeout_ms,
            what="reader",
            wait_s=wait_s,
            tls=tls,
            token=token,
        )
        self._copies = (
            CopiedReads(self._connections.broker_at, self._environment.clock.boot_ms)
            if from_copies
            else None
        )
        self._pauses: Pauses = Backoff(first_ms=POLL_MS).pauses(self._environment.new_rng())
        self._reset()

    def _reset(self) -> None:
        self._lineage = LineageOrder()
        self._replacing_rows = ReplacingRows()
        self._read_states: dict[int, _ReadState] = {}
        self._buffer: deque[Message[V]] = deque()
        self._positions: dict[int, int] = {}
        self._failures = FailureTracker(self._wanted.subject, follows=self._wanted.follows)
        self._open_reads = OpenReads(self._environment.clock, self._copies)

    def __repr__(self) -> str:
        where, state = ", ".join(self._addresses), self._connections.loop_binding.state
        return f"<Reader of {self._wanted.subject} at {where}, {state}>"

    async def __aenter__(self) -> Self:
        """
        Open the reader, and resolve `start` and `stop` to offsets in each partition.

        Raises:
            SubjectUnknownError: there is no such subject.
            PartitionUnknownError: the subject has no such partition, or its data is gone.
            OffsetOutOfRangeError: an offset is not stored; the stored ones are `error.first_offset`
                up to, but not including, `error.next_offset`. This error and PartitionUnknownError
                are temporary if a broker is running on an older copy of its data folder.
            NotSentError, OutcomeUnknownError: no metaserver replied within `wait_s`, or the broker
                of a partition did not.
            UsageError: the reader is already open, or was opened before a fork.
        """
        network = self._connections.open()
        try:
            self._reset()
            self._meta = MetaClient(network, self._addresses, timeout_ms=self._call_timeout_ms)
            await self._connections.wait_for(self._meta, self._locate_start)
        except BaseException:
            await clean_up(self._connections.close)
            raise
        return self

    async def close(self) -> None:
        """Close all connections. A cancellation is re-raised afterwards."""
        self._connections.request_close()
        await clean_up(self._close)

    async def _close(self) -> None:
        try:
            await self._connections.close()
        finally:
            # Last, because an iteration in another task may open reads until it fails.
            await self._open_reads.end()

    @property
    def positions(self) -> dict[int, int]:
        """
        A copy of the next offset of each partition, after the messages that were handed out or
        filtered out.

        Another reader continues there with `Reader(…, start=positions)`, even if the positions were
        stored as JSON in between.
        """
        return dict(self._positions)

    # ── iteration ─────────────────────────────────────────────────────────────────────────────────
    def __aiter__(self) -> AsyncIterator[Message[V]]:
        return self

    async def __anext__(self) -> Message[V]:
        """
        Return the next message.

        Raises:
            StopAsyncIteration: everything has been read.
            FilterError: `where` failed; the next call continues after that message.
            UnreachableError: the broker of a partition, or every metaserver asked about one, has
                not replied for ten seconds. With `follow`, the reader instead retries indefinitely
                and logs the failure.
            OffsetOutOfRangeError: for ten seconds, messages that were read before have been missing
                on the broker of a partition, which is running on an older copy of its data folder.
            PartitionUnknownError: for ten seconds, the partition has been missing on such a broker;
                or all messages of `partition` are gone.
            SubjectDeletedError: the subject was deleted; a later subject of the same name is a
                different one.
            ClosedError, UsageError: the reader is not open, or not open in this process and event
                loop.
        """
        self._connections.loop_binding.check()
        replacing = self._replacing_rows
        while True:
            while self._buffer:
                message = self._buffer.popleft()
                self._positions[message.partition_id] = message.offset + 1
                if replacing.ids and replacing.is_source_read(message, self._was_read):
                    continue
                if self._wanted.matches(message):
                    return message
            if not await self._fill():
                raise StopAsyncIteration

    def _was_read(self, partition_id: int, _start: int, end: int) -> bool:
        return end <= self._positions.get(partition_id, 0)

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    async def _locate_start(self) -> None:
        """
        Resolve where reading starts and ends in each known partition. If one disappears in the
        meantime, or its broker has lost its place, start over.

        Raises:
            PartitionUnknownError, WrongBrokerError: that was so in every attempt for
                READ_GIVE_UP_MS.
        """
        until_ms = self._environment.clock.boot_ms() + READ_GIVE_UP_MS
        while isinstance(states := await self._build_read_states(), KeylaneError):
            if self._environment.clock.boot_ms() >= until_ms:
                raise states
            await asyncio.sleep(self._pauses.next_pause_ms() / 1000)
        self._pauses.reset()
        self._read_states = {int(state.partition.partition_id): state for state in states}
        self._positions = {
            partition_id: state.next_offset for partition_id, state in self._read_states.items()
        }
        self._positions |= {
            partition_id: offset
            for partition_id, offset in self._wanted.start.offsets.items()
            if partition_id not in self._read_states
        }  # offsets in partitions whose data is gone: rows may have replaced their messages
        if not self._wanted.follows:
            self._finish_ended()

    async def _build_read_states(
        self,
    ) -> list[_ReadState] | PartitionUnknownError | WrongBrokerError:
        """Return the read state of each known partition, or the error of a partition that
        disappeared since the history was fetched, or whose broker has lost its place.
        """
        route = await self._meta.route(self._wanted.subject)
        key = None if route.may_reroute_keys else self._wanted.key
        self._lineage = LineageOrder(key=key, partition=self._wanted.partition)
        history = (
            await self._meta.call(endpoints.HISTORY, subject=self._wanted.subject)
        ).partitions
        ids = {int(entry.partition.partition_id) for entry in history}
        requested_ids = (
            set(self._wanted.start.offsets)
            | set(self._wanted.stop.offsets)
            | ({self._wanted.partition} - {None})
        )
        unknown_ids = [
            partition_id
            for partition_id in requested_ids
            if partition_id is not None and partition_id not in ids
        ]
        for partition_id in sorted(unknown_ids):
            raise PartitionUnknownError(
                f"subject {self._wanted.subject!r} has no partition {partition_id}",
                partition_id=partition_id,
                subject=self._wanted.subject,
            )
        self._update_lineage(history)
        for partition_id in self._left_out & self._lineage.unread_ids:
            self._lineage.finish(partition_id)
        unread_partitions = [
            entry.partition
            for entry in history
            if entry.partition.partition_id in self._lineage.unread_ids
        ]
        try:
            offsets = await gather_limited(self._fetch_offsets, unread_partitions)
        except WrongBrokerError as error:
            return error
        except PartitionUnknownError as error:
            if error.partition_id is None:
                raise
            history = (
                await self._meta.call(endpoints.HISTORY, subject=self._wanted.subject)
            ).partitions
            if any(
                entry.partition.partition_id == error.partition_id and not entry.is_gone
                for entry in history
            ):
                raise
            return error
        ranges = ranges_to_read(
            self._wanted.start, self._wanted.stop, offsets, self._lineage.parents
        )
        return [
            _ReadState(stored.partition, begin, None if self._wanted.follows else end)
            for stored, (begin, end) in zip(offsets, ranges, strict=True)
        ]

    def _update_lineage(self, history: list[PartitionHistory]) -> None:
        """
        Merge the subject's current partitions into the lineage.

        Raises:
            SubjectDeletedError: they belong to a later subject of the same name.
            PartitionUnknownError: the messages of `partition` are gone.
        """
        self._lineage.check_subject(self._wanted.subject, history)
        self._replacing_rows.update(filter(self._lineage.is_wanted, history))
        self._report_gone(self._lineage.update(history))

    def _report_gone(self, unreadable: list[PartitionHistory]) -> None:
        for entry in unreadable:
            partition_id = entry.partition.partition_id
            if self._wanted.partition is not None:
                raise self._data_gone_error(int(partition_id))
            if entry.lost:
                log.warning(
                    "partition %d of %s was on a lost disk; its messages are skipped",
                    partition_id,
                    self._wanted.subject,
                )

    def _data_gone_error(self, partition_id: int) -> PartitionUnknownError:
        return PartitionUnknownError(
            f"the messages of partition {partition_id} are gone",
            partition_id=partition_id,
            subject=self._wanted.subject,
        )

    async def _fetch_offsets(self, partition: Partition) -> OffsetLookup:
        """Return a partition's stored offsets, and the offsets of the time bounds. The partition's
        status is fetched before the times are looked up.
        """
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

        start_at, stop_at = await at_time(self._wanted.start), await at_time(self._wanted.stop)
        return OffsetLookup(partition, status.first_offset, status.next_offset, start_at, stop_at)

    def _finish_ended(self) -> None:
        """Finish the partitions that have nothing left to read."""
        for partition_id, state in list(self._read_states.items()):
            if state.end is not None and state.next_offset >= state.end:
                self._finish(partition_id)

    def _finish(self, partition_id: int) -> None:
        del self._read_states[partition_id]
        self._lineage.finish(partition_id)

    async def _fetch_children(self) -> UnreachableError | None:
        """
        Fetch the children of partitions that are read to their end. The children are read from
        their first message.

        Returns:
            The error if no metaserver replied, in which case the known partitions are still read;
            None otherwise.
        """
        if not (self._wanted.follows and self._lineage.lacks_children):
            return None
        try:
            history = await self._fetch_history()
        except UnreachableError as error:
            return error
        self._add_partitions(history)
        return None

    async def _fetch_history(self) -> list[PartitionHistory]:
        """
        Fetch all partitions of the subject that is read.

        Raises:
            SubjectDeletedError: it was deleted, perhaps so long ago that no metaserver knows it.
        """
        name = self._wanted.subject
        try:
            return (await self._meta.call(endpoints.HISTORY, subject=name)).partitions
        except SubjectUnknownError as error:
            raise SubjectDeletedError(f"subject {name!r} was deleted", subject=name) from error

    def _add_partitions(self, history: list[PartitionHistory]) -> None:
        """Start reading new partitions at their first message. Raises the errors of
        `_update_lineage`.
        """
        self._update_lineage(history)
        for entry in history:
            partition = entry.partition
            partition_id = int(partition.partition_id)
            if partition_id in self._lineage.unread_ids:
                state = self._read_states.setdefault(partition_id, _ReadState(partition, 0, None))
                state.update(entry)
                self._positions.setdefault(partition_id, 0)

    def _broker(self, partition: Partition) -> BrokerClient:
        if partition.address is None:
            raise NotSentError.of_group(partition.broker_group)
        return self._connections.broker_at(partition.address)

    # ── chunks ────────────────────────────────────────────────────────────────────────────────────
    async def _fill(self) -> bool:
        """Read chunks of the readable partitions until there are messages. Return False if
        everything has been read.
        """
        while not self._buffer:
            self._connections.check()  # another task may close it
            metaserver_error = await self._fetch_children()
            readable = self._readable()
            if not readable and not (self._wanted.follows and self._lineage.lacks_children):
                return False
            failures = await self._read_chunks(readable)
            if metaserver_error is not None:
                failures[None] = metaserver_error
            now_ms = self._environment.clock.boot_ms()
            self._failures.record_failures(failures, now_ms)
            if failures:
                await self._wait_for_servers(now_ms)
                continue
            self._pauses.reset()
            if not self._buffer:
                await self._wait_for_messages()
        return True

    def _readable(self) -> list[int]:
        return [int(entry.partition.partition_id) for entry in self._lineage.readable()]

    async def _wait_for_messages(self) -> None:
        """Wait until a partition may have messages, or the children of one may have become
        known.
        """
        readable, lacks_children = self._readable(), self._lineage.lacks_children
        if not self._open_idle_reads(readable) and (readable or lacks_children):
            await self._open_reads.wait(POLL_MS if lacks_children else None)

    def _open_idle_reads(self, readable: list[int]) -> list[int]:
        """Open a long poll for each partition that is read to its end. Return the other partitions,
        which may be read now.
        """
        states = {
            partition_id: self._read_states[partition_id]
            for partition_id in readable
            if partition_id in self._read_states
        }
        self._open_reads.retain(
            {partition_id: state.partition.address for partition_id, state in states.items()}
        )
        bytes_max = max(self._chunk_bytes * CHUNKS_MAX // max(len(states), CHUNKS_MAX), 1)
        for partition_id, state in states.items():
            if state.at_end and state.partition.address is not None:
                self._open_reads.begin(
                    self._broker(state.partition),
                    partition_id,
                    state.next_offset,
                    bytes_max=bytes_max,
                )
        return self._open_reads.find_due(states)

    async def _read_chunks(self, readable: list[int]) -> Failures:
        """
        Read a chunk of each partition without an open read, at most CHUNKS_MAX at once. Chunks that
        have arrived are kept even if others fail.

        Returns:
            The transient errors. Other errors are raised.
        """
        failures: Failures = {}
        fatal: list[BaseException] = []
        due_ids = self._open_idle_reads(readable)
        for first in range(0, len(due_ids), CHUNKS_MAX):
            partition_ids = due_ids[first : first + CHUNKS_MAX]
            results = await asyncio.gather(
                *map(self._read_chunk, partition_ids), return_exceptions=True
            )
            for partition_id, error in zip(partition_ids, results, strict=True):
                if isinstance(error, TRANSIENT_ERRORS):
                    failures[partition_id] = error
                elif error is not None:
                    fatal.append(error)
        if fatal:
            raise fatal[0]
        return failures

    async def _wait_for_servers(self, now_ms: int) -> None:
        """
        Fetch the partitions again and pause, because brokers may have moved and messages may be
        gone.

        The fetch comes before the pause, so that a program that cancels the wait and tries again
        also finds a broker that has moved.

        Raises:
            KeylaneError: an error has lasted too long at `now_ms` on the boot clock.
            SubjectDeletedError
            PartitionUnknownError: the messages of `partition` are gone.
        """
        metaserver_error: UnreachableError | None = None
        try:
            history = await self._fetch_history()
        except UnreachableError as error:
            metaserver_error = error  # unknown whether messages that a broker lacks are gone
        else:
            self._lineage.check_subject(self._wanted.subject, history)
            if self._wanted.follows:
                self._add_partitions(history)  # rows may have replaced messages that are gone
            if self._refresh_partitions(history):
                return
        self._failures.check(now_ms, metaserver_error)
        if not self._buffer:  # messages of other partitions are handed out without a pause
            await self._open_reads.wait(self._pauses.next_pause_ms())

    def _refresh_partitions(self, history: Iterable[PartitionHistory]) -> bool:
        """
        Update the brokers' addresses, and finish partitions whose messages are gone.

        The broker of a lost partition may still reply, so the partition is read as long as that
        yields messages.

        Returns:
            True if a partition was finished or a broker has a new address, so that an immediate
            retry may succeed.
        """
        has_changed = False
        for entry in history:
            partition_id = int(entry.partition.partition_id)
            state = self._read_states.get(partition_id)
            if state is None:
                continue
            address = entry.partition.address
            has_changed |= address is not None and address != state.partition.address
            state.update(entry)
            if entry.is_gone and not (
                state.may_have_more and not self._open_reads.pending(partition_id)
            ):
                self._skip_gone(state, entry)
                has_changed = True
        return has_changed

    def _skip_gone(self, state: _ReadState, entry: PartitionHistory) -> None:
        """Finish a partition whose messages are gone. Raises PartitionUnknownError if some of them
        were unread and no other partition is wanted.
        """
        partition_id = int(entry.partition.partition_id)
        if entry.end_offset is None or state.next_offset < entry.end_offset:
            if self._wanted.partition is not None:
                raise self._data_gone_error(partition_id)
            log.warning(
                "partition %d of %s %s: its messages from offset %d on are skipped",
                partition_id,
                self._wanted.subject,
                "was on a disk that is lost" if entry.lost else "has expired",
                state.next_offset,
            )
        self._finish(partition_id)

    async def _read_chunk(self, partition_id: int) -> None:
        """Read messages of a partition into the buffer."""
        state = self._read_states[partition_id]
        offset = state.next_offset
        state.may_have_more = False
        state.at_end = False
        try:
            reply, payload = await self._open_reads.read(
                self._broker(state.partition), partition_id, offset, bytes_max=self._chunk_bytes
            )
        except OffsetOutOfRangeError as error:
            self._skip_removed(state, error)
            return
        assert isinstance(reply, Batches)
        if payload:
            messages: list[Message[V]] = read_messages(
                payload,
                offset,
                subject=self._wanted.subject,
                partition=state.partition,
                codec=self._codec,
            )
            self._buffer.extend(
                messages if state.end is None else messages[: max(state.end - offset, 0)]
            )
            state.next_offset = reply.upto
            state.may_have_more = True
        if state.end is None:
            at_end = state.next_offset >= reply.next_offset
            has_ended = reply.sealed and at_end
            state.at_end = at_end and not has_ended
        else:
            has_ended = state.next_offset >= state.end
            if not payload:  # everything up to `end` was stored when the reader was opened
                raise OffsetOutOfRangeError(
                    partition_id=partition_id,
                    offset=offset,
                    first_offset=reply.first_offset,
                    next_offset=reply.next_offset,
                )
        if has_ended:
            self._finish(partition_id)

    def _skip_removed(self, state: _ReadState, error: OffsetOutOfRangeError) -> None:
        """Continue after messages that retention has removed. Raises `error` if none were
        removed.
        """
        first = error.first_offset or 0
        if state.next_offset >= first:
            raise error
        log.warning(
            "partition %d of %s: %s removed by retention before the reader got to them",
            state.partition.partition_id,
            self._wanted.subject,
            counted(first - state.next_offset, "message was", "messages were"),
        )
        state.next_offset = self._positions[int(state.partition.partition_id)] = first
        if state.end is not None and first >= state.end:
            self._finish(int(state.partition.partition_id))
