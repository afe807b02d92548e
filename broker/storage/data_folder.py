"""The small JSON files in a data folder: its identity, its openings, and the operators' tokens that
the broker accepts without asking a metaserver. Does disk I/O through `Files`.

    {"format": 1, "broker_id": "9f…", "broker_group": "g1"}    format 2: with copies, or a copy

Invariants
    A folder is refused, and not changed, if it belongs to another broker group, has a newer format,
    or contains other programs' files.

    {"format": 1, "opening": "7c…", "heard": ["e1…"], "unheard": ["09…"]}

An opening is *heard* once a metaserver has accepted a report of it.

Invariants
    Each opening has a random name and lists the earlier openings. An older copy of the folder lacks
    the newest opening, so the metaserver recognises it as a copy. The name is durable before it is
    reported. The list always contains the last heard opening, no matter how many unheard ones
    follow.

    {"format": 1, "operators": {"3b4e…": "admin", "9c01…": "cluster"}}

Only the SHA-256 of a token is stored; see `AccessNews.operators`.
"""

from __future__ import annotations

import logging
import random

import msgspec

from ...protocol.errors import DataFolderError, StorageError
from ...protocol.ids import check_name
from .copy_file import check_no_copy
from .files import Files, replace_file

IDENTITY_PATH = "identity.json"
FORMAT = 1
FORMAT_WITH_COPIES = 2
"""The format of a folder that only brokers which know of copies may serve: acks may have to wait
for copies of it, or it is one.
"""
_INITIAL_NAMES = frozenset({"lock", IDENTITY_PATH + ".tmp", "lost+found"})
"""The names that a folder may contain before a broker uses it for the first time."""


class FolderIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The broker and the broker group to which a data folder belongs."""

    format: int
    broker_id: str
    """A random id that is written when the folder is first used. It distinguishes the folder from
    other folders of the same broker group.
    """
    broker_group: str


def claim_folder(files: Files, *, broker_group: str, rng: random.Random) -> FolderIdentity:
    """
    Read the identity of a locked data folder, or write one if the folder is empty.

    Raises:
        DataFolderError: the folder belongs to another broker group, has a newer format, is not a
            broker's data folder, or is unreadable.
    """
    check_name("broker group", broker_group)
    check_no_copy(files)
    if not is_claimed(files):
        foreign = [name for name in files.list() if name not in _INITIAL_NAMES]
        if foreign:
            raise DataFolderError(
                f"{files.name()} contains files that are not a broker's: {', '.join(foreign[:5])}",
                path=files.name(),
            )
        identity = FolderIdentity(
            format=FORMAT, broker_id=f"{rng.getrandbits(128):032x}", broker_group=broker_group
        )
        _write_identity(files, identity)
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


def is_claimed(files: Files) -> bool:
    """Return True if a data folder has an identity."""
    return files.size(IDENTITY_PATH) is not None


def read_identity(files: Files) -> FolderIdentity:
    """
    Read the identity of a data folder.

    Raises:
        DataFolderError: the folder is not a broker's data folder, has a newer format, or is
            unreadable.
    """
    if not is_claimed(files):
        error = DataFolderError(
            f"{files.name()} is not a broker's data folder: it has no {IDENTITY_PATH}",
            path=files.name(),
        )
        error.hint = "Pass --data with the folder that the broker was started with."
        raise error
    try:
        identity = msgspec.json.decode(files.pread(IDENTITY_PATH, 0, 1 << 16), type=FolderIdentity)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise DataFolderError(
            f"{files.name()}/{IDENTITY_PATH} is unreadable: {problem}", path=files.name()
        ) from problem
    if identity.format not in {FORMAT, FORMAT_WITH_COPIES}:
        raise DataFolderError(
            f"{files.name()} has format {identity.format}, this broker writes formats {FORMAT} "
            f"and {FORMAT_WITH_COPIES}",
            path=files.name(),
        )
    return identity


def has_copies(files: Files) -> bool:
    """Return True if acks of this folder's broker may have to wait for copies: it must ask a
    metaserver first. Raises DataFolderError.
    """
    return read_identity(files).format == FORMAT_WITH_COPIES


def record_copies(files: Files, *, exist: bool) -> None:
    """Note in the folder, durably, whether acks may have to wait for copies."""
    number = FORMAT_WITH_COPIES if exist else FORMAT
    _write_identity(files, msgspec.structs.replace(read_identity(files), format=number))


def _write_identity(files: Files, identity: FolderIdentity) -> None:
    replace_file(files, IDENTITY_PATH, msgspec.json.encode(identity) + b"\n")


def copy_origin(files: Files, *, broker_group: str, broker_id: str, opening: str) -> None:
    """Give a copy the identity of the folder that it copies, and the name of the opening up to
    which it copies, durably: a broker that is started on the copy follows that opening.
    """
    _write_identity(
        files,
        FolderIdentity(format=FORMAT_WITH_COPIES, broker_id=broker_id, broker_group=broker_group),
    )
    _write(files, Opening(opening=opening))


log = logging.getLogger("keylane.broker")

OPENING_PATH = "opening.json"
HEARD_MAX = 25
"""The number of heard openings that are listed, newest first. There is more than one because a
database that was restored from a backup may know only an older opening.
"""
FIRST_MAX = 25
"""The number of oldest unheard openings that are listed. Any of them may have been heard: the file
is rewritten only when the list is nearly full, so most starts need only one write.
"""
NEWEST_MAX = 50
"""The number of newest unheard openings that are listed in addition. A report may be accepted even
if its reply is lost.
"""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """An opening of a data folder, and the earlier openings, the oldest first."""

    format: int = FORMAT
    opening: str = ""
    """A random name; "" if the file is missing or unreadable."""
    heard: tuple[str, ...] = ()
    """The newest openings whose reports a metaserver has accepted."""
    unheard: tuple[str, ...] = ()
    """The openings since `heard` was last written. If a metaserver has heard any of them, it has
    heard one of the first FIRST_MAX or one of the newest.
    """

    @property
    def earlier(self) -> tuple[str, ...]:
        """The earlier openings."""
        return self.heard + self.unheard


def begin_opening(files: Files, *, rng: random.Random) -> Opening:
    """
    Begin a new opening of a locked and claimed data folder, whose name is stored durably.

    If the disk rejects writes, return the previous opening: the broker can still serve reads.
    """
    previous = read_opening(files)
    opening = _next_opening(previous, f"{rng.getrandbits(128):032x}")
    try:
        _write(files, opening)
    except StorageError as error:
        log.warning("cannot write the opening of the data folder: %s", error.message)
        return previous
    return opening


def record_promotion(files: Files, copy_id: str) -> None:
    """Make the id of a promoted copy the name of its newest opening, durably: from then on, a
    metaserver refuses reports of folders that do not know it.
    """
    previous = read_opening(files)
    if previous.opening != copy_id:
        _write(files, _next_opening(previous, copy_id))


def _next_opening(previous: Opening, name: str) -> Opening:
    unheard = previous.unheard
    if previous.opening and previous.opening not in previous.heard:
        unheard = (*unheard, previous.opening)
    unheard = (*unheard[:FIRST_MAX], *unheard[FIRST_MAX:][-NEWEST_MAX:])
    return msgspec.structs.replace(previous, opening=name, unheard=unheard)


def record_heard(files: Files, opening: Opening) -> None:
    """
    Record that a metaserver has accepted a report of this opening. The record is written only if
    the list of unheard openings is nearly full.

    If the disk rejects writes, the list remains unchanged.
    """
    if opening.opening and len(opening.unheard) >= FIRST_MAX - 1:
        heard = (*opening.heard, *opening.unheard, opening.opening)[-HEARD_MAX:]
        try:
            _write(files, msgspec.structs.replace(opening, heard=heard, unheard=()))
        except StorageError as error:
            log.info("cannot record that a metaserver knows this opening: %s", error.message)


def read_opening(files: Files) -> Opening:
    """Return the last opening of a data folder. Its name is "" if the file is missing or
    unreadable.
    """
    if files.size(OPENING_PATH) is None:
        return Opening()
    try:
        return msgspec.json.decode(files.pread(OPENING_PATH, 0, 1 << 16), type=Opening)
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageError) as error:
        log.warning("%s/%s is unreadable: %s", files.name(), OPENING_PATH, error)
        return Opening()


def _write(files: Files, opening: Opening) -> None:
    replace_file(files, OPENING_PATH, msgspec.json.encode(opening) + b"\n")


OPERATORS_PATH = "operators.json"
OPERATORS_BYTES_MAX = 4 << 20


class _OperatorsFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of operators.json."""

    format: int = 1
    operators: dict[str, str] = {}


def save_operators(files: Files, operators: dict[str, str]) -> None:
    """Replace the stored operators, durably. If the disk rejects writes, the old operators
    remain.
    """
    try:
        replace_file(
            files, OPERATORS_PATH, msgspec.json.encode(_OperatorsFile(operators=operators)) + b"\n"
        )
    except StorageError as error:
        log.warning("cannot write the operators' tokens: %s", error.message)


def read_operators(files: Files) -> dict[str, str]:
    """Return the stored operators, or an empty dict if the file is missing or unreadable."""
    if files.size(OPERATORS_PATH) is None:
        return {}
    try:
        return msgspec.json.decode(
            files.pread(OPERATORS_PATH, 0, OPERATORS_BYTES_MAX), type=_OperatorsFile
        ).operators
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageError) as error:
        log.warning("%s/%s is unreadable: %s", files.name(), OPERATORS_PATH, error)
        return {}
