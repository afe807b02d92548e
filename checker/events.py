"""The events of a run in the order of true time; the index of an event is its instant. Pure.

Values are unique: a value, or a digest in its place, identifies a message in every event.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

Value = Hashable


class Sent(NamedTuple):
    """A producer queued a message, the `number`-th of its session."""

    value: Value
    key: bytes
    producer: str
    number: int
    strict: bool


class Settled(NamedTuple):
    """
    The outcome of a message, which its producer knows:

        stored      it is in the log
        not done    it is not in the log
        unknown     it may be in the log
        gone        like unknown: the producer died, was closed, or reported that the message
                    may be on a lost disk
        withdrawn   the producer was closed, and said that the message is not in the log
        flushed     its future was not awaited, and a later flush or close raised no error
    """

    value: Value
    outcome: str
    partition_id: int = 0
    offset: int = -1
    reordered: bool = False
    twice: bool = False
    """True if the receipt says that the message may also be stored elsewhere."""


class Stored(NamedTuple):
    """A message in the final log; the events of one partition are ordered by offset."""

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
    An operator opened the children of a partition whose end is unknown, after a warning that this
    reorders messages.

    This happens only on a subject that allows it. An outbox stores messages there in their order,
    and groups may read them in another order.
    """

    partition_id: int


class AcceptedLost(NamedTuple):
    """An operator has accepted the loss of a partition's disk: its messages are no longer owed to
    any group.
    """

    partition_id: int


class Batched(NamedTuple):
    """A batch in the final log; the events of one partition are ordered by offset."""

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
    """Boot clock of the consumer's machine at this instant, in nanoseconds."""
    deadline_ns: int
    """End of the lease by the same clock, in nanoseconds."""
    ours: bool = False
    """True if the consumer has promised to keep the partition until the handler has ended."""
    session_left_ms: int | None = None
    """Milliseconds left to the session by the metaserver's database; None: not read."""
    with_earlier: bool = False
    """True if the program got it together with an earlier message of its key, at `clock_ns`, and
    continues with it now.
    """


class Ended(NamedTuple):
    """A handler returned; there is no such event for one that raised or was cancelled."""

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
    """Milliseconds left to the session of `holder`."""


class LetGo(NamedTuple):
    """A consumer released a lease at the metaserver; if partition and token are 0, all its
    leases.
    """

    session: str
    partition_id: int
    token: int


class Holds(NamedTuple):
    """A consumer reported its leases to the metaserver, as pairs of (partition id, token); there is
    an event for each change.
    """

    session: str
    holding: tuple[tuple[int, int], ...]


class Served(NamedTuple):
    """A broker accepted a call that needs the fence: "acquire", "pull", "ack", "release" or "park";
    or a "reset".
    """

    kind: str
    group: str
    partition_id: int
    token: int
    began: int
    """Instant at which the broker was asked."""
    cursor: int = -1
    ranges: tuple[tuple[int, int], ...] = ()
    """Acked offsets `[start, end)`: for an ack those in the request, for an acquire those above the
    cursor.
    """


class SetAside(NamedTuple):
    """
    A broker is asked to park messages, so its cursor may pass them from now on, though they are not
    handled.

    `skipped`: an operator gives them up, so they are no longer owed.
    `alone`: they are set aside without their key, whose later messages are not held up.
    """

    group: str
    partition_id: int
    """Partition that stores their bytes."""
    token: int
    """Token of the owner; 0: an operator asks."""
    ranges: tuple[tuple[int, int], ...]
    skipped: bool = False
    alone: bool = False


class Edited(NamedTuple):
    """
    An operator replaces the value of a parked message; the edit is requested or confirmed.

    The outcome of an edit that was requested and never confirmed is unknown.
    """

    group: str
    partition_id: int
    """Partition that stores the bytes of the message."""
    offset: int
    value: Value
    done: bool


class Replaced(NamedTuple):
    """
    A session has ended because a process with its instance name was started.

    Its process may live on, and start handlers until it learns that: by giving the name again, the
    operator declares it dead. Its later calls to brokers are judged like any others.
    """

    session: str


class Looked(NamedTuple):
    """A broker showed a group's cursor."""

    group: str
    partition_id: int
    token: int
    cursor: int
    acked_above: int
    """Number of messages acked above the cursor."""
    run: int = 0
    """Number of the broker's run. A cursor that is shown may not be durable: a crash may set it
    back, because its acks were not answered.
    """


class Resetting(NamedTuple):
    """
    A broker is asked to set a group's cursor for an operator; a `Served` event follows once it has
    done so.

    `alone`: children are left out, and keep what they took over from the partition.
    """

    group: str
    partition_id: int
    token: int
    cursor: int
    alone: bool = False


class Expired(NamedTuple):
    """Retention removes the messages below an offset, which the database promises to `groups`."""

    partition_id: int
    first_offset: int
    groups: tuple[str, ...]


class Recovered(NamedTuple):
    """A restarted broker recovered a group's progress from its log."""

    group: str
    partition_id: int
    token: int
    """Fence that the broker recovered."""
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
