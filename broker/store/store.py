"""The store of a broker: its state, log, index and cache. It runs on one event loop.

The store decides appends, new partitions, seals and fences, and makes them durable; `service.py`
decides acks. A method that decides does so before it returns, and either returns a future of the
durable record or takes a function to call with the outcome. Calls are therefore decided in the
order in which they are made.

Handles damage of the index while the broker serves: health reports it, and the next start rebuilds
the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from ...protocol.batch import check_batch, check_lengths, check_unpacks
from ...protocol.clock import Clock
from ...protocol.control import HostPartition, TimeBound
from ...protocol.errors import (
    CorruptBatchError,
    CorruptIndexError,
    InvalidRequestError,
    KeylaneError,
    OffsetOutOfRangeError,
    StorageError,
)
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.record import HEADER_BYTES
from ..partition.appends import Duplicate
from ..partition.partition import Group, HostedPartition, check_facts, stored_facts
from ..partition.records import CursorBody, FenceBody, encode_body
from ..partition.state import BrokerState, counts_as_end
from ..settings import BrokerSettings
from ..storage.append_file import Buffer
from ..storage.files import Files
from ..storage.index.interface import ConsumeQueues, Unit, offset_at
from ..storage.index.kinds import mark_incomplete, mark_others_incomplete, open_index
from ..storage.log.commit_log import CommitLog
from ..storage.log.log_reader import BatchReader
from ..storage.log.recovery import RecoveredLog
from ..storage.snapshot import Snapshots
from .carry_over import CarryOver
from .group_commit import Ended, Entry, GroupCommit, RunBlocking
from .holds import FirstOffsets, MessageHolds
from .opening import open_state
from .quick_sync import QuickSync
from .snapshotter import Snapshotter
from .tail_cache import TailCache
from .traffic import Traffic

log = logging.getLogger("keylane.broker")


class IndexDamage:
    """Handles damage of one kind of index."""

    def __init__(
        self, state: BrokerState, files: Files, kind: str, *, run_blocking: RunBlocking
    ) -> None:
        self._state = state
        self._files = files
        self._kind = kind
        self._run_blocking = run_blocking

    async def report(self, error: CorruptIndexError) -> None:
        """Report the damage in health, and mark the index so that the next start rebuilds it."""
        if self._state.until_restart:
            return
        text = f"{error.message}; the next start rebuilds the index"
        log.error("%s", text)
        self._state.problems.append(text)
        self._state.until_restart.add(text)
        try:
            await self._run_blocking(mark_incomplete, self._files, self._kind)
        except StorageError as failed:
            log.warning("cannot mark the index as damaged: %s", failed.message)


HELD_MS_MIN = 60_000
"""The time in milliseconds above which a held partition time is reported in the log."""
OWN_RECORD_BYTES = 4096
"""The room, in bytes, that is required for a fence, a seal or a partition before its record is
made.
"""
DURABLE = "fsync"
"""The durability of an acked record, as answers, receipts and health name it: it is on the disk."""


class Store:
    """A recovered store. It is made by `open` and then used from one event loop."""

    def __init__(
        self,
        *,
        settings: BrokerSettings,
        clock: Clock,
        state: BrokerState,
        log: CommitLog,
        queues: ConsumeQueues,
        recovered: RecoveredLog,
        snapshots: Snapshots,
        position: int,
        run_commit: RunBlocking,
        run_read: RunBlocking,
        run_background: RunBlocking,
        files: Files,
        quick: QuickSync | None,
    ) -> None:
        self.state = state
        self.log = log
        self.recovered = recovered
        self._clock = clock
        self.queues = queues
        self._reader = BatchReader(log, queues)
        self._run_commit = run_commit
        self.run_read = run_read
        self.traffic = Traffic()
        self._cache = TailCache(settings.cache_bytes)
        self.commit = GroupCommit(
            log,
            queues,
            run_blocking=run_commit,
            clock=clock,
            queued_bytes_max=settings.queued_bytes_max,
            commit_bytes_max=settings.commit_bytes_max,
            free_bytes=files.free_bytes,
            durations=self.traffic.commits,
            quick=quick,
            broker_group=settings.group,
        )
        self.snapshotter = Snapshotter(
            state,
            log,
            queues,
            self.commit,
            snapshots,
            position=position,
            snapshot_bytes=settings.snapshot_bytes,
            run_blocking=run_background,
        )
        self.carry_over = CarryOver(
            files,
            state=state,
            log=log,
            commit=self.commit,
            snapshotter=self.snapshotter,
            run_read=run_background,
            run_commit=run_commit,
        )
        self.index_damage = IndexDamage(state, files, settings.index, run_blocking=run_read)
        self.firsts = FirstOffsets(state, save=self.save_progress)
        self.holds = MessageHolds(state, self.commit, self.firsts, clock=clock)
        self.fence_floor = 0
        """Tokens up to and including this one are refused, because they were granted before an
        operator accepted this data folder.
        """
        self._wake: Callable[[int], None] = lambda _partition_id: None

    @classmethod
    def open(
        cls,
        files: Files,
        settings: BrokerSettings,
        *,
        clock: Clock,
        run_commit: RunBlocking,
        run_read: RunBlocking,
        run_background: RunBlocking | None = None,
        quick: QuickSync | None = None,
    ) -> Store:
        """
        Recover the store of a locked data folder. Blocks.

        Raises:
            DataFolderError: a newer broker wrote in this folder.
        """
        queues = open_index(files, settings.index)
        mark_others_incomplete(files, settings.index)
        opened = open_state(files, queues, clock=clock)
        recovered = opened.recovered
        log = CommitLog(
            files, segment_bytes=settings.segment_bytes, bases=recovered.bases, end=recovered.end
        )
        return cls(
            settings=settings,
            clock=clock,
            state=opened.state,
            log=log,
            queues=queues,
            recovered=recovered,
            snapshots=opened.snapshots,
            position=opened.position,
            run_commit=run_commit,
            run_read=run_read,
            run_background=run_background or run_read,
            files=files,
            quick=quick,
        )

    def on_change(self, wake: Callable[[int], None]) -> None:
        """Call `wake(partition_id)` when a partition has new messages, has a newer owner, or is
        sealed.
        """
        self._wake = wake

    def wake(self, partition_id: int) -> None:
        """Answer the pulls that wait for a change of the partition."""
        self._wake(partition_id)

    # ── appends ───────────────────────────────────────────────────────────────────────────────────
    def append(
        self,
        partition_id: int,
        record: memoryview,
        ended: Ended,
        *,
        in_turn: bool = False,
        unpacks: bool = False,
    ) -> tuple[int, bool]:
        """
        Decide on a batch, and queue it.

        Args:
            ended: called once the batch is durable or has failed, but not before this method
            returns.
            in_turn: the caller has waited for room with `commit.turn`.
            unpacks: the caller has checked that a packed batch unpacks; otherwise it is unpacked
                here if it is to be stored.

        Returns:
            Its base offset, and True if it is a duplicate.

        Raises:
            CorruptBatchError, UnpackError, InvalidRequestError, PartitionUnknownError,
            StaleRouteError, SequenceGapError, SequenceReusedError, ProducerFencedError,
            MessageTooLargeError, OverloadedError, BrokerReadOnlyError:
                nothing was stored.
        """
        header = check_batch(record)
        if (length := header.length) != len(record):
            raise CorruptBatchError("bytes after the batch", length=length, size_bytes=len(record))
        unpacked_bytes = check_lengths(record, header)
        if header.partition_id != partition_id:
            raise InvalidRequestError(
                f"a batch of partition {header.partition_id} for partition {partition_id}",
                partition_id=partition_id,
            )
        partition = self.state.partition(partition_id)
        self.commit.check_room(header.length, in_turn=in_turn)
        self.state.touch(partition)
        duplicate = partition.decide_append(header)
        if isinstance(duplicate, Duplicate):
            self.commit.when_flushed(ended)
            return duplicate.base_offset, True
        if unpacked_bytes > (partition.facts.message_bytes_max or MESSAGE_BYTES_MAX):
            partition.check_message_sizes(record, header)
        if header.compression and not unpacks:
            check_unpacks(record, header)
        base_offset = partition.next_offset
        now_ms = self._clock.wall_ns() // 1_000_000
        at_ms = now_ms if base_offset else self.state.first_time_ms(partition, now_ms)
        undo = partition.apply_append(header, base_offset=base_offset, appended_at_ms=at_ms)
        entry = Entry(
            record,
            partition_id=partition_id,
            base_offset=base_offset,
            count=header.count,
            appended_at_ms=partition.appended_at_ms,
            on_durable=partial(self._stored, partition),
            undo=partial(partition.undo_append, undo),
        )
        self.commit.add(entry, ended)
        return base_offset, False

    def _stored(self, partition: HostedPartition, entry: Entry) -> None:
        next_offset = entry.base_offset + entry.count
        partition.readable_offset = next_offset
        self.traffic.note_stored(
            partition.facts.subject, messages=entry.count, size_bytes=len(entry.record)
        )
        self._cache.add(
            entry.partition_id,
            entry.base_offset,
            next_offset,
            header=entry.stamped,
            body=memoryview(entry.record)[HEADER_BYTES:],
        )
        self._wake(entry.partition_id)

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    def host(self, facts: HostPartition) -> tuple[HostedPartition, asyncio.Future[None]]:
        """
        Host a partition. A repeated call with the same facts changes nothing.

        Raises:
            InvalidRequestError: the facts are impossible.
            InvalidRequestError: the partition is hosted with other facts, or was dropped.
            BrokerReadOnlyError, OverloadedError
        """
        facts = stored_facts(facts)
        check_facts(facts)
        partition_id: int = facts.partition.partition_id
        known = self.state.partitions.get(partition_id)
        if known is not None:
            known.check_same_facts(facts)
            return known, self.commit.flushed()
        self.state.check_no_orphan(partition_id)
        self.state.check_not_dropped(partition_id)
        # A partition is not hosted where messages are refused. It is hosted where they queue:
        # otherwise a resize would wait for as long as producers are fast.
        self.commit.check_takes_messages()
        self.commit.check_room(OWN_RECORD_BYTES, own=True)
        partition = self.state.host(facts)
        self.state.hosting.add(partition_id)

        def on_durable(_entry: Entry) -> None:
            self.state.hosting.discard(partition_id)
            self.state.partitions.version += 1

        entry = Entry(
            encode_body(partition_id, facts),
            partition_id=partition_id,
            on_durable=on_durable,
            undo=partial(self.state.unhost, partition_id),
        )
        return partition, self.commit.submit(entry)

    def begin_times(self, partition: HostedPartition, from_ms: int) -> asyncio.Future[None]:
        """
        Let no message of an unused partition have a time before `from_ms`. A repeated call changes
        nothing.

        The partition continues others, which ended at that time by the calendars of other brokers
        (milliseconds since 1970). A time that is too far ahead of this broker's calendar is
        ignored, and the log says so.

        Raises:
            OverloadedError, BrokerReadOnlyError
        """
        before, now_ms = partition.appended_at_ms, self._clock.wall_ms()
        if from_ms <= before:
            return self.commit.flushed()
        ahead_ms = from_ms - now_ms
        number, subject = partition.partition_id, partition.facts.subject
        if not counts_as_end(from_ms, now_ms):
            log.warning(
                "partition %d of %s starts with this broker's clock, which is %d s behind the "
                "clock of the partition it continues; reads by time may skip messages in between",
                number,
                subject,
                ahead_ms // 1_000,
            )
            return self.commit.flushed()
        self.commit.check_room(OWN_RECORD_BYTES, own=True)
        if ahead_ms > HELD_MS_MIN:
            log.warning(
                "messages of partition %d of %s have one time for %d s, that of what it continues: "
                "this broker's calendar is behind; `keylane cluster check` compares the calendars",
                number,
                subject,
                ahead_ms // 1_000,
            )
        self.state.touch(partition)
        partition.appended_at_ms = from_ms
        entry = Entry(
            encode_body(number, replace(partition.facts, times_from_ms=from_ms)),
            partition_id=number,
            undo=partial(setattr, partition, "appended_at_ms", before),
        )
        return self.commit.submit(entry)

    def seal(self, partition_id: int) -> tuple[HostedPartition, asyncio.Future[None]]:
        """
        Seal a partition: it takes no more appends, and its end is fixed once the seal is durable.

        Raises:
            PartitionUnknownError, CorruptLogError, OverloadedError, BrokerReadOnlyError
        """
        partition = self.state.partition(partition_id)
        if partition.sealed:
            return partition, self.commit.flushed()
        self.check_seal(partition)
        self.state.touch(partition)
        partition.sealed = True

        def on_durable(_entry: Entry) -> None:
            partition.ended = True
            self._wake(partition_id)

        entry = Entry(
            encode_body(partition_id, None),
            partition_id=partition_id,
            base_offset=partition.next_offset,
            on_durable=on_durable,
            undo=partial(setattr, partition, "sealed", False),
        )
        return partition, self.commit.submit(entry)

    def check_seal(self, partition: HostedPartition) -> None:
        """Raise CorruptLogError, OverloadedError or BrokerReadOnlyError if the partition cannot be
        sealed now.
        """
        partition.check_end_known()
        # `own` is set because a disk that is too full for messages has room for a seal, which moves
        # them to another broker.
        self.commit.check_room(OWN_RECORD_BYTES, own=True)

    # ── consumer groups ───────────────────────────────────────────────────────────────────────────
    def raise_fence(
        self, partition: HostedPartition, group: Group, *, token: int, session: str
    ) -> asyncio.Future[None]:
        """Raise a group's fence after `decide_acquire`, and add a new group to the partition."""
        self.commit.check_room(OWN_RECORD_BYTES, own=True)
        self.state.touch(partition)
        is_new = group.name not in partition.groups
        if is_new:
            self.firsts.grouped.add(partition.partition_id)
        body = FenceBody(group.name, token, session)
        partition.groups[group.name] = group
        undo: Callable[[], object] = partition.apply_fence(body)
        if is_new:
            undo = partial(partition.groups.pop, group.name)
        self._wake(partition.partition_id)

        def on_durable(_entry: Entry) -> None:
            self.traffic.fences += 1
            group.durable_fence = max(group.durable_fence, token)
            group.kept = True

        entry = Entry(
            encode_body(partition.partition_id, body),
            partition_id=partition.partition_id,
            on_durable=on_durable,
            undo=undo,
        )
        return self.commit.submit(entry)

    def save_progress(self, partition: HostedPartition, group: Group) -> asyncio.Future[None]:
        """Save like `save_progress_then`, and return a future that is resolved when the progress is
        durable.
        """
        durable, _ = self.commit.waited_for(partial(self.save_progress_then, partition, group))
        return durable

    def save_progress_then(self, partition: HostedPartition, group: Group, ended: Ended) -> None:
        """Make a group's progress durable with the next commit, which calls `ended`."""
        self.state.touch(partition)
        self.commit.add_late(
            (partition.partition_id, group.name),
            partial(self._late_progress, partition, group),
            ended,
        )

    def _late_progress(self, partition: HostedPartition, group: Group) -> Entry:
        known = self.state.partitions.get(partition.partition_id) is partition
        if not known or partition.groups.get(group.name) is not group:
            return Entry(b"")  # it was dropped or forgotten meanwhile
        return self._progress(partition, group)

    def _progress(
        self,
        partition: HostedPartition,
        group: Group,
        *,
        undo: Callable[[], object] | None = None,
    ) -> Entry:
        """Return a record of a group's present progress."""
        body = group.cursor_body()
        return Entry(
            encode_body(partition.partition_id, body),
            partition_id=partition.partition_id,
            base_offset=body.cursor,
            on_durable=partial(self._progressed, partition, group, body, group.version),
            undo=undo,
        )

    def _progressed(
        self,
        partition: HostedPartition,
        group: Group,
        body: CursorBody,
        version: int,
        _entry: Entry,
    ) -> None:
        group.saved(body, version)
        if partition.ended and group.lock.shared and group.drained(partition.next_offset):
            # Pulls of other sessions are answered with the end.
            self._wake(partition.partition_id)

    def save_now(
        self, partition: HostedPartition, group: Group, *, undo: Callable[[], object]
    ) -> asyncio.Future[None]:
        """Write a group's present progress; `undo` is called if the write fails."""
        self.state.touch(partition)
        return self.commit.submit(self._progress(partition, group, undo=undo))

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    async def read(
        self, partition: HostedPartition, offset: int, *, bytes_max: int
    ) -> tuple[bytes, int]:
        """
        Read durable batches, beginning with the batch that contains `offset`. Return them and the
        offset after their last message.

        Raises:
            CorruptLogError: the first batch is damaged on the disk.
            OffsetOutOfRangeError: retention has removed the offset meanwhile.
        """
        pieces, upto = self.cached(partition, offset, bytes_max=bytes_max)
        if pieces:
            return b"".join(pieces), upto
        end = partition.readable_end(offset)
        try:
            data, upto = await self.run_read(
                self._reader.read, partition.partition_id, offset, end, bytes_max
            )
        except StorageError as error:
            if offset >= partition.first_offset:
                if isinstance(error, CorruptIndexError):
                    await self.index_damage.report(error)
                else:
                    self.state.met_damage(partition, error)
                raise
            # Retention has removed the offset during the read.
            raise OffsetOutOfRangeError(
                offset=offset,
                first_offset=partition.first_offset,
                next_offset=partition.readable_offset,
            ) from None
        return data, upto

    def cached(
        self, partition: HostedPartition, offset: int, *, bytes_max: int
    ) -> tuple[list[Buffer], int]:
        """Read like `read`, but only from memory, and return the bytes in pieces. There are none if
        the first batch is not in memory.
        """
        return self._cache.read(partition.partition_id, offset, bytes_max=bytes_max)

    async def offset_at(
        self, partition: HostedPartition, at_ms: int, bound: TimeBound
    ) -> int | None:
        """
        Return the offset of a message by the time at which it was stored.

        LOWER finds the first message at this time or later, UPPER the last message at this time or
        earlier. None means that there is no such message. Messages that are being written are
        awaited: they already have their times, so a range that ends at a time contains all of them,
        or the message with which it begins.

        Raises:
            CorruptLogError: the index is damaged there.
        """
        if partition.next_offset > partition.readable_offset:
            with contextlib.suppress(KeylaneError):  # in that case they are not stored
                await self.commit.waited_for(self.commit.when_flushed)[0]
        first, end = partition.first_offset, partition.readable_offset
        number = partition.partition_id
        try:
            unit = await self.run_read(self.queues.by_time, number, at_ms, bound)
        except CorruptIndexError as error:
            await self.index_damage.report(error)
            raise
        offset = offset_at(unit, bound)
        if bound is TimeBound.UPPER and offset is not None and offset >= end:
            offset = end - 1  # the index has newer batches
        if bound is TimeBound.LOWER and offset is not None and offset < first < end:
            offset = first  # the index still has the batch; times never fall
        return offset if offset is not None and first <= offset < end else None

    async def head(self, partition: HostedPartition) -> Unit | None:
        """
        Return the batch with the first stored message, or None if there is no message.

        Raises:
            CorruptLogError: the index is damaged there.
        """
        first, end = partition.first_offset, partition.readable_offset
        if first == end:
            return None
        number = partition.partition_id
        try:
            units = await self.run_read(
                lambda: self.queues.find(number, first, end=end, bytes_max=1)
            )
        except CorruptIndexError as error:
            await self.index_damage.report(error)
            raise
        return units[0] if units else None

    async def close(self) -> None:
        """
        Write queued records and a snapshot at the end of the log, and close the files.

        No method that decides may be called after this. If the snapshot fails, the next start
        reads more of the log.
        """
        await self.commit.close()
        await self.snapshotter.ended()
        if not self.commit.failed:
            await self.snapshotter.write(clean=True)
        await self._run_commit(self._close)

    def _close(self) -> None:
        self.queues.close()
        self.log.close()
