"""The retention loop: it reads disk use and segment ages, lets `policy.py` decide, and removes
segments. Disk.

    ages, disk ─▶ policy.py ─▶ first position a group needs ─▶ partitions that only these segments
        describe are written again
      ─▶ first offsets rise ─▶ segments removed ─▶ the index forgets them ─▶ a snapshot, so that a
          start need not correct

`docs/ARCHITECTURE.md` explains each step and its reason.

Invariants
    First offsets rise before segments are removed, so a read of a removed offset is answered with
    the first offset. First offsets rise only when every record that must be written before the
    removal is durable. Messages stay until the metaserver has sent the groups of their partition,
    unless the subject's retention is TIME; rows of a hidden subject therefore stay until it is
    published. Messages that a job holds stay, whatever the subject's retention is. Segments are
    removed only when a metaserver has accepted a report of this opening and does not refuse the
    folder. If the calendar jumps forward, nothing becomes old for a day: `../wall_clock.py`.
    The index forgets last. After a crash in between, a start corrects it by the beginning of the
    log. After partitions were dropped, the oldest segments without a message of a hosted partition
    are removed at any age. The loop never occupies the event loop for long; blocking work is done
    in slices between commits.
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
from ...protocol.errors import BrokerReadOnlyError, CorruptIndexError, KeylaneError, StorageError
from ...protocol.limits import UNTOLD_MAX
from ...protocol.log_filter import LogFilter
from ...protocol.record import Kind
from ...protocol.text import counted
from ..partition.partition import HostedPartition
from ..settings import BrokerSettings
from ..standing import Standing
from ..storage.files import Files
from ..storage.log.log_reader import segment_headers
from ..storage.reserve import Reserve
from ..store.group_commit import RunBlocking
from ..store.store import Store
from ..wall_clock import WallClock
from .policy import (
    DiskUse,
    Limits,
    SealedSegment,
    allowed_position,
    begins_segment,
    reason_to_refuse,
    removed_from_ms,
    wanted_position,
)

log = logging.getLogger("keylane.broker")

_FULL, _EARLY = "full", "early"
"""Keys of two troubles: messages are refused, and messages are removed before their time."""
CHECK_MS = 10_000
"""The time between two checks, in milliseconds; RocketMQ uses the same interval."""
SLICE = 500
"""The number of partitions that are examined without a pause."""
NOT_ACCEPTED = "nothing is removed until a metaserver takes this broker's report"
"""The problem that is reported meanwhile: the folder may be an older copy, which lacks consumer
groups.
"""
NO_DISK = DiskUse(free_bytes=0, total_bytes=0)
"""A disk of which nothing is in use."""
HEADERS_MAX = 10_000
"""The number of records of a segment that one check reads to find its messages. The next check
continues after them.
"""
READ_BYTES_MAX = 16 << 20
"""The largest size, in bytes, of a sealed segment that is read for the time of its newest
message.
"""


class _Times:
    """The times of a segment's messages, as far as the segment was read."""

    __slots__ = ("at", "first_ms", "newest_ms", "whole")

    def __init__(self, base: int) -> None:
        self.at = base
        """The position of the first record that was not read."""
        self.first_ms: int | None = None
        self.newest_ms = 0
        self.whole = False
        """True if all of the segment was read after it was sealed."""


class Cleaning:
    """The retention loop; `problem` says why segments stay that should be removed."""

    def __init__(
        self,
        store: Store,
        files: Files,
        settings: BrokerSettings,
        *,
        clock: Clock,
        run_commit: RunBlocking,
        run_read: RunBlocking,
        standing: Standing | None = None,
        calendar: WallClock | None = None,
    ) -> None:
        """Create the loop.

        Args:
            standing: keeps every segment until a metaserver has accepted this broker's report; None
                if there is no metaserver.
            calendar: may be shared.
        """
        self._store = store
        self._standing = standing
        self._queues = store.queues
        self._files = files
        self._firsts = store.firsts
        self._reserve = Reserve(files)
        self._forgotten = store.log.first_position
        """The log position up to which the index has forgotten the log."""
        self._calendar = calendar or WallClock(clock)
        self._clock = clock
        self._troubles = LogFilter()
        self.adopt(settings)
        self._dropped_version = -1 if store.state.dropped else 0
        """The version of the dropped partitions for which `_vacant` was found."""
        self._vacant = 0
        """The position below which no hosted partition has a message."""
        self._run_commit = run_commit
        self._run_read = run_read
        self._refusal = ""
        self._disk_use = NO_DISK
        """The disk use that the last check has found; nothing counts as used before the first
        one.
        """
        self._times: dict[int, _Times] = {}
        """The base of a segment → the times of its messages."""
        self.problem = ""
        self.untold: tuple[int, ...] = ()
        """The partitions, at most UNTOLD_MAX, whose messages stay only because their groups were
        never sent.
        """
        self._untold: list[int] = []
        """The partitions whose groups were never sent, as the present check has found them, except
        those of hidden subjects.
        """
        self._hidden: dict[int, str] = {}
        """Partition id → hidden subject, for partitions whose groups were never sent; they are sent
        when the subject is published.
        """
        self._held: list[int] = []
        """The partitions of which jobs hold messages that no group needs, as the present check has
        found them.
        """

    def adopt(self, settings: BrokerSettings) -> None:
        """Remove messages by the limits of these settings from now on, and trust the calendar as it
        is.
        """
        self._calendar.believe()
        self._limits = Limits(
            retention_ms=settings.retention_ms, retention_bytes=settings.retention_bytes
        )

    def removed_from_ms(self, stored_ms: int) -> int | None:
        """Return the earliest time at which a message that was stored at `stored_ms` may be
        removed, by the disk use of the last check; None means never.
        """
        return removed_from_ms(
            stored_ms,
            self._limits,
            self._disk_use,
            log_bytes=self._store.log.end - self._store.log.first_position,
            now_ms=self._calendar.reported_ms(),
        )

    async def run(self) -> None:
        """Check every CHECK_MS, until cancelled."""
        while True:
            try:
                await self.check()
            except CorruptIndexError as error:
                self.problem = error.message
                await self._store.index_damage.report(error)
            except KeylaneError as error:
                self.problem = error.message
                if line := self._troubles.met(error.message, self._clock.boot_ms()):
                    log.warning("retention: %s", line)
            except Exception as error:
                self.problem = f"a bug in the broker: {error!r}"
                log.exception("retention")
            await self._pause()

    async def _pause(self) -> None:
        """Wait until the next check is due. If the last check lacked the acceptance of a
        metaserver, wait at most until that arrives.
        """
        if self._standing is None or self.problem != NOT_ACCEPTED:
            await asyncio.sleep(CHECK_MS / 1000)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_MS / 1000):
                await self._standing.wait_accepted()

    async def check(self) -> int:
        """
        Remove the segments that are due, and return the number of removed segments.

        Raises:
            KeylaneError: some segments were not removed; the next check tries again.
        """
        disk, segments, oldest_ms = await self._run_read(self._look)
        if await self._begin_segment(oldest_ms, segments=len(segments) + 1):
            disk, segments, _ = await self._run_read(self._look)
        if segments and segments[-1].newest_ms is None:
            newest_ms = await self._newest_ms()
            segments = [
                each if each.newest_ms is not None else replace(each, newest_ms=newest_ms)
                for each in segments
            ]
        self._disk_use = disk
        self._refuse(reason_to_refuse(disk))
        try:
            return await self._remove_what_is_due(disk, segments)
        finally:
            self._log_refusal()

    def _log_refusal(self) -> None:
        """Log why messages are refused at the end of a check, or that they are accepted again."""
        now_ms = self._clock.boot_ms()
        if not self._refusal:
            if self._troubles.over(now_ms, _FULL):
                log.warning("messages are accepted again: the disk has room")
        elif self._troubles.met("disk", now_ms, _FULL):
            log.error("messages are refused: %s; free disk space or add a disk", self._refusal)

    def _log_early_removal(self, percent: int) -> None:
        """Log that the log was shortened because of the disk, earlier than its own limits
        require.
        """
        if self._troubles.met("disk", self._clock.boot_ms(), _EARLY):
            log.warning(
                "the disk was %d %% full: messages that no group needs are removed early, now up "
                "to position %d; free space, add a disk, or shorten retention_ms",
                percent,
                self._store.log.first_position,
            )

    async def _begin_segment(self, oldest_ms: int | None, *, segments: int) -> bool:
        """Let the next record begin a segment if the present one is old enough. Return True if it
        does.
        """
        now_ms = self._calendar.now_ms()
        if not begins_segment(oldest_ms, self._limits, segments=segments, now_ms=now_ms):
            return False
        try:
            await self._store.commit.roll()
        except (StorageError, BrokerReadOnlyError) as error:
            log.warning("retention: no new segment could be begun: %s", error.message)
            return False
        return True

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._store.commit.refuse_messages(reason)

    async def _remove_what_is_due(self, disk: DiskUse, segments: list[SealedSegment]) -> int:
        if self._store.log.leaving:
            await self._run_commit(self._store.log.finish_drop)
        end = self._store.log.end
        now_ms = self._calendar.now_ms()
        wanted = wanted_position(segments, self._limits, disk, end=end, now_ms=now_ms)
        in_time = wanted_position(segments, self._limits, NO_DISK, end=end, now_ms=now_ms)
        await self._run_read(self._reserve.ensure)
        await self._look_for_vacant(end)
        vacant = [segment.end for segment in segments if segment.end <= self._vacant]
        wanted, in_time = max([wanted, *vacant]), max([in_time, *vacant])
        gone = 0
        if self._standing is not None and not self._standing.accepted:
            self.problem = NOT_ACCEPTED
            self.untold = ()
        elif segments and wanted > segments[0].base:
            gone = await self._remove(segments, wanted, disk)
            if gone and self._store.log.first_position > in_time:
                self._log_early_removal(disk.percent())
        else:
            self.problem = ""
            self.untold = ()
        self.problem = self.problem or self._calendar.problem
        if self._forgotten < self._store.log.first_position:
            await self._forget()
        return gone

    async def _remove(self, segments: list[SealedSegment], wanted: int, disk: DiskUse) -> int:
        self._firsts.changed.clear()
        self._untold = []
        self._hidden = {}
        self._held = []
        floor = await self._floor(wanted, list(self._store.state.partitions))
        self.untold = (*self._untold, *self._hidden)[:UNTOLD_MAX]
        allowed = self._allowed(segments, wanted, floor)
        if allowed <= segments[0].base:
            return 0
        await self._prepare(allowed, disk)
        try:
            allowed = await self._decide(segments, allowed)
            await self._rise()
            await self._save_counts()
            gone = await self._store.carry_over.drop(allowed)
        finally:
            self._refuse(reason_to_refuse(await self._run_read(self._disk)))
        log.info("removed the log up to position %d", self._store.log.first_position)
        return gone

    def _allowed(self, segments: list[SealedSegment], wanted: int, floor: int | None) -> int:
        allowed = allowed_position(segments, wanted, floor)
        self.problem = ""
        if allowed < wanted:
            why = f"a consumer group has not acked position {floor}"
            if self._held:
                why = f"jobs hold messages of {_named(self._held)}"
            if self._hidden:
                why = f"the rows of hidden subject {min(self._hidden.values())!r} are not published"
            if self._untold:
                why = (
                    f"the metaserver has not told which consumer groups read {_named(self._untold)}"
                )
            self.problem = f"segments up to position {wanted} should be removed, but {why}"
        return allowed

    async def _prepare(self, position: int, disk: DiskUse) -> None:
        """Write the partitions that the segments describe again. If the disk is full, remove the
        reserve first.
        """
        carry_over = self._store.carry_over
        try:
            await carry_over.prepare(position)
        except (StorageError, BrokerReadOnlyError):
            if not await self._run_read(self._reserve.release):
                raise
            # The space of the reserve is for records that must precede the removal, not for
            # messages.
            self._refuse(reason_to_refuse(disk) or "the disk is full")
            await carry_over.prepare(position)

    async def _save_counts(self) -> None:
        """Save the counts of messages removed unread, then log them once for each group."""
        try:
            await self._firsts.flush()
        except (StorageError, BrokerReadOnlyError):
            if not await self._run_read(self._reserve.release):
                raise
            await self._firsts.flush()
        removed, self._firsts.removed = self._firsts.removed, {}
        for (subject, group), (messages, partitions) in sorted(removed.items()):
            log.warning(
                "retention removes %s of %s that group %s has not read, in %s",
                counted(messages, "message"),
                subject,
                group,
                counted(partitions, "partition"),
            )

    async def _decide(self, segments: list[SealedSegment], position: int) -> int:
        """Decide the position up to which segments are removed, and set pending first offsets, also
        for groups that joined meanwhile.
        """
        firsts = self._firsts
        pending = await self._behind(position)
        while changed := firsts.changed:
            firsts.changed = set()
            floor = await self._floor(position, list(changed))
            allowed = self._allowed(segments, position, floor) if floor is not None else position
            if allowed < position:
                position = allowed
                pending = await self._behind(position)
        firsts.pending = pending
        return position

    async def _behind(self, position: int) -> dict[int, int]:
        firsts: dict[int, int] = {}
        steps = self._queues.first_offsets_at(position)
        while (some := await self._run_read(_next_step, steps)) is not None:
            firsts.update(some)
        return firsts

    # ── looking ───────────────────────────────────────────────────────────────────────────────────
    def _disk(self) -> DiskUse:
        return DiskUse(free_bytes=self._files.free_bytes(), total_bytes=self._files.total_bytes())

    def _look(self) -> tuple[DiskUse, list[SealedSegment], int | None]:
        """Return the disk's use, the sealed segments, and the time of the first message in the
        segment that is being written.
        """
        bases = self._store.log.bases
        self._times = {base: self._times.get(base) or _Times(base) for base in bases}
        behind: list[int | None] = []
        first_ms: int | None = None
        for base, end in reversed(list(pairwise(bases))):
            # As long as the calendar is not set back, no message of a segment is newer than the
            # first message after the segment.
            first_ms = self._read_times(end).first_ms or first_ms
            behind.append(first_ms)
            self._read_times(base, end=end)
        segments: list[SealedSegment] = []
        known_ms = 0
        for (base, end), at_ms in zip(pairwise(bases), reversed(behind), strict=True):
            # If the calendar was set back, that time is too early; the times of the segment's own
            # messages, and of older ones, are not.
            times = self._times[base]
            known_ms = max(known_ms, times.newest_ms)
            newest_ms = known_ms if times.whole else None
            if newest_ms is None and at_ms is not None:
                newest_ms = known_ms = max(known_ms, at_ms)
            segments.append(SealedSegment(base, end, newest_ms))
        return self._disk(), segments, self._read_times(bases[-1]).first_ms

    def _read_times(self, base: int, *, end: int | None = None) -> _Times:
        """
        Continue to read a segment until its first message, or to its end if it is sealed and small.

        Args:
            end: where the segment ends; None if it may still be written.
        """
        times = self._times[base]
        reads_all = end is not None and end - base <= READ_BYTES_MAX
        if times.whole or (times.first_ms is not None and not reads_all):
            return times
        headers = segment_headers(self._files, base, start=times.at)
        for header in islice(headers, HEADERS_MAX):
            times.at = header.position + header.length
            if header.kind == Kind.MESSAGES:
                times.newest_ms = max(times.newest_ms, header.appended_at_ms)
                if times.first_ms is None:
                    times.first_ms = header.appended_at_ms
                if not reads_all:
                    return times
        times.whole = end is not None and next(headers, None) is None
        return times

    async def _newest_ms(self) -> int:
        """Return the time of the newest stored message, or 0 if there are no messages."""
        newest_ms = 0
        async for slice_ in self._slices(list(self._store.state.partitions)):
            stored = (each for each in slice_ if each.first_offset < each.readable_offset)
            newest_ms = max([newest_ms, *(each.appended_at_ms for each in stored)])
        return newest_ms

    async def _floor(self, wanted: int, numbers: list[int]) -> int | None:
        """Return the first position below `wanted` at which there is a message that a group of
        these partitions needs, or None.
        """
        floor: int | None = None
        async for slice_ in self._slices(numbers):
            cursors = [
                (partition.partition_id, cursor)
                for partition in slice_
                if (cursor := self._needed_from(partition)) < partition.readable_offset
            ]
            for partition_id, position in await self._run_read(self._first_needed, cursors):
                if position >= wanted:
                    continue
                floor = position if floor is None else min(floor, position)
                partition = self._store.state.partitions.get(partition_id)
                if partition is None:
                    continue
                if self._needed_from(partition) < self._groups_need(partition):
                    self._held.append(partition_id)
                elif not partition.groups_told and partition.facts.hidden:
                    self._hidden[partition_id] = partition.facts.hidden
                elif not partition.groups_told:
                    self._untold.append(partition_id)
        return floor

    async def _look_for_vacant(self, end: int) -> None:
        """Find the first position that has a message of a hosted partition, if partitions were
        dropped since the last search.
        """
        version = self._store.state.dropped.version
        if version == self._dropped_version:
            return
        vacant = end
        async for slice_ in self._slices(list(self._store.state.partitions)):
            firsts = [
                (partition.partition_id, partition.first_offset)
                for partition in slice_
                if partition.first_offset < partition.readable_offset
            ]
            positions = [at for _, at in await self._run_read(self._first_needed, firsts)]
            vacant = min([vacant, *positions])
        self._vacant = vacant
        self._dropped_version = version

    def _needed_from(self, partition: HostedPartition) -> int:
        """Return the first offset that a group needs or a job holds."""
        needed = self._groups_need(partition)
        held = self._store.holds.needed_from(partition)
        return needed if held is None else min(needed, max(held, partition.first_offset))

    def _groups_need(self, partition: HostedPartition) -> int:
        """Return the first offset that a group needs, or the partition's first offset if its groups
        were never sent.
        """
        if partition.facts.retention is Retention.TIME:
            return partition.readable_offset
        if not partition.groups_told:
            return partition.first_offset
        cursors = (group.needed_from for group in partition.groups.values())
        return max(min(cursors, default=partition.readable_offset), partition.first_offset)

    async def _slices(self, numbers: list[int]) -> AsyncIterator[list[HostedPartition]]:
        partitions = self._store.state.partitions
        for start in range(0, len(numbers), SLICE):
            hosted = (partitions.get(number) for number in numbers[start : start + SLICE])
            yield [partition for partition in hosted if partition is not None]
            await asyncio.sleep(0)

    def _first_needed(self, cursors: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (partition id, position of its first needed message) for partitions that have
        needed messages.
        """
        return [
            (partition_id, units[0].position)
            for partition_id, cursor in cursors
            if (units := self._queues.find(partition_id, cursor, end=cursor + 1, bytes_max=1))
        ]

    # ── removing ──────────────────────────────────────────────────────────────────────────────────
    async def _rise(self) -> None:
        numbers = list(self._firsts.pending)
        for start in range(0, len(numbers), SLICE):
            for partition_id in numbers[start : start + SLICE]:
                self._firsts.rise(partition_id)
            await asyncio.sleep(0)

    async def _forget(self) -> None:
        """Let the index forget the removed segments, and write a snapshot with the log's beginning
        (`retained`).
        """
        position = self._store.log.first_position
        steps = self._queues.retain(position, dropped=self._store.state.dropped.durable())
        while await self._run_commit(_next_step, steps) is not None:  # appends come in between
            pass
        self._forgotten = self._store.state.retained = position
        await self._store.snapshotter.write()


def _named(numbers: list[int]) -> str:
    """Return the lowest partition id and the number of the others, as text."""
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return f"partition {min(numbers)}{more}"


def _next_step(steps: Iterator[list[tuple[int, int]]]) -> list[tuple[int, int]] | None:
    return next(steps, None)
