"""What a follower notes: when its reader was opened, what it was given, when it kept its positions,
how far it is, and what it was told to be removed. Pure.
"""

from __future__ import annotations

from typing import NamedTuple


class Opened(NamedTuple):
    """A reader was opened; instants are indexes of the world's history."""

    began: int
    """When the opening began."""
    owed_from: int
    """What is sent from here on is owed to this reader."""
    after_keeping: bool
    """It goes on at the positions that were kept last."""
    latest: bool = False
    """It begins behind everything that is stored."""


class Given(NamedTuple):
    """The reader gave a message."""

    partition_id: int
    offset: int
    key: bytes
    value: bytes
    queue: int = 0
    logic_offset: int = 0


class Kept(NamedTuple):
    """The program kept the reader's positions, behind all that it was given."""


class Told(NamedTuple):
    """The reader was told that what lies before an offset of a partition is removed."""

    partition_id: int
    offset: int


class Passed(NamedTuple):
    """The reader's position in a partition, behind what it gave and what is not wanted."""

    partition_id: int
    offset: int


Note = Opened | Given | Kept | Told | Passed
