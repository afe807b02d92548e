"""Removes old segments, again and again: asks the disk and the log, has it decided, and carries it out.  Disk.

    ages, disk ─▶ retention.py ─▶ first position a group needs ─▶ first offsets rise ─▶ index ─▶ segments go

Invariants
    First offsets rise before anything goes: whoever asks for what is gone is told the first offset that is not.
    It never runs on the event loop for long, and what blocks is done in slices between commits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

from ..protocol.clock import Clock
from ..protocol.control import Retention
from ..protocol.errors import KeylaneError
from ..protocol.record import Kind
from .group_commit import RunBlocking
from .partition import HostedPartition
from .retention import (
    DiskUse,
    Limits,
    Segment,
    allowed_position,
    reason_to_hold,
    wanted_position,
)
from .settings import BrokerSettings
from .storage.files import Files
from .storage.headers import segment_headers
from .store import Store

log = logging.getLogger("keylane.broker")

CHECK_MS = 10_000
"""RocketMQ's."""
SLICE = 500
"""Partitions between two turns of the event loop."""
HEADERS_MAX = 10_000
"""How far a segment is read for its first message."""


class Cleaning:
    """The loop of retention; `problem` says what keeps it from removing what it should."""

    def __init__(
        self,
        store: Store,
        files: Files,
        settings: BrokerSettings,
        *,
        clock: Clock,
        run_commit: RunBlocking,
        run_read: RunBlocking,
    ) -> None:
        self._store = store
        self._queues = store.queues
        self._files = files
        self._limits = Limits(
            retention_ms=settings.retention_ms, retention_bytes=settings.retention_bytes
        )
        self._clock = clock
        self._run_commit = run_commit
        self._run_read = run_read
        self._first_ms: dict[int, int] = {}
        """Time of the first message of a segment, by its base."""
        self.problem = ""

    async def run(self) -> None:
        """Check for ever; cancel it to end it."""
        while True:
            try:
                await self.check()
            except KeylaneError as error:
                self.problem = error.message
                log.warning("retention: %s", error.message)
            await asyncio.sleep(CHECK_MS / 1000)

    async def check(self) -> int:
        """
        Remove what is due now; how many segments went.

        Raises:
            KeylaneError: not all of them; what is left is tried again with the next check.
        """
        disk, segments = await self._run_read(self._look)
        self._store.commit.hold(reason_to_hold(disk))
        end = self._store.log.end
        wanted = wanted_position(
            segments, self._limits, disk, end=end, now_ms=self._clock.wall_ms()
        )
        if not segments or wanted <= segments[0].base:
            self.problem = ""
            return 0
        floor = await self._floor(wanted)
        allowed = allowed_position(segments, wanted, floor)
        self.problem = ""
        if allowed < wanted:
            self.problem = (
                f"segments up to position {wanted} should go, "
                f"and a consumer group has not acked position {floor}"
            )
        gone = 0
        while self._store.log.first_position < allowed:
            await self._drop_first()
            gone += 1
        if gone:
            self._store.commit.hold(reason_to_hold(await self._run_read(self._disk)))
        return gone

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────
    def _disk(self) -> DiskUse:
        return DiskUse(free_bytes=self._files.free_bytes(), total_bytes=self._files.total_bytes())

    def _look(self) -> tuple[DiskUse, list[Segment]]:
        bases = self._store.log.bases
        self._first_ms = {base: at for base, at in self._first_ms.items() if base in bases}
        segments: list[Segment] = []
        newest_ms: int | None = None
        for base, end in reversed(list(pairwise(bases))):
            # No message of a segment is newer than the first one that comes after it.
            newest_ms = self._first_message_ms(end) or newest_ms
            segments.append(Segment(base, end, newest_ms))
        return self._disk(), segments[::-1]

    def _first_message_ms(self, base: int) -> int | None:
        known = self._first_ms.get(base)
        if known is None:
            for count, header in enumerate(segment_headers(self._files, base)):
                if header.kind == Kind.MESSAGES:
                    known = self._first_ms[base] = header.appended_at_ms
                    break
                if count == HEADERS_MAX:
                    break
        return known

    async def _floor(self, wanted: int) -> int | None:
        """The first position below `wanted` of a message that a group needs; None if there is none."""
        floor: int | None = None
        async for slice_ in self._slices():
            cursors = [
                (one.partition_id, max(cursor, one.first_offset))
                for one in slice_
                if one.facts.retention is not Retention.TIME
                and one.groups
                and (cursor := min(group.acked.cursor for group in one.groups.values()))
                < one.readable_offset
            ]
            found = await self._run_read(self._first_needed, cursors)
            if found is not None and found < wanted and (floor is None or found < floor):
                floor = found
        return floor

    async def _slices(self) -> AsyncIterator[list[HostedPartition]]:
        partitions = self._store.state.partitions
        numbers = list(partitions)
        for start in range(0, len(numbers), SLICE):
            found = (partitions.get(number) for number in numbers[start : start + SLICE])
            yield [one for one in found if one is not None]
            await asyncio.sleep(0)

    def _first_needed(self, cursors: list[tuple[int, int]]) -> int | None:
        found = [
            units[0].position
            for partition_id, cursor in cursors
            if (units := self._queues.find(partition_id, cursor, end=cursor + 1, bytes_max=1))
        ]
        return min(found, default=None)

    # ── removing ──────────────────────────────────────────────────────────────────────────────────────
    async def _drop_first(self) -> None:
        position = self._store.log.bases[1]
        steps = self._queues.retain(position)
        while (changed := await self._run_commit(_next_step, steps)) is not None:
            for start in range(0, len(changed), SLICE):
                for partition_id, first in changed[start : start + SLICE]:
                    self._raise_first(partition_id, first)
                await asyncio.sleep(0)
        await self._store.carry_over.drop_first_segment()
        log.info("removed the log up to position %d", position)

    def _raise_first(self, partition_id: int, first: int) -> None:
        partition = self._store.state.partitions.get(partition_id)
        if partition is None or first <= partition.first_offset:
            return
        self._store.state.touch(partition)
        partition.first_offset = first
        for group in partition.groups.values():
            cursor = group.acked.cursor
            if group.skip_to(first):
                # Time alone counts for this subject.
                log.warning(
                    "partition %d: group %s has missed offsets %d to %d",
                    partition_id, group.name, cursor, first,
                )  # fmt: skip
                self._store.save_progress(partition, group)


def _next_step(steps: Iterator[list[tuple[int, int]]]) -> list[tuple[int, int]] | None:
    return next(steps, None)
