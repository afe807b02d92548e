"""Which opening of a data folder this is: `opening.json`, written anew at each start.  Disk, through `Files`.

    {"format": 1, "opening": "7c…", "heard": ["e1…"], "unheard": ["09…"]}

Invariants
    Each opening has a random name of its own and names those before it.  So an older copy of the folder does not know
    the newest opening, and can be told.
    The name is on the disk before anybody hears it.
    However many openings no metaserver heard of, the last one that was heard of is still named.
"""

from __future__ import annotations

import logging
import random

import msgspec

from ...protocol.errors import StorageError
from .files import Files, replace_file

log = logging.getLogger("keylane.broker")

PATH = "opening.json"
FORMAT = 1
HEARD_MAX = 25
"""Names of openings that were heard of: the newest ones.  A database restored from a copy may know an older one."""
FIRST_MAX = 25
"""So many openings may be heard of before that is noted: a start costs no write more."""
NEWEST_MAX = 50
"""Of more openings than those: a metaserver may have taken a report, and its answer may not have come."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """An opening of a data folder, and those before it, each kind the oldest first."""

    format: int = FORMAT
    opening: str = ""
    """Empty: nobody knows, because the file is missing or unreadable."""
    heard: tuple[str, ...] = ()
    """A metaserver took a report of these."""
    unheard: tuple[str, ...] = ()
    """The openings since that was noted: whoever heard of one of them, it is among the first."""

    @property
    def before(self) -> tuple[str, ...]:
        """The openings before this one."""
        return self.heard + self.unheard


def begin_opening(files: Files, *, rng: random.Random) -> Opening:
    """
    Name this opening of a locked and claimed data folder.

    A disk that takes no more writes keeps the name of the opening before: the broker can still be read.
    """
    last = read_opening(files)
    unheard = last.unheard
    if last.opening and last.opening not in last.heard:
        unheard = (*unheard, last.opening)
    unheard = (*unheard[:FIRST_MAX], *unheard[FIRST_MAX:][-NEWEST_MAX:])
    name = f"{rng.getrandbits(128):032x}"
    opening = msgspec.structs.replace(last, opening=name, unheard=unheard)
    try:
        _write(files, opening)
    except StorageError as error:
        log.warning("this opening of the data folder is not noted: %s", error.message)
        return last
    return opening


def note_heard(files: Files, opening: Opening) -> None:
    """
    A metaserver took a report of this opening; that is noted before so many others come that its name would go.

    Where it cannot be written, the openings before it are kept.
    """
    if opening.opening and len(opening.unheard) >= FIRST_MAX - 1:
        heard = (*opening.heard, *opening.unheard, opening.opening)[-HEARD_MAX:]
        try:
            _write(files, msgspec.structs.replace(opening, heard=heard, unheard=()))
        except StorageError as error:
            log.info("that this opening was heard of is not noted: %s", error.message)


def read_opening(files: Files) -> Opening:
    """The last opening of a data folder; one without a name if that is not known."""
    if files.size(PATH) is None:
        return Opening()
    try:
        return msgspec.json.decode(files.pread(PATH, 0, 1 << 16), type=Opening)
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageError) as error:
        log.warning("%s/%s is unreadable: %s", files.name(), PATH, error)
        return Opening()


def _write(files: Files, opening: Opening) -> None:
    replace_file(files, PATH, msgspec.json.encode(opening) + b"\n")
