"""The JSON bodies of the control calls between clients, brokers and the metaserver. Pure.

`endpoints.py` lists the calls with their bodies. More bodies are in `operations.py`, `queues.py`
and `progress.py`.

The response to a failed call has the error's HTTP status and an ErrorBody. Durations are in
milliseconds. Bodies contain durations instead of points in time; the receiver adds them to its own
clock.
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
    """Whether a program is ready for work. If not, `reason` says why."""

    program: str
    ready: bool
    reason: str = ""
    details: dict[str, Any] = {}


# ── brokers ───────────────────────────────────────────────────────────────────────────────────────
class BrokerHeartbeat(Struct, frozen=True, kw_only=True):
    """A periodic report of a broker. The first one registers the broker."""

    broker_group: ShortText
    broker_id: ShortText
    """The identity of the data folder, which distinguishes it from other folders of the same broker
    group.
    """
    address: ShortText
    readable: bool = True
    writable: bool = True
    problem: ShortText = ""
    """The reason why the broker does not accept writes; "" if it does."""
    opening: ShortText = ""
    """The random name of this opening of the data folder; "" if not reported."""
    opened_after: Annotated[tuple[ShortText, ...], Meta(max_length=OPENINGS_MAX)] = ()
    """The earlier openings of the folder, until the metaserver has stored them."""
    log_end: Count = 0
    """The log position up to which the broker's log is durable. It only grows."""
    hosted: Count = 0
    """The number of partitions that the broker hosts."""
    highest_id: Count = 0
    """The highest id of these partitions; 0 if there are none. If this id is not in the database,
    the database was restored to an older state.
    """
    untold: Annotated[tuple[int, ...], Meta(max_length=GROUPLESS_PARTITIONS_MAX)] = ()
    """Up to GROUPLESS_PARTITIONS_MAX partitions with messages that are due for removal. Retention
    must keep these messages, because the broker has never received the consumer groups of the
    partition.
    """
    version: ShortText = ""
    """The version of the broker's program. A metaserver refuses a report without it."""
    cluster: ShortText = ""
    """The name of the cluster in the broker's settings; "" if there is none."""
    steps_back: bool = False
    """True if the broker becomes a copy by itself when another folder has its place."""
    term: Count = 0
    """How often a copy of the folder was promoted, as this broker knows."""
    history: Count = 0
    """The highest `BrokerWelcome.history` that it was sent."""


def quiet_limit_ms(ttl_ms: int) -> int:
    """Return the maximum time between two reports of an unchanged broker, in milliseconds. Several
    reports must fail before a metaserver considers the broker silent.
    """
    return min(ttl_ms // 4, 5_000)


class BrokerWelcome(Struct, frozen=True, kw_only=True):
    """
    The response to a report. The next report is due after `heartbeat_ms`, or after at most
    `quiet_limit_ms(ttl_ms)` if nothing changes.

    A broker that does not report for `ttl_ms` counts as unavailable.
    """

    heartbeat_ms: int
    ttl_ms: int
    groups_missed: bool = False
    """True if the broker may lack consumer groups that the database has. Until it has received a
    partition's groups again, retention must not remove messages from that partition.
    """
    fence: int = 0
    """The highest token that the broker must refuse from its first request on, if an operator has
    accepted an outdated data folder; otherwise 0.
    """
    access: AccessNews | None = None
    """The keys and versions that the broker needs to check capabilities; None if access control is
    off.
    """
    cluster_version: str = ""
    """The lowest version of all members, which determines the formats that may be written; "" if
    not known yet.
    """
    history: int = 0
    """How often the sets of copies of all broker groups were changed. A database that has fewer
    changes is an older one.
    """


class AcceptFolder(Struct, frozen=True, kw_only=True):
    """
    Accept a data folder that was refused as outdated. The messages missing from it are lost.

    The response is the RefusedBroker of the folder. `address` selects one if several were refused.
    """

    address: ShortText = ""
    dry_run: bool = False
    """True to return the folder that would be accepted, without changing anything."""


# ── subjects ──────────────────────────────────────────────────────────────────────────────────────
class Retention(enum.StrEnum):
    """The condition under which retention may remove an old message. ACKED: every consumer group
    has acked it. TIME: its age alone.
    """

    ACKED = "acked"
    TIME = "time"


class CreateSubject(Struct, frozen=True, kw_only=True):
    """Create a subject whose partitions are distributed across the available broker groups."""

    subject: str
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 2
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    retention: Retention = Retention.ACKED
    static: bool = False
    """True if the subject has logic queues. Their number never decreases, and increases only when
    an operator grows the subject.
    """
    message_bytes_max: MessageBytesMax = MESSAGE_BYTES_MAX
    """The maximum total size of the key, value and properties of one message, in bytes."""


class AutoCreate(Struct, frozen=True, kw_only=True):
    """Create a subject for its first message if it does not exist."""

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
    """The reason why its creation failed. Such a subject has no open partition, and its name can be
    reused.
    """
    hidden_for: str = ""
    """The target as which this hidden subject will be published; "" if it is not hidden."""
    expires_in_ms: int | None = None
    """The time after which this hidden subject may be deleted unless messages are added or it is
    published, in milliseconds; None if it never expires.
    """


class SubjectList(Struct, frozen=True, kw_only=True):
    """All subjects, ordered by name."""

    subjects: list[SubjectSummary]


# ── consumers ─────────────────────────────────────────────────────────────────────────────────────
class Join(Struct, frozen=True, kw_only=True):
    """Begin a consumer session. The client draws `session` at random, which makes the call
    idempotent.
    """

    subject: str
    group: str
    session: Annotated[str, Meta(min_length=16, max_length=64, pattern="^[0-9a-f]+$")]
    client: ShortText = ""
    """The host, process id and name of the client, for display."""
    ttl_ms: TtlMs = TTL_MS_DEFAULT
    suspended: bool = False
    """True if the session begins suspended, so that it receives no grants; see Suspend."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The first session of a group sets the group's strategy."""
    filter: Annotated[str, Meta(max_length=FILTER_CHARS_MAX)] = ""
    """The text of the consumer's `MessageFilter`; "" if there is none. The join is refused if
    another member has a different filter.
    """
    group_id: Count = 0
    """The group id of the client's previous session; 0 if there was none. The join is refused if
    that group has been deleted.
    """
    start: GroupStart | None = None
    """Where the group starts if this session creates it; None means at the first message."""
    instance: InstanceName = ""
    """The client's instance name in the group. A restarted client with the same name immediately
    receives the leases of its predecessor.
    """
    again: bool = False
    """True if the client has already had a session since it was opened. It then gets its instance
    name only if no other client uses it.
    """


class Joined(Struct, frozen=True, kw_only=True):
    """The session has begun. Its ttl is counted from the time at which the client sent the
    request.
    """

    ttl_ms: int
    heartbeat_ms: int
    group_id: int = 0
    """Distinguishes the group from an earlier or later one with the same name; 0 if not
    reported.
    """
    start: GroupStart | None = None
    """Where the group starts, as set by its first session or by `group create`; None if not
    reported.
    """
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """The order strategy of the subject."""
    cluster_id: str = ""
    """The identity of the cluster, whose partition ids and tokens are unknown to any other one; ""
    if not reported.
    """
    grants: Grants | None = None
    """The grants of the session, as in the response to a heartbeat; None if not reported."""


class LeaseEnd(enum.StrEnum):
    """How the lease of a partition ended."""

    EXPIRED = "expired"
    """Its owner sent no heartbeat for the duration of its ttl."""
    REBALANCE = "rebalance"
    """Its owner released it because the metaserver granted the partition to another member."""
    RELEASED = "released"
    """Its owner released it without that: it was leaving or suspended, or the broker refused it."""
    LEFT = "left"
    """Its owner left the group."""
    REPLACED = "replaced"
    """A consumer with the same instance name took the place of its owner."""
    ENDED = "ended"
    """An operator ended the session of its owner."""


class PreviousOwner(Struct, frozen=True, kw_only=True):
    """The member that had a partition before its present owner."""

    client: str
    end: LeaseEnd


class Grant(Struct, frozen=True, kw_only=True):
    """A permission for a session to handle a partition for its group."""

    partition: Partition
    token: int
    parked_parents: tuple[Partition, ...] = ()
    """
    The parents on which the group had parked messages when it drained them. The partition adopts
    these messages.

    They are followed by more distant ancestors that have new parked messages, because they were
    reset without the partitions in between.
    """
    parked_tokens: tuple[int, ...] = ()
    """The last tokens of these parents. Messages that were adopted under a lower token date from
    before a reset, and are adopted again.
    """
    parked_ranges: tuple[tuple[tuple[int, int], ...], ...] = ()
    """The half-open ranges of logical partitions that are adopted from each parent; () means the
    partition's own range.
    """
    previous: PreviousOwner | None = None
    """The owner before the session; None if there was none or it is unknown."""


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Renew the session and all its leases. This is a long poll: the metaserver responds as soon as
    the version of the grants differs from `known_version`, or after `wait_ms`.
    """

    session: str
    known_version: int = -1
    drained: tuple[int, ...] = ()
    """The sealed partitions that the group has acked to their ends."""
    parked: tuple[int, ...] = ()
    """Those of the partitions in `drained` on which the group has parked messages."""
    holding: tuple[tuple[int, int], ...] | None = None
    """The (partition id, token) of each partition that the session holds or is handing over; None
    if not reported. A withdrawn lease that is missing here becomes free: either the session never
    received the grant, or its release was lost.
    """
    wait_ms: WaitMs = 0
    suspended: bool | None = None
    """Whether the session wants to be suspended; None if not reported. If the session knows the
    newest grants, this overrides a Suspend call that was delayed or whose response was lost.
    """
    group_id: int = 0
    """The group id from the join; 0 if not reported. It reveals a delayed join, which would begin
    the session again in a later group with the same name.
    """
    unreached: tuple[str, ...] | None = None
    """The broker groups to which the session cannot connect although the cluster reports them as
    alive; None if not reported. If the group is exclusive, their partitions are granted to sessions
    that do not report them.
    """


class Grants(Struct, frozen=True, kw_only=True):
    """All grants of a session. It must hand over every partition that is missing here."""

    version: int
    """The version of the session's grants, which increases with every change. The session ignores
    lower versions.
    """
    ttl_ms: int
    grants: tuple[Grant, ...]
    policy: GroupPolicy = GroupPolicy()
    """The stored failure policy of the group, which overrides the consumer's settings."""
    suspended_by: OperatorSwitch = OperatorSwitch.OFF
    """The operator's switch that suspends the session."""
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    """The order strategy of the subject. Under BEST_TRIED, a failing message does not delay later
    ones unless a policy says so.
    """
    group_id: int = 0
    """The group id of the session's group; 0 if not reported."""


class ReleaseGrant(Struct, frozen=True, kw_only=True):
    """Report that the session has handed over a partition, which the metaserver may then grant to
    another session.
    """

    session: str
    partition_id: int
    token: int
    fence: int = 0
    """The broker's fence if it is above the token. A metaserver with a restored database may not
    know it.
    """


class Suspend(Struct, frozen=True, kw_only=True):
    """Suspend a session: it hands over its partitions and receives no new ones until it is resumed
    with `suspended=False`.
    """

    session: str
    suspended: bool = True


class Leave(Struct, frozen=True, kw_only=True):
    """End a session. Its leases become free."""

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
    hands_over_to: str | None = None
    """The consumer that gets the partition as soon as the owner has handed it over; None if it need
    not.
    """
    age_ms: int | None = None
    """The time since the partition was opened, in milliseconds; None if not known."""
    previous_client: str | None = None
    """The client that owned it before; None if there was none, or if not known."""


class GroupMember(Struct, frozen=True, kw_only=True):
    """A live session of a group."""

    client: str
    partitions: int
    """The number of partitions that it owns; 0 in a SHARED group."""
    heard_ms: int
    """The time since its last heartbeat, in milliseconds."""
    expires_in_ms: int
    """The time until its leases end unless it sends a heartbeat, in milliseconds."""
    suspended: bool = False
    """True if it does not want any partitions, or if an operator has suspended it or its group."""
    filter: str = ""
    """The text of its `MessageFilter`; "" if it has none, or if not reported."""
    unreached: tuple[str, ...] = ()
    """The broker groups to which it cannot connect although the cluster reports them as alive."""
    session: str = ""
    """The id of its session; "" if not reported."""
    unreached_ms: tuple[int, ...] = ()
    """For each of `unreached`, the time since it reported that first, in milliseconds; () if not
    known.
    """


class EndedMember(Struct, frozen=True, kw_only=True):
    """The member of a group whose session was the last to end. If its client has joined again, it
    is a member too.
    """

    client: str
    left: bool
    """True if it left the group; False if it sent no heartbeat for the duration of its ttl."""
    ended_ms: int | None = None
    """The time since then, in milliseconds; None if unknown."""
    heard_ms: int | None = None
    """The time since its last heartbeat, in milliseconds; None if unknown."""


class GivenUpPartition(Struct, frozen=True, kw_only=True):
    """The messages that a group had not read from a partition whose loss an operator has
    accepted.
    """

    partition_id: int
    name: str
    broker_group: str
    messages_max: int | None = None
    """The maximum number of messages that the group may have lost; None if unknown, for example
    because the partition was open.
    """


class WaitingProducer(Struct, frozen=True, kw_only=True):
    """A producer that waits for a broker, as it tells the metaserver from which it awaits another
    route.
    """

    client: ShortText
    """The host and the process id of the producer."""
    broker_group: ShortText
    messages: Count
    """The number of messages that it has not stored because of that."""
    waiting_ms: Count
    """The time since it sent the oldest of them, in milliseconds."""
    reason: ShortText
    """Why it waits, as a text for users."""


class GroupView(Struct, frozen=True, kw_only=True):
    """A consumer group of a subject. `silent_ms` is the time since the last heartbeat of any
    session; None if a session is alive, or if not reported.
    """

    subject: str
    group: str
    sessions: int
    owners: tuple[OwnerView, ...]
    """The owners by partition. In a SHARED group, these are the partitions with their tokens, which
    all sessions use.
    """
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    settings: GroupSettings | None = None
    reset: PendingReset | None = None
    silent_ms: int | None = None
    revision: str = ""
    """Changes with each grant, each reset and each change of the members; "" if not reported. As
    long as it stays the same, no member is alive and no reset is running, the cursors cannot move.
    """
    given_up: tuple[GivenUpPartition, ...] = ()
    """The messages that were lost with accepted losses, ordered by partition."""
    members: tuple[GroupMember, ...] = ()
    """The live sessions, in the order in which they joined; () if there are none, or if not
    reported.
    """
    ended: EndedMember | None = None
    """The member that ended last; None if there is none, or if not reported."""
    waiting_producers: tuple[WaitingProducer, ...] = ()
    """The producers of the subject that wait for a broker, as far as they have told the metaserver
    that answers.
    """


class DeleteGroup(Struct, frozen=True, kw_only=True):
    """Delete a consumer group. Repeating the call returns the progress of the deletion."""

    force: bool = False
    """True to delete the group even if it has live consumers. Their sessions end, and their tokens
    are refused.
    """
    group_id: Count = 0
    """The group id from an earlier response, which protects a later group with the same name; 0
    means the current group with this name.
    """


class GroupDeletion(Struct, frozen=True, kw_only=True):
    """The progress of deleting a consumer group. The metaserver completes the deletion."""

    subject: str
    group: str
    group_id: int
    left: int = 0
    """The number of partitions whose brokers have not forgotten the group yet; 0 if it is
    deleted.
    """
    problem: str = ""
    """The error of a broker that has not forgotten the group yet."""


class DeleteSubject(Struct, frozen=True, kw_only=True):
    """Delete a subject with its messages and consumer groups. Repeating the call returns the
    progress of the deletion.
    """

    force: bool = False
    """True to delete the subject even if it has live consumers. Their sessions end."""
    subject_id: Count = 0
    """The subject id from an earlier response, which protects a later subject with the same name; 0
    means the current subject with this name.
    """


class SubjectDeletion(Struct, frozen=True, kw_only=True):
    """The progress of deleting a subject. The metaserver completes the deletion."""

    subject: str
    subject_id: int
    left: int = 0
    """The number of partitions that brokers have not dropped yet; 0 if the subject is deleted and
    its name can be reused.
    """
    problem: str = ""
    """The error of a broker that has not dropped its partitions yet."""


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
    Host a partition. Repeating the call with the same metadata has no effect.

    The broker stores the metadata, so that a lost metaserver database can be rebuilt from it.
    """

    subject: str
    partition: Partition
    order_strategy: OrderStrategy | None = None
    """The order strategy of the subject; None if not reported."""
    partitions_wanted: Count = 0
    """The number of partitions with which the subject was created; 0 if not reported."""
    retention: Retention | None = None
    """The retention of the subject; None if not reported, which means ACKED."""
    static: bool = False
    """True if the subject has logic queues."""
    groups: tuple[str, ...] | None = None
    """All consumer groups of the subject, for which retention waits from the first message on; None
    if not reported. They are not part of the partition's metadata: a repeated call may have more
    groups.
    """
    tokens_above: Count = 0
    """Same meaning as in RegisterGroups; sent together with `groups`."""
    message_bytes_max: Annotated[int, Meta(ge=0, le=MESSAGE_BYTES_MAX)] = 0
    """The subject's limit for one message, in bytes, if it is lower than MESSAGE_BYTES_MAX;
    otherwise 0.
    """
    hidden: str = ""
    """The hidden subject for which the partition was created; "" if there is none. When a lost
    database is rebuilt, sealed parents prove that the hidden subject was published.
    """
    cluster_id: str = ""
    """The identity of the cluster; "" if not reported."""
    times_from_ms: Count = 0
    """A lower bound of the times of the partition's messages, in milliseconds since 1970; 0 if not
    reported. It is the highest `PartitionStatus.ended_at_ms` of its parents on other brokers. It is
    sent in a repeated call once they are sealed, and is not part of the metadata.
    """


def hosted_limit(message_bytes_max: int) -> int:
    """Return a subject's message limit as it is encoded in HostPartition, where 0 stands for
    MESSAGE_BYTES_MAX.
    """
    return message_bytes_max if message_bytes_max < MESSAGE_BYTES_MAX else 0


class DropPartition(Struct, frozen=True, kw_only=True):
    """
    Drop a partition of a deleted subject, with its messages. Repeating the call has no effect.

    The broker will never host the partition again, even if it does not host it at present.
    """

    subject: str
    last_id: Annotated[int, Meta(ge=1, le=MAX_I64)]
    """The highest partition id of the subject. A later subject with the same name has only higher
    ids.
    """


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
    """The metadata that the broker received when it began to host the partition."""
    unsealable: str = ""
    """The reason why the partition cannot be sealed at present; "" if it can be, or if it is
    already sealed. Not set in a page of partitions.
    """
    groups_told: bool = True
    """True if the broker has received all consumer groups of the subject. Until then, retention
    does not remove any messages from the partition.
    """
    forgotten_token: int = 0
    """The highest token of a deleted group. The partition refuses that group's tokens up to this
    one.
    """
    holds: tuple[HoldView, ...] = ()
    """The holds of jobs against retention. Not set in a page of partitions."""
    limited_by: str = ""
    """The quota for which calls that send or pull messages of the subject wait at the broker, such
    as "bytes of principal 'shop'"; "" if they do not. Not set in a page of partitions.
    """
    limited_ms: int = 0
    """How long they wait for it, in milliseconds."""
    messages_per_s: float | None = None
    """Messages stored in a second, on average over the last 30 to 60 seconds; None if not
    reported.
    """
    bytes_per_s: float | None = None
    stored_bytes: int | None = None
    """About how many bytes the stored messages take, from the sizes of some batches; None if the
    call did not ask for it.
    """
    ended_at_ms: int = 0
    """In the response to a seal, an upper bound of the times of the partition's messages, in
    milliseconds since 1970; 0 if not reported.
    """
    limited_for_ms: int = 0
    """The time since calls began to wait for `limited_by`, in milliseconds."""


class TimeBound(enum.StrEnum):
    """Which message a time refers to. LOWER: the first one at or after it. UPPER: the last one at
    or before it.
    """

    LOWER = "lower"
    UPPER = "upper"


class FoundOffset(Struct, frozen=True, kw_only=True):
    """The result of looking up the time at which the broker stored a message. `offset` is None if
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
    """The identity of the broker's data folder."""
    more_after: int | None = None
    """The id after which the next page begins; None if this is the last page."""
    dropped: dict[str, int] = {}
    """Maps the names of deleted subjects to their highest partition ids, for the subjects whose
    partitions the broker dropped most recently.
    """
    dropped_id: int = 0
    """The highest id of a partition that the broker has dropped."""


# ── messages over HTTP ────────────────────────────────────────────────────────────────────────────
class PostReceipt(Struct, frozen=True, kw_only=True):
    """The location of a posted message, and its durability."""

    partition_id: int
    queue: int | None
    """The number of the logic queue; None if the subject is not static."""
    offset: int
    logic_offset: int | None
    """The offset in the logic queue; None if the subject is not static."""
    durable: str
    """How durable the message is. "fsync" means that it is on the broker's disk."""
    duplicate: bool = False
    """True if an earlier request with the same idempotency key had already stored the message."""
    copies: int = 1
    """The number of data folders that have the message."""


class Posted(Struct, frozen=True, kw_only=True):
    """The response if all posted messages are stored. The receipts are in the order of the
    messages.
    """

    receipts: list[PostReceipt]


class PartlyPosted(ErrorBody, frozen=True, kw_only=True):
    """The error response if only some of the posted messages are stored. It has a receipt for each
    stored message, and null for the others.
    """

    receipts: list[PostReceipt | None]


class MessageView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored message. The key and the value are text if they are valid UTF-8, and base64
    otherwise. `key` is null for a message without a key.
    """

    partition_id: int
    offset: int
    queue: int
    logic_offset: int
    sent_at_ns: int
    key: str | msgspec.UnsetType | None = msgspec.UNSET
    key_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    value: str | msgspec.UnsetType = msgspec.UNSET
    value_base64: bytes | msgspec.UnsetType = msgspec.UNSET
    properties: dict[str, str] = {}
    properties_base64: dict[str, bytes] | bytes | msgspec.UnsetType = msgspec.UNSET
    """The properties whose values are bytes. If the stored properties cannot be decoded because
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
    """The offset at which the next read begins."""
    first_offset: int
    """The first offset of the partition that is still stored."""
    end_offset: int
    """The offset that follows the partition's last message."""
    sealed: bool
    """True if the partition does not accept any more messages."""
