"""Bodies of the calls that make a consumer group, and set and suspend it.  Pure.

The metaserver keeps these settings by subject and group, and tells the group's members with their
grants.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from ..backoff import PAUSE_MS_MAX
from ..progress import AtMs
from ..progress import Offset as Cursor
from ..routing import ConsumeStrategy

TRIES_MAX_MAX = 1_000_000
CLIENT_CHARS_MAX = 512
ClientName = Annotated[str, Meta(min_length=1, max_length=CLIENT_CHARS_MAX)]
TriesMax = Annotated[int, Meta(ge=1, le=TRIES_MAX_MAX)]
FirstMs = Annotated[int, Meta(ge=0, le=PAUSE_MS_MAX)]
MaxMs = Annotated[int, Meta(ge=1, le=PAUSE_MS_MAX)]


class FailurePolicy(enum.StrEnum):
    """What becomes of a message that failed `tries_max` times; RETRY: of one that failed."""

    BLOCK = "block"
    PARK = "park"
    DEAD = "dead"
    RETRY = "retry"


class FullPolicy(enum.StrEnum):
    """What becomes of a key that is to be parked where a group can park no more."""

    BLOCK = "block"
    DEAD = "dead"


class StartAt(enum.StrEnum):
    """
    Where a new group begins: the first message, behind the last one, or the first one at or after a
    time.

    CURSORS names an offset in each partition, as where a backfill has ended.
    """

    EARLIEST = "earliest"
    LATEST = "latest"
    TIME = "time"
    CURSORS = "cursors"


class GroupStart(Struct, frozen=True, kw_only=True):
    """Where a group begins on the partitions that exist when it is made; later ones it reads from
    their first message.
    """

    at: StartAt = StartAt.EARLIEST
    at_ms: AtMs | None = None
    """For TIME: milliseconds since 1970, by the brokers' calendars.  For CURSORS: when they were
    taken, by any calendar; it tells one backfill from another.
    """
    cursors: dict[int, Cursor] | None = None
    """For CURSORS: partition id → first offset; a partition that is not named is read from its
    first message.
    """

    @property
    def stored(self) -> GroupStart:
        """As the metaserver stores it and tells it: without the cursors."""
        return replace(self, cursors=None)

    def __str__(self) -> str:
        if self.at is StartAt.CURSORS:
            return f"the end of the backfill planned {self.at_ms} ms since 1970"
        return self.at.value if self.at_ms is None else f"{self.at_ms} ms since 1970"


class GroupPolicy(Struct, frozen=True, kw_only=True):
    """What is stored of a group's failure policy; None: what the code of each consumer says."""

    on_failure: FailurePolicy | None = None
    on_full: FullPolicy | None = None
    """For PARK: what becomes of a key that finds no room."""
    tries_max: TriesMax | None = None
    """Tries of a message until `on_failure` applies."""
    backoff_first_ms: FirstMs | None = None
    """The pause after the first try, in milliseconds; goes with `backoff_max_ms`."""
    backoff_max_ms: MaxMs | None = None
    """The longest pause between two tries, in milliseconds."""


class OperatorSwitch(enum.StrEnum):
    """What an operator has suspended of a group, as one member sees it."""

    OFF = "off"
    GROUP = "group"
    CLIENT = "client"


class CreateGroup(Struct, frozen=True, kw_only=True):
    """Make a consumer group, and fix where it begins."""

    start: GroupStart = GroupStart()
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE


class SetGroup(Struct, frozen=True, kw_only=True):
    """Change what is stored of a group's failure policy; None leaves a field as it is."""

    on_failure: FailurePolicy | None = None
    on_full: FullPolicy | None = None
    tries_max: TriesMax | None = None
    backoff_first_ms: FirstMs | None = None
    backoff_max_ms: MaxMs | None = None
    forget: bool = False
    """Forget all that was stored of the policy before, then set the fields."""


class SuspendGroup(Struct, frozen=True, kw_only=True):
    """Suspend a group or one client of it, or end that.  A group and each of its clients have
    switches of their own.
    """

    suspended: bool
    client: ClientName | None = None
    """The name of a client, also of one that is not there now; None: the whole group."""


class GroupSettings(Struct, frozen=True, kw_only=True):
    """What is stored of a consumer group."""

    subject: str
    group: str
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    policy: GroupPolicy = GroupPolicy()
    start: GroupStart = GroupStart()
    unstarted: tuple[int, ...] = ()
    """Partitions whose brokers have not stored yet where the group begins: it is granted none of
    them.
    """
    suspended: bool = False
    """An operator has suspended the whole group."""
    suspended_clients: tuple[str, ...] = ()
    """Names of the clients that an operator has suspended, in order."""
