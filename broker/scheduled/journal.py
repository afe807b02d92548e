"""The journal of scheduled messages: segments of frames in `scheduled/`. Disk, through `Files`;
one thread at a time.

    scheduled/00000000000000000001.log      numbered from 1; only the last is written, at its end

Invariants
    A frame is synced before the next one is written; if the process that wrote it has not synced
    it, the next start does. The rest of a write that a full disk or a crash has interrupted can lie
    only after the frames of the last segment. Segments are removed from the first on, so a record
    that settles a message is not removed before the message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

from ...protocol.errors import CorruptLogError, DataFolderError, StorageError
from ..storage.files import AppendFile, Files, write_again
from .records import Place, Record, encode_frame, read_frame, scan

log = logging.getLogger("keylane.broker")

FOLDER = "scheduled"
SUFFIX = ".log"
SEGMENT_BYTES = 16 << 20
"""The size in bytes of a segment, which is read in one piece at a start. A larger frame has a
segment of its own.
"""


def segment_path(segment: int) -> str:
    """Return the path of a segment in the data folder."""
    return f"{FOLDER}/{segment:020d}{SUFFIX}"


class ScheduledJournal:
    """The journal of a data folder; made by `open`."""

    def __init__(self, files: Files, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._files = files
        self.segment_bytes = segment_bytes
        self._sizes: dict[int, int] = {}
        """Segment → its bytes, the oldest segment first."""
        self._file: AppendFile | None = None
        self.problems: list[str] = []
        """The damage of the journal. A damaged journal is not written."""

    @classmethod
    def open(
        cls,
        files: Files,
        visit: Callable[[Place, list[Record]], None],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        cut: bool = True,
    ) -> ScheduledJournal:
        """
        Read every frame, the oldest first.

        Args:
            cut: cut off an unfinished write, and make the last frame durable. If it is False, no
                byte is changed.

        Raises:
            DataFolderError: a newer broker wrote the journal.
            StorageError: the last frame may not be durable.
        """
        journal = cls(files, segment_bytes=segment_bytes)
        segments = _segments(files)
        for before, segment in pairwise(segments):
            if segment != before + 1:
                journal.problems.append(f"{FOLDER}: segment {before + 1} is missing")
        newest: Place | None = None

        def seen(place: Place, records: list[Record]) -> None:
            nonlocal newest
            newest = place
            visit(place, records)

        for segment in segments:
            journal._read(segment, seen, last=segment == segments[-1], cut=cut)
        if cut and not journal.problems and newest and newest.segment == segments[-1]:
            journal._write_again(newest)
        return journal

    def _read(
        self, segment: int, visit: Callable[[Place, list[Record]], None], *, last: bool, cut: bool
    ) -> None:
        path = segment_path(segment)
        size = self._files.size(path) or 0
        data = self._files.pread(path, 0, size)
        end, problem, newer = scan(data, segment, visit)
        if newer:
            raise DataFolderError(
                f"{self._files.name()}/{path} is of a newer keylane: byte {end}", path=path
            )
        self._sizes[segment] = end
        if end == len(data):
            return
        if problem or not last:
            self.problems.append(f"{path}: {problem or f'damaged from byte {end} on'}")
        elif cut:
            log.warning("%s: cutting %d bytes of an unfinished write", path, len(data) - end)
            file = self._files.open_append(path)
            try:
                file.truncate(end)
            finally:
                file.close()

    def _write_again(self, place: Place) -> None:
        """Make the last frame durable, because it may be only in the page cache."""
        path = segment_path(place.segment)
        file = self._files.open_append(path)
        try:
            end = place.position + place.length
            write_again(self._files, path, file, start=place.position, end=end)
            file.fdatasync()
        finally:
            file.close()
        self._files.sync_folder(FOLDER)  # the process may have ended before it did this

    @property
    def bytes(self) -> int:
        """The number of bytes in all segments."""
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
            StorageError: the journal must not be written again before a start.
        """
        segment = max(self._sizes, default=0)
        frame = encode_frame(records, segment=segment, position=self._sizes.get(segment, 0))
        if not segment or 0 < self._sizes[segment] > self.segment_bytes - len(frame):
            segment += 1
            frame = encode_frame(records, segment=segment, position=0)
            self._begin(segment)
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

    def _begin(self, segment: int) -> None:
        """Create the file of a new segment."""
        if segment == 1:
            self._files.make_folder(FOLDER)
        self._cut_unfinished(segment - 1)
        self.close()
        self._file = self._files.open_append(segment_path(segment))
        self._file.rewind(0)
        self._sizes[segment] = 0

    def _cut_unfinished(self, segment: int) -> None:
        """Cut off the rest of a write that a full disk has interrupted, durably. In a segment that
        is not the last one, a start would treat it as damage.
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
        end = scan(data, segment, lambda _place, more: records.extend(more)).end
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
