"""JSON bodies of the control calls between clients, brokers and the metaserver. Pure.

`endpoints.py` says which call takes which body. More bodies are in `operations.py`, `queues.py`
and `progress.py`.

An error is answered with its HTTP status and an ErrorBody. Durations are in milliseconds. No body
contains an instant: the receiver adds a duration to its own clock.
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
from .membership.views import BrokerView as BrokerView  # noqa: PLC0414 - exported
from .membership.views import RefusedBroker as RefusedBroker  # noqa: PLC0414 - exported
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
    """An error of a control call."""

    code: int
    name: str
    message: str
    hint: str = ""
    fate: Fate = Fate.NOT_DONE
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, error: KeylaneError) -> ErrorBody:
        """Return the body that carries `error`."""
        return cls(
            code=error.code,
            name=type(error).__name__,
            message=wire_text(error.message),
            hint=wire_hint(error),
            fate=error.fate,
            details=wire_details(error),
        )

    def error(self) -> KeylaneError:
        """Return the error that this body carries."""
        error = error_from_wire(self.code, self.message, self.details, self.hint)
        error.fate = self.fate
        return error


class Done(Struct, frozen=True):
    """The answer of a call that is done and has nothing to return."""


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
    """Identity of the data folder; it distinguishes two folders of one broker group."""
    address: ShortText
    readable: bool = True
    writable: bool = True
    problem: ShortText = ""
    """Reason why the broker takes no writes; "" if it takes them."""
    opening: ShortText = ""
    """Random name of this opening of the data folder; "" from a broker that does not report
    openings.
    """
    opened_after: Annotated[tuple[ShortText, ...], Meta(max_length=OPENINGS_MAX)] = ()
    """Earlier openings of the folder; left out once the metaserver has them."""
    log_end: Count = 0
    """Position in bytes before which the broker's log is durable; it only grows."""
    hosted: Count = 0
    """Number of partitions that the broker hosts."""
    highest_id: Count = 0
    """Highest id of these partitions; 0 if there are none. A database without a partition of such
    an id has been set back.
    """
    untold: Annotated[tuple[int, ...], Meta(max_length=UNTOLD_MAX)] = ()
    """The first UNTOLD_MAX partitions whose messages retention should remove but may not, because
    the broker has never received their consumer groups.
    """
    version: ShortText = ""
    """Version of the broker's program; a metaserver refuses a report without it."""
    cluster: ShortText = ""
    """Cluster that the broker's settings name; "": none."""


def quiet_limit_ms(ttl_ms: int) -> int:
    """Return the longest time in milliseconds between two reports without news. Several such
    reports have to fail before a metaserver considers the broker silent.
    """
    return min(ttl_ms // 4, 5_000)


class BrokerWelcome(Struct, frozen=True, kw_only=True):
    """
    Answer to a report: the next one is due after `heartbeat_ms`, or after at most
    `quiet_limit_ms(ttl_ms)` if there is no news.

    A broker that is silent for `ttl_ms` counts as not available.
    """

    heartbeat_ms: int
    ttl_ms: int
    groups_missed: bool = False
    """The broker may not know every consumer group in the database. Retention removes no message
    of a partition until the broker has received the partition's groups again.
    """
    fence: int = 0
    """Not 0 if an operator has accepted a data folder that is behind: tokens up to this one are
    refused before any request.
    """
    access: AccessNews | None = None
    """Keys and versions by which the broker judges capabilities, where access control is on."""
    cluster_version: str = ""
    """Lowest version of all members, which decides what formats may be written; "": not known yet.
    """


class AcceptFolder(Struct, frozen=True, kw_only=True):
    """
    Accept a data folder that was refused because it is behind; the messages that it lacks are lost.

    The answer is its RefusedBroker. `address` selects a folder if several were refused.
    """

    address: ShortText = ""
    dry_run: bool = False
    """Answer with the folder that would be accepted, and change nothing."""


# ── subjects ──────────────────────────────────────────────────────────────────────────────────────
class Retention(enum.StrEnum):
    """When retention may remove an old message. ACKED: once every consumer group has acked it.
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
    """The subject has logic queues. Their number never falls, and rises only when an operator
    grows the subject.
    """
    message_bytes_max: MessageBytesMax = MESSAGE_BYTES_MAX
    """Limit in bytes of key, value and properties of one message together."""


class AutoCreate(Struct, frozen=True, kw_only=True):
    """Create a subject that does not exist yet, in order to send messages to it."""

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
    """Reason why its creation failed. Such a subject has no open partition, and its name may be
    used again.
    """
    hidden_for: str = ""
    """Subject in which this hidden one is to be published; "": it is not hidden."""
    expires_in_ms: int | None = None
    """Milliseconds after which this hidden subject may be deleted, unless it is filled or
    published; None: it never expires.
    """


class SubjectList(Struct, frozen=True, kw_only=True):
    """All subjects, ordered by name."""

    subjects: list[SubjectSummary]


# ── consumers ─────────────────────────────────────────────────────────────────────────────────────
class Join(Struct, frozen=True, kw_only=True):
    """Begin a session of a consumer. The client draws `session` at random, so a repeat is
    harmless.
    """

    subject: str
    group: str
    session: Annotated[str, Meta(min_length=16, max_length=64, pattern="^[0-9a-f]+$")]
    client: ShortText = ""
    """Host, process id and name of the client, for people."""
    ttl_ms: TtlMs = TTL_MS_DEFAULT
    suspended: bool = False
    """The session begins suspended, so it is granted nothing; see Suspend."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The first session of a group sets the group's strategy."""
    filter: Annotated[str, Meta(max_length=FILTER_CHARS_MAX)] = ""
    """Text of the consumer's `MessageFilter`; the join is refused if the filter of another member
    differs. "": the consumer leaves nothing out.
    """
    group_id: Count = 0
    """Group of the client's earlier session; the join is refused if that group was deleted since.
    0: there was none.
    """
    start: GroupStart | None = None
    """Where the group begins if this session creates it; None: at the first message."""
    instance: InstanceName = ""
    """Name of the client's place in the group. A restarted client with the same name gets the
    leases of its predecessor at once.
    """
    again: bool = False
    """The client had an earlier session since it was opened: it takes the place of an instance only
    if that is free.
    """


class Joined(Struct, frozen=True, kw_only=True):
    """The session has begun; its ttl counts from the time when the request was sent."""

    ttl_ms: int
    heartbeat_ms: int
    group_id: int = 0
    """Distinguishes the group from an earlier or later one of the same name; 0: not reported."""
    start: GroupStart | None = None
    """Where the group began, which its first session or `group create` has fixed; None: not
    reported.
    """
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """Order strategy of the subject."""
    grants: Grants | None = None
    """Grants of the session, the same as in the answer to its first heartbeat; None: not reported.
    """


class Grant(Struct, frozen=True, kw_only=True):
    """The session may handle this partition for its group."""

    partition: Partition
    token: int
    parked_parents: tuple[Partition, ...] = ()
    """
    Parents on which the group had parked messages when it drained them; the partition takes them
    over.

    After them come further ancestors that have parked messages again since they were reset without
    the partitions between.
    """
    parked_tokens: tuple[int, ...] = ()
    """Last tokens of these parents. Messages that were taken over under a lower token date from
    before a reset, and are taken over again.
    """
    parked_ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Half-open ranges of logical partitions that are taken over from each parent; (): those of the
    partition.
    """


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Renew the session and all its leases in one call. The server replies as soon as the grants
    differ from `known_version`, and after `wait_ms` at the latest.
    """

    session: str
    known_version: int = -1
    drained: tuple[int, ...] = ()
    """Sealed partitions that the group has acked to their end."""
    parked: tuple[int, ...] = ()
    """Those among `drained` on which the group has parked messages."""
    holding: tuple[tuple[int, int], ...] | None = None
    """(partition id, token) of each partition that the session has or is handing over; None: not
    reported. A lease that was taken back and is missing here becomes free: the session never
    received the grant, or its release was lost.
    """
    wait_ms: WaitMs = 0
    suspended: bool | None = None
    """Whether the session wants to be suspended; None: not reported. If the session knows the
    newest grants, this overrides a Suspend call that arrived late or whose answer was lost.
    """
    group_id: int = 0
    """Group id from the join; 0: not reported. A join that arrives late may begin the session
    again, in a later group of the name.
    """
    unreached: tuple[str, ...] | None = None
    """Broker groups to which the session cannot connect, though the cluster reports them alive;
    None: not reported. An exclusive group's partitions there are granted to other sessions, if
    there is one that does not report the same.
    """


class Grants(Struct, frozen=True, kw_only=True):
    """All grants of the session. The session hands over each partition that is missing here."""

    version: int
    """Rises with every change of the session's grants; the session ignores a lower version."""
    ttl_ms: int
    grants: tuple[Grant, ...]
    policy: GroupPolicy = GroupPolicy()
    """Stored failure policy of the group, which overrides the consumer's code."""
    suspended_by: OperatorSwitch = OperatorSwitch.OFF
    """The operator's switch that keeps grants from the session."""
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """Order strategy of the subject: under BEST_TRIED a message that fails does not hold up those
    that follow it, unless a policy says so.
    """
    group_id: int = 0
    """Group of the session."""


class ReleaseGrant(Struct, frozen=True, kw_only=True):
    """Report that a partition is handed over: the metaserver may grant it to another session."""

    session: str
    partition_id: int
    token: int
    fence: int = 0
    """The broker's fence, if it is above the token; a metaserver whose database is older may not
    know it.
    """


class Suspend(Struct, frozen=True, kw_only=True):
    """Suspend a session, which hands over its partitions and is granted none; `suspended=False`
    resumes it.
    """

    session: str
    suspended: bool = True


class Leave(Struct, frozen=True, kw_only=True):
    """End a session; its leases become free."""

    session: str


class OwnerView(Struct, frozen=True, kw_only=True):
    """The owner of a partition in a group; `session`, `client` and `expires_in_ms` are None if
    there is none.
    """

    partition: Partition
    token: int
    session: str | None = None
    client: str | None = None
    expires_in_ms: int | None = None


class GivenUpPartition(Struct, frozen=True, kw_only=True):
    """The messages that a group had not read of a partition whose loss an operator has accepted."""

    partition_id: int
    name: str
    broker_group: str
    messages_max: int | None = None
    """Most messages that the group can have lost; None: not known, for example because the
    partition was open.
    """


class GroupView(Struct, frozen=True, kw_only=True):
    """A group on a subject: its owners, live sessions and stored settings (None: not reported), and
    for how long no session has been heard (None: one is alive, or not reported).
    """

    subject: str
    group: str
    sessions: int
    owners: tuple[OwnerView, ...]
    """Owners by partition; in a SHARED group the partitions with their tokens, which every session
    may use.
    """
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    settings: GroupSettings | None = None
    reset: PendingReset | None = None
    silent_ms: int | None = None
    revision: str = ""
    """Changes with each grant, reset and change of its members. While it stays the same, no member
    is alive and nobody sets the group's progress, cursors do not move. "": not reported.
    """
    given_up: tuple[GivenUpPartition, ...] = ()
    """Ordered by partition."""


class DeleteGroup(Struct, frozen=True, kw_only=True):
    """Delete a consumer group, or ask how far its deletion is."""

    force: bool = False
    """Delete it even if it has live consumers: their sessions end, and their tokens are refused."""
    group_id: Count = 0
    """Group id of an earlier answer, so that a later group of the same name is not touched. 0: the
    current group of this name.
    """


class GroupDeletion(Struct, frozen=True, kw_only=True):
    """Progress of the deletion of a consumer group. It continues by itself."""

    subject: str
    group: str
    group_id: int
    left: int = 0
    """Number of partitions whose brokers still have to forget the group; 0: the group is gone."""
    problem: str = ""
    """Reason why one of these brokers has not forgotten it."""


class DeleteSubject(Struct, frozen=True, kw_only=True):
    """Delete a subject with its messages and consumer groups, or ask how far its deletion is."""

    force: bool = False
    """Delete it even if it has live consumers: their sessions end."""
    subject_id: Count = 0
    """Subject id of an earlier answer, so that a later subject of the same name is not touched. 0:
    the current subject of this name.
    """


class SubjectDeletion(Struct, frozen=True, kw_only=True):
    """Progress of the deletion of a subject. It continues by itself."""

    subject: str
    subject_id: int
    left: int = 0
    """Number of partitions that brokers still have to drop; 0: the subject is gone, and its name
    free.
    """
    problem: str = ""
    """Reason why one of these brokers has not dropped its partitions."""


class GroupSummary(Struct, frozen=True, kw_only=True):
    """A group in the list of groups."""

    group: str
    strategy: ConsumeStrategy
    sessions: int


class GroupList(Struct, frozen=True, kw_only=True):
    """The consumer groups of a subject, ordered by name."""

    groups: list[str]
    summaries: list[GroupSummary] = []


class SwitchGroup(Struct, frozen=True, kw_only=True):
    """Change a group's consume strategy. Its sessions end; new sessions must join with the new
    strategy.
    """

    strategy: ConsumeStrategy


# ── partitions on a broker ────────────────────────────────────────────────────────────────────────
class HostPartition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    Host this partition. A repeat with the same facts changes nothing.

    The broker stores the facts of the subject, so that the metaserver's database can be rebuilt
    from brokers.
    brokers.
    """

    subject: str
    partition: Partition
    order_strategy: OrderStrategy | None = None
    """Order strategy of the subject; None: not reported."""
    partitions_wanted: Count = 0
    """Number of partitions that the subject was created with; 0: not reported."""
    retention: Retention | None = None
    """Retention of the subject; None: not reported, which means ACKED."""
    static: bool = False
    """The subject has logic queues."""
    groups: tuple[str, ...] | None = None
    """Every consumer group of the subject, so that retention waits for them from the first message
    on; None: not reported. Groups are no fact of the partition: a repeat may have more of them.
    """
    tokens_above: Count = 0
    """Same meaning as in KnowGroups; sent together with `groups`."""
    message_bytes_max: Annotated[int, Meta(ge=0, le=MESSAGE_BYTES_MAX)] = 0
    """Limit in bytes of one message of the subject, if it is lower than MESSAGE_BYTES_MAX; else 0.
    """
    hidden: str = ""
    """Hidden subject for which the partition was created. When a lost database is rebuilt, sealed
    parents show that it was published.
    """
    times_from_ms: Count = 0
    """Lowest time that a message of the partition gets, in milliseconds since 1970: the end of the
    times in the partitions on other brokers that it continues, `PartitionStatus.ended_at_ms`. It
    is sent with a repeat, once they are sealed, and is no fact of the partition. 0: not reported.
    """


def hosted_limit(message_bytes_max: int) -> int:
    """Return the limit of a subject in the form of HostPartition: 0 for MESSAGE_BYTES_MAX."""
    return message_bytes_max if message_bytes_max < MESSAGE_BYTES_MAX else 0


class DropPartition(Struct, frozen=True, kw_only=True):
    """
    Drop a partition of a deleted subject, with its messages. A repeat changes nothing.

    The broker never hosts the partition again, even if it does not host it now.
    """

    subject: str
    last_id: Annotated[int, Meta(ge=1, le=MAX_I64)]
    """Highest partition id of the subject; a later subject of that name has only higher ids."""


class PartitionStatus(Struct, frozen=True, kw_only=True):
    """The state of a partition at its broker."""

    partition_id: int
    subject: str
    name: str
    state: PartitionState
    first_offset: int
    next_offset: int
    groups: tuple[GroupStatus, ...] = ()
    facts: HostPartition | None = None
    """Facts that the broker received when it began to host the partition."""
    unsealable: str = ""
    """Reason why the partition cannot be sealed now; "" if it can, or is sealed. Left out of a
    page of partitions.
    """
    groups_told: bool = True
    """The broker has received every consumer group of the subject; until then retention removes no
    message of the partition.
    """
    forgotten_token: int = 0
    """Highest token of deleted groups that the partition refuses."""
    holds: tuple[HoldView, ...] = ()
    """Holds of jobs against retention; left out of a page of partitions."""
    ended_at_ms: int = 0
    """In the answer to a seal: no message has a later time by now, in milliseconds since 1970; 0:
    not reported.
    """


class TimeBound(enum.StrEnum):
    """The message that is meant by a time. LOWER: the first at or after it. UPPER: the last at or
    before it.
    """

    LOWER = "lower"
    UPPER = "upper"


class FoundOffset(Struct, frozen=True, kw_only=True):
    """Result of a lookup by the time at which the broker stored messages; `offset` is None if there
    is no such message.
    """

    offset: int | None
    first_offset: int
    next_offset: int


class PartitionStatusList(Struct, frozen=True, kw_only=True):
    """A page of the partitions that a broker hosts, ordered by id."""

    broker_group: str
    partitions: list[PartitionStatus]
    broker_id: str = ""
    """Identity of the broker's data folder."""
    more_after: int | None = None
    """Id after which the next page begins; None: this is the last page."""
    dropped: dict[str, int] = {}
    """Highest partition id by name of a deleted subject, for the subjects of which the broker has
    dropped partitions last.
    """
    dropped_id: int = 0
    """Highest id of a partition that the broker has dropped."""


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
    """How durable the message is; "fsync": on the broker's disk."""
    duplicate: bool = False
    """An earlier request with the same idempotency key has stored the message, so it was not stored
    again.
    """


class Posted(Struct, frozen=True, kw_only=True):
    """All posted messages are stored; receipts are in the order of the messages."""

    receipts: list[PostReceipt]


class PartlyPosted(ErrorBody, frozen=True, kw_only=True):
    """Only some posted messages are stored: an error, with a receipt for each stored message, and
    null for each other.
    """

    receipts: list[PostReceipt | None]


class MessageView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored message. Bytes that are UTF-8 text are in `key` and `value`, other bytes in the
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
    """Properties whose values are bytes; or all stored bytes if they cannot be read as properties,
    which other programs may write.
    """


class MessagePage(Struct, frozen=True, kw_only=True):
    """Messages of a partition, ordered by offset; for a logic queue, all offsets here are logic
    offsets.
    """

    subject: str
    partition_id: int
    messages: list[MessageView]
    next_offset: int
    """Offset at which the next read begins."""
    first_offset: int
    """First offset of the partition that is still stored."""
    end_offset: int
    """Offset after the partition's last message."""
    sealed: bool
    """The partition takes no more messages."""
