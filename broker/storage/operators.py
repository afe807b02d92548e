"""Keeps the tokens that a broker accepts by itself in `operators.json`, for starts without a
metaserver. Disk, through `Files`.

    {"format": 1, "operators": {"3b4e…": "admin", "9c01…": "cluster"}}

See `AccessNews.operators`: a token is kept only as its SHA-256.
"""

from __future__ import annotations

import logging

import msgspec

from ...protocol.errors import StorageError
from .files import Files, replace_file

log = logging.getLogger("keylane.broker")

PATH = "operators.json"
BYTES_MAX = 4 << 20


class _OperatorsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    format: int = 1
    operators: dict[str, str] = {}


def keep_operators(files: Files, operators: dict[str, str]) -> None:
    """Write the operators, durably. If the disk accepts no writes, the earlier ones stay."""
    try:
        replace_file(files, PATH, msgspec.json.encode(_OperatorsFile(operators=operators)) + b"\n")
    except StorageError as error:
        log.warning("cannot write which tokens operators have: %s", error.message)


def read_operators(files: Files) -> dict[str, str]:
    """Return the operators that were written last, or none if the file is missing or unreadable."""
    if files.size(PATH) is None:
        return {}
    try:
        return msgspec.json.decode(files.pread(PATH, 0, BYTES_MAX), type=_OperatorsFile).operators
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageError) as error:
        log.warning("%s/%s is unreadable: %s", files.name(), PATH, error)
        return {}
