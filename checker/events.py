"""The events of a run, in chronological order. The index of an event is its instant. Pure.

Values are unique: a value, or its digest, identifies a message in every event.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

Value = Hashable


class Sent(NamedTuple):
    """A producer queued a message, which is the `number`-th one of its session."""

    value: Value
    key: bytes
    producer: str
    number: int
    strict: bool


class Settled(NamedTuple):
    """
    The outcome of a message, as known to its producer:

        stored      it is in the log
        not done    it is not in the log
        unknown     it may be in the log
        gone        like unknown: the producer died, was closed, or reported that the message
                    may be on a lost disk
        withdrawn   the producer was closed, and reported that the message is not in the log
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
    """A message in the final log. The events of one partition are ordered by offset."""

    partition_id: int
    offset: int
    key: bytes
    value: Value


class Ranged(NamedTuple):
    """A partition covers the logical partitions `[range_start, range_end)`."""

    partition_id: int
    range_start: int
    range_end: int


class Abandoned(NamedTuple):
    """
    An operator opened the children of a partition whose end is unknown, after a warning that this
    reorders messages.

    Only some subjects allow this. An outbox stores messages in such a subject in order, but groups
    may read them in a different order.
    """

    partition_id: int


class AcceptedLost(NamedTuple):
    """An operator has accepted the loss of a partition's disk. Its messages are no longer owed to
    any group.
    """

    partition_id: int


class Batched(NamedTuple):
    """A batch in the final log. The events of one partition are ordered by offset."""

    partition_id: int
    offset: int
    messages: int
    producer_id: int
    epoch: int
    sequence: int


class Routed(NamedTuple):
    """A producer begins to use a route. `partition_ids` are its open partitions, in ascending
    order.
    """

    producer: str
    version: int
    partition_ids: tuple[int, ...]


class Started(NamedTuple):
    """A handler was started."""

    group: str
    session: str
    partition_id: int
    offset: int
    value: Value
    token: int
    clock_ns: int
    """The boot clock of the consumer's machine at this instant, in nanoseconds."""
    deadline_ns: int
    """The end of the lease, by the same clock, in nanoseconds."""
    ours: bool = False
    """True if the consumer has promised to keep the partition until the handler has ended."""
    session_left_ms: int | None = None
    """The time until the session expires, by the metaserver's database, in milliseconds; None if it
    was not read.
    """
    with_earlier: bool = False
    """True if the program received the message at `clock_ns`, in one batch with an earlier message
    of its key, and starts to handle it only now.
    """
    is_promised: bool = False
    """True if the lease at the metaserver had ended, by the consumer's clock, and the consumer
    relied on the promise of a broker that nobody else is let in.
    """


class Ended(NamedTuple):
    """A handler returned. For a handler that raised or was cancelled, the event is `Dropped`
    instead.
    """

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
    """The metaserver committed a grant. `holder` is the session that had the lease before."""

    group_id: int
    partition_id: int
    token: int
    session: str
    holder: str
    holder_left_ms: int
    """The time until the session of `holder` expires, in milliseconds."""


class LeaseReleased(NamedTuple):
    """A consumer released a lease at the metaserver. If partition and token are 0, it released all
    its leases.
    """

    session: str
    partition_id: int
    token: int


class LeasesReported(NamedTuple):
    """A consumer reported its leases to the metaserver, as (partition id, token), and they differ
    from those in its previous report.
    """

    session: str
    holding: tuple[tuple[int, int], ...]


class Served(NamedTuple):
    """A broker accepted a call that it checks against the fence: "acquire", "pull", "ack",
    "release", "park" or "reset".
    """

    kind: str
    group: str
    partition_id: int
    token: int
    began: int
    """The instant at which the request was sent."""
    cursor: int = -1
    ranges: tuple[tuple[int, int], ...] = ()
    """The acked offsets `[start, end)`: for an ack, those in its request; for an acquire, those
    above the cursor.
    """


class SetAside(NamedTuple):
    """
    A broker is asked to park messages, so that its cursor may pass them although they have not been
    handled.

    `skipped` means that an operator gives them up, so that the group does not have to handle them.
    `alone` means that they are parked without their key, so that later messages of the key do not
    wait for them.
    """

    group: str
    partition_id: int
    """The partition that stores their bytes."""
    token: int
    """The token of the owner; 0 if the request comes from an operator."""
    ranges: tuple[tuple[int, int], ...]
    skipped: bool = False
    alone: bool = False


class Edited(NamedTuple):
    """
    An operator replaces the value of a parked message. `done` is False for the request, and True
    for its confirmation.

    The outcome of an edit that is never confirmed is unknown.
    """

    group: str
    partition_id: int
    """The partition that stores the bytes of the message."""
    offset: int
    value: Value
    done: bool


class Replaced(NamedTuple):
    """
    A session has ended because a newer process has taken over its instance name.

    The old process may still start handlers until it learns this: whoever reuses the name declares
    the old process dead. Its later calls to brokers are judged like any others.
    """

    session: str


class Looked(NamedTuple):
    """A broker answered a query for a group's cursor."""

    group: str
    partition_id: int
    token: int
    cursor: int
    acked_above: int
    """The number of messages acked above the cursor."""
    run: int = 0
    """How often the broker has been restarted so far. The reported cursor may not be durable: a
    crash may set it back if the acks have not been answered yet.
    """


class Resetting(NamedTuple):
    """
    A broker is asked to reset a group's cursor for an operator. A `Served` event follows when that
    is done.

    `alone` means that the reset excludes the children, which keep the parked messages that they
    have adopted.
    """

    group: str
    partition_id: int
    token: int
    cursor: int
    alone: bool = False


class Expired(NamedTuple):
    """Retention removes the messages below an offset. The database promises them to `groups`."""

    partition_id: int
    first_offset: int
    groups: tuple[str, ...]


class Recovered(NamedTuple):
    """A restarted broker has recovered a group's progress from its log."""

    group: str
    partition_id: int
    token: int
    """The fence that the broker recovered."""
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
    | LeaseReleased
    | LeasesReported
    | Served
    | SetAside
    | Edited
    | Replaced
    | Looked
    | Resetting
    | Expired
    | Recovered
)
