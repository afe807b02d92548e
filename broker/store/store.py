"""The broker's store: its state, log, index and cache. It runs on one event loop.

The store decides appends, new partitions, seals and fences, and makes them durable; `service.py`
decides acks. A method that decides something does so before it returns. It either returns a future
that is resolved when the record is durable, or takes a callback for the outcome. Calls are
therefore decided in the order in which they are made.

If the index is found to be damaged while the broker serves, the health report says so, and the
index is rebuilt at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from ...protocol.batch import check_batch, check_lengths, check_unpacks
from ...protocol.clock import Clock
from ...protocol.control import HostPartition, TimeBound
from ...protocol.errors import (
    BusyError,
    CorruptBatchError,
    CorruptIndexError,
    InvalidRequestError,
    KeylaneError,
    OffsetOutOfRangeError,
    Reason,
    StorageError,
)
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.record import HEADER_BYTES
from ..partition.appends import Duplicate
from ..partition.partition import Group, HostedPartition, strip_volatile_facts, validate_facts
from ..partition.pull_lock import promise_left_ms
from ..partition.records import CursorBody, FenceBody, encode_body
from ..partition.state import BrokerState, is_plausible_end
from ..settings import BrokerSettings
from ..storage.append_file import Buffer
from ..storage.files import Files
from ..storage.index.interface import FIND_UNITS_MAX, ConsumeQueues, Unit, offset_at
from ..storage.index.kinds import mark_incomplete, mark_others_incomplete, open_index
from ..storage.log.commit_log import CommitLog
from ..storage.log.log_reader import BatchReader
from ..storage.log.recovery import RecoveredLog
from ..storage.snapshot import Snapshots
from .agenda import Agenda, EmptyAgenda
from .carry_over import CarryOver
from .group_commit import DoneCallback, Entry, GroupCommit, RunBlocking
from .holds import FirstOffsets, MessageHolds
from .opening import Recovery, open_state
from .quick_sync import QuickSync
from .rates import Rates
from .snapshotter import Snapshotter
from .tail_cache import TailCache
from .traffic import Traffic

log = logging.getLogger("keylane.broker")


CLOCK_LAG_WARN_MS = 60_000
"""How far this broker's clock may be behind a partition's first time before a warning is logged, in
milliseconds.
"""
CONTROL_RECORD_BYTES = 4096
"""The room that the commit queue must have before a fence, a seal or a new partition is decided, in
bytes.
"""
TAIL_STEP_FACTOR = 4
"""How many times as many messages as before each step of `find_tail` goes back."""
SAMPLED_MAX = 8
"""The number of batches whose sizes tell about how large a partition is."""
DURABLE = "fsync"
"""The name used in replies, receipts and health reports for the durability of an acked record: it
is on the disk.
"""


class Store:
    """A recovered store. It is created by `open`, and then used by one event loop."""

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
        agenda: Agenda,
        quick: QuickSync | None,
    ) -> None:
        self.state = state
        self.log = log
        self.recovered = recovered
        self._clock = clock
        self._opened_ms = clock.boot_ms()
        self.queues = queues
        self._reader = BatchReader(log, queues)
        self._run_commit = run_commit
        self.run_read = run_read
        self.traffic = Traffic()
        self.rates = Rates(clock.boot_ms())
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
            agenda,
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
            agenda=agenda,
            run_read=run_background,
            run_commit=run_commit,
        )
        self.agenda = agenda
        self._files = files
        self._index_kind = settings.index
        self.first_offsets = FirstOffsets(state, save=self.save_progress)
        self.holds = MessageHolds(state, self.commit, self.first_offsets, clock=clock)
        self.fence_floor = 0
        """Tokens up to this one are refused, because they were granted before an operator accepted
        this data folder.
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
        agenda: Agenda | None = None,
        begun: Recovery | None = None,
    ) -> Store:
        """
        Recover the store of a locked data folder. Blocks.

        Args:
            agenda: the scheduled messages, which are recovered as well; None if there are none.
            begun: a recovery with this agenda that has read a part of the log.

        Raises:
            DataFolderError: a newer broker has written to this folder.
        """
        queues = open_index(files, settings.index) if begun is None else begun.queues
        mark_others_incomplete(files, settings.index)
        agenda = agenda or EmptyAgenda()
        opened_state = open_state(files, queues, agenda, clock=clock, begun=begun)
        recovered = opened_state.recovered
        log = CommitLog(
            files, segment_bytes=settings.segment_bytes, bases=recovered.bases, end=recovered.end
        )
        return cls(
            settings=settings,
            clock=clock,
            state=opened_state.state,
            log=log,
            queues=queues,
            recovered=recovered,
            snapshots=opened_state.snapshots,
            position=opened_state.position,
            run_commit=run_commit,
            run_read=run_read,
            run_background=run_background or run_read,
            files=files,
            agenda=agenda,
            quick=quick,
        )

    def on_change(self, wake: Callable[[int], None]) -> None:
        """Set `wake`, which is called with the partition id whenever a partition has new messages
        or a newer owner, or is sealed.
        """
        self._wake = wake

    def wake(self, partition_id: int) -> None:
        """Wake the pulls that wait for a change to the partition."""
        self._wake(partition_id)

    # ── appends ───────────────────────────────────────────────────────────────────────────────────
    def append(
        self,
        partition_id: int,
        record: memoryview,
        on_done: DoneCallback,
        *,
        is_admitted: bool = False,
        unpacks: bool = False,
    ) -> tuple[int, bool]:
        """
        Decide on a batch, and queue it.

        Args:
            on_done: called once the batch is durable or has failed, but not before this method
                returns.
            is_admitted: True if the caller has waited for room with `commit.admission`.
            unpacks: True if the caller has verified that a compressed batch can be decompressed.
                Otherwise this method verifies it.

        Returns:
            The batch's base offset, and True if it is a duplicate.

        Raises:
            CorruptBatchError, UnpackError, InvalidRequestError, PartitionUnknownError,
            StaleRouteError, SequenceGapError, SequenceReusedError, ProducerFencedError,
            MessageTooLargeError, OverloadedError, BrokerReadOnlyError: nothing was stored.
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
        self.commit.check_room(header.length, is_admitted=is_admitted)
        self.state.mark_dirty(partition)
        duplicate = partition.decide_append(header)
        if isinstance(duplicate, Duplicate):
            self.commit.call_when_flushed(on_done)
            return duplicate.base_offset, True
        if unpacked_bytes > (partition.facts.message_bytes_max or MESSAGE_BYTES_MAX):
            partition.check_message_sizes(record, header)
        if header.compression and not unpacks:
            check_unpacks(record, header)
        base_offset = partition.next_offset
        now_ms = self._clock.wall_ns() // 1_000_000
        appended_at_ms = now_ms if base_offset else self.state.first_time_ms(partition, now_ms)
        undo = partition.apply_append(
            header, base_offset=base_offset, appended_at_ms=appended_at_ms
        )
        entry = Entry(
            record,
            partition_id=partition_id,
            base_offset=base_offset,
            count=header.count,
            appended_at_ms=partition.appended_at_ms,
            on_durable=partial(self._on_stored, partition),
            undo=partial(partition.undo_append, undo),
        )
        self.commit.add(entry, on_done)
        return base_offset, False

    def _on_stored(self, partition: HostedPartition, entry: Entry) -> None:
        next_offset = entry.base_offset + entry.count
        partition.readable_offset = next_offset
        self.traffic.count_stored(
            partition.facts.subject, messages=entry.count, size_bytes=len(entry.record)
        )
        self.rates.count(
            entry.partition_id,
            messages=entry.count,
            size_bytes=len(entry.record),
            now_ms=self._clock.boot_ms(),
        )
        self._cache.add(
            entry.partition_id,
            entry.base_offset,
            next_offset,
            header=entry.stamped_header,
            body=memoryview(entry.record)[HEADER_BYTES:],
        )
        self._wake(entry.partition_id)

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    def host(self, facts: HostPartition) -> tuple[HostedPartition, asyncio.Future[None]]:
        """
        Host a partition. Repeating the call with the same facts has no effect.

        Raises:
            InvalidRequestError: the facts are invalid, or the partition is hosted with other facts
                or was dropped.
            BrokerReadOnlyError, OverloadedError: nothing was changed.
        """
        facts = strip_volatile_facts(facts)
        validate_facts(facts)
        partition_id: int = facts.partition.partition_id
        known_partition = self.state.partitions.get(partition_id)
        if known_partition is not None:
            known_partition.check_same_facts(facts)
            return known_partition, self.commit.wait_flushed()
        self.state.check_no_orphan(partition_id)
        self.state.check_not_dropped(partition_id)
        # Do not host a partition while messages are refused. But host it while they queue:
        # otherwise a resize would wait as long as producers are fast.
        self.commit.check_accepts_messages()
        self.commit.check_room(CONTROL_RECORD_BYTES, is_control=True)
        partition = self.state.host(facts)
        self.state.hosting.add(partition_id)

        def on_durable(_entry: Entry) -> None:
            self.state.hosting.discard(partition_id)
            self.state.partitions.version += 1

        entry = Entry(
            encode_body(partition_id, facts),
            partition_id=partition_id,
            on_durable=on_durable,
            undo=partial(self.state.undo_host, partition_id),
        )
        return partition, self.commit.submit(entry)

    def begin_times(self, partition: HostedPartition, from_ms: int) -> asyncio.Future[None]:
        """
        Make the times of an unused partition's messages begin at `from_ms` or later. Repeating the
        call has no effect.

        The partition continues others, which ended at `from_ms` (milliseconds since 1970) by other
        brokers' clocks. A time that is too far ahead of this broker's clock is ignored, with a
        warning in the log.

        Raises:
            OverloadedError, BrokerReadOnlyError: nothing was changed.
        """
        previous, now_ms = partition.appended_at_ms, self._clock.wall_ms()
        if from_ms <= previous:
            return self.commit.wait_flushed()
        ahead_ms = from_ms - now_ms
        partition_id, subject = partition.partition_id, partition.facts.subject
        if not is_plausible_end(from_ms, now_ms):
            log.warning(
                "partition %d of %s starts with this broker's clock, which is %d s behind the "
                "clock of the partition it continues; reads by time may skip messages in between",
                partition_id,
                subject,
                ahead_ms // 1_000,
            )
            return self.commit.wait_flushed()
        self.commit.check_room(CONTROL_RECORD_BYTES, is_control=True)
        if ahead_ms > CLOCK_LAG_WARN_MS:
            log.warning(
                "messages of partition %d of %s get the same time for %d s, that of the end of the "
                "partition it continues: this broker's clock is behind; `keylane cluster check` "
                "compares clocks",
                partition_id,
                subject,
                ahead_ms // 1_000,
            )
        self.state.mark_dirty(partition)
        partition.appended_at_ms = from_ms
        entry = Entry(
            encode_body(partition_id, replace(partition.facts, times_from_ms=from_ms)),
            partition_id=partition_id,
            undo=partial(setattr, partition, "appended_at_ms", previous),
        )
        return self.commit.submit(entry)

    def seal(self, partition_id: int) -> tuple[HostedPartition, asyncio.Future[None]]:
        """
        Seal a partition: it no longer accepts appends, and its end is fixed once the seal is
        durable.

        Raises:
            PartitionUnknownError, CorruptLogError, OverloadedError, BrokerReadOnlyError: nothing
            was changed.
        """
        partition = self.state.partition(partition_id)
        if partition.sealed:
            return partition, self.commit.wait_flushed()
        self.check_seal(partition)
        self.state.mark_dirty(partition)
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
        sealed at present.
        """
        partition.check_end_known()
        # Set `is_control`: a disk that is too full for messages still has room for a seal, which
        # moves them to another broker.
        self.commit.check_room(CONTROL_RECORD_BYTES, is_control=True)

    # ── consumer groups ───────────────────────────────────────────────────────────────────────────
    def raise_fence(
        self, partition: HostedPartition, group: Group, *, token: int, session: str
    ) -> asyncio.Future[None]:
        """Raise a group's fence after `decide_acquire`, and register the group if it is new."""
        self.commit.check_room(CONTROL_RECORD_BYTES, is_control=True)
        self.state.mark_dirty(partition)
        is_new = group.name not in partition.groups
        if is_new:
            self.first_offsets.changed_ids.add(partition.partition_id)
        body = FenceBody(group.name, token, session)
        partition.groups[group.name] = group
        undo: Callable[[], object] = partition.apply_fence(body)
        if is_new:
            undo = partial(partition.groups.pop, group.name)
        self._wake(partition.partition_id)

        def on_durable(_entry: Entry) -> None:
            self.traffic.fences += 1
            group.durable_fence = max(group.durable_fence, token)
            group.is_durable = True

        entry = Entry(
            encode_body(partition.partition_id, body),
            partition_id=partition.partition_id,
            on_durable=on_durable,
            undo=undo,
        )
        return self.commit.submit(entry)

    def promise_left_ms(self, group: Group) -> int:
        """Return how long a promise keeps higher tokens out of a group, in milliseconds."""
        return promise_left_ms(group.lock, now_ms=self._clock.boot_ms(), opened_ms=self._opened_ms)

    def check_not_promised(self, partition_id: int, group: Group, token: int) -> None:
        """End the promise to a group's owner. Raises BusyError while it lasts."""
        if left_ms := self.promise_left_ms(group):
            group.lock.waiting_token = max(group.lock.waiting_token, token)
            raise BusyError(Reason.PROMISED, partition_id=partition_id, left_ms=left_ms)

    def record_promise(
        self, partition: HostedPartition, group: Group, promise_ms: int, on_done: DoneCallback
    ) -> None:
        """Make a promise to a group's owner durable, then call `on_done`. Raises
        BrokerReadOnlyError if that is impossible now.
        """
        self.commit.check_room(0, is_control=True)
        lock = group.lock
        self.state.mark_dirty(partition)
        body = FenceBody(group.name, lock.fence, lock.session, promise_ms)
        data = encode_body(partition.partition_id, body)
        self.commit.add(Entry(data, partition_id=partition.partition_id), on_done)

    def save_progress(self, partition: HostedPartition, group: Group) -> asyncio.Future[None]:
        """Save the progress like `save_progress_then`. Return a future that is resolved when it is
        durable.
        """
        durable, _ = self.commit.call_with_future(
            partial(self.save_progress_then, partition, group)
        )
        return durable

    def save_progress_then(
        self, partition: HostedPartition, group: Group, on_done: DoneCallback
    ) -> None:
        """Make a group's progress durable with the next commit, then call `on_done`."""
        self.state.mark_dirty(partition)
        self.commit.add_deferred(
            (partition.partition_id, group.name),
            partial(self._deferred_progress, partition, group),
            on_done,
        )

    def _deferred_progress(self, partition: HostedPartition, group: Group) -> Entry:
        is_hosted = self.state.partitions.get(partition.partition_id) is partition
        if not is_hosted or partition.groups.get(group.name) is not group:
            return Entry(b"")  # dropped or forgotten meanwhile
        return self._progress_entry(partition, group)

    def _progress_entry(
        self,
        partition: HostedPartition,
        group: Group,
        *,
        undo: Callable[[], object] | None = None,
    ) -> Entry:
        """Return a record that contains a group's current progress."""
        body = group.cursor_body()
        return Entry(
            encode_body(partition.partition_id, body),
            partition_id=partition.partition_id,
            base_offset=body.cursor,
            on_durable=partial(self._on_progress_saved, partition, group, body, group.version),
            undo=undo,
        )

    def _on_progress_saved(
        self,
        partition: HostedPartition,
        group: Group,
        body: CursorBody,
        version: int,
        _entry: Entry,
    ) -> None:
        group.record_saved(body, version)
        if partition.ended and group.lock.is_shared and group.has_drained(partition.next_offset):
            # Pulls of other sessions are answered with the end of the partition.
            self._wake(partition.partition_id)

    def save_now(
        self, partition: HostedPartition, group: Group, *, undo: Callable[[], object]
    ) -> asyncio.Future[None]:
        """Write a group's current progress immediately. `undo` is called if the write fails."""
        self.state.mark_dirty(partition)
        return self.commit.submit(self._progress_entry(partition, group, undo=undo))

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    async def report_index_damage(self, error: CorruptIndexError) -> None:
        """Report the damage in the health report, and mark the index for a rebuild at the next
        start.
        """
        if self.state.repaired_by_restart:
            return
        text = f"{error.message}; the next start rebuilds the index"
        log.error("%s", text)
        self.state.problems.append(text)
        self.state.repaired_by_restart.add(text)
        try:
            await self.run_read(mark_incomplete, self._files, self._index_kind)
        except StorageError as failure:
            log.warning("cannot mark the index as damaged: %s", failure.message)

    async def read(
        self, partition: HostedPartition, offset: int, *, bytes_max: int
    ) -> tuple[bytes, int]:
        """
        Read durable batches, beginning with the one that contains `offset`. Return them, and the
        offset that follows their last message.

        Raises:
            CorruptLogError: the first batch is damaged.
            OffsetOutOfRangeError: retention has removed the offset in the meantime.
        """
        pieces, next_offset = self.read_cached(partition, offset, bytes_max=bytes_max)
        if pieces:
            return b"".join(pieces), next_offset
        end = partition.readable_end(offset)
        try:
            data, next_offset = await self.run_read(
                self._reader.read, partition.partition_id, offset, end, bytes_max
            )
        except StorageError as error:
            if offset >= partition.first_offset:
                if isinstance(error, CorruptIndexError):
                    await self.report_index_damage(error)
                else:
                    self.state.record_damage(partition, error)
                raise
            # Retention has removed the offset during the read.
            raise OffsetOutOfRangeError(
                offset=offset,
                first_offset=partition.first_offset,
                next_offset=partition.readable_offset,
            ) from None
        return data, next_offset

    def read_cached(
        self, partition: HostedPartition, offset: int, *, bytes_max: int
    ) -> tuple[list[Buffer], int]:
        """Read like `read`, but from memory only. The bytes are returned in pieces. There are none
        if the first batch is not cached.
        """
        return self._cache.read(partition.partition_id, offset, bytes_max=bytes_max)

    async def find_offset_at(
        self, partition: HostedPartition, at_ms: int, bound: TimeBound
    ) -> int | None:
        """
        Find a message by the time at which it was stored, and return its offset.

        LOWER finds the first message that was stored at `at_ms` or later, and UPPER finds the last
        one that was stored at `at_ms` or earlier. Returns None if there is no such message.
        Messages that are being written already have their times, so they are awaited.

        Raises:
            CorruptLogError: the index is damaged at this place.
        """
        if partition.next_offset > partition.readable_offset:
            with contextlib.suppress(KeylaneError):  # then they are not stored
                await self.commit.call_with_future(self.commit.call_when_flushed)[0]
        first, end = partition.first_offset, partition.readable_offset
        partition_id = partition.partition_id
        try:
            unit = await self.run_read(self.queues.find_by_time, partition_id, at_ms, bound)
        except CorruptIndexError as error:
            await self.report_index_damage(error)
            raise
        offset = offset_at(unit, bound)
        if bound is TimeBound.UPPER and offset is not None and offset >= end:
            offset = end - 1  # the index already has newer batches
        if bound is TimeBound.LOWER and offset is not None and offset < first < end:
            offset = first  # the index still has a removed batch, and times never decrease
        return offset if offset is not None and first <= offset < end else None

    async def first_unit(self, partition: HostedPartition) -> Unit | None:
        """
        Return the unit of the first stored batch, or None if there are no messages.

        Raises:
            CorruptLogError: the index is damaged at this place.
        """
        units = await self._units_at(partition, [partition.first_offset])
        return units[0] if units else None

    async def stored_bytes(self, partition: HostedPartition) -> int:
        """
        Return about how many bytes of the log a partition's messages take, from the sizes of
        SAMPLED_MAX batches that are spread evenly.

        Raises:
            CorruptLogError: the index is damaged at such a place.
        """
        first, stored = partition.first_offset, partition.readable_offset - partition.first_offset
        offsets = sorted({first + stored * n // SAMPLED_MAX for n in range(SAMPLED_MAX)})
        batches = {unit.position: unit for unit in await self._units_at(partition, offsets)}
        messages = sum(unit.message_count for unit in batches.values())
        return sum(unit.length for unit in batches.values()) * stored // max(messages, 1)

    async def _units_at(self, partition: HostedPartition, offsets: Sequence[int]) -> list[Unit]:
        """Return the units of the batches with these offsets; none if there are no messages. Raises
        CorruptLogError.
        """
        partition_id, end = partition.partition_id, partition.readable_offset
        if partition.first_offset == end:
            return []

        def find() -> list[Unit]:
            return [
                unit
                for offset in offsets
                for unit in self.queues.find(partition_id, offset, end=end, bytes_max=1)[:1]
            ]

        try:
            units: list[Unit] = await self.run_read(find)
        except CorruptIndexError as error:
            await self.report_index_damage(error)
            raise
        return units

    async def find_tail(self, partition: HostedPartition, *, bytes_max: int) -> int:
        """
        Return the offset from which on the last batches are read: at least one, and roughly as many
        as fit into `bytes_max`.

        Raises:
            CorruptLogError: the index is damaged at this place.
        """
        first, end = partition.first_offset, partition.readable_offset
        try:
            tail: int = await self.run_read(
                self._find_tail, partition.partition_id, first, end, bytes_max
            )
        except CorruptIndexError as error:
            await self.report_index_damage(error)
            raise
        return tail

    def _find_tail(self, partition_id: int, first: int, end: int, bytes_max: int) -> int:
        """See `find_tail`. Blocks."""
        tail = start = end
        while start > first:
            start = max(first, end - TAIL_STEP_FACTOR * (end - start) - 1)
            units = self.queues.find(partition_id, start, end=end, bytes_max=bytes_max)
            if not units or units[-1].next_offset < end:
                break  # they do not fit
            start = min(start, units[0].base_offset)
            tail = max(first, start)
            size_bytes = sum(unit.length for unit in units)
            is_large = TAIL_STEP_FACTOR * size_bytes > bytes_max
            if is_large or TAIL_STEP_FACTOR * len(units) > FIND_UNITS_MAX:
                break
        return tail

    async def close(self) -> None:
        """
        Write queued records and a snapshot at the end of the log, then close the files.

        Nothing may be decided after this call. If the snapshot fails, the next start replays more
        of the log.
        """
        await self.commit.close()
        await self.snapshotter.wait()
        if not self.commit.has_failed:
            await self.snapshotter.write(clean=True)
        await self._run_commit(self._close)

    def _close(self) -> None:
        self.queues.close()
        self.log.close()
