"""Whose data folder this is: `identity.json`, written once.  Disk, through `Files`.

    {"format": 1, "broker_id": "9f…", "broker_group": "g1"}

Invariants
    A folder of another broker group, of a newer format, or with files of somebody else is refused by name, and
    nothing in it is changed.
"""

from __future__ import annotations

import random

import msgspec

from ...protocol.errors import DataFolderError
from ...protocol.ids import check_name
from .files import Files, replace_file

PATH = "identity.json"
FORMAT = 1
_OURS_BEFORE = frozenset({"lock", PATH + ".tmp", "lost+found"})
"""What may lie in a folder that is taken for the first time."""


class FolderIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a data folder belongs to."""

    format: int
    broker_id: str
    """Random, given when the folder was first used: tells a copied or exchanged folder."""
    broker_group: str


def claim_folder(files: Files, *, broker_group: str, rng: random.Random) -> FolderIdentity:
    """
    Read the identity of a locked data folder, or write it if the folder is empty.

    Raises:
        DataFolderError: another group's, a newer format, not a broker's, or unreadable.
    """
    check_name("broker group", broker_group)
    if files.size(PATH) is None:
        foreign = [name for name in files.list() if name not in _OURS_BEFORE]
        if foreign:
            raise DataFolderError(
                f"{files.name()} has files that are not a broker's: {', '.join(foreign[:5])}",
                path=files.name(),
            )
        found = FolderIdentity(
            format=FORMAT, broker_id=f"{rng.getrandbits(128):032x}", broker_group=broker_group
        )
        replace_file(files, PATH, msgspec.json.encode(found) + b"\n")
        return found
    found = read_identity(files)
    if found.broker_group != broker_group:
        raise DataFolderError(
            f"{files.name()} belongs to broker group {found.broker_group}, not to {broker_group}",
            path=files.name(),
            broker_group=found.broker_group,
        )
    return found


def read_identity(files: Files) -> FolderIdentity:
    """
    The identity of a data folder; nothing is changed.

    Raises:
        DataFolderError: it is no broker's folder, of a newer format, or unreadable.
    """
    if files.size(PATH) is None:
        raise DataFolderError(
            f"{files.name()} is not a broker's data folder: it has no {PATH}", path=files.name()
        )
    try:
        found = msgspec.json.decode(files.pread(PATH, 0, 1 << 16), type=FolderIdentity)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataFolderError(
            f"{files.name()}/{PATH} is unreadable: {error}", path=files.name()
        ) from error
    if found.format != FORMAT:
        raise DataFolderError(
            f"{files.name()} has format {found.format}, this broker writes format {FORMAT}",
            path=files.name(),
        )
    return found
