"""The journal in which brokers of version 0.2 kept scheduled messages, written as they wrote it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import crc32c
import msgspec

from keylane.broker.scheduled.old_journal import FOLDER, HEADER_BYTES, MAGIC, MAGIC_2, segment_path
from keylane.broker.scheduled.records import DroppedMessages, Record, ScheduledForSubject
from keylane.broker.storage.files import Files


def encode_frame(changes: Sequence[Record], *, segment: int, position: int) -> bytes:
    """A frame at this place of the journal."""
    body = msgspec.msgpack.encode(changes)
    is_second = any(isinstance(each, ScheduledForSubject | DroppedMessages) for each in changes)
    checked = struct.pack("<IIQQ", HEADER_BYTES + len(body), crc32c.crc32c(body), segment, position)
    crc = crc32c.crc32c(checked).to_bytes(4, "little")
    return b"".join((MAGIC_2 if is_second else MAGIC, crc, checked, body))


def write_journal(
    files: Files,
    frames: Iterable[Sequence[Record]],
    *,
    segment_bytes: int = 16 << 20,
    first: int = 1,
) -> None:
    """Write frames as segments, durably."""
    segments = [b""]
    for changes in frames:
        number = first + len(segments) - 1
        frame = encode_frame(changes, segment=number, position=len(segments[-1]))
        if segments[-1] and len(segments[-1]) + len(frame) > segment_bytes:
            segments.append(b"")
            frame = encode_frame(changes, segment=number + 1, position=0)
        segments[-1] += frame
    files.make_folder(FOLDER)
    for number, data in enumerate(segments, first):
        file = files.open_append(segment_path(number))
        file.append([data])
        file.fdatasync()
        file.close()
    files.sync_folder(FOLDER)
