"""What happened in a run, as events in the order of true time; the index of an event is its
instant.  Pure.

Values are unique: a value, or a digest in its place, identifies a message in every event.
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
    A producer knows the outcome of a message:

        stored      it is in the log
        not done    it is not in the log
        unknown     it may be in the log
        gone        as unknown: the producer died, was closed, or reported that the message may be on a lost disk
        withdrawn   the producer was closed, and said that the message is not in the log
        flushed     its future was not awaited, and a later flush or close raised no error
    """

    value: Value
    outcome: str
    partition_id: int = 0
    offset: int = -1
    reordered: bool = False
    twice: bool = False
    """The receipt says that the message may be stored elsewhere as well."""


class Stored(NamedTuple):
    """The final log has this message here; events of one partition come in the order of offsets."""

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
    """
    An operator opened the children of a partition whose end is unknown, and was warned that this
    reorders messages.

    Only of a subject that allows that.  An outbox stores messages in their order there, and groups
    may read them in another one.
    """

    partition_id: int


class AcceptedLost(NamedTuple):
    """An operator has accepted the loss of a partition's disk: its messages are no longer owed to
    any group.
    """

    partition_id: int


class Batched(NamedTuple):
    """The final log has this batch here; events of one partition come in the order of offsets."""

    partition_id: int
    offset: int
    messages: int
    producer_id: int
    epoch: int
    sequence: int


class Routed(NamedTuple):
    """A producer uses this route from now on; `partition_ids` are the open partitions,
    ascending.
    """

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
    """The consumer has promised to keep the partition until the handler has ended."""
    session_left_ms: int | None = None
    """Time left to the session by the metaserver's database; None: not read."""
    with_earlier: bool = False
    """The program was given it together with an earlier message of its key, at `clock_ns`, and goes
    on with it now.
    """


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
    """The metaserver committed a grant; `holder` is the session that had the lease before."""

    group_id: int
    partition_id: int
    token: int
    session: str
    holder: str
    holder_left_ms: int
    """Time left to the session of `holder`."""


class LetGo(NamedTuple):
    """A consumer released a lease at the metaserver; partition and token 0: all of its leases."""

    session: str
    partition_id: int
    token: int


class Holds(NamedTuple):
    """A consumer reported its leases to the metaserver, as pairs of (partition id, token); an event
    for each change.
    """

    session: str
    holding: tuple[tuple[int, int], ...]


class Served(NamedTuple):
    """A broker accepted a call that needs the fence: "acquire", "pull", "ack", "release", "park";
    or a "reset".
    """

    kind: str
    group: str
    partition_id: int
    token: int
    began: int
    """The instant at which the broker was asked."""
    cursor: int = -1
    ranges: tuple[tuple[int, int], ...] = ()
    """Acked offsets `[start, end)`: of an ack those in the request, of an acquire those above the
    cursor.
    """


class SetAside(NamedTuple):
    """
    A broker is asked to park messages: its cursor may pass them from now on, though they are not
    handled.

    `skipped`: an operator gives them up; they are owed no longer.
    `alone`: they are set aside without their key, whose later messages go on.
    """

    group: str
    partition_id: int
    """The partition that has their bytes."""
    token: int
    """The owner's; 0: an operator asks."""
    ranges: tuple[tuple[int, int], ...]
    skipped: bool = False
    alone: bool = False


class Edited(NamedTuple):
    """
    An operator puts another value in the place of a parked message: asked for, or told as done.

    A value that was asked for and never told as done may have been put there or not.
    """

    group: str
    partition_id: int
    """The partition that has the bytes of the message."""
    offset: int
    value: Value
    done: bool


class Replaced(NamedTuple):
    """
    A session has ended because a process with its instance name was started.

    Its process may live, and start handlers until it hears of that: the name is the operator's word
    that it is dead. What it still asks of brokers is judged as of any other.
    """

    session: str


class Looked(NamedTuple):
    """A broker showed a group's cursor."""

    group: str
    partition_id: int
    token: int
    cursor: int
    acked_above: int
    """Messages acked above the cursor."""
    run: int = 0
    """Number of the broker's run.  A cursor that is shown may not be durable: a crash may take it
    back, because its acks were not answered.
    """


class Resetting(NamedTuple):
    """
    A broker is asked to set a group's cursor for an operator; a `Served` event follows when it has
    done so.

    `alone`: without children, which keep what they took over of the partition.
    """

    group: str
    partition_id: int
    token: int
    cursor: int
    alone: bool = False


class Expired(NamedTuple):
    """Retention removes the messages below an offset; the database promises them to `groups`."""

    partition_id: int
    first_offset: int
    groups: tuple[str, ...]


class Recovered(NamedTuple):
    """A restarted broker recovered a group's progress from its log."""

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
    | SetAside
    | Edited
    | Replaced
    | Looked
    | Resetting
    | Expired
    | Recovered
)
