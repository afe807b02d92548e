"""Defines the format of a backup file: JSON lines with a head, the rows, and an end that contains
their number and checksum. Pure.

    {"format":1,"program":"0.2.0","revision":"0200","cluster":"k…","cluster_version":"0.2"}
    ["subjects",{"subject_id":1,…}]
    {"rows":57,"sha256":"…"}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ...protocol.errors import ConfigError, Reason

FORMAT = 1


class BackupHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: the program that wrote the backup, and its cluster."""

    format: int
    program: str
    revision: str
    cluster: str
    cluster_version: str


class BackupEnd(msgspec.Struct, frozen=True):
    """The last line, which proves that the file is complete."""

    rows: int
    sha256: str


Row = tuple[str, dict[str, Any]]


def encode_backup(head: BackupHead, rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield the lines of a backup file."""
    digest = hashlib.sha256()
    count = 0
    line = msgspec.json.encode(head) + b"\n"
    digest.update(line)
    yield line
    for row in rows:
        line = msgspec.json.encode(row) + b"\n"
        digest.update(line)
        count += 1
        yield line
    yield msgspec.json.encode(BackupEnd(count, digest.hexdigest())) + b"\n"


def decode_backup(content: bytes, path: str) -> tuple[BackupHead, list[Row]]:
    """
    Return the head and the rows of a backup file.

    Raises:
        ConfigError: the file is not a backup, has another format, or is truncated or damaged.
    """
    lines = content.splitlines(keepends=True)
    try:
        if len(lines) < 2:
            raise ConfigError(
                Reason.BACKUP_FILE, f"{path} is not a backup, or is truncated", path=path
            )
        head = msgspec.json.decode(lines[0], type=BackupHead)
        if head.format != FORMAT:
            raise ConfigError(
                Reason.BACKUP_FILE, f"{path} has format {head.format}, not {FORMAT}", path=path
            )
        end = msgspec.json.decode(lines[-1], type=BackupEnd)
        rows = [msgspec.json.decode(line, type=Row) for line in lines[1:-1]]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            Reason.BACKUP_FILE,
            f"{path} is truncated or damaged, or is not a backup: {error}",
            path=path,
        ) from error
    if end != BackupEnd(len(rows), hashlib.sha256(b"".join(lines[:-1])).hexdigest()):
        raise ConfigError(Reason.BACKUP_FILE, f"{path} is damaged: checksum mismatch", path=path)
    return head, rows
