"""The retention loop: reads disk usage and segment ages, lets `policy.py` decide, and removes
segments. Does disk I/O.

    ages, disk usage ─▶ policy.py ─▶ first position that is still needed
      ─▶ partitions described in these segments are rewritten ─▶ first offsets are raised
      ─▶ segments are removed ─▶ the index forgets them ─▶ a snapshot

`docs/ARCHITECTURE.md` explains each step and its reason.

Invariants
    First offsets are raised before segments are removed, so a read at a removed offset is answered
    with the first offset. They are raised only when all records that must precede the removal are
    durable. Messages are kept until the metaserver has sent their partition's groups, unless the
    subject's retention is TIME; so rows of a hidden subject are kept until it is published.
    Messages that a job holds are kept, regardless of the subject's retention. Segments are removed
    only if a metaserver has accepted a report of this opening and does not refuse the folder. If
    the clock
    jumps forward, nothing becomes old for a day: `../wall_clock.py`. The index forgets last. If the
    broker crashes before that, the next start corrects the index. After partitions were dropped,
    the oldest segments are removed at any age if they have no message of a hosted partition. The
    event loop is never occupied for long; blocking work is done in slices between commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import islice, pairwise

from ...protocol.clock import Clock
from ...protocol.control import Retention
from ...protocol.errors import (
    BrokerReadOnlyError,
    CorruptIndexError,
    DataFolderError,
    KeylaneError,
    StorageError,
)
from ...protocol.limits import GROUPLESS_PARTITIONS_MAX
from ...protocol.log_filter import LogFilter
from ...protocol.record import Kind
from ...protocol.text import counted
from ..folder_ownership import FolderOwnership
from ..partition.partition import HostedPartition
from ..settings import BrokerSettings
from ..storage.files import Files
from ..storage.log.log_reader import read_segment_headers
from ..storage.reserve import ensure_reserve, release_reserve
from ..store.group_commit import RunBlocking
from ..store.store import Store
from ..wall_clock import WallClock
from .policy import (
    DiskUse,
    Limits,
    SealedSegment,
    allowed_position,
    earliest_removal_ms,
    must_begin_segment,
    reason_to_refuse,
    wanted_position,
)

log = logging.getLogger("keylane.broker")

_REFUSED, _REMOVED_EARLY = "full", "early"
"""The keys under which `LogFilter` counts refused messages and early removals."""
CHECK_MS = 10_000
"""The interval between two checks, in milliseconds, as in RocketMQ."""
SLICE = 500
"""The number of partitions that are examined between two pauses."""
NOT_ACCEPTED = "nothing is removed until a metaserver accepts this broker's report"
"""The problem that is reported until then. The folder may be an older copy that lacks consumer
groups.
"""
NO_DISK = DiskUse(free_bytes=0, total_bytes=0)
"""The disk usage that is assumed while it is unknown or irrelevant: nothing is used."""
HEADERS_MAX = 10_000
"""The maximum number of a segment's records that one check reads to find messages. The next check
continues after them.
"""
READ_BYTES_MAX = 16 << 20
"""The maximum size, in bytes, of a sealed segment that is read to find the time of its newest
message.
"""


class _MessageTimes:
    """The times of a segment's messages, up to the position to which it has been read."""

    __slots__ = ("first_ms", "is_complete", "newest_ms", "next_position")

    def __init__(self, base: int) -> None:
        self.next_position = base
        """The position of the first record that has not been read."""
        self.first_ms: int | None = None
        self.newest_ms = 0
        self.is_complete = False
        """True if the whole segment was read after it was sealed."""


class RetentionLoop:
    """The retention loop. `problem` is the reason why segments are kept that should be removed."""

    def __init__(
        self,
        store: Store,
        files: Files,
        settings: BrokerSettings,
        *,
        clock: Clock,
        run_commit: RunBlocking,
        run_read: RunBlocking,
        folder_ownership: FolderOwnership | None = None,
        calendar: WallClock | None = None,
    ) -> None:
        """
        Args:
            folder_ownership: says whether a metaserver has accepted this broker's report, without
                which nothing is removed. None if there is no metaserver.
            calendar: the wall clock; may be shared.
        """
        self._store = store
        self._folder_ownership = folder_ownership
        self._queues = store.queues
        self._files = files
        self._first_offsets = store.first_offsets
        self._forgotten_position = store.log.first_position
        """The log position below which the index has already forgotten all batches."""
        self._wall_clock = calendar or WallClock(clock)
        self._clock = clock
        self._log_filter = LogFilter()
        self.apply_settings(settings)
        self._dropped_version = -1 if store.state.dropped else 0
        """The version of the dropped partitions for which `_vacant_end` was computed."""
        self._vacant_end = 0
        """The position below which there is no message of a hosted partition."""
        self._run_commit = run_commit
        self._run_read = run_read
        self._refusal = ""
        self._disk_use = NO_DISK
        """The disk usage found by the last check."""
        self._times: dict[int, _MessageTimes] = {}
        """Maps the base of each segment to the times of its messages."""
        self.problem = ""
        self.untold: tuple[int, ...] = ()
        """The ids of at most GROUPLESS_PARTITIONS_MAX partitions whose messages are kept only
        because the metaserver has never sent their groups.
        """
        self._unregistered_ids: list[int] = []
        """The ids of partitions whose groups have never been sent, except those of hidden subjects,
        as found by the current check.
        """
        self._hidden_subjects: dict[int, str] = {}
        """Maps each partition of a hidden subject whose groups have never been sent to that
        subject. They are sent only when the subject is published.
        """
        self._held_ids: list[int] = []
        """The ids of partitions in which jobs hold messages that no group needs, as found by the
        current check.
        """

    def apply_settings(self, settings: BrokerSettings) -> None:
        """Apply the limits of new settings, and trust the current wall-clock time."""
        self._wall_clock.trust_now()
        self._limits = Limits(
            retention_ms=settings.retention_ms, retention_bytes=settings.retention_bytes
        )

    def removed_from_ms(self, stored_ms: int) -> int | None:
        """Return the earliest time at which a message that was stored at `stored_ms` may be
        removed, assuming the disk usage of the last check; None means never.
        """
        return earliest_removal_ms(
            stored_ms,
            self._limits,
            self._disk_use,
            log_bytes=self._store.log.end - self._store.log.first_position,
            now_ms=self._wall_clock.reported_ms(),
        )

    async def run(self) -> None:
        """Check every CHECK_MS, until cancelled."""
        while True:
            try:
                await self.check()
            except CorruptIndexError as error:
                self.problem = error.message
                await self._store.report_index_damage(error)
            except KeylaneError as error:
                self.problem = error.message
                if line := self._log_filter.count_failure(error.message, self._clock.boot_ms()):
                    log.warning("retention: %s", line)
            except Exception as error:
                self.problem = f"a bug in the broker: {error!r}"
                log.exception("retention")
            await self._wait_next_check()

    async def _wait_next_check(self) -> None:
        """Wait until the next check is due: after CHECK_MS, or, if the last check was made before a
        metaserver had accepted this broker's report, as soon as one does.
        """
        if self._folder_ownership is None or self.problem != NOT_ACCEPTED:
            await asyncio.sleep(CHECK_MS / 1000)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_MS / 1000):
                await self._folder_ownership.wait_accepted()

    async def check(self) -> int:
        """
        Remove the segments that are due, and return their number.

        Raises:
            KeylaneError: some segments were not removed; the next check tries again.
        """
        try:
            disk, segments, oldest_ms = await self._run_read(self._survey)
        except DataFolderError as error:  # files that are open would still take messages
            self._refuse_messages(error.message)
            raise
        if await self._begin_segment(oldest_ms, segments=len(segments) + 1):
            disk, segments, _ = await self._run_read(self._survey)
        if segments and segments[-1].newest_ms is None:
            newest_ms = await self._newest_ms()
            segments = [
                segment if segment.newest_ms is not None else replace(segment, newest_ms=newest_ms)
                for segment in segments
            ]
        segments = await self._with_kept_bytes(segments)
        self._disk_use = disk
        self._refuse_messages(reason_to_refuse(disk))
        try:
            return await self._remove_due(disk, segments)
        finally:
            self._log_refusal()

    async def _with_kept_bytes(self, segments: list[SealedSegment]) -> list[SealedSegment]:
        """Return the segments with the sizes of the scheduled messages in them."""
        if not segments:
            return segments
        bases = [*(segment.base for segment in segments), segments[-1].end]
        kept_bytes = await self._store.agenda.kept_bytes(bases)
        return [
            replace(segment, kept_bytes=size) if size else segment
            for segment, size in zip(segments, kept_bytes[:-1], strict=True)
        ]

    def _log_refusal(self) -> None:
        """Log that messages are refused, with the reason, or that they are accepted again."""
        now_ms = self._clock.boot_ms()
        if not self._refusal:
            if self._log_filter.end_failures(now_ms, _REFUSED):
                log.warning("messages are accepted again: the disk has room")
        elif self._log_filter.count_failure("disk", now_ms, _REFUSED):
            log.error("messages are refused: %s; free disk space or add a disk", self._refusal)

    def _log_early_removal(self, percent: int) -> None:
        """Log that segments were removed to free disk space before the log's limits required it."""
        if self._log_filter.count_failure("disk", self._clock.boot_ms(), _REMOVED_EARLY):
            log.warning(
                "the disk was %d %% full: messages that no group needs are removed early, now up "
                "to position %d; free space, add a disk, or shorten retention_ms",
                percent,
                self._store.log.first_position,
            )

    async def _begin_segment(self, oldest_ms: int | None, *, segments: int) -> bool:
        """Begin a new segment if the active one is old enough. Return True if a segment was
        begun.
        """
        now_ms = self._wall_clock.now_ms()
        if not must_begin_segment(oldest_ms, self._limits, segments=segments, now_ms=now_ms):
            return False
        try:
            await self._store.commit.begin_segment()
        except (StorageError, BrokerReadOnlyError) as error:
            log.warning("retention: cannot begin a new segment: %s", error.message)
            return False
        return True

    def _refuse_messages(self, reason: str) -> None:
        self._refusal = reason
        self._store.commit.refuse_messages(reason)

    async def _remove_due(self, disk: DiskUse, segments: list[SealedSegment]) -> int:
        """Remove the segments that the policy wants to remove and nobody needs."""
        if self._store.log.has_undeleted:
            await self._run_commit(self._store.log.delete_leftovers)
        end = self._store.log.end
        now_ms = self._wall_clock.now_ms()
        target_position = wanted_position(segments, self._limits, disk, end=end, now_ms=now_ms)
        due_position = wanted_position(segments, self._limits, NO_DISK, end=end, now_ms=now_ms)
        await self._run_read(ensure_reserve, self._files)
        await self._update_vacant_end(end)
        vacant = [segment.end for segment in segments if segment.end <= self._vacant_end]
        target_position, due_position = (
            max([target_position, *vacant]),
            max([due_position, *vacant]),
        )
        removed_count = 0
        if self._folder_ownership is not None and not self._folder_ownership.accepted:
            self.problem = NOT_ACCEPTED
            self.untold = ()
        elif segments and target_position > segments[0].base:
            removed_count = await self._remove(segments, target_position, disk)
            if removed_count and self._store.log.first_position > due_position:
                self._log_early_removal(disk.percent())
        else:
            self.problem = ""
            self.untold = ()
        self.problem = self.problem or self._wall_clock.problem
        if self._forgotten_position < self._store.log.first_position:
            await self._forget_removed()
        return removed_count

    async def _remove(self, segments: list[SealedSegment], wanted: int, disk: DiskUse) -> int:
        """Remove the segments below `wanted` that nobody needs, and return their number."""
        self._first_offsets.changed_ids.clear()
        self._unregistered_ids = []
        self._hidden_subjects = {}
        self._held_ids = []
        floor = await self._find_floor(wanted, list(self._store.state.partitions))
        self.untold = (*self._unregistered_ids, *self._hidden_subjects)[:GROUPLESS_PARTITIONS_MAX]
        allowed = self._allowed_position(segments, wanted, floor)
        if allowed <= segments[0].base:
            return 0
        await self._rewrite_partitions(allowed, disk)
        try:
            allowed = await self._decide_position(segments, allowed)
            await self._raise_first_offsets()
            await self._save_counts()
            removed = await self._store.carry_over.remove_segments(allowed)
        finally:
            self._refuse_messages(reason_to_refuse(await self._run_read(self._measure_disk)))
        log.debug("removed the log up to position %d", self._store.log.first_position)
        return removed

    def _allowed_position(
        self, segments: list[SealedSegment], wanted: int, floor: int | None
    ) -> int:
        """Return the position up to which segments may be removed, and set `problem`."""
        allowed = allowed_position(segments, wanted, floor)
        self.problem = ""
        if allowed < wanted:
            reason = f"a consumer group has not acked position {floor}"
            if self._held_ids:
                reason = f"jobs hold messages of {_describe(self._held_ids)}"
            if self._hidden_subjects:
                subject = min(self._hidden_subjects.values())
                reason = f"the rows of hidden subject {subject!r} are not published"
            if self._unregistered_ids:
                names = _describe(self._unregistered_ids)
                reason = f"the metaserver has not said which consumer groups read {names}"
            self.problem = f"segments up to position {wanted} should be removed, but {reason}"
        return allowed

    async def _rewrite_partitions(self, position: int, disk: DiskUse) -> None:
        """Rewrite the partitions described in these segments, using the reserve if the disk is
        full.
        """
        carry_over = self._store.carry_over
        try:
            await carry_over.rewrite_described(position)
        except (StorageError, BrokerReadOnlyError):
            if not await self._run_read(release_reserve, self._files):
                raise
            # The reserved space is for the records that must precede the removal, not for messages.
            self._refuse_messages(reason_to_refuse(disk) or "the disk is full")
            await carry_over.rewrite_described(position)

    async def _save_counts(self) -> None:
        """Make the numbers of messages that were removed unread durable, then log them once per
        group.
        """
        try:
            await self._first_offsets.flush()
        except (StorageError, BrokerReadOnlyError):
            if not await self._run_read(release_reserve, self._files):
                raise
            await self._first_offsets.flush()
        removed_unread, self._first_offsets.removed_unread = self._first_offsets.removed_unread, {}
        for (subject, group), (messages, partitions) in sorted(removed_unread.items()):
            log.warning(
                "retention removes %s of %s that group %s has not read, in %s",
                counted(messages, "message"),
                subject,
                group,
                counted(partitions, "partition"),
            )

    async def _decide_position(self, segments: list[SealedSegment], position: int) -> int:
        """Decide the position up to which segments are removed, taking into account groups that
        have joined in the meantime, and set the pending first offsets.
        """
        first_offsets = self._first_offsets
        pending_offsets = await self._first_offsets_at(position)
        while changed_ids := first_offsets.changed_ids:
            first_offsets.changed_ids = set()
            floor = await self._find_floor(position, list(changed_ids))
            allowed = (
                self._allowed_position(segments, position, floor) if floor is not None else position
            )
            if allowed < position:
                position = allowed
                pending_offsets = await self._first_offsets_at(position)
        first_offsets.pending_offsets = pending_offsets
        return position

    async def _first_offsets_at(self, position: int) -> dict[int, int]:
        """Return the first offset that each partition will have when the log begins at
        `position`.
        """
        firsts: dict[int, int] = {}
        steps = self._queues.first_offsets_at(position)
        while (step := await self._run_read(_next_step, steps)) is not None:
            firsts.update(step)
        return firsts

    # ── reading ───────────────────────────────────────────────────────────────────────────────────
    def _measure_disk(self) -> DiskUse:
        return DiskUse(free_bytes=self._files.free_bytes(), total_bytes=self._files.total_bytes())

    def _survey(self) -> tuple[DiskUse, list[SealedSegment], int | None]:
        """Return the disk usage, the sealed segments, and the time of the active segment's first
        message.
        """
        bases = self._store.log.bases
        self._times = {base: self._times.get(base) or _MessageTimes(base) for base in bases}
        following_ms: list[int | None] = []
        first_ms: int | None = None
        for base, end in reversed(list(pairwise(bases))):
            # Unless the clock is set back, no message of a segment is newer than the first message
            # after that segment.
            first_ms = self._read_times(end).first_ms or first_ms
            following_ms.append(first_ms)
            self._read_times(base, end=end)
        segments: list[SealedSegment] = []
        known_ms = 0
        for (base, end), at_ms in zip(pairwise(bases), reversed(following_ms), strict=True):
            # If the clock was set back, that time is too early, but the times of the segment's own
            # messages and of older ones are not.
            times = self._times[base]
            known_ms = max(known_ms, times.newest_ms)
            newest_ms = known_ms if times.is_complete else None
            if newest_ms is None and at_ms is not None:
                newest_ms = known_ms = max(known_ms, at_ms)
            segments.append(SealedSegment(base, end, newest_ms))
        return self._measure_disk(), segments, self._read_times(bases[-1]).first_ms

    def _read_times(self, base: int, *, end: int | None = None) -> _MessageTimes:
        """
        Continue to read a segment up to its first message or, if it is sealed and small, up to its
        end.

        Args:
            end: the end of a sealed segment; None for the active one.
        """
        times = self._times[base]
        reads_all = end is not None and end - base <= READ_BYTES_MAX
        if times.is_complete or (times.first_ms is not None and not reads_all):
            return times
        headers = read_segment_headers(self._files, base, start=times.next_position)
        for header in islice(headers, HEADERS_MAX):
            times.next_position = header.position + header.length
            if header.kind in {Kind.MESSAGES, Kind.SCHEDULED}:
                times.newest_ms = max(times.newest_ms, header.appended_at_ms)
                if times.first_ms is None:
                    times.first_ms = header.appended_at_ms
                if not reads_all:
                    return times
        times.is_complete = end is not None and next(headers, None) is None
        return times

    async def _newest_ms(self) -> int:
        """Return the time of the newest stored message, or 0 if there are no messages."""
        newest_ms = 0
        async for slice_ in self._partition_slices(list(self._store.state.partitions)):
            times = (
                partition.appended_at_ms
                for partition in slice_
                if partition.first_offset < partition.readable_offset
            )
            newest_ms = max([newest_ms, *times])
        return newest_ms

    async def _find_floor(self, wanted: int, partition_ids: list[int]) -> int | None:
        """Return the position of the first message below `wanted` that a group needs or a job holds
        in these partitions, or None if there is none.
        """
        floor: int | None = None
        async for slice_ in self._partition_slices(partition_ids):
            cursors = [
                (partition.partition_id, cursor)
                for partition in slice_
                if (cursor := self._first_needed_offset(partition)) < partition.readable_offset
            ]
            for partition_id, position in await self._run_read(self._first_needed, cursors):
                if position >= wanted:
                    continue
                floor = position if floor is None else min(floor, position)
                partition = self._store.state.partitions.get(partition_id)
                if partition is None:
                    continue
                if self._first_needed_offset(partition) < self._needed_by_groups(partition):
                    self._held_ids.append(partition_id)
                elif not partition.groups_told and partition.facts.hidden:
                    self._hidden_subjects[partition_id] = partition.facts.hidden
                elif not partition.groups_told:
                    self._unregistered_ids.append(partition_id)
        return floor

    async def _update_vacant_end(self, end: int) -> None:
        """Find the position of the first message of a hosted partition, if partitions were dropped
        since the last time.
        """
        version = self._store.state.dropped.version
        if version == self._dropped_version:
            return
        vacant_end = end
        async for slice_ in self._partition_slices(list(self._store.state.partitions)):
            firsts = [
                (partition.partition_id, partition.first_offset)
                for partition in slice_
                if partition.first_offset < partition.readable_offset
            ]
            positions = [
                position for _, position in await self._run_read(self._first_needed, firsts)
            ]
            vacant_end = min([vacant_end, *positions])
        self._vacant_end = vacant_end
        self._dropped_version = version

    def _first_needed_offset(self, partition: HostedPartition) -> int:
        """Return the first offset of a partition that a group needs or a job holds."""
        needed_offset = self._needed_by_groups(partition)
        held_offset = self._store.holds.first_held_offset(partition)
        return (
            needed_offset
            if held_offset is None
            else min(needed_offset, max(held_offset, partition.first_offset))
        )

    def _needed_by_groups(self, partition: HostedPartition) -> int:
        """Return the first offset that a group needs. If the partition's groups have never been
        sent, this is its first offset.
        """
        if partition.facts.retention is Retention.TIME:
            return partition.readable_offset
        if not partition.groups_told:
            return partition.first_offset
        cursors = (group.first_needed_offset for group in partition.groups.values())
        return max(min(cursors, default=partition.readable_offset), partition.first_offset)

    async def _partition_slices(
        self, partition_ids: list[int]
    ) -> AsyncIterator[list[HostedPartition]]:
        """Yield, in slices, those of the partitions that are still hosted."""
        partitions = self._store.state.partitions
        for start in range(0, len(partition_ids), SLICE):
            hosted_partitions = map(partitions.get, partition_ids[start : start + SLICE])
            yield [partition for partition in hosted_partitions if partition is not None]
            await asyncio.sleep(0)

    def _first_needed(self, cursors: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (partition id, position of the batch) for each (partition id, offset) whose batch
        is in the index.
        """
        return [
            (partition_id, units[0].position)
            for partition_id, cursor in cursors
            if (units := self._queues.find(partition_id, cursor, end=cursor + 1, bytes_max=1))
        ]

    # ── removing ──────────────────────────────────────────────────────────────────────────────────
    async def _raise_first_offsets(self) -> None:
        partition_ids = list(self._first_offsets.pending_offsets)
        for start in range(0, len(partition_ids), SLICE):
            for partition_id in partition_ids[start : start + SLICE]:
                self._first_offsets.raise_pending(partition_id)
            await asyncio.sleep(0)

    async def _forget_removed(self) -> None:
        """Remove the dropped segments' batches from the index, and write a snapshot that contains
        the start of the log (`retained`).
        """
        position = self._store.log.first_position
        steps = self._queues.retain(position, dropped=self._store.state.dropped.copy_durable())
        # Each step is a separate call, so that appends are served between the steps.
        while await self._run_commit(_next_step, steps) is not None:
            pass
        self._forgotten_position = self._store.state.retained = position
        await self._store.snapshotter.write()


def _describe(partition_ids: list[int]) -> str:
    """Return a text with the lowest partition id and the number of other ones."""
    others = f" and {len(partition_ids) - 1} more" if len(partition_ids) > 1 else ""
    return f"partition {min(partition_ids)}{others}"


def _next_step(steps: Iterator[list[tuple[int, int]]]) -> list[tuple[int, int]] | None:
    return next(steps, None)
