"""Reads the journal in which brokers of version 0.2 kept scheduled messages, and moves its content
into the commit log. Does disk I/O through `Files`.

    scheduled/00000000000000000001.log      numbered from 1; a segment consists of frames
    ┌───────┬────────────┬────────┬──────────┬────────────┬─────────────┬──────────────────────────┐
    │ magic │ header_crc │ length │ body_crc │ segment u64│ position u64│ body: msgpack of changes │
    └───────┴────────────┴────────┴──────────┴────────────┴─────────────┴──────────────────────────┘
     0       4            8        12         16           24            32            little-endian

    header_crc = CRC-32C of bytes [8, 32); body_crc = CRC-32C of the body; length = header and body
    the last byte of the magic is the format: 2 if the frame has a change of kind 5 or 6, else 1

Invariants
    The segments are removed when all that is needed of them is durable in the log, the oldest
    first, and before anything is delivered or canceled. So a start that finds segments may move
    them again, all or what is left of them: a message that is in the log twice counts once, and a
    segment with a message is never left without the later ones, which say what became of it.
    A damaged journal is not moved, and not changed.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import crc32c

from ...protocol.errors import CorruptLogError, DataFolderError, DiskFullError
from ...protocol.text import counted
from ..storage.files import Files, file_numbers
from ..storage.log.commit_log import CommitLog
from .records import Place, Record, ScheduledMessageRecord, decode_changes, encode_records
from .schedule_index import ScheduleIndex

log = logging.getLogger("keylane.broker")

FOLDER = "scheduled"
MAGIC = b"KLS1"
MAGIC_2 = b"KLS2"
HEADER_BYTES = 32
FRAME_BYTES_MAX = 16 << 20
MOVED_BYTES = 1 << 20
"""The approximate size of the changes that are written to the log at once, in bytes."""
_HEADER = struct.Struct("<4sIIIQQ")


def segment_path(segment: int) -> str:
    """Return the path of a segment in the data folder."""
    return f"{FOLDER}/{segment:020d}.log"


def journal_segments(files: Files) -> list[int]:
    """Return the numbers of the segments in the data folder, ascending."""
    return file_numbers(files.list(FOLDER), digits=20, suffix=".log")


class ScanResult(NamedTuple):
    """The result of scanning a segment. `end` is the end of its last valid frame."""

    end: int
    problem: str
    """Why the bytes at `end` are damage rather than an unfinished write; "" if they are not
    damage.
    """
    newer: bool = False
    """True if a frame with a newer format begins at `end`."""


def read_frame(
    data: bytes | memoryview, start: int, *, segment: int, position: int
) -> tuple[int, list[Record]] | None:
    """Return the length and the changes of the frame at `start`, or None if there is no valid frame
    for this position.
    """
    if len(data) - start < HEADER_BYTES:
        return None
    magic, header_crc, length, body_crc, frame_segment, frame_position = _HEADER.unpack_from(
        data, start
    )
    view = memoryview(data)
    if (
        magic not in {MAGIC, MAGIC_2}
        or (frame_segment, frame_position) != (segment, position)
        or crc32c.crc32c(view[start + 8 : start + HEADER_BYTES]) != header_crc
        or not HEADER_BYTES <= length <= min(FRAME_BYTES_MAX, len(data) - start)
    ):
        return None
    body = view[start + HEADER_BYTES : start + length]
    if crc32c.crc32c(body) != body_crc:
        return None
    try:
        return length, decode_changes(body, position)
    except CorruptLogError:
        return None


def scan(data: bytes, segment: int, on_frame: Callable[[int, list[Record]], None]) -> ScanResult:
    """
    Call `on_frame` with the position and the changes of each frame of a segment, in order, up to
    the first invalid bytes.

    The invalid bytes are an unfinished write if no valid frame follows them, because a frame was
    written only after the previous one was durable. Otherwise they are damage.
    """
    position = 0
    while position < len(data):
        frame = read_frame(data, position, segment=segment, position=position)
        if frame is None:
            break
        length, changes = frame
        on_frame(position, changes)
        position += length
    magic = data[position : position + 4]
    is_newer = (
        len(magic) == 4 and magic[:3] == MAGIC[:3] and magic[3:].isdigit() and magic > MAGIC_2
    )
    return ScanResult(position, _find_damage(data, position, segment), is_newer)


def _find_damage(data: bytes, end: int, segment: int) -> str:
    """Return a description of the damage if a valid frame follows `end`, otherwise ""."""
    position = data.find(MAGIC[:3], end + 1)
    while position >= 0:
        if read_frame(data, position, segment=segment, position=position) is not None:
            return f"bytes {end} to {position} are damaged"
        position = data.find(MAGIC[:3], position + 1)
    return ""


def read_journal(
    files: Files, on_frame: Callable[[int, int, list[Record]], None] = lambda *_frame: None
) -> list[str]:
    """
    Call `on_frame` with the segment, the position and the changes of every frame of a journal, the
    oldest first. An unfinished write at the end is skipped. Blocks.

    Returns:
        Descriptions of the damage.

    Raises:
        DataFolderError: a newer broker wrote the journal.
    """
    segments = journal_segments(files)
    problems = [
        f"{FOLDER}: segment {previous + 1} is missing"
        for previous, segment in pairwise(segments)
        if segment != previous + 1
    ]
    for segment in segments:
        path = segment_path(segment)
        data = files.pread(path, 0, files.size(path) or 0)
        end, problem, is_newer = scan(data, segment, partial(on_frame, segment))
        if is_newer:
            raise DataFolderError(
                f"{files.name()}/{path} was written by a newer keylane: byte {end}", path=path
            )
        if problem or (end < len(data) and segment != segments[-1]):
            problems.append(f"{path}: {problem or f'damaged from byte {end} on'}")
    return problems


def move_journal(
    files: Files, schedule_index: ScheduleIndex, commit_log: CommitLog, *, now_ms: int
) -> list[str]:
    """
    Move the content of a journal, if there is one, into the log and the index, durably, and remove
    the journal. Blocks. Nothing may be decided about scheduled messages before this.

    Returns:
        The reasons why it was not moved; the next start tries again.

    Raises:
        DataFolderError: a newer broker wrote the journal.
        StorageError: the log or the folder cannot be written.
    """
    if not journal_segments(files):
        return []
    old_index = ScheduleIndex()

    def replay(segment: int, position: int, changes: list[Record]) -> None:
        for change in changes:
            old_index.replay(change, _old_place(segment, position))

    if problems := read_journal(files, replay):
        return problems
    old_index.finish_replay()
    mover = _Mover(schedule_index, commit_log, now_ms)

    def move(segment: int, position: int, changes: list[Record]) -> None:
        place = _old_place(segment, position)
        for change in changes:
            if isinstance(change, ScheduledMessageRecord):
                entry = old_index.entries.get(change.scheduled_id)
                if entry is not None and entry.place == place:
                    mover.add(change)

    try:
        read_journal(files, move)
        for change in (*old_index.open_deliveries(), *old_index.settled_changes()):
            mover.add(change)
        mover.flush()
    except DiskFullError as error:
        return [f"{FOLDER}/ cannot be moved into the log: {error.message}"]
    for segment in journal_segments(files):
        files.remove(segment_path(segment))
        files.sync_folder(FOLDER)
    log.info(
        "moved %s from %s/ into the commit log",
        counted(len(old_index.entries), "scheduled message"),
        FOLDER,
    )
    return []


def _old_place(segment: int, position: int) -> Place:
    return Place(segment, position)  # only compared with others of this journal


class _Mover:
    """Writes changes to the log, some at a time, and applies them."""

    def __init__(self, schedule_index: ScheduleIndex, commit_log: CommitLog, now_ms: int) -> None:
        self._schedule_index = schedule_index
        self._commit_log = commit_log
        self._now_ms = now_ms
        self._changes: list[Record] = []
        self._size_bytes = 0

    def add(self, change: Record) -> None:
        """Write a change, now or later."""
        self._changes.append(change)
        self._size_bytes += change.size
        if self._size_bytes >= MOVED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Make all added changes durable, and apply them."""
        plan = self._commit_log.plan()
        written: list[tuple[Place, Record]] = []
        for record in encode_records(self._changes) if self._changes else ():
            position, _ = plan.add(record.data, base_offset=0, appended_at_ms=self._now_ms)
            place = Place(position, len(record.data))
            written += [(place, change) for change in record.changes]
        if written:
            self._commit_log.write(plan)
        for place, change in written:
            self._schedule_index.replay(change, place)
        self._changes.clear()
        self._size_bytes = 0
