"""Keeps the index of scheduled messages over restarts and over removals of the log. Does disk I/O
through `Files`.

    scheduled/agenda.snap     magic "KSA1" │ crc u32 │ position u64 │ images: length u32, msgpack
                              crc = CRC-32C of all that follows it; little-endian

The file is a copy of the index at a position of the log; the records from there on are applied to
it at a start. It is written with each snapshot, so that a start reads no more of the log for it
than for everything else. Without it a start reads the whole log.

Invariants
    The log alone, from its first segment on, has all messages that wait, all open deliveries, and
    the outcomes that are remembered. A message is not written again after the record that settles
    it. What is written again is checked and queued without an await in between, so nothing that was
    decided earlier follows it in the log.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from bisect import bisect_right
from collections.abc import Sequence

import crc32c
import msgspec

from ...protocol.clock import Clock
from ...protocol.errors import CorruptLogError, DataFolderError
from ...protocol.record import Header, Kind
from ...protocol.text import counted
from ..storage.files import Files, replace_file
from ..storage.log.commit_log import CommitLog
from ..storage.log.holes import Hole
from ..store.group_commit import Entry, GroupCommit, RunBlocking
from .records import (
    DroppedMessages,
    LogRecord,
    Place,
    Record,
    ScheduledMessageRecord,
    decode_changes,
    encode_records,
    read_changes,
)
from .schedule_index import SEARCH_COUNT, ScheduleImage, ScheduleIndex

log = logging.getLogger("keylane.broker")

FOLDER = "scheduled"
PATH = f"{FOLDER}/agenda.snap"
MAGIC = b"KSA1"
REWRITTEN_BYTES_MAX = 1 << 20
"""The size of the records that are written again before their writes are awaited, in bytes; a
larger record is written alone.
"""
SETTLE_S = 0.02
"""How long to wait before the records below a position are examined again while some of their
messages are being settled, in seconds.
"""
PROBLEMS_MAX = 100
_HEAD = struct.Struct("<4sIQ")
_U32 = struct.Struct("<I")


class _StoredImage(msgspec.Struct, frozen=True, array_like=True):
    """One of the images in the file."""

    image: ScheduleImage
    problems: Sequence[str] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_StoredImage).decode


class ScheduledAgenda:
    """The scheduled messages of a broker, as an `Agenda` of its store."""

    def __init__(self, files: Files, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self.index = ScheduleIndex()
        self.problems: list[str] = []
        """Descriptions of the damage to the log."""
        self.journal_problems: list[str] = []
        """The reasons why the journal of an earlier version was not moved into the log."""
        self._position = 0
        """The log position below which all records are in the index."""

    @property
    def problem(self) -> str:
        """The reason why nothing is accepted or delivered, because a lost record may have settled a
        message; "" if there is none.
        """
        return next(iter([*self.problems, *self.journal_problems]), "")

    # ── a start ───────────────────────────────────────────────────────────────────────────────────
    def load(self, *, is_expected: bool, position: int, first_position: int) -> int:
        """See `Agenda`. If the folder was moved away, its messages are given up."""
        self.index = ScheduleIndex()
        self.problems = []
        self._position = position
        if not is_expected:
            return position
        if FOLDER not in self._files.list():
            log.warning(
                "%s/%s is gone: the scheduled messages below position %d are given up",
                self._files.name(),
                FOLDER,
                position,
            )
            return position
        try:
            self._position = self._read()
        except CorruptLogError as error:
            log.warning("scheduled messages are read from the whole log: %s", error.message)
            self._position = 0
        if self._position < first_position:
            self.index = ScheduleIndex()
            self.problems = []
            self._position = 0
        return self._position

    def _read(self) -> int:
        """Read the file into the index, and return its position. Raises CorruptLogError."""
        size = self._files.size(PATH)
        data = b"" if size is None else self._files.pread(PATH, 0, size)
        if len(data) < _HEAD.size:
            raise CorruptLogError(f"{PATH} is missing or cut")
        magic, crc, position = _HEAD.unpack_from(data)
        if magic[:3] == MAGIC[:3] and magic[3:].isdigit() and magic > MAGIC:
            raise DataFolderError(
                f"{self._files.name()}/{PATH} was written by a newer keylane", path=PATH
            )
        if magic != MAGIC or crc32c.crc32c(memoryview(data)[8:]) != crc:
            raise CorruptLogError(f"{PATH} is damaged")
        start = _HEAD.size
        while start < len(data):
            (length,) = _U32.unpack_from(data, start)
            image = _decode(memoryview(data)[start + 4 : start + 4 + length])
            self.index.restore(image.image)
            self.problems += image.problems
            start += 4 + length
        return int(position)

    def on_record(self, header: Header, body: memoryview) -> None:
        """See `Agenda`."""
        if header.position < self._position:
            return
        try:
            changes = decode_changes(body, header.position)
        except CorruptLogError as error:
            self._add_problem(error.message)
            return
        for change in changes:
            self.index.replay(change, Place(header.position, header.length))

    def on_hole(self, hole: Hole) -> None:
        """See `Agenda`. Messages after the hole are not affected, and those in it are lost; but
        messages before it may have been settled in it.
        """
        if hole.end <= self._position:
            return
        has_lost = any(header.kind == Kind.SCHEDULED for header, _ in hole.lost_records)
        if (has_lost or not hole.explained) and self.index.entries:
            self._add_problem(
                f"the log is damaged at positions [{hole.start}, {hole.end}): what became of "
                "scheduled messages may be lost"
            )

    def _add_problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    # ── snapshots ─────────────────────────────────────────────────────────────────────────────────
    async def images(self) -> list[bytes]:
        """See `Agenda`."""
        images: list[ScheduleImage] = []
        for image in self.index.images():
            images.append(image)
            await asyncio.sleep(0)
        if self.problems:
            return [_encode(_StoredImage(ScheduleImage(()), self.problems)), *map(_packed, images)]
        return [*map(_packed, images)]

    def save(self, images: Sequence[bytes], *, position: int) -> None:
        """See `Agenda`."""
        if not images:
            return
        pieces = [piece for image in images for piece in (_U32.pack(len(image)), image)]
        head = position.to_bytes(8, "little")
        crc = crc32c.crc32c(head)
        for piece in pieces:
            crc = crc32c.crc32c(piece, crc)
        self._files.make_folder(FOLDER)
        replace_file(self._files, PATH, _HEAD.pack(MAGIC, crc, position), *pieces)

    # ── retention ─────────────────────────────────────────────────────────────────────────────────
    async def kept_bytes(self, bases: Sequence[int]) -> list[int]:
        """See `Agenda`."""
        kept = [0] * len(bases)
        entries = list(self.index.entries.values())
        for start in range(0, len(entries), SEARCH_COUNT):
            for entry in entries[start : start + SEARCH_COUNT]:
                segment = bisect_right(bases, entry.place.position) - 1
                if segment >= 0:
                    kept[segment] += entry.size
            await asyncio.sleep(0)
        return kept

    async def rewrite_below(
        self, position: int, log: CommitLog, commit: GroupCommit, run_read: RunBlocking
    ) -> None:
        """See `Agenda`."""
        while True:
            await self._rewrite_messages(position, log, commit, run_read)
            if not self.index.is_settling(position):
                break
            # If the write of an outcome fails, the records before it are needed after all.
            await asyncio.sleep(SETTLE_S)
        changes = [*self.index.open_deliveries(position), *self.index.settled_changes(position)]
        if changes:
            await self._write(changes, commit)

    async def _rewrite_messages(
        self, position: int, log: CommitLog, commit: GroupCommit, run_read: RunBlocking
    ) -> None:
        """Write the messages again that are below `position` and not being settled."""
        entries = list(self.index.entries.values())
        places: dict[Place, None] = {}
        for start in range(0, len(entries), SEARCH_COUNT):
            places |= dict.fromkeys(
                entry.place
                for entry in entries[start : start + SEARCH_COUNT]
                if entry.place.position < position
            )
            await asyncio.sleep(0)
        queued: list[tuple[Place, ScheduledMessageRecord]] = []
        size_bytes = 0
        for place in sorted(places):
            data = await run_read(log.read, *place)
            try:
                changes = read_changes(data, place)
            except CorruptLogError as error:
                await self._drop_damaged(place, error, commit)
                continue
            queued += [
                (place, each) for each in changes if isinstance(each, ScheduledMessageRecord)
            ]
            size_bytes += place.length
            if size_bytes >= REWRITTEN_BYTES_MAX:
                await self._write_needed(queued, commit)
                queued, size_bytes = [], 0
        await self._write_needed(queued, commit)

    async def _write_needed(
        self, messages: Sequence[tuple[Place, ScheduledMessageRecord]], commit: GroupCommit
    ) -> None:
        needed = [
            message
            for place, message in messages
            if self.index.is_needed(message.scheduled_id, place)
        ]
        if needed:
            await self._write(needed, commit)

    async def _write(self, changes: Sequence[Record], commit: GroupCommit) -> None:
        """Write changes that are in the index, and note where they are now."""
        commit.check_room(0, is_control=True)
        await asyncio.gather(
            *(commit.submit(self._entry(record)) for record in encode_records(changes))
        )

    def _entry(self, record: LogRecord) -> Entry:
        def on_durable(entry: Entry) -> None:
            self.index.relocate(record.changes, Place(entry.position, entry.size_bytes))

        return Entry(record.data, appended_at_ms=self._clock.wall_ms(), on_durable=on_durable)

    async def _drop_damaged(
        self, place: Place, error: CorruptLogError, commit: GroupCommit
    ) -> None:
        """Drop the messages of a damaged record, which would otherwise keep the log for ever. Those
        that are being delivered have been read before, and are left to their delivery.
        """
        ids = tuple(
            scheduled_id
            for scheduled_id, entry in self.index.entries.items()
            if entry.place == place and not entry.in_delivery
        )
        if not ids:
            return
        commit.check_room(0, is_control=True)
        self.index.begin_drop(ids)
        (record,) = encode_records([DroppedMessages(ids)])

        def on_durable(entry: Entry) -> None:
            self.index.on_dropped(ids, entry.position)

        await commit.submit(
            Entry(
                record.data,
                appended_at_ms=self._clock.wall_ms(),
                on_durable=on_durable,
                undo=lambda: self.index.requeue(ids),
            )
        )
        log.error(
            "%s dropped, never to be delivered: %s",
            counted(len(ids), "scheduled message", "scheduled messages"),
            error.message,
        )


def _packed(image: ScheduleImage) -> bytes:
    return _encode(_StoredImage(image))
