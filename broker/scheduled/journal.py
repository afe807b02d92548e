"""Stores the journal of scheduled messages as segments of frames in `scheduled/`. Does disk I/O
through `Files`, in one thread at a time.

    scheduled/00000000000000000001.log      numbered from 1; only the last is written, at its end

Invariants
    A frame is synced before the next one is written; if the process crashes before the sync, the
    next start does it. An unfinished write can only follow the frames of the last segment.
    The oldest segment is removed first, so a record that settles a message is not removed before
    the message.

`JournalWriter` runs on one event loop, and writes records in the order of the calls: all records
that wait for the disk become one frame with one sync.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from ...protocol.errors import (
    BrokerReadOnlyError,
    CorruptLogError,
    DataFolderError,
    DiskFullError,
    FlushFailedError,
    KeylaneError,
    StorageError,
)
from ..storage.files import AppendFile, Files, rewrite_in_place
from ..store.group_commit import RunBlocking
from .records import Place, Record, encode_frame, read_frame, record_bytes, scan

log = logging.getLogger("keylane.broker")

FOLDER = "scheduled"
SUFFIX = ".log"
SEGMENT_BYTES = 16 << 20
"""The maximum size of a segment in bytes. The broker reads a segment in one piece when it starts. A
larger frame gets its own segment.
"""


def segment_path(segment: int) -> str:
    """Return the path of a segment in the data folder."""
    return f"{FOLDER}/{segment:020d}{SUFFIX}"


class ScheduledJournal:
    """The journal of a data folder; created with `open`."""

    def __init__(self, files: Files, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._files = files
        self.segment_bytes = segment_bytes
        self._sizes: dict[int, int] = {}
        """Maps segments to sizes in bytes, the oldest segment first."""
        self._file: AppendFile | None = None
        self.problems: list[str] = []
        """Descriptions of the damage to the journal. A damaged journal is not written."""

    @classmethod
    def open(
        cls,
        files: Files,
        on_frame: Callable[[Place, list[Record]], None],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        must_cut: bool = True,
    ) -> ScheduledJournal:
        """
        Open the journal, and call `on_frame` with every frame, the oldest first.

        Args:
            must_cut: True to truncate an unfinished write, and to make the last frame durable. If
                False, nothing is changed.

        Raises:
            DataFolderError: a newer broker wrote the journal.
            StorageError: the last frame may not be durable.
        """
        journal = cls(files, segment_bytes=segment_bytes)
        segments = _segments(files)
        for previous, segment in pairwise(segments):
            if segment != previous + 1:
                journal.problems.append(f"{FOLDER}: segment {previous + 1} is missing")
        newest: Place | None = None

        def visit_and_track(place: Place, records: list[Record]) -> None:
            nonlocal newest
            newest = place
            on_frame(place, records)

        for segment in segments:
            journal._read(
                segment, visit_and_track, is_last=segment == segments[-1], must_cut=must_cut
            )
        if must_cut and not journal.problems and newest and newest.segment == segments[-1]:
            journal._write_again(newest)
        return journal

    def _read(
        self,
        segment: int,
        on_frame: Callable[[Place, list[Record]], None],
        *,
        is_last: bool,
        must_cut: bool,
    ) -> None:
        """Read a segment, and pass its frames to `on_frame`. An unfinished write is truncated if
        `must_cut` is true.
        """
        path = segment_path(segment)
        size = self._files.size(path) or 0
        data = self._files.pread(path, 0, size)
        end, problem, is_newer = scan(data, segment, on_frame)
        if is_newer:
            raise DataFolderError(
                f"{self._files.name()}/{path} was written by a newer keylane: byte {end}", path=path
            )
        self._sizes[segment] = end
        if end == len(data):
            return
        if problem or not is_last:
            self.problems.append(f"{path}: {problem or f'damaged from byte {end} on'}")
        elif must_cut:
            log.warning("%s: cutting %d bytes of an unfinished write", path, len(data) - end)
            file = self._files.open_append(path)
            try:
                file.truncate(end)
            finally:
                file.close()

    def _write_again(self, place: Place) -> None:
        """Make the last frame durable, because it may only be in the page cache."""
        path = segment_path(place.segment)
        file = self._files.open_append(path)
        try:
            end = place.position + place.length
            rewrite_in_place(self._files, path, file, start=place.position, end=end)
            file.fdatasync()
        finally:
            file.close()
        self._files.sync_folder(FOLDER)  # the process may have crashed before it did this

    @property
    def size_bytes(self) -> int:
        """The total size of all segments, in bytes."""
        return sum(self._sizes.values())

    @property
    def segments(self) -> list[int]:
        """The numbers of the segments, the oldest first."""
        return list(self._sizes)

    def append(self, records: Sequence[Record]) -> Place:
        """
        Write records as one frame, durably. Blocks.

        Raises:
            DiskFullError: nothing was written.
            StorageError: the journal must not be written until the broker restarts.
        """
        segment = max(self._sizes, default=0)
        frame = encode_frame(records, segment=segment, position=self._sizes.get(segment, 0))
        if not segment or 0 < self._sizes[segment] > self.segment_bytes - len(frame):
            segment += 1
            frame = encode_frame(records, segment=segment, position=0)
            self._begin_segment(segment)
        if self._file is None:
            self._file = self._files.open_append(segment_path(segment))
        position = self._sizes[segment]
        try:
            self._file.append([frame])
        except StorageError:
            self._file.rewind(position)
            raise
        self._file.fdatasync()
        if not position:
            self._files.sync_folder(FOLDER)
        self._sizes[segment] = position + len(frame)
        return Place(segment, position, len(frame))

    def _begin_segment(self, segment: int) -> None:
        """Create the file of a new segment."""
        if segment == 1:
            self._files.make_folder(FOLDER)
        self._cut_unfinished(segment - 1)
        self.close()
        self._file = self._files.open_append(segment_path(segment))
        self._file.rewind(0)
        self._sizes[segment] = 0

    def _cut_unfinished(self, segment: int) -> None:
        """Truncate an unfinished write, durably. In any segment but the last, it would be treated
        as damage at the next start.
        """
        end = self._sizes.get(segment, 0)
        if self._file is not None and (self._files.size(segment_path(segment)) or 0) > end:
            self._file.truncate(end)

    def read(self, place: Place) -> list[Record]:
        """
        Return the records of a frame. Blocks.

        Raises:
            CorruptLogError: the bytes are damaged.
        """
        segment, position, length = place
        path = segment_path(segment)
        frame = read_frame(
            self._files.pread(path, position, length), 0, segment=segment, position=position
        )
        if frame is None:
            raise CorruptLogError(
                f"{self._files.name()}/{path} is damaged at byte {position}", position=position
            )
        return frame[1]

    def read_segment(self, segment: int) -> list[Record]:
        """
        Return all records of a segment. Blocks.

        Raises:
            CorruptLogError: the bytes are damaged.
        """
        records: list[Record] = []
        size = self._sizes[segment]
        data = self._files.pread(segment_path(segment), 0, size)
        end = scan(data, segment, lambda _place, new_records: records.extend(new_records)).end
        if end != size:
            raise CorruptLogError(
                f"{self._files.name()}/{segment_path(segment)} is damaged at byte {end}",
                position=end,
            )
        return records

    def remove(self, segment: int) -> None:
        """Remove the oldest segment, durably. Blocks."""
        assert segment == min(self._sizes) < max(self._sizes)
        self._files.remove(segment_path(segment))
        self._files.sync_folder(FOLDER)
        del self._sizes[segment]

    def close(self) -> None:
        """Close the file that is being written."""
        if self._file is not None:
            with suppress(StorageError):
                self._file.close()
            self._file = None


def _segments(files: Files) -> list[int]:
    """Return the numbers of the segments in the data folder, ascending."""
    return sorted(
        int(stem)
        for name in files.list(FOLDER)
        if name.endswith(SUFFIX)
        and len(stem := name.removesuffix(SUFFIX)) == 20
        and stem.isascii()
        and stem.isdecimal()
    )


WRITE_BYTES_MAX = 4 << 20
"""The maximum size of the records in a frame, in bytes, which only a single write may exceed. A
frame over FRAME_BYTES_MAX would be truncated at the next start.
"""


@dataclass(slots=True)
class _PendingWrite:
    """Records that wait for the disk."""

    records: Sequence[Record]
    size_bytes: int
    done: asyncio.Future[None]
    on_durable: Callable[[Place], object]
    undo: Callable[[], object]


class JournalWriter:
    """Writes a journal; it must be the only writer."""

    def __init__(
        self,
        journal: ScheduledJournal,
        run_blocking: RunBlocking,
        *,
        on_written: Callable[[], object],
    ) -> None:
        """
        Args:
            run_blocking: runs one function at a time, in the order of the calls.
            on_written: called after each frame.
        """
        self._journal = journal
        self._run_blocking = run_blocking
        self._on_written = on_written
        self._queue: deque[_PendingWrite] = deque()
        self._failure = ""
        """The reason why writes are refused; "" if they are accepted."""
        self._task: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        """The reason why writes are refused; "" if they are accepted."""
        return self._journal.problems[0] if self._journal.problems else self._failure

    def check(self) -> None:
        """Raise CorruptLogError or BrokerReadOnlyError if writes are refused."""
        if self._journal.problems:
            raise CorruptLogError(f"scheduled messages are not served: {self.problem}")
        if self._failure:
            raise BrokerReadOnlyError(f"scheduled messages cannot be written: {self._failure}")

    def submit(
        self,
        records: Sequence[Record],
        *,
        on_durable: Callable[[Place], object] = lambda _place: None,
        undo: Callable[[], object] = lambda: None,
    ) -> asyncio.Future[None]:
        """
        Queue records for writing, and return a future that is done when they are durable.

        Args:
            on_durable: called when they are durable, before the future is done.
            undo: called instead of `on_durable` if they were not written or may not be durable.
        """
        done = asyncio.get_running_loop().create_future()
        self._queue.append(
            _PendingWrite(records, sum(map(record_bytes, records)), done, on_durable, undo)
        )
        if self._task is None:
            self._task = asyncio.create_task(self._write(), name="scheduled messages")
        return done

    async def _write(self) -> None:
        """Write the queued records, a frame at a time, until the queue is empty."""
        while self._queue:
            batch: list[_PendingWrite] = []
            size_bytes = 0
            while self._queue and (
                not batch or size_bytes + self._queue[0].size_bytes <= WRITE_BYTES_MAX
            ):
                batch.append(self._queue.popleft())
                size_bytes += batch[-1].size_bytes
            records = [record for write in batch for record in write.records]
            place = Place(0, 0, 0)
            try:
                self.check()
                if records:
                    place = await self._run_blocking(self._journal.append, records)
            except KeylaneError as error:
                self._fail(batch, error)
                continue
            except Exception as error:
                log.exception("a bug in the broker stopped the writing of scheduled messages")
                self._fail(batch, FlushFailedError(f"a bug in the broker: {error!r:.200}"))
                continue
            for write in batch:
                write.on_durable(place)
                write.done.set_result(None)
            self._on_written()
        self._task = None

    def _fail(self, batch: Sequence[_PendingWrite], error: KeylaneError) -> None:
        """Report a failure to the callers. After any disk error other than a full disk, all later
        writes are refused.
        """
        if isinstance(error, StorageError) and not isinstance(error, DiskFullError):
            self._failure = self._failure or error.message
            log.critical("scheduled messages are refused until the broker is restarted: %s", error)
        for write in batch:
            write.undo()
            write.done.set_exception(error.copy())
            write.done.exception()  # mark as retrieved, because the caller may have been cancelled

    async def wait_idle(self) -> None:
        """Wait until all submitted records are written."""
        if self._task is not None:
            await asyncio.wait([self._task])
