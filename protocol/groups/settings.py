"""The bodies of the calls that create a consumer group, change its settings or suspend it. Pure.

The metaserver stores these settings for each subject and group, and sends them to the group's
members together with their grants.
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
from ..text import format_time

TRIES_LIMIT = 1_000_000
CLIENT_CHARS_MAX = 512
ClientName = Annotated[str, Meta(min_length=1, max_length=CLIENT_CHARS_MAX)]
TriesMax = Annotated[int, Meta(ge=1, le=TRIES_LIMIT)]
FirstMs = Annotated[int, Meta(ge=0, le=PAUSE_MS_MAX)]
MaxMs = Annotated[int, Meta(ge=1, le=PAUSE_MS_MAX)]


class FailurePolicy(enum.StrEnum):
    """What happens to a message after `tries_max` failed attempts or, with RETRY, after the first
    one.
    """

    BLOCK = "block"
    PARK = "park"
    DEAD = "dead"
    RETRY = "retry"


class FullPolicy(enum.StrEnum):
    """What happens to a key that should be parked when the group's limit is reached."""

    BLOCK = "block"
    DEAD = "dead"


class StartAt(enum.StrEnum):
    """
    Where a new group starts: at the first message, after the last message, or at the first message
    stored at or after a given time.

    CURSORS gives an offset for each partition, for example the end of a backfill.
    """

    EARLIEST = "earliest"
    LATEST = "latest"
    TIME = "time"
    CURSORS = "cursors"


class GroupStart(Struct, frozen=True, kw_only=True):
    """The start of a group on the partitions that exist when it is created. The group reads later
    partitions from their first message.
    """

    at: StartAt = StartAt.EARLIEST
    at_ms: AtMs | None = None
    """With TIME, milliseconds since 1970 by the brokers' wall clocks. With CURSORS, the time at
    which the cursors were read, which distinguishes one backfill from another.
    """
    cursors: dict[int, Cursor] | None = None
    """With CURSORS, maps partition ids to the first offset to read. Other partitions are read from
    their first message.
    """

    @property
    def stored(self) -> GroupStart:
        """The start as the metaserver stores and reports it, that is, without the cursors."""
        return replace(self, cursors=None)

    def __str__(self) -> str:
        if self.at_ms is None:
            return self.at.value
        time = format_time(self.at_ms)
        return f"the end of the backfill planned at {time}" if self.at is StartAt.CURSORS else time


class GroupPolicy(Struct, frozen=True, kw_only=True):
    """The stored failure policy of a group. If a field is None, the consumer's own setting
    applies.
    """

    on_failure: FailurePolicy | None = None
    on_full: FullPolicy | None = None
    """With PARK, what happens to a key beyond the limit of parked keys."""
    tries_max: TriesMax | None = None
    """The number of attempts for a message before `on_failure` applies."""
    backoff_first_ms: FirstMs | None = None
    """The pause after the first attempt, in milliseconds. Must be set together with
    `backoff_max_ms`.
    """
    backoff_max_ms: MaxMs | None = None
    """The longest pause between two attempts, in milliseconds."""


class OperatorSwitch(enum.StrEnum):
    """The operator's switch that suspends a session: no switch, that of its group, or that of its
    client name.
    """

    OFF = "off"
    GROUP = "group"
    CLIENT = "client"


class CreateGroup(Struct, frozen=True, kw_only=True):
    """Create a consumer group with a fixed start."""

    start: GroupStart = GroupStart()
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE


class SetGroup(Struct, frozen=True, kw_only=True):
    """Change the stored failure policy of a group. Fields that are None are left unchanged."""

    on_failure: FailurePolicy | None = None
    on_full: FullPolicy | None = None
    tries_max: TriesMax | None = None
    backoff_first_ms: FirstMs | None = None
    backoff_max_ms: MaxMs | None = None
    forget: bool = False
    """True to clear the stored policy before setting the fields."""


class SuspendGroup(Struct, frozen=True, kw_only=True):
    """Suspend or resume a group or one of its clients. The group and each client have separate
    switches.
    """

    suspended: bool
    client: ClientName | None = None
    """The name of a client, which does not have to be connected; None means the whole group."""


class GroupSettings(Struct, frozen=True, kw_only=True):
    """The stored settings of a consumer group."""

    subject: str
    group: str
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    policy: GroupPolicy = GroupPolicy()
    start: GroupStart = GroupStart()
    unstarted: tuple[int, ...] = ()
    """The partitions whose brokers have not stored the group's start yet, or do not know the group
    although messages may still be sent there. They are not granted to the group's sessions.
    """
    suspended: bool = False
    """True if an operator has suspended the whole group."""
    suspended_clients: tuple[str, ...] = ()
    """The sorted names of the clients that an operator has suspended."""
    suspended_ms: int | None = None
    """The time since the whole group was suspended, in milliseconds; None if it is not, or if not
    known.
    """
    clients_suspended_ms: int | None = None
    """The time since the last of these clients was suspended, in milliseconds; None as above."""
