"""The identity of a data folder: `identity.json`, written once. It is read and written through
`Files`.

    {"format": 1, "broker_id": "9f…", "broker_group": "g1"}

Invariants
    A folder of another broker group, of a newer format, or with files of other programs is refused
    and not changed.
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
"""The names that a folder may contain before its first use."""


class FolderIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The broker and the broker group that a data folder belongs to."""

    format: int
    broker_id: str
    """A random id that is written at the folder's first use. It distinguishes the folder from
    another one of the same broker group.
    """
    broker_group: str


def claim_folder(files: Files, *, broker_group: str, rng: random.Random) -> FolderIdentity:
    """
    Read the identity of a locked data folder, or write it if the folder is empty.

    Raises:
        DataFolderError: the folder belongs to another broker group, has a newer format, is not a
            broker's, or is unreadable.
    """
    check_name("broker group", broker_group)
    if files.size(PATH) is None:
        foreign = [name for name in files.list() if name not in _OURS_BEFORE]
        if foreign:
            raise DataFolderError(
                f"{files.name()} has files that are not a broker's: {', '.join(foreign[:5])}",
                path=files.name(),
            )
        identity = FolderIdentity(
            format=FORMAT, broker_id=f"{rng.getrandbits(128):032x}", broker_group=broker_group
        )
        replace_file(files, PATH, msgspec.json.encode(identity) + b"\n")
        return identity
    identity = read_identity(files)
    if identity.broker_group != broker_group:
        raise DataFolderError(
            f"{files.name()} belongs to broker group {identity.broker_group}, not to "
            f"{broker_group}",
            path=files.name(),
            broker_group=identity.broker_group,
        )
    return identity


def read_identity(files: Files) -> FolderIdentity:
    """
    Read the identity of a data folder.

    Raises:
        DataFolderError: the folder is not a broker's, has a newer format, or is unreadable.
    """
    if files.size(PATH) is None:
        foreign = DataFolderError(
            f"{files.name()} is not a broker's data folder: it has no {PATH}", path=files.name()
        )
        foreign.hint = "Name the folder that the broker was started with, by --data."
        raise foreign
    try:
        identity = msgspec.json.decode(files.pread(PATH, 0, 1 << 16), type=FolderIdentity)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataFolderError(
            f"{files.name()}/{PATH} is unreadable: {error}", path=files.name()
        ) from error
    if identity.format != FORMAT:
        raise DataFolderError(
            f"{files.name()} has format {identity.format}, this broker writes format {FORMAT}",
            path=files.name(),
        )
    return identity
