"""The table of control calls: method, path, bodies, rights.  Server, client and OpenAPI document follow it.  Pure.

    METASERVER    the calls of a metaserver, in the order of its OpenAPI document
    BROKER        the calls of a broker beside the data plane

A body is JSON; its type describes it.  `{name}` in a path is a name or a number, percent-encoded.  An error is
answered with its HTTP status and an `ErrorBody`.  Durations are milliseconds.  No body has an instant: the receiver
adds a duration to its own clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from msgspec import Struct

from .control import (
    AcceptFolder,
    BrokerHeartbeat,
    BrokerView,
    BrokerWelcome,
    CreateSubject,
    Done,
    FoundOffset,
    Grants,
    GroupList,
    GroupView,
    Health,
    Heartbeat,
    HostPartition,
    Join,
    Joined,
    Leave,
    PartitionStatus,
    PartitionStatusList,
    RefusedBroker,
    ReleaseGrant,
    SubjectList,
    SubjectView,
    Suspend,
    SwitchGroup,
)
from .operations import Cordon, OperationList, OperationView, Reshape, SubjectHistory
from .progress import GroupReset, KnowGroups, ResetGroup, SetCursor
from .queues import QueueList
from .routing import Route
from .verification import Verification

A_co = TypeVar("A_co", covariant=True)


class Rights(enum.StrEnum):
    """The right that a call will need.  Servers do not check it: they serve loopback addresses only."""

    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    ADMINISTER = "administer"
    """Operators, and the servers of the cluster among themselves."""


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[A_co]):
    """A control call, answered with an `A_co`."""

    method: str
    path: str
    request: type[Struct] | None
    """The type of the body; None: the call has no body."""
    answer: type[A_co]
    rights: Rights
    summary: str
    query: tuple[str, ...] = ()
    """Optional parameters behind the question mark."""
    idempotent: bool = False
    """A POST that may be repeated when its outcome is unknown.  A GET may always be repeated."""

    @property
    def repeatable(self) -> bool:
        """True if the call may be repeated when its outcome is unknown."""
        return self.idempotent or self.method == "GET"

    def path_of(self, **names: object) -> str:
        """The path with its `{names}` filled in, percent-encoded."""
        return self.path.format_map({key: quote(str(name), safe="") for key, name in names.items()})


# ── to a metaserver: brokers and subjects ─────────────────────────────────────────────────────────────
BROKER_HEARTBEAT = Endpoint(
    "POST",
    "/v1/brokers/heartbeat",
    BrokerHeartbeat,
    BrokerWelcome,
    Rights.ADMINISTER,
    "A broker reports itself; its first report registers it.",
)
CORDON = Endpoint(
    "POST",
    "/v1/brokers/{group}/cordon",
    Cordon,
    BrokerView,
    Rights.ADMINISTER,
    "Cordon or uncordon a broker group: a cordoned group gets no new partitions.",
    idempotent=True,
)
ACCEPT_FOLDER = Endpoint(
    "POST",
    "/v1/brokers/{group}/accept",
    AcceptFolder,
    RefusedBroker,
    Rights.ADMINISTER,
    "Accept a data folder that is refused because it is behind.",
)
CREATE_SUBJECT = Endpoint(
    "POST",
    "/v1/subjects",
    CreateSubject,
    SubjectView,
    Rights.ADMINISTER,
    "Create a subject; a repeat with the same settings changes nothing.",
    idempotent=True,
)
SUBJECTS = Endpoint("GET", "/v1/subjects", None, SubjectList, Rights.READ, "All subjects, by name.")
SUBJECT = Endpoint(
    "GET",
    "/v1/subjects/{subject}",
    None,
    SubjectView,
    Rights.READ,
    "One subject with its route.",
)
ROUTE = Endpoint(
    "GET",
    "/v1/subjects/{subject}/route",
    None,
    Route,
    Rights.READ,
    "The route; waits up to wait_ms for a version that differs from known_version.",
    query=("known_version", "wait_ms", "order_strategy"),
)
QUEUES = Endpoint(
    "GET",
    "/v1/subjects/{subject}/queues",
    None,
    QueueList,
    Rights.READ,
    "The logic queues of a static subject, each a chain of partitions with its logic offsets.",
)

# ── to a metaserver: consumers ────────────────────────────────────────────────────────────────────────
JOIN = Endpoint(
    "POST",
    "/v1/consumers/join",
    Join,
    Joined,
    Rights.CONSUME,
    "Begin a consumer session.",
    idempotent=True,
)
HEARTBEAT = Endpoint(
    "POST",
    "/v1/consumers/heartbeat",
    Heartbeat,
    Grants,
    Rights.CONSUME,
    "Renew a session; returns at once when its grants differ from known_version.",
)
RELEASE = Endpoint(
    "POST",
    "/v1/consumers/release",
    ReleaseGrant,
    Done,
    Rights.CONSUME,
    "The hand-over of a partition is finished.",
    idempotent=True,
)
SUSPEND = Endpoint(
    "POST",
    "/v1/consumers/suspend",
    Suspend,
    Done,
    Rights.CONSUME,
    "Suspend a session, which then hands over its partitions and is granted none; or resume it.",
    idempotent=True,
)
LEAVE = Endpoint(
    "POST",
    "/v1/consumers/leave",
    Leave,
    Done,
    Rights.CONSUME,
    "End a session; its leases become free.",
    idempotent=True,
)
GROUP = Endpoint(
    "GET",
    "/v1/subjects/{subject}/groups/{group}",
    None,
    GroupView,
    Rights.READ,
    "The owners of a consumer group's partitions.",
)
GROUPS = Endpoint(
    "GET",
    "/v1/subjects/{subject}/groups",
    None,
    GroupList,
    Rights.READ,
    "The consumer groups of a subject.",
)
SWITCH_GROUP = Endpoint(
    "POST",
    "/v1/subjects/{subject}/groups/{group}/strategy",
    SwitchGroup,
    GroupView,
    Rights.ADMINISTER,
    "Change a group's consume strategy; its sessions end, and earlier owners are fenced.",
)

# ── to any server ─────────────────────────────────────────────────────────────────────────────────────
HEALTH = Endpoint("GET", "/v1/health", None, Health, Rights.READ, "Whether the server is ready.")

# ── to a metaserver: changes of partitions, the cluster as a whole ────────────────────────────────────
RESHAPE = Endpoint(
    "POST",
    "/v1/operations",
    Reshape,
    OperationList,
    Rights.ADMINISTER,
    "Begin operations on partitions, or only plan them; the metaserver completes them.",
)
CANCEL_OPERATION = Endpoint(
    "POST",
    "/v1/operations/{id}/cancel",
    None,
    OperationView,
    Rights.ADMINISTER,
    "Undo an operation before its first seal.",
)
OPERATIONS = Endpoint(
    "GET",
    "/v1/subjects/{subject}/operations",
    None,
    OperationList,
    Rights.READ,
    "The latest operations of a subject, the newest first.",
)
HISTORY = Endpoint(
    "GET",
    "/v1/subjects/{subject}/history",
    None,
    SubjectHistory,
    Rights.READ,
    "Every partition that a subject ever had, with parents and end offsets.",
)
VERIFY = Endpoint(
    "GET",
    "/v1/verify",
    None,
    Verification,
    Rights.ADMINISTER,
    "Thirteen checks of the database against the brokers.",
)
RESET_GROUP = Endpoint(
    "POST",
    "/v1/subjects/{subject}/groups/{group}/reset",
    ResetGroup,
    GroupReset,
    Rights.ADMINISTER,
    "Set the progress of a consumer group that has no live consumers.",
)
OPENAPI = Endpoint(
    "GET", "/v1/openapi.json", None, dict, Rights.READ, "These calls as an OpenAPI document."
)

# ── to a broker ───────────────────────────────────────────────────────────────────────────────────────
HOST_PARTITION = Endpoint(
    "POST",
    "/v1/partitions",
    HostPartition,
    PartitionStatus,
    Rights.ADMINISTER,
    "Host a partition; a repeat changes nothing, unless the partition is in use.",
    idempotent=True,
)
PARTITIONS = Endpoint(
    "GET",
    "/v1/partitions",
    None,
    PartitionStatusList,
    Rights.READ,
    "A page of the hosted partitions, by id.",
    query=("after", "limit"),
)
PARTITION = Endpoint(
    "GET",
    "/v1/partitions/{id}",
    None,
    PartitionStatus,
    Rights.READ,
    "One partition with its groups, or with the requested group.",
    query=("group",),
)
OFFSET_AT = Endpoint(
    "GET",
    "/v1/partitions/{id}/offset",
    None,
    FoundOffset,
    Rights.READ,
    "The offset of a message by the time it was stored; bound is lower or upper.",
    query=("at_ms", "bound"),
)
SEAL = Endpoint(
    "POST",
    "/v1/partitions/{id}/seal",
    None,
    PartitionStatus,
    Rights.ADMINISTER,
    "Seal a partition: next_offset is its end.  With empty=1, refused if it has messages.",
    query=("empty",),
    idempotent=True,
)
SET_CURSOR = Endpoint(
    "POST",
    "/v1/partitions/{id}/cursor",
    SetCursor,
    PartitionStatus,
    Rights.ADMINISTER,
    "Raise a group's fence and set its cursor.",
    idempotent=True,
)
KNOW_GROUPS = Endpoint(
    "POST",
    "/v1/partitions/{id}/groups",
    KnowGroups,
    Done,
    Rights.ADMINISTER,
    "Have retention wait for groups that have not read a partition yet.",
    idempotent=True,
)

METASERVER: tuple[Endpoint[Any], ...] = (
    BROKER_HEARTBEAT,
    CORDON,
    ACCEPT_FOLDER,
    CREATE_SUBJECT,
    SUBJECTS,
    SUBJECT,
    ROUTE,
    QUEUES,
    JOIN,
    HEARTBEAT,
    RELEASE,
    SUSPEND,
    LEAVE,
    GROUP,
    GROUPS,
    SWITCH_GROUP,
    HEALTH,
    RESHAPE,
    CANCEL_OPERATION,
    OPERATIONS,
    HISTORY,
    VERIFY,
    RESET_GROUP,
)
"""All calls but the one for the OpenAPI document, which is made of these."""
BROKER: tuple[Endpoint[Any], ...] = (
    HOST_PARTITION,
    PARTITIONS,
    PARTITION,
    OFFSET_AT,
    SEAL,
    SET_CURSOR,
    KNOW_GROUPS,
    HEALTH,
)
