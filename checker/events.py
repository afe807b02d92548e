"""What happened in a run, as events in the order of true time; the index of an event is its instant.  Pure.

Values are unique: a message is known by its value, or by what stands for it, wherever it turns up.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

Value = Hashable


class Sent(NamedTuple):
    """A producer queued a message: the `number`-th of its session."""

    value: Value
    key: bytes
    producer: str
    number: int
    strict: bool


class Settled(NamedTuple):
    """
    A producer heard what became of it: "stored", "not done", "unknown"; "gone" if it died before, or was closed and
    could not tell, or was told that it may have been on a lost disk; "withdrawn" if it was closed and said that it is stored nowhere; "flushed" if nobody asked about the
    message, and a flush or a close after it told no error.
    """

    value: Value
    outcome: str
    partition_id: int = 0
    offset: int = -1
    reordered: bool = False
    twice: bool = False
    """It was told that the message may be stored elsewhere as well."""


class Stored(NamedTuple):
    """The log at the end holds this message here; each partition's in order."""

    partition_id: int
    offset: int
    key: bytes
    value: Value


class Ranged(NamedTuple):
    """A partition takes the logical partitions `[range_start, range_end)`."""

    partition_id: int
    range_start: int
    range_end: int


class Abandoned(NamedTuple):
    """An operator let what continues a partition go on without it, and was told that this reorders its messages."""

    partition_id: int


class AcceptedLost(NamedTuple):
    """An operator has accepted that a partition's disk is lost: from now on it is owed to nobody."""

    partition_id: int


class Batched(NamedTuple):
    """The log at the end holds this batch here; each partition's in order."""

    partition_id: int
    offset: int
    messages: int
    producer_id: int
    epoch: int
    sequence: int


class Routed(NamedTuple):
    """A producer follows this route from now on; the ids of its open partitions rise."""

    producer: str
    version: int
    partition_ids: tuple[int, ...]


class Started(NamedTuple):
    """A handler began."""

    group: str
    session: str
    partition_id: int
    offset: int
    value: Value
    token: int
    clock_ns: int
    """The boot clock of the consumer's machine, as read now."""
    deadline_ns: int
    """The end of the lease, by the same clock."""
    ours: bool = False
    """The consumer keeps the partition until it has ended; False if that is nobody's promise."""
    session_left_ms: int | None = None
    """What the metaserver's database still gives the session; None if nobody looked."""


class Ended(NamedTuple):
    """A handler returned; one that raised or was cancelled has no such event."""

    group: str
    partition_id: int
    offset: int
    token: int
    session: str = ""


class Dropped(NamedTuple):
    """A handler raised, or was cancelled."""

    session: str
    partition_id: int
    offset: int


class Granted(NamedTuple):
    """The metaserver committed a grant; `holder` had it before, with so much of its session left."""

    group_id: int
    partition_id: int
    token: int
    session: str
    holder: str
    holder_left_ms: int


class LetGo(NamedTuple):
    """A consumer told the metaserver that it is through: with one partition (and token), or all (0, 0)."""

    session: str
    partition_id: int
    token: int


class Holds(NamedTuple):
    """A consumer told the metaserver what it holds: pairs of (partition id, token); told only when it changed."""

    session: str
    holding: tuple[tuple[int, int], ...]


class Served(NamedTuple):
    """A broker accepted a call that needs the fence: "acquire", "pull", "ack", "release"; or a "reset"."""

    kind: str
    group: str
    partition_id: int
    token: int
    began: int
    """The instant at which the broker was asked."""
    cursor: int = -1
    ranges: tuple[tuple[int, int], ...] = ()
    """Acked: in the request of an ack, above the cursor in the answer of an acquire."""


class Looked(NamedTuple):
    """Somebody saw a group's cursor at its broker."""

    group: str
    partition_id: int
    token: int
    cursor: int
    acked_above: int
    """Messages acked above the cursor."""
    run: int = 0
    """Which run of the broker answered.  What it shows may not be durable yet, so a crash may take a cursor
    back; nobody was told that those acks are safe."""


class Resetting(NamedTuple):
    """A broker is asked to set a group's cursor, as an operator wants; `Served` says that it has done so."""

    group: str
    partition_id: int
    token: int
    cursor: int


class Expired(NamedTuple):
    """Retention removes what a partition has before an offset; `groups` are those that the database promises it to."""

    partition_id: int
    first_offset: int
    groups: tuple[str, ...]


class Recovered(NamedTuple):
    """A broker came up again and found this of a group in its log."""

    group: str
    partition_id: int
    token: int
    """The fence."""
    cursor: int


Event = (
    Sent
    | Settled
    | Stored
    | Ranged
    | Abandoned
    | AcceptedLost
    | Batched
    | Routed
    | Started
    | Ended
    | Dropped
    | Granted
    | LetGo
    | Holds
    | Served
    | Looked
    | Resetting
    | Expired
    | Recovered
)
