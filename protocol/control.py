"""JSON bodies of the control calls: what clients, brokers and the metaserver tell each other.  Pure.

Which call takes which body is in `endpoints.py`; bodies of calls that change partitions, read logic queues or set a
group's progress are in `operations.py`, `queues.py` and `progress.py`.

An error is answered with its HTTP status and an ErrorBody.  Durations are milliseconds and never instants:
a receiver adds them to its own clock.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from .errors import Fate, KeylaneError
from .errors.wire import error_from_wire, wire_details, wire_text
from .limits import (
    PARTITIONS_MAX,
    PULL_WAIT_MS_MAX,
    TTL_MS_DEFAULT,
    TTL_MS_MAX,
    TTL_MS_MIN,
    UNTOLD_MAX,
)
from .routing import ConsumeStrategy, OrderStrategy, Partition, PartitionState, Route

Count = Annotated[int, Meta(ge=0)]
WaitMs = Annotated[int, Meta(ge=0, le=PULL_WAIT_MS_MAX)]
TtlMs = Annotated[int, Meta(ge=TTL_MS_MIN, le=TTL_MS_MAX)]
SHORT_TEXT_CHARS_MAX = 512
ShortText = Annotated[str, Meta(max_length=SHORT_TEXT_CHARS_MAX)]
OPENINGS_MAX = 128


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
            hint=error.hint,
            fate=error.fate,
            details=wire_details(error),
        )

    def error(self) -> KeylaneError:
        """The error this body carries."""
        found = error_from_wire(self.code, self.message, self.details)
        found.fate = self.fate
        return found


class Done(Struct, frozen=True):
    """It is done; there is nothing to tell."""


class Health(Struct, frozen=True, kw_only=True):
    """Is the program alive and taking work; `reason` says why not."""

    program: str
    ready: bool
    reason: str = ""
    details: dict[str, Any] = {}


# ── brokers ───────────────────────────────────────────────────────────────────────────────────────────
class BrokerHeartbeat(Struct, frozen=True, kw_only=True):
    """A broker reports itself; the first one registers it."""

    broker_group: ShortText
    broker_id: ShortText
    """Identity of the data folder: two folders of one group are told apart by it."""
    address: ShortText
    readable: bool = True
    writable: bool = True
    opening: ShortText = ""
    """Random name of this opening of the data folder; "" from a broker that does not say it, as the next two."""
    opened_after: Annotated[tuple[ShortText, ...], Meta(max_length=OPENINGS_MAX)] = ()
    """The openings before it; left out while the reports are taken."""
    log_end: Count = 0
    """Position up to which the broker's log is durable: it only grows."""
    hosted: Count = 0
    """How many partitions it hosts."""
    untold: Annotated[tuple[int, ...], Meta(max_length=UNTOLD_MAX)] = ()
    """Partitions, some of them if there are many, of which retention should remove messages and may not: the broker was
    never told their consumer groups."""


class BrokerWelcome(Struct, frozen=True, kw_only=True):
    """Report again after `heartbeat_ms`; silent for `ttl_ms` means not available."""

    heartbeat_ms: int
    ttl_ms: int
    groups_missed: bool = False
    """Some consumer group in the database may be unknown to the broker: it removes nothing of a partition until it is told
    the partition's groups again."""
    fence: int = 0
    """Not 0 where an operator has accepted the data folder although it was behind: every token up to it was granted
    before that, and is refused before anything is served."""


class AcceptFolder(Struct, frozen=True, kw_only=True):
    """
    Go on with a data folder that was refused because it is behind; what it lacks is given up.

    Answered with the RefusedBroker.  `address` tells which, if several are refused.
    """

    address: ShortText = ""
    dry_run: bool = False
    """Answer what would be accepted, change nothing."""


class RefusedBroker(Struct, frozen=True, kw_only=True):
    """A broker that reports itself under a broker group's name and is refused."""

    broker_group: str
    address: str
    problem: str = ""
    log_end: int = 0
    """Where the log of its data folder ends."""
    known_log_end: int = 0
    """Where the broker group's log ended at the last report that was taken."""


class BrokerView(Struct, frozen=True, kw_only=True):
    """A broker group as the metaserver sees it."""

    broker_group: str
    address: str
    available: bool
    silent_ms: int
    cordoned: bool = False
    """It gets no new partitions."""


# ── subjects ──────────────────────────────────────────────────────────────────────────────────────────
class Retention(enum.StrEnum):
    """What an old message waits for: that every consumer group has ACKED it, or nothing: TIME alone counts."""

    ACKED = "acked"
    TIME = "time"


class CreateSubject(Struct, frozen=True, kw_only=True):
    """Create a subject with `partitions` physical ones over up to that many available broker groups."""

    subject: str
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 2
    order_strategy: OrderStrategy = OrderStrategy.STRICT
    retention: Retention = Retention.ACKED
    static: bool = False
    """Its partitions are logic queues, whose number never changes."""


class SubjectView(Struct, frozen=True, kw_only=True):
    """A subject's settings and its route."""

    subject: str
    order_strategy: OrderStrategy
    route: Route
    retention: Retention = Retention.ACKED
    static: bool = False


class SubjectSummary(Struct, frozen=True, kw_only=True):
    """One line of the list of subjects."""

    subject: str
    order_strategy: OrderStrategy
    partitions: int
    route_version: int
    problem: str = ""
    """Why its creation has failed: nothing is open, and the name is free for another one."""


class SubjectList(Struct, frozen=True, kw_only=True):
    """All subjects, by name."""

    subjects: list[SubjectSummary]


# ── consumers ─────────────────────────────────────────────────────────────────────────────────────────
class Join(Struct, frozen=True, kw_only=True):
    """A new session of a consumer; `session` is chosen by the client at random, so that a retry is harmless."""

    subject: str
    group: str
    session: Annotated[str, Meta(min_length=16, max_length=64, pattern="^[0-9a-f]+$")]
    client: ShortText = ""
    """For people: host, pid, a name."""
    ttl_ms: TtlMs = TTL_MS_DEFAULT
    suspended: bool = False
    """It lives, and is granted nothing yet; see Suspend."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The first session of a group decides it for all."""


class Joined(Struct, frozen=True, kw_only=True):
    """The session lives; the ttl counts from the sending of the request."""

    ttl_ms: int
    heartbeat_ms: int


class Grant(Struct, frozen=True, kw_only=True):
    """The session may handle this partition for its group."""

    partition: Partition
    token: int


class Heartbeat(Struct, frozen=True, kw_only=True):
    """Renews the session and its leases at once, and returns when the grants differ from `known_version`."""

    session: str
    known_version: int = -1
    drained: tuple[int, ...] = ()
    """Sealed partitions that the group has acked to their end."""
    holding: tuple[tuple[int, int], ...] | None = None
    """(partition id, token) of all that the session has or is still handing over; None: it does not say.  What was
    taken back and is not among them is free: the session never heard of that grant, or its release was lost."""
    wait_ms: WaitMs = 0
    suspended: bool | None = None
    """What its last Suspend asked for; None: it does not say.  From who knows the newest grants it counts, whatever a
    Suspend said that came late, or whose answer was lost."""


class Grants(Struct, frozen=True, kw_only=True):
    """What the session holds now.  A partition missing here that it still holds: hand it over."""

    version: int
    """Rises with every change of the session's grants; a lower one is out of date."""
    ttl_ms: int
    grants: tuple[Grant, ...]


class ReleaseGrant(Struct, frozen=True, kw_only=True):
    """The hand-over of a partition is finished: its next owner may be granted."""

    session: str
    partition_id: int
    token: int
    fence: int = 0
    """A higher token that the broker has seen: one the metaserver may not know, if its database is older than that."""


class Suspend(Struct, frozen=True, kw_only=True):
    """The session hands over what it holds and gets nothing new, or, not `suspended`, takes part again."""

    session: str
    suspended: bool = True


class Leave(Struct, frozen=True, kw_only=True):
    """The session ends; what it held is free."""

    session: str


class OwnerView(Struct, frozen=True, kw_only=True):
    """Who holds a partition for a group.  `expires_in_ms` is None without an owner."""

    partition: Partition
    token: int
    session: str | None = None
    client: str | None = None
    expires_in_ms: int | None = None


class GroupView(Struct, frozen=True, kw_only=True):
    """A consumer group on a subject: owners, by partition, and the number of live sessions."""

    subject: str
    group: str
    sessions: int
    owners: tuple[OwnerView, ...]
    """Of a SHARED group: the partitions with their tokens; they are every session's."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE


class GroupSummary(Struct, frozen=True, kw_only=True):
    """One line of the list of groups."""

    group: str
    strategy: ConsumeStrategy
    sessions: int


class GroupList(Struct, frozen=True, kw_only=True):
    """The consumer groups of a subject, by name."""

    groups: list[str]
    summaries: list[GroupSummary] = []


class SwitchGroup(Struct, frozen=True, kw_only=True):
    """Have a group consume so from now on.  Its sessions end; those that join again have to say the same."""

    strategy: ConsumeStrategy


# ── partitions on a broker ────────────────────────────────────────────────────────────────────────────
class HostPartition(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    Host this partition from now on; again with the same facts changes nothing.

    The broker keeps what it is told of the subject, so that the metaserver's database can be made anew from it.
    """

    subject: str
    partition: Partition
    order_strategy: OrderStrategy | None = None
    """The subject's; None: not said."""
    partitions_wanted: Count = 0
    """How many partitions the subject was created with; 0: not said."""
    retention: Retention | None = None
    """What old messages of the subject wait for; None: not said, as ACKED."""
    static: bool = False
    """The subject's number of logic queues never changes."""
    groups: tuple[str, ...] | None = None
    """Every consumer group of the subject, so that retention waits for them from the first message on; None: not said.
    No fact of the partition: it may be said again with more groups."""


class GroupStatus(Struct, frozen=True, kw_only=True):
    """A consumer group's progress on a partition, from the broker."""

    group: str
    token: int
    cursor: int
    acked_above: int
    """Messages acked above the cursor."""
    lag: int
    """Messages not acked yet."""
    holder: str | None = None
    """Session that has the pull lock."""
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The consume strategy under which this token was acquired."""
    by_operator: bool = False
    """The token was brought to set the cursor, by no consumer."""
    ttl_ms: int = 0
    """Of the session that brought the token; 0: not known, as after a restart of the broker."""
    removed_unread: int = 0
    """Messages that retention by time removed before the group had acked them."""


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
    """What the broker was told when it began to host it."""
    unsealable: str = ""
    """Why it cannot be sealed now; "" if it can, or is.  Said by who is asked for this partition alone."""
    groups_told: bool = True
    """The broker was told every consumer group of the subject; until then it removes nothing of the partition."""


class TimeBound(enum.StrEnum):
    """Which of the messages around a time: LOWER the first at or after it, UPPER the last at or before it."""

    LOWER = "lower"
    UPPER = "upper"


class FoundOffset(Struct, frozen=True, kw_only=True):
    """The message that a lookup by time found, by the time its broker stored it; None: there is no such message."""

    offset: int | None
    first_offset: int
    next_offset: int


class PartitionStatusList(Struct, frozen=True, kw_only=True):
    """What a broker hosts, by id, or a part of it."""

    broker_group: str
    partitions: list[PartitionStatus]
    broker_id: str = ""
    """Identity of the data folder."""
    more_after: int | None = None
    """There is more: ask again for what comes after this id."""


encode_json = msgspec.json.Encoder().encode
