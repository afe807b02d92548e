"""Reading the whole log at start: fold every record, cut a torn tail, refuse damage.  Disk, through `Files`.

    whole record ──▶ visit                        bytes that are no record, at position p:
                                                    in an earlier segment               → CorruptLogError
                                                    a BARRIER record whole after p      → CorruptLogError
                                                    else: a commit that never finished  → cut at p

Invariants
    Nothing that was durable is cut, and nothing at all is cut before the reason is known.
    What was read as whole is made durable before it is served: it may have been in the page cache only.

Source: Kafka truncates at the first bad record and so loses good ones after bit rot (NATS #7549 likewise); the
barrier tells one from the other without a second sync per commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ...protocol.errors import CorruptLogError
from ...protocol.record import (
    HEADER_BYTES,
    MAGIC,
    RECORD_BYTES_MAX,
    Header,
    Wrong,
    read_record,
)
from .commit_log import BARRIER, FOLDER, segment_bases, segment_path
from .files import Files, replace_file

log = logging.getLogger("keylane.broker")

READ_BYTES = 4 << 20
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")
Visit = Callable[[Header, memoryview], None]
"""Called with each record's header and body, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What recovery found: the segments' bases, the end of the log, and how much was cut off it."""

    bases: list[int]
    end: int
    cut_bytes: int = 0


def recover_log(files: Files, visit: Visit) -> Recovered:
    """
    Read the log from its first segment to its end.

    Raises:
        CorruptLogError: durable bytes are damaged, or a segment is missing; nothing was changed.
    """
    files.make_folder(FOLDER)
    bases = segment_bases(files)
    if not bases:
        return Recovered(bases=[], end=0)
    for base, following in pairwise(bases):
        end, problem = _read_segment(files, base, visit)
        if problem is not None or end != following:
            raise _corrupt(end, problem or "a segment is missing")
    last = bases[-1]
    end, problem = _read_segment(files, last, visit)
    size = files.size(segment_path(last)) or 0
    cut_bytes = last + size - end
    assert (problem is None) == (cut_bytes == 0)
    if problem is not None:
        whole, durable_at = _whole_after(files, last, end)
        if durable_at is not None:
            raise _corrupt(end, f"{problem}; what follows at {durable_at} is whole")
        _keep_cut(files, last, end, whole)
    file = files.open_append(segment_path(last))
    try:
        if cut_bytes:
            log.warning("cut %d bytes of an unfinished write at position %d", cut_bytes, end)
            file.truncate(end - last)
        else:
            file.fdatasync()
    finally:
        file.close()
    return Recovered(bases=bases, end=end, cut_bytes=cut_bytes)


def _corrupt(position: int, reason: str) -> CorruptLogError:
    return CorruptLogError(
        f"the commit log is damaged at position {position}: {reason}", position=position
    )


def _read_segment(files: Files, base: int, visit: Visit) -> tuple[int, str | None]:
    """Visit the records of a segment; the position after the last whole one, and what stopped there if not the end."""
    path = segment_path(base)
    size = files.size(path) or 0
    at = 0
    wanted = READ_BYTES
    while at < size:
        data = files.pread(path, at, max(wanted, READ_BYTES))
        view = memoryview(data)
        start = 0
        while True:
            header = read_record(data, start)
            if not isinstance(header, Header):
                break
            if header.position != base + at + start:
                header = Wrong(f"a record of position {header.position}")
                break
            visit(header, view[start + HEADER_BYTES : start + header.length])
            start += header.length
        at += start
        if isinstance(header, Wrong):
            return base + at, header.reason
        wanted = header.wanted
        if at + wanted > size and at < size:
            return base + at, "a record cut short"
    return base + at, None


def _whole_after(files: Files, base: int, position: int) -> tuple[int, int | None]:
    """How many records are whole after the damage at `position`, and where the first with BARRIER is."""
    path = segment_path(base)
    size = files.size(path) or 0
    whole = 0
    at = position - base
    while at < size:
        data = files.pread(path, at, READ_BYTES + RECORD_BYTES_MAX)
        start = data.find(_MAGIC_BYTES, 1 if at + base == position else 0)
        while 0 <= start < READ_BYTES:
            header = read_record(data, start)
            step = 1
            if isinstance(header, Header) and header.position == base + at + start:
                if header.flags & BARRIER:
                    return whole, header.position
                whole += 1
                step = header.length
            start = data.find(_MAGIC_BYTES, start + step)
        at += READ_BYTES
    return whole, None


def _keep_cut(files: Files, base: int, position: int, whole: int) -> None:
    """Keep a copy of what is about to be cut, if there is more in it than one broken record."""
    if not whole:
        return
    path = segment_path(base)
    size = files.size(path) or 0
    data = files.pread(path, position - base, size - (position - base))
    replace_file(files, f"cut-{position:020d}.bin", data)
    log.warning(
        "%d whole records of the unfinished write are kept in cut-%020d.bin", whole, position
    )
