"""JSON bodies of the control calls between clients, brokers and the metaserver.  Pure.

`endpoints.py` says which call takes which body.  More bodies are in `operations.py`, `queues.py`
and `progress.py`.

An error is answered with its HTTP status and an ErrorBody.  Durations are milliseconds.  No body
has an instant: the receiver adds a duration to its own clock.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .access.capability import AccessNews
from .errors import Fate, KeylaneError, error_from_wire, wire_details, wire_hint, wire_text
from .groups import GroupPolicy, GroupSettings, GroupStart, OperatorSwitch
from .ids import MAX_I64, NAME_CHARS_MAX
from .limits import (
    FILTER_CHARS_MAX,
    MESSAGE_BYTES_MAX,
    MESSAGE_BYTES_MAX_MIN,
    PARTITIONS_MAX,
    PULL_WAIT_MS_MAX,
    TTL_MS_DEFAULT,
    TTL_MS_MAX,
    TTL_MS_MIN,
    UNTOLD_MAX,
)
from .membership.broker_views import BrokerView as BrokerView  # noqa: PLC0414 - exported
from .membership.broker_views import RefusedBroker as RefusedBroker  # noqa: PLC0414 - exported
from .progress import GroupStatus as GroupStatus  # noqa: PLC0414 - exported
from .progress import PendingReset
from .reprocess.holds import HoldView
from .routing import ConsumeStrategy, OrderStrategy, Partition, PartitionState, Route

Count = Annotated[int, Meta(ge=0, le=MAX_I64)]
WaitMs = Annotated[int, Meta(ge=0, le=PULL_WAIT_MS_MAX)]
TtlMs = Annotated[int, Meta(ge=TTL_MS_MIN, le=TTL_MS_MAX)]
MessageBytesMax = Annotated[int, Meta(ge=MESSAGE_BYTES_MAX_MIN, le=MESSAGE_BYTES_MAX)]
SHORT_TEXT_CHARS_MAX = 512
ShortText = Annotated[str, Meta(max_length=SHORT_TEXT_CHARS_MAX)]
OPENINGS_MAX = 128
InstanceName = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]


class ErrorBody(Struct, frozen=True, kw_only=True):
    """An error on the control plane."""

    code: int
    name: str
    message: str
    hint: str = ""
    fate: Fate = Fate.NOT_DONE
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, error: KeylaneError) -> ErrorBody:
        """The body that carries `error`."""
        return cls(
            code=error.code,
            name=type(error).__name__,
            message=wire_text(error.message),
            hint=wire_hint(error),
            fate=error.fate,
            details=wire_details(error),
        )

    def error(self) -> KeylaneError:
        """The error that this body carries."""
        error = error_from_wire(self.code, self.message, self.details, self.hint)
        error.fate = self.fate
        return error


class Done(Struct, frozen=True):
    """The call is done; the answer has no fields."""


class Health(Struct, frozen=True, kw_only=True):
    """Whether a program is ready for work; `reason` says why it is not."""

    program: str
    ready: bool
    reason: str = ""
    details: dict[str, Any] = {}


# ── brokers ───────────────────────────────────────────────────────────────────────────────────────
class BrokerHeartbeat(Struct, frozen=True, kw_only=True):
    """A broker reports itself; its first report registers it."""

    broker_group: ShortText
    broker_id: ShortText
    """Identity of the data folder; it tells two folders of one broker group apart."""
    address: ShortText
    readable: bool = True
    writable: bool = True
    problem: ShortText = ""
    """Why it takes no writes; "" from one that takes them."""
    opening: ShortText = ""
    """Random name of this opening of the data folder; "" from a broker that does not report
    openings.
    """
    opened_after: Annotated[tuple[ShortText, ...], Meta(max_length=OPENINGS_MAX)] = ()
    """The earlier openings of the folder; left out once the metaserver takes the reports."""
    log_end: Count = 0
    """Position up to which the broker's log is durable; it only grows."""
    hosted: Count = 0
    """Number of partitions that the broker hosts."""
    highest_id: Count = 0
    """The highest id of these; 0 from one that hosts none, or is older than this field.  A database
    that has no partition of such an id went back.
    """
    untold: Annotated[tuple[int, ...], Meta(max_length=UNTOLD_MAX)] = ()
    """The first UNTOLD_MAX partitions whose messages retention should remove and may not, because
    the broker was never told their consumer groups.
    """
    version: ShortText = ""
    """Of the broker's program; a metaserver refuses a report without it."""
    cluster: ShortText = ""
    """The cluster that its settings name; "": none."""


def quiet_limit_ms(ttl_ms: int) -> int:
    """How far apart reports without news are at most; if one fails, many more come before a
    metaserver finds the broker silent.
    """
    return min(ttl_ms // 4, 5_000)


class BrokerWelcome(Struct, frozen=True, kw_only=True):
    """
    The next report is due after `heartbeat_ms`, or without news after `quiet_limit_ms(ttl_ms)` at
    the latest.

    A broker that is silent for `ttl_ms` is not available.
    """

    heartbeat_ms: int
    ttl_ms: int
    groups_missed: bool = False
    """The broker may not know every consumer group in the database.  Retention removes no message
    of a partition until the broker has been told the partition's groups again.
    """
    fence: int = 0
    """Not 0 if an operator has accepted a data folder that was behind: tokens up to it are refused
    before any request.
    """
    access: AccessNews | None = None
    """Whom to believe, where access control is on."""
    cluster_version: str = ""
    """The lowest version of all members, which decides what formats may be written; "": not known
    yet.
    """


class AcceptFolder(Struct, frozen=True, kw_only=True):
    """
    Accept a data folder that was refused because it is behind; messages that it lacks are lost.

    The answer is its RefusedBroker.  `address` selects a folder if several are refused.
    """

    address: ShortText = ""
    dry_run: bool = False
    """Answer with the folder that would be accepted; change nothing."""


# ── subjects ──────────────────────────────────────────────────────────────────────────────────────
class Retention(enum.StrEnum):
    """When retention may remove an old message.  ACKED: once every consumer group has acked it.
    TIME: by age alone.
    """

    ACKED = "acked"
    TIME = "time"


class CreateSubject(Struct, frozen=True, kw_only=True):
    """Create a subject with `partitions` partitions, spread over the available broker groups."""

    subject: str
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 2
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    retention: Retention = Retention.ACKED
    static: bool = False
    """The subject has logic queues.  Their number never falls, and rises only when an operator
    grows the subject.
    """
    message_bytes_max: MessageBytesMax = MESSAGE_BYTES_MAX
    """Key, value and properties of one message together."""


class AutoCreate(Struct, frozen=True, kw_only=True):
    """Create a subject that is unknown, to send messages to it."""

    order_strategy: OrderStrategy = OrderStrategy.STRICT


class SubjectView(Struct, frozen=True, kw_only=True):
    """A subject's settings and its route."""

    subject: str
    order_strategy: OrderStrategy
    route: Route
    retention: Retention = Retention.ACKED
    static: bool = False
    message_bytes_max: int = MESSAGE_BYTES_MAX


class SubjectSummary(Struct, frozen=True, kw_only=True):
    """A subject in the list of subjects."""

    subject: str
    order_strategy: OrderStrategy
    partitions: int
    route_version: int
    problem: str = ""
    """Why its creation failed.  Such a subject has no open partition, and its name may be used
    again.
    """
    hidden_for: str = ""
    """The subject that it is to be published in; "": it is not hidden."""
    expires_in_ms: int | None = None
    """Of a hidden one: it is deleted after this time at the earliest, unless it is filled or
    published; None: never.
    """


class SubjectList(Struct, frozen=True, kw_only=True):
    """All subjects, by name."""

    subjects: list[SubjectSummary]


# ── consumers ─────────────────────────────────────────────────────────────────────────────────────
class Join(Struct, frozen=True, kw_only=True):
    """Begin a session of a consumer.  The client draws `session` at random, so that a repeat is
    harmless.
    """

    subject: str
    group: str
    session: Annotated[str, Meta(min_length=16, max_length=64, pattern="^[0-9a-f]+$")]
    client: ShortText = ""
    """For people: host, process id, a name."""
    ttl_ms: TtlMs = TTL_MS_DEFAULT
    suspended: bool = False
    """The session begins suspended: it is granted nothing; see Suspend."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The first session of a group sets the group's strategy."""
    filter: Annotated[str, Meta(max_length=FILTER_CHARS_MAX)] = ""
    """What the consumer leaves out, as `MessageFilter.text`; refused if another member's differs.
    "": nothing.
    """
    group_id: Count = 0
    """The group that the client's earlier session was of; refused if that group was deleted since.
    0: it had none.
    """
    start: GroupStart | None = None
    """Where the group begins if this session makes it; None: at the first message."""
    instance: InstanceName = ""
    """The client's place in the group, which a restarted client has again: it gets the leases of a
    predecessor at once.
    """
    again: bool = False
    """The client had an earlier session since it was opened: it takes the place of an instance only
    if that is free.
    """


class Joined(Struct, frozen=True, kw_only=True):
    """The session has begun; its ttl counts from when the request was sent."""

    ttl_ms: int
    heartbeat_ms: int
    group_id: int = 0
    """Tells the group from an earlier or a later one of the same name; 0: not said."""
    start: GroupStart | None = None
    """Where the group began, which its first session or `group create` has fixed; None: not
    said.
    """
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """Of the subject."""
    grants: Grants | None = None
    """What the session is granted, as the answer to its first heartbeat would say; None: not
    said.
    """


class Grant(Struct, frozen=True, kw_only=True):
    """The session may handle this partition for its group."""

    partition: Partition
    token: int
    parked_parents: tuple[Partition, ...] = ()
    """
    Parents on which the group had parked messages when it drained them: they become the
    partition's.

    Behind them further ancestors that have parked anew since they were reset without the partitions
    between.
    """
    parked_tokens: tuple[int, ...] = ()
    """Their last tokens.  What was taken over of a parent under a lower one is of before a reset,
    and is taken over again.
    """
    parked_ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Of each the half-open ranges of logical partitions that are taken over; if () is said: the
    partition's.
    """


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Renews the session and its leases at once.  The answer comes when the grants differ from
    `known_version`.
    """

    session: str
    known_version: int = -1
    drained: tuple[int, ...] = ()
    """Sealed partitions that the group has acked to their end."""
    parked: tuple[int, ...] = ()
    """Those of them on which the group has parked messages."""
    holding: tuple[tuple[int, int], ...] | None = None
    """(partition id, token) of each partition that the session has or is handing over; None: not
    said.  A lease that was taken back and is missing here becomes free: the session never heard of
    the grant, or its release was lost.
    """
    wait_ms: WaitMs = 0
    suspended: bool | None = None
    """Whether the session wants to be suspended; None: not said.  If the session knows the newest
    grants, this counts more than a Suspend call that arrived late or whose answer was lost.
    """
    group_id: int = 0
    """Of the join; 0: not said.  A join that arrives late may begin the session again, in a later
    group of the name.
    """
    unreached: tuple[str, ...] | None = None
    """Broker groups to which the session gets no connection, though the cluster hears of them;
    None: not said.  An exclusive group's partitions there are granted to other sessions, if there
    is one that does not say the same.
    """


class Grants(Struct, frozen=True, kw_only=True):
    """All grants of the session.  The session hands over each partition that is missing here."""

    version: int
    """Rises with every change of the session's grants; the session ignores a lower version."""
    ttl_ms: int
    grants: tuple[Grant, ...]
    policy: GroupPolicy = GroupPolicy()
    """What is stored of the group's failure policy; counts more than the code of the consumer."""
    suspended_by: OperatorSwitch = OperatorSwitch.OFF
    """Why an operator lets the session have no grants."""
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """Of the subject: under BEST_TRIED a message that fails does not hold up what follows it,
    unless a policy says so.
    """
    group_id: int = 0
    """The session's group."""


class ReleaseGrant(Struct, frozen=True, kw_only=True):
    """The hand-over of a partition is finished: the metaserver may grant it to another session."""

    session: str
    partition_id: int
    token: int
    fence: int = 0
    """The broker's fence, if it is above the token.  The metaserver may not know it if its database
    is older.
    """


class Suspend(Struct, frozen=True, kw_only=True):
    """Suspend a session: it hands over its partitions and is granted none.  `suspended=False`
    resumes it.
    """

    session: str
    suspended: bool = True


class Leave(Struct, frozen=True, kw_only=True):
    """End a session; its leases become free."""

    session: str


class OwnerView(Struct, frozen=True, kw_only=True):
    """The owner of a partition in a group; `session`, `client` and `expires_in_ms` are None without
    an owner.
    """

    partition: Partition
    token: int
    session: str | None = None
    client: str | None = None
    expires_in_ms: int | None = None


class GivenUpPartition(Struct, frozen=True, kw_only=True):
    """What a group had not read of a partition whose loss an operator has accepted."""

    partition_id: int
    name: str
    broker_group: str
    messages_max: int | None = None
    """It lost at most this many messages; None: not known, as where the partition was open."""


class GroupView(Struct, frozen=True, kw_only=True):
    """A group on a subject: owners, live sessions, what is stored (None: not said), for how long
    none is heard (None: one is, or not said).
    """

    subject: str
    group: str
    sessions: int
    owners: tuple[OwnerView, ...]
    """In a SHARED group the partitions with their tokens: every session may use them."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    settings: GroupSettings | None = None
    reset: PendingReset | None = None
    silent_ms: int | None = None
    revision: str = ""
    """Another one after each grant, reset and change of its members; while none lives and none sets
    it, cursors stay.  "": not said.
    """
    given_up: tuple[GivenUpPartition, ...] = ()
    """By partition."""


class DeleteGroup(Struct, frozen=True, kw_only=True):
    """Delete a consumer group, or ask how far its deletion is."""

    force: bool = False
    """Also if it has live consumers: their sessions end, and their tokens are refused."""
    group_id: Count = 0
    """The group of an earlier answer: a group that was made since under its name is not touched.
    0: the one of this name.
    """


class GroupDeletion(Struct, frozen=True, kw_only=True):
    """How far the deletion of a consumer group is.  It goes on by itself."""

    subject: str
    group: str
    group_id: int
    left: int = 0
    """Partitions whose brokers still have to forget the group; 0: the group is gone."""
    problem: str = ""
    """Why one of these brokers has not."""


class DeleteSubject(Struct, frozen=True, kw_only=True):
    """Delete a subject with its messages and consumer groups, or ask how far its deletion is."""

    force: bool = False
    """Also if it has live consumers: their sessions end."""
    subject_id: Count = 0
    """The subject of an earlier answer: one that was made since under its name is not touched.  0:
    the one of this name.
    """


class SubjectDeletion(Struct, frozen=True, kw_only=True):
    """How far the deletion of a subject is.  It goes on by itself."""

    subject: str
    subject_id: int
    left: int = 0
    """Partitions that brokers still have to drop; 0: the subject is gone, and its name is free."""
    problem: str = ""
    """Why one of these brokers has not."""


class GroupSummary(Struct, frozen=True, kw_only=True):
    """A group in the list of groups."""

    group: str
    strategy: ConsumeStrategy
    sessions: int


class GroupList(Struct, frozen=True, kw_only=True):
    """The consumer groups of a subject, by name."""

    groups: list[str]
    summaries: list[GroupSummary] = []


class SwitchGroup(Struct, frozen=True, kw_only=True):
    """Change a group's consume strategy.  Its sessions end; new sessions must join with the new
    strategy.
    """

    strategy: ConsumeStrategy


# ── partitions on a broker ────────────────────────────────────────────────────────────────────────
class HostPartition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    Host this partition.  A repeat with the same facts changes nothing.

    The broker keeps the facts of the subject, so that the metaserver's database can be rebuilt from
    brokers.
    """

    subject: str
    partition: Partition
    order_strategy: OrderStrategy | None = None
    """The subject's; None: not said."""
    partitions_wanted: Count = 0
    """The number of partitions that the subject was created with; 0: not said."""
    retention: Retention | None = None
    """The subject's; None: not said, as ACKED."""
    static: bool = False
    """The subject has logic queues."""
    groups: tuple[str, ...] | None = None
    """Every consumer group of the subject, so that retention waits for them from the first message
    on; None: not said. Groups are no fact of the partition: a repeat may have more of them.
    """
    tokens_above: Count = 0
    """As in KnowGroups; goes with `groups`."""
    message_bytes_max: Annotated[int, Meta(ge=0, le=MESSAGE_BYTES_MAX)] = 0
    """The subject's limit of one message, if it is lower than MESSAGE_BYTES_MAX; 0: it is not."""
    hidden: str = ""
    """The hidden subject that the partition was made for.  A lost database: it was published if its
    parents are sealed.
    """
    times_from_ms: Count = 0
    """No message of the partition gets an earlier time: where those end that it continues on other
    brokers, as `PartitionStatus.ended_at_ms`.  Told with a repeat, once they are sealed; no fact of
    the partition.  0: not said.
    """


def hosted_limit(message_bytes_max: int) -> int:
    """The limit of a subject as HostPartition says it: 0 for MESSAGE_BYTES_MAX."""
    return message_bytes_max if message_bytes_max < MESSAGE_BYTES_MAX else 0


class DropPartition(Struct, frozen=True, kw_only=True):
    """
    Drop a partition of a deleted subject, with its messages.  A repeat changes nothing.

    The broker never hosts the partition again, also if it does not host it now.
    """

    subject: str
    last_id: Annotated[int, Meta(ge=1, le=MAX_I64)]
    """The highest partition id of the subject; a later subject of that name has higher ids only."""


class PartitionStatus(Struct, frozen=True, kw_only=True):
    """A partition as its broker has it."""

    partition_id: int
    subject: str
    name: str
    state: PartitionState
    first_offset: int
    next_offset: int
    groups: tuple[GroupStatus, ...] = ()
    facts: HostPartition | None = None
    """The facts that the broker was given when it began to host the partition."""
    unsealable: str = ""
    """Why the partition cannot be sealed now; "" if it can, or is sealed.  Left out of a page of
    partitions.
    """
    groups_told: bool = True
    """The broker was told every consumer group of the subject; before that, retention removes no
    message of the partition.
    """
    forgotten_token: int = 0
    """The highest token of deleted groups that the partition refuses."""
    holds: tuple[HoldView, ...] = ()
    """What jobs hold against retention; left out of a page of partitions."""
    ended_at_ms: int = 0
    """In the answer to a seal: no message has a later time by now, in milliseconds since 1970; 0:
    not said.
    """


class TimeBound(enum.StrEnum):
    """Which message around a time is meant: LOWER the first at or after it, UPPER the last at or
    before it.
    """

    LOWER = "lower"
    UPPER = "upper"


class FoundOffset(Struct, frozen=True, kw_only=True):
    """The result of a lookup by the time at which the broker stored messages; `offset` is None
    without such a message.
    """

    offset: int | None
    first_offset: int
    next_offset: int


class PartitionStatusList(Struct, frozen=True, kw_only=True):
    """A page of the partitions that a broker hosts, by id."""

    broker_group: str
    partitions: list[PartitionStatus]
    broker_id: str = ""
    """Identity of the data folder."""
    more_after: int | None = None
    """The next page begins after this id; None: this is the last page."""
    dropped: dict[str, int] = {}
    """Name of a deleted subject → its highest partition id; of the last subjects of which the
    broker dropped partitions.
    """
    dropped_id: int = 0
    """The highest id of a partition that the broker dropped."""


# ── messages over HTTP ────────────────────────────────────────────────────────────────────────────
class PostReceipt(Struct, frozen=True, kw_only=True):
    """Where a posted message is stored, and how durably."""

    partition_id: int
    queue: int | None
    """Number of the logic queue; None if the subject is not static."""
    offset: int
    logic_offset: int | None
    """Offset in the logic queue; None if the subject is not static."""
    durable: str
    """"fsync": on the broker's disk."""
    duplicate: bool = False
    """The message was stored by an earlier request with the same idempotency key, and is stored
    once.
    """


class Posted(Struct, frozen=True, kw_only=True):
    """Every posted message is stored; receipts in the order of the messages."""

    receipts: list[PostReceipt]


class PartlyPosted(ErrorBody, frozen=True, kw_only=True):
    """Some posted messages are stored: an error, and a receipt for each message that is; null for
    the others.
    """

    receipts: list[PostReceipt | None]


class MessageView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored message.  Bytes that are UTF-8 text are in `key` and `value`, any others in the
    fields with base64.
    """

    partition_id: int
    offset: int
    queue: int
    logic_offset: int
    sent_at_ns: int
    key: str | msgspec.UnsetType = msgspec.UNSET
    key_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    value: str | msgspec.UnsetType = msgspec.UNSET
    value_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    properties: dict[str, str] = {}
    properties_base64: dict[str, bytes] | bytes | msgspec.UnsetType = msgspec.UNSET
    """The properties that are bytes; or all stored bytes where they are no properties, as another
    program may write.
    """


class MessagePage(Struct, frozen=True, kw_only=True):
    """Messages of a partition, by offset; of a logic queue, every offset here is a logic offset."""

    subject: str
    partition_id: int
    messages: list[MessageView]
    next_offset: int
    """The offset of the next read."""
    first_offset: int
    """The first offset of the partition that is still stored."""
    end_offset: int
    """One past the partition's last message."""
    sealed: bool
    """The partition takes no more messages."""
