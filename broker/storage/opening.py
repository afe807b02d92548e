"""The openings of a data folder: `opening.json`, written at each start. Disk, through `Files`.

    {"format": 1, "opening": "7c…", "heard": ["e1…"], "unheard": ["09…"]}

An opening is *heard* when a metaserver has accepted a report of it.

Invariants
    Each opening has a random name and lists the earlier openings. An older copy of the folder lacks
    the newest opening, so the metaserver recognises it as a copy. The name is durable before it is
    reported. The list always has the last heard opening, after any number of unheard ones.
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
"""The number of heard openings that are listed, the newest ones: a database restored from a backup
may know only an older opening.
"""
FIRST_MAX = 25
"""The number of unheard openings that are listed from the first on. Any of them may have been
heard: that is written only when the list is nearly full, so that most starts cost one write.
"""
NEWEST_MAX = 50
"""The number of further unheard openings that are listed, the newest ones: a report may be accepted
although its answer is lost.
"""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """An opening of a data folder, and the earlier openings, the oldest first."""

    format: int = FORMAT
    opening: str = ""
    """A random name; "" if the file is missing or unreadable."""
    heard: tuple[str, ...] = ()
    """The newest openings of which a metaserver has accepted a report."""
    unheard: tuple[str, ...] = ()
    """The openings since `heard` was written. If a metaserver has heard any of them, it is one of
    the first FIRST_MAX or of the newest.
    """

    @property
    def before(self) -> tuple[str, ...]:
        """The earlier openings."""
        return self.heard + self.unheard


def begin_opening(files: Files, *, rng: random.Random) -> Opening:
    """
    Name a new opening of a locked and claimed data folder, durably.

    If the disk accepts no writes, the previous opening is returned, so that the broker can still
    serve reads.
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
        log.warning("cannot write the opening of the data folder: %s", error.message)
        return last
    return opening


def note_heard(files: Files, opening: Opening) -> None:
    """
    Write that a metaserver has accepted a report of this opening, if the list of unheard openings
    is nearly full.

    If the disk accepts no writes, the list stays as it is.
    """
    if opening.opening and len(opening.unheard) >= FIRST_MAX - 1:
        heard = (*opening.heard, *opening.unheard, opening.opening)[-HEARD_MAX:]
        try:
            _write(files, msgspec.structs.replace(opening, heard=heard, unheard=()))
        except StorageError as error:
            log.info("cannot write that a metaserver knows this opening: %s", error.message)


def read_opening(files: Files) -> Opening:
    """Return the last opening of a data folder, or an opening without a name if the file is missing
    or unreadable.
    """
    if files.size(PATH) is None:
        return Opening()
    try:
        return msgspec.json.decode(files.pread(PATH, 0, 1 << 16), type=Opening)
    except (msgspec.MsgspecError, UnicodeDecodeError, StorageError) as error:
        log.warning("%s/%s is unreadable: %s", files.name(), PATH, error)
        return Opening()


def _write(files: Files, opening: Opening) -> None:
    replace_file(files, PATH, msgspec.json.encode(opening) + b"\n")
