"""JSON bodies of the control calls between clients, brokers and the metaserver. Pure.

`endpoints.py` lists the calls with their bodies. Further bodies are in `operations.py`, `queues.py`
and `progress.py`.

The response to a failed call has the error's HTTP status and an ErrorBody. Durations are in
milliseconds. Bodies have durations instead of instants; the receiver adds them to its own clock.
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
    GROUPLESS_PARTITIONS_MAX,
    MESSAGE_BYTES_MAX,
    MESSAGE_BYTES_MAX_MIN,
    PARTITIONS_MAX,
    PULL_WAIT_MS_MAX,
    TTL_MS_DEFAULT,
    TTL_MS_MAX,
    TTL_MS_MIN,
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
    """The body of an error response."""

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
    """The response to a successful call that returns nothing."""


class Health(Struct, frozen=True, kw_only=True):
    """Whether a program is ready for work; if not, `reason` says why."""

    program: str
    ready: bool
    reason: str = ""
    details: dict[str, Any] = {}


# ── brokers ───────────────────────────────────────────────────────────────────────────────────────
class BrokerHeartbeat(Struct, frozen=True, kw_only=True):
    """A regular report of a broker. The first one registers it."""

    broker_group: ShortText
    broker_id: ShortText
    """Identity of the data folder, which distinguishes it from other folders of the same broker
    group.
    """
    address: ShortText
    readable: bool = True
    writable: bool = True
    problem: ShortText = ""
    """Reason why the broker accepts no writes; "" if it does."""
    opening: ShortText = ""
    """Random name of this opening of the data folder; "": not reported."""
    opened_after: Annotated[tuple[ShortText, ...], Meta(max_length=OPENINGS_MAX)] = ()
    """Earlier openings of the folder, until the metaserver has stored them."""
    log_end: Count = 0
    """Position in bytes up to which the broker's log is durable. It only grows."""
    hosted: Count = 0
    """Number of partitions that the broker hosts."""
    highest_id: Count = 0
    """Highest id of these partitions; 0 if there are none. If the database does not have this id,
    it was restored to an older state.
    """
    untold: Annotated[tuple[int, ...], Meta(max_length=GROUPLESS_PARTITIONS_MAX)] = ()
    """Up to GROUPLESS_PARTITIONS_MAX partitions that have messages due for removal, which retention
    must keep because the broker has never received the consumer groups of the partition.
    """
    version: ShortText = ""
    """Version of the broker's program; a metaserver refuses a report without it."""
    cluster: ShortText = ""
    """Name of the cluster in the broker's settings; "": none."""


def quiet_limit_ms(ttl_ms: int) -> int:
    """Return the longest time in milliseconds between two reports of an unchanged broker. Several
    reports must fail before a metaserver considers the broker silent.
    """
    return min(ttl_ms // 4, 5_000)


class BrokerWelcome(Struct, frozen=True, kw_only=True):
    """
    The response to a report. The next one is due after `heartbeat_ms`, or after at most
    `quiet_limit_ms(ttl_ms)` if nothing changes.

    A broker that does not report for `ttl_ms` counts as unavailable.
    """

    heartbeat_ms: int
    ttl_ms: int
    groups_missed: bool = False
    """The broker may lack consumer groups that the database has. Until it has received the groups
    of a partition again, retention must not remove messages there.
    """
    fence: int = 0
    """If an operator has accepted an outdated data folder: a fence. The broker must refuse tokens
    up to this one from its first request on. Otherwise 0.
    """
    access: AccessNews | None = None
    """Keys and versions by which the broker checks capabilities; None: access control is off."""
    cluster_version: str = ""
    """Lowest version of all members, which determines the formats that may be written; "": not
    known yet.
    """


class AcceptFolder(Struct, frozen=True, kw_only=True):
    """
    Accept a data folder that was refused as outdated. The messages that it lacks are lost.

    The response is the RefusedBroker of the folder. `address` selects one if several were refused.
    """

    address: ShortText = ""
    dry_run: bool = False
    """Return the folder that would be accepted, without changing anything."""


# ── subjects ──────────────────────────────────────────────────────────────────────────────────────
class Retention(enum.StrEnum):
    """Condition under which retention may remove an old message. ACKED: every consumer group has
    acked it. TIME: its age alone.
    """

    ACKED = "acked"
    TIME = "time"


class CreateSubject(Struct, frozen=True, kw_only=True):
    """Create a subject whose partitions are distributed over the available broker groups."""

    subject: str
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 2
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    retention: Retention = Retention.ACKED
    static: bool = False
    """The subject has logic queues. Their number never decreases, and increases only when an
    operator grows the subject.
    """
    message_bytes_max: MessageBytesMax = MESSAGE_BYTES_MAX
    """Maximum bytes of key, value and properties of one message together."""


class AutoCreate(Struct, frozen=True, kw_only=True):
    """Create a subject for its first message, if it does not exist."""

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
    """Reason why its creation failed. Such a subject has no open partition, and its name can be
    reused.
    """
    hidden_for: str = ""
    """Target in which this hidden subject will be published; "": it is not hidden."""
    expires_in_ms: int | None = None
    """Milliseconds after which this hidden subject may be deleted, unless messages are added or it
    is published; None: it never expires.
    """


class SubjectList(Struct, frozen=True, kw_only=True):
    """All subjects, ordered by name."""

    subjects: list[SubjectSummary]


# ── consumers ─────────────────────────────────────────────────────────────────────────────────────
class Join(Struct, frozen=True, kw_only=True):
    """Begin a consumer session. The client draws `session` at random, so the call is idempotent."""

    subject: str
    group: str
    session: Annotated[str, Meta(min_length=16, max_length=64, pattern="^[0-9a-f]+$")]
    client: ShortText = ""
    """Host, process id and name of the client, for display."""
    ttl_ms: TtlMs = TTL_MS_DEFAULT
    suspended: bool = False
    """The session begins suspended, so it gets no grants; see Suspend."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The first session of a group sets the group's strategy."""
    filter: Annotated[str, Meta(max_length=FILTER_CHARS_MAX)] = ""
    """Text of the consumer's `MessageFilter`; "": no filter. The join is refused if another member
    has a different filter.
    """
    group_id: Count = 0
    """Group id of the client's previous session; 0: there was none. The join is refused if that
    group has been deleted.
    """
    start: GroupStart | None = None
    """Start of the group if this session creates it; None: the first message."""
    instance: InstanceName = ""
    """Instance name of the client in the group. A restarted client with the same name immediately
    gets the leases of its predecessor.
    """
    again: bool = False
    """The client has already had a session since it was opened: it gets its instance name only if
    no other client uses it.
    """


class Joined(Struct, frozen=True, kw_only=True):
    """The session has begun. Its ttl counts from the time when the client sent the request."""

    ttl_ms: int
    heartbeat_ms: int
    group_id: int = 0
    """Distinguishes the group from an earlier or later one of the same name; 0: not reported."""
    start: GroupStart | None = None
    """Start of the group, fixed by its first session or by `group create`; None: not reported."""
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """Order strategy of the subject."""
    grants: Grants | None = None
    """Grants of the session, as in the response to a heartbeat; None: not reported."""


class Grant(Struct, frozen=True, kw_only=True):
    """Permission for a session to handle a partition for its group."""

    partition: Partition
    token: int
    parked_parents: tuple[Partition, ...] = ()
    """
    Parents on which the group had parked messages when it drained them. The partition adopts these
    messages.

    They are followed by further ancestors that have new parked messages, because they were reset
    without the partitions between.
    """
    parked_tokens: tuple[int, ...] = ()
    """Last tokens of these parents. Messages that were adopted under a lower token date from before
    a reset, and are adopted again.
    """
    parked_ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Half-open ranges of logical partitions that are adopted from each parent; (): the partition's
    own range.
    """


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Renew the session and all its leases. This is a long poll: the metaserver responds as soon as
    the grants differ from `known_version`, or after `wait_ms`.
    """

    session: str
    known_version: int = -1
    drained: tuple[int, ...] = ()
    """Sealed partitions that the group has acked to their end."""
    parked: tuple[int, ...] = ()
    """Partitions in `drained` on which the group has parked messages."""
    holding: tuple[tuple[int, int], ...] | None = None
    """(partition id, token) of each partition that the session holds or is handing over; None: not
    reported. A withdrawn lease that is missing here becomes free: either the session never received
    the grant, or its release was lost.
    """
    wait_ms: WaitMs = 0
    suspended: bool | None = None
    """Whether the session wants to be suspended; None: not reported. If the session knows the
    newest grants, this overrides a Suspend call that was delayed or whose response was lost.
    """
    group_id: int = 0
    """Group id from the join; 0: not reported. It reveals a delayed join, which begins the session
    again in a later group of the same name.
    """
    unreached: tuple[str, ...] | None = None
    """Broker groups to which the session cannot connect, although the cluster reports them alive;
    None: not reported. If the group is exclusive, their partitions are granted to sessions that do
    not report them.
    """


class Grants(Struct, frozen=True, kw_only=True):
    """All grants of a session, which hands over every partition that is missing here."""

    version: int
    """Version of the session's grants, which increases with every change. The session ignores lower
    versions.
    """
    ttl_ms: int
    grants: tuple[Grant, ...]
    policy: GroupPolicy = GroupPolicy()
    """Stored failure policy of the group. It overrides the consumer's settings."""
    suspended_by: OperatorSwitch = OperatorSwitch.OFF
    """Operator's switch that suspends the session."""
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """Order strategy of the subject. Under BEST_TRIED, a failing message does not delay later ones,
    unless a policy says so.
    """
    group_id: int = 0
    """Group id of the session's group; 0: not reported."""


class ReleaseGrant(Struct, frozen=True, kw_only=True):
    """Report that the session has handed over a partition. The metaserver may grant it to
    another.
    """

    session: str
    partition_id: int
    token: int
    fence: int = 0
    """The broker's fence, if it is above the token: a metaserver with a restored database may not
    know it.
    """


class Suspend(Struct, frozen=True, kw_only=True):
    """Suspend a session: it hands over its partitions and gets no new ones until `suspended=False`
    resumes it.
    """

    session: str
    suspended: bool = True


class Leave(Struct, frozen=True, kw_only=True):
    """End a session; its leases become free."""

    session: str


class OwnerView(Struct, frozen=True, kw_only=True):
    """The owner of a partition in a group. `session`, `client` and `expires_in_ms` are None if no
    session owns it.
    """

    partition: Partition
    token: int
    session: str | None = None
    client: str | None = None
    expires_in_ms: int | None = None


class GroupMember(Struct, frozen=True, kw_only=True):
    """A live session of a group."""

    client: str
    partitions: int
    """Number of partitions that it owns; 0 in a SHARED group."""
    heard_ms: int
    """Milliseconds since its last heartbeat."""
    expires_in_ms: int
    """Milliseconds until its leases end, unless it sends a heartbeat."""
    suspended: bool = False
    """It wants no partitions, or an operator has suspended it or its group."""


class EndedMember(Struct, frozen=True, kw_only=True):
    """The consumer of a group whose session ended last."""

    client: str
    left: bool
    """True if it left the group; False if it sent no heartbeats until its ttl had ended."""
    ended_ms: int | None = None
    """Milliseconds since then; None: not known."""


class GivenUpPartition(Struct, frozen=True, kw_only=True):
    """The messages that a group had not read in a partition whose loss an operator has accepted."""

    partition_id: int
    name: str
    broker_group: str
    messages_max: int | None = None
    """Maximum number of messages that the group may have lost; None: unknown, for example because
    the partition was open.
    """


class GroupView(Struct, frozen=True, kw_only=True):
    """A consumer group of a subject. `silent_ms` is the time since the last heartbeat of any
    session; None: one is alive, or not reported.
    """

    subject: str
    group: str
    sessions: int
    owners: tuple[OwnerView, ...]
    """Owners by partition. In a SHARED group these are the partitions with their tokens, which all
    sessions use.
    """
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    settings: GroupSettings | None = None
    reset: PendingReset | None = None
    silent_ms: int | None = None
    revision: str = ""
    """Changes with each grant, reset and change of the members; "": not reported. As long as it
    stays the same, no member is alive and no reset runs, the cursors cannot move.
    """
    given_up: tuple[GivenUpPartition, ...] = ()
    """Messages lost with accepted losses, ordered by partition."""
    members: tuple[GroupMember, ...] = ()
    """Live sessions in the order of joining; (): none, or not reported."""
    ended: EndedMember | None = None
    """The member that ended last; None: none, or not reported."""


class DeleteGroup(Struct, frozen=True, kw_only=True):
    """Delete a consumer group. A repeat returns the progress of the deletion."""

    force: bool = False
    """Delete the group even if it has live consumers. Their sessions end, and their tokens are
    refused.
    """
    group_id: Count = 0
    """Group id from an earlier response, to protect a later group of the same name; 0: the current
    group of this name.
    """


class GroupDeletion(Struct, frozen=True, kw_only=True):
    """Progress of the deletion of a consumer group, which the metaserver completes."""

    subject: str
    group: str
    group_id: int
    left: int = 0
    """Number of partitions whose brokers have not yet forgotten the group; 0: it is deleted."""
    problem: str = ""
    """Error of a broker that has not forgotten the group yet."""


class DeleteSubject(Struct, frozen=True, kw_only=True):
    """Delete a subject with its messages and consumer groups. A repeat returns the progress of the
    deletion.
    """

    force: bool = False
    """Delete the subject even if it has live consumers. Their sessions end."""
    subject_id: Count = 0
    """Subject id from an earlier response, to protect a later subject of the same name; 0: the
    current subject of this name.
    """


class SubjectDeletion(Struct, frozen=True, kw_only=True):
    """Progress of the deletion of a subject, which the metaserver completes."""

    subject: str
    subject_id: int
    left: int = 0
    """Number of partitions that brokers have not yet dropped; 0: the subject is deleted, and its
    name can be reused.
    """
    problem: str = ""
    """Error of a broker that has not dropped its partitions yet."""


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
    """Change a group's consume strategy. Its sessions end, and new ones must join with the new
    strategy.
    """

    strategy: ConsumeStrategy


# ── partitions on a broker ────────────────────────────────────────────────────────────────────────
class HostPartition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    Host a partition. A repeat with the same metadata changes nothing.

    The broker stores these metadata. A lost database of the metaserver can be rebuilt from them.
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
    """All consumer groups of the subject, for which retention waits from the first message on;
    None: not reported. They are not metadata of the partition: a repeat may have more groups.
    """
    tokens_above: Count = 0
    """Same meaning as in RegisterGroups; sent together with `groups`."""
    message_bytes_max: Annotated[int, Meta(ge=0, le=MESSAGE_BYTES_MAX)] = 0
    """The subject's limit in bytes for one message, if lower than MESSAGE_BYTES_MAX; else 0."""
    hidden: str = ""
    """Hidden subject for which the partition was created; "": none. When a lost database is
    rebuilt, sealed parents prove that the hidden subject was published.
    """
    times_from_ms: Count = 0
    """Lower bound of the times of messages in the partition, in milliseconds since 1970; 0: not
    reported. It is the highest `PartitionStatus.ended_at_ms` of its parents on other brokers. It is
    sent with a repeat once they are sealed, and is not part of the metadata.
    """


def hosted_limit(message_bytes_max: int) -> int:
    """Return a subject's message limit as HostPartition encodes it: 0 stands for
    MESSAGE_BYTES_MAX.
    """
    return message_bytes_max if message_bytes_max < MESSAGE_BYTES_MAX else 0


class DropPartition(Struct, frozen=True, kw_only=True):
    """
    Drop a partition of a deleted subject, with its messages. A repeat changes nothing.

    The broker will never host the partition again, even if it does not host it now.
    """

    subject: str
    last_id: Annotated[int, Meta(ge=1, le=MAX_I64)]
    """Highest partition id of the subject. A later subject of the same name has only higher ids."""


class PartitionStatus(Struct, frozen=True, kw_only=True):
    """The state of a partition on its broker."""

    partition_id: int
    subject: str
    name: str
    state: PartitionState
    first_offset: int
    next_offset: int
    groups: tuple[GroupStatus, ...] = ()
    facts: HostPartition | None = None
    """Metadata that the broker received when it began to host the partition."""
    unsealable: str = ""
    """Reason why the partition cannot be sealed now; "" if it can be, or is sealed. Not filled in
    for a page of partitions.
    """
    groups_told: bool = True
    """The broker has received all consumer groups of the subject. Until then, retention removes no
    messages of the partition.
    """
    forgotten_token: int = 0
    """Highest token of a deleted group; the partition refuses tokens of that group up to it."""
    holds: tuple[HoldView, ...] = ()
    """Holds of jobs against retention. Not filled in for a page of partitions."""
    ended_at_ms: int = 0
    """In the response to a seal: upper bound of the times of its messages, in milliseconds since
    1970; 0: not reported.
    """


class TimeBound(enum.StrEnum):
    """Which message a time refers to. LOWER: the first at or after it. UPPER: the last at or before
    it.
    """

    LOWER = "lower"
    UPPER = "upper"


class FoundOffset(Struct, frozen=True, kw_only=True):
    """The result of a lookup by the time at which the broker stored a message. `offset` is None if
    there is no such message.
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
    """Highest partition id by name of the deleted subject, for the subjects whose partitions the
    broker dropped most recently.
    """
    dropped_id: int = 0
    """Highest id of a partition that the broker has dropped."""


# ── messages over HTTP ────────────────────────────────────────────────────────────────────────────
class PostReceipt(Struct, frozen=True, kw_only=True):
    """The location of a posted message, and its durability."""

    partition_id: int
    queue: int | None
    """Number of the logic queue; None if the subject is not static."""
    offset: int
    logic_offset: int | None
    """Offset in the logic queue; None if the subject is not static."""
    durable: str
    """How durable the message is; "fsync": on the broker's disk."""
    duplicate: bool = False
    """True if an earlier request with the same idempotency key had already stored the message."""


class Posted(Struct, frozen=True, kw_only=True):
    """The response if all posted messages are stored. Receipts are in the order of the messages."""

    receipts: list[PostReceipt]


class PartlyPosted(ErrorBody, frozen=True, kw_only=True):
    """The error response if only some posted messages are stored: a receipt for each of these, null
    for the others.
    """

    receipts: list[PostReceipt | None]


class MessageView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored message. Key and value are text if they are UTF-8, and base64 otherwise."""

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
    """Properties whose values are bytes. If the stored properties cannot be decoded, because
    another program wrote them, these are all their bytes.
    """


class MessagePage(Struct, frozen=True, kw_only=True):
    """Messages of a partition or a logic queue, ordered by offset. For a logic queue, all offsets
    are logic offsets.
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
