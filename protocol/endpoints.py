"""The table of control calls with their methods, paths, bodies and rights. Servers, clients and the
OpenAPI document are built from it. Pure.

    METASERVER    the calls of a metaserver, in the order of its OpenAPI document
    BROKER        the calls of a broker besides the data plane

Bodies are JSON of the given type, except for posted messages. `{name}` in a path is a name or a
number, percent-encoded. The response to a failed call has the error's HTTP status and an
`ErrorBody`. Durations are in milliseconds. Bodies contain durations instead of points in time; the
receiver adds them to its own clock. Wall-clock times are used for scheduled messages only.
"""

from __future__ import annotations

from typing import Any

from .access.capability import AccessNews
from .control import (
    AcceptFolder,
    AutoCreate,
    BrokerHeartbeat,
    BrokerView,
    BrokerWelcome,
    CreateSubject,
    DeleteGroup,
    DeleteSubject,
    Done,
    DropPartition,
    FoundOffset,
    Grants,
    GroupDeletion,
    GroupList,
    GroupView,
    Health,
    Heartbeat,
    HostPartition,
    Join,
    Joined,
    Leave,
    MessagePage,
    PartitionStatus,
    PartitionStatusList,
    Posted,
    RefusedBroker,
    ReleaseGrant,
    SubjectDeletion,
    SubjectList,
    SubjectView,
    Suspend,
    SwitchGroup,
)
from .copies import (
    ChangeCopySet,
    CopySet,
    ForgetCopy,
    HandedOver,
    HandOver,
    OfferPlace,
    PromoteCopy,
    SetCopies,
    TakeOver,
)
from .groups import CreateGroup, GroupSettings, SetGroup, SuspendGroup
from .http.access import (
    AskCapability,
    AuditPage,
    Capabilities,
    ChangeGrant,
    CheckAccess,
    CreateToken,
    Decision,
    GrantList,
    MadeToken,
    NoteAudit,
    QuotaList,
    SetQuota,
    TokenList,
    TokenView,
    UnsetQuota,
)
from .http.endpoint import Endpoint, Rights
from .http.message_json import MessageObject
from .http.posted import CONTENT_TYPE, IDEMPOTENCY_KEY, JSON, KEY_HEADER, NDJSON, RAW
from .operations import (
    BalancePlan,
    Cordon,
    HideSubject,
    OperationList,
    OperationView,
    Publication,
    PublishSubject,
    Reshape,
    SetBalance,
    SetSubject,
    SubjectHistory,
)
from .parked import ChangeParkedKey, ParkedList, ParkedOffsets
from .progress import (
    CanceledReset,
    ForgetGroup,
    ForgottenGroup,
    GroupReset,
    RegisterGroups,
    RegisterGroupsBatch,
    RegisterGroupsResult,
    ResetGroup,
    SetCursor,
)
from .queues import QueueList
from .reading.bounds import AskBounds, BoundsList
from .reading.newest import NewestMessage
from .reprocess.holds import Held, SetHold
from .routing import Route
from .scheduled.receipt import CanceledScheduled, ScheduledList, ScheduledPage
from .verification import Verification
from .why import Explanation

DATA_PATH = "/v1/data"
"""The path at which a client opens a connection to a broker's data plane, whose frames are in
`frames.py`. It is not a call, so it is not in the tables below.
"""

WORK_MS = 15_000
"""The timeout, in milliseconds, of calls for which the server writes a lot of data or calls other
servers.
"""

# ── to every server ───────────────────────────────────────────────────────────────────────────────
HEALTH = Endpoint("GET", "/v1/health", None, Health, Rights.KNOWN, "Whether the server is ready.")
LIVE = Endpoint(
    "GET", "/health/live", None, Done, Rights.OPEN, "Responds as long as the server runs."
)
READY = Endpoint(
    "GET",
    "/health/ready",
    None,
    Health,
    Rights.OPEN,
    "Whether clients should use the server; if not, status 503 with the reason.",
)
METRICS = Endpoint(
    "GET",
    "/metrics",
    None,
    str,
    Rights.OPEN,
    "Metrics of the server in the Prometheus text format.",
    response_type="text/plain; version=0.0.4; charset=utf-8",
)
FRONT = Endpoint(
    "GET",
    "/",
    None,
    str,
    Rights.OPEN,
    "Says to a person with a browser what the server is, and lists its calls.",
    response_type="text/plain; charset=utf-8",
)
OPENAPI = Endpoint(
    "GET",
    "/v1/openapi.json",
    None,
    dict,
    Rights.OPEN,
    "The OpenAPI document of the server's calls.",
)

# ── to a metaserver: brokers and subjects ─────────────────────────────────────────────────────────
BROKER_HEARTBEAT = Endpoint(
    "POST",
    "/v1/brokers/heartbeat",
    BrokerHeartbeat,
    BrokerWelcome,
    Rights.CLUSTER,
    "A regular report of a broker; the first one registers it.",
    caller_repeats=True,
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
    "Accept a data folder that was refused as outdated.",
)
COPY_SET = Endpoint(
    "GET",
    "/v1/brokers/{group}/copies",
    None,
    CopySet,
    Rights.ADMINISTER,
    "How many data folders a broker group is to have, and which copies acks wait for.",
)
SET_COPIES = Endpoint(
    "POST",
    "/v1/brokers/{group}/copies",
    SetCopies,
    CopySet,
    Rights.ADMINISTER,
    "Set how many data folders a broker group is to have.",
    idempotent=True,
)
FORGET_COPY = Endpoint(
    "POST",
    "/v1/brokers/{group}/copies/forget",
    ForgetCopy,
    CopySet,
    Rights.ADMINISTER,
    "Let acks wait no more for a copy that is gone for good.",
)
CHANGE_COPY_SET = Endpoint(
    "POST",
    "/v1/brokers/{group}/copies/set",
    ChangeCopySet,
    CopySet,
    Rights.CLUSTER,
    "Ask which copies acks wait for, or change them; only the group's broker calls this.",
    idempotent=True,
    caller_repeats=True,
)
PROMOTE_COPY = Endpoint(
    "POST",
    "/v1/brokers/{group}/copies/promote",
    PromoteCopy,
    CopySet,
    Rights.ADMINISTER,
    "Let a copy take the place of the broker's data folder.",
    idempotent=True,
)
TAKE_OVER = Endpoint(
    "POST",
    "/v1/brokers/{group}/copies/take-over",
    TakeOver,
    CopySet,
    Rights.CLUSTER,
    "Let the copy that asks take the place of a broker that is gone, or has offered it.",
    idempotent=True,
)
OFFER_PLACE = Endpoint(
    "POST",
    "/v1/brokers/{group}/copies/offer",
    OfferPlace,
    CopySet,
    Rights.CLUSTER,
    "Let a copy take the broker's place, or withdraw that; only the group's broker calls this.",
    idempotent=True,
)
HAND_OVER = Endpoint(
    "POST",
    "/v1/brokers/{group}/copies/hand-over",
    HandOver,
    HandedOver,
    Rights.ADMINISTER,
    "Let a copy take the place of a broker that serves.",
    timeout_ms=WORK_MS,
)
CREATE_SUBJECT = Endpoint(
    "POST",
    "/v1/subjects",
    CreateSubject,
    SubjectView,
    Rights.ADMINISTER,
    "Create a subject; a repeat with the same settings changes nothing.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
AUTO_CREATE = Endpoint(
    "POST",
    "/v1/subjects/{subject}/auto-create",
    AutoCreate,
    SubjectView,
    Rights.PRODUCE,
    "Create a subject for its first message, if the setting auto_create allows it; changes "
    "nothing if it exists.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
SUBJECTS = Endpoint("GET", "/v1/subjects", None, SubjectList, Rights.ANY, "All subjects, by name.")
SUBJECT = Endpoint(
    "GET",
    "/v1/subjects/{subject}",
    None,
    SubjectView,
    Rights.ANY,
    "One subject with its route.",
)
ROUTE = Endpoint(
    "GET",
    "/v1/subjects/{subject}/route",
    None,
    Route,
    Rights.ANY,
    "The route; waits up to wait_ms for a version that differs from known_version. A producer says "
    "in `waiting` for which brokers it waits.",
    query=("known_version", "wait_ms", "order_strategy", "subject_id", "waiting"),
)
DELETE_SUBJECT = Endpoint(
    "POST",
    "/v1/subjects/{subject}/delete",
    DeleteSubject,
    SubjectDeletion,
    Rights.ADMINISTER,
    "Delete a subject; the metaserver completes the deletion, and a repeat reports its progress.",
    timeout_ms=WORK_MS,
)
QUEUES = Endpoint(
    "GET",
    "/v1/subjects/{subject}/queues",
    None,
    QueueList,
    Rights.ANY,
    "The logic queues of a static subject, each a chain of partitions with its logic offsets.",
)

# ── to a metaserver: consumers ────────────────────────────────────────────────────────────────────
JOIN = Endpoint(
    "POST",
    "/v1/consumers/join",
    Join,
    Joined,
    Rights.CONSUME,
    "Begin a consumer session.",
    idempotent=True,
    caller_repeats=True,
)
HEARTBEAT = Endpoint(
    "POST",
    "/v1/consumers/heartbeat",
    Heartbeat,
    Grants,
    Rights.CONSUME,
    "Renew a session; returns at once when its grants differ from known_version.",
    caller_repeats=True,
    one_address=True,
)
RELEASE = Endpoint(
    "POST",
    "/v1/consumers/release",
    ReleaseGrant,
    Done,
    Rights.CONSUME,
    "Finish the hand-over of a partition: its lease is free.",
    idempotent=True,
    caller_repeats=True,
)
SUSPEND = Endpoint(
    "POST",
    "/v1/consumers/suspend",
    Suspend,
    Done,
    Rights.CONSUME,
    "Suspend a session, which then hands over its partitions and gets no new ones; or resume it.",
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
    Rights.ANY,
    "The owners of a consumer group's partitions.",
)
GROUPS = Endpoint(
    "GET",
    "/v1/subjects/{subject}/groups",
    None,
    GroupList,
    Rights.ANY,
    "The consumer groups of a subject.",
)
WHY = Endpoint(
    "GET",
    "/v1/subjects/{subject}/groups/{group}/why",
    None,
    Explanation,
    Rights.ANY,
    "Why messages do not arrive at a consumer group, and what to do; with a key, why those of this "
    "key do not.",
    query=("key", "key_base64"),
)
SWITCH_GROUP = Endpoint(
    "POST",
    "/v1/subjects/{subject}/groups/{group}/strategy",
    SwitchGroup,
    GroupView,
    Rights.ADMINISTER,
    "Change a group's consume strategy; its sessions end, and earlier owners are fenced.",
)

CREATE_GROUP = Endpoint(
    "POST",
    "/v1/subjects/{subject}/groups/{group}",
    CreateGroup,
    GroupSettings,
    Rights.JOIN,
    "Create a consumer group that starts at the earliest message, the latest or a time; a repeat "
    "changes nothing.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
GROUP_SETTINGS = Endpoint(
    "GET",
    "/v1/subjects/{subject}/groups/{group}/settings",
    None,
    GroupSettings,
    Rights.ANY,
    "The stored settings of a consumer group: its start, its failure policy, and the clients that "
    "an operator has suspended.",
)
SET_GROUP = Endpoint(
    "POST",
    "/v1/subjects/{subject}/groups/{group}/settings",
    SetGroup,
    GroupSettings,
    Rights.ADMINISTER,
    "Change the stored failure policy of a consumer group; its members apply it at once.",
    idempotent=True,
)
SUSPEND_GROUP = Endpoint(
    "POST",
    "/v1/subjects/{subject}/groups/{group}/suspension",
    SuspendGroup,
    GroupSettings,
    Rights.ADMINISTER,
    "Suspend a consumer group or one of its clients, which then hands over its partitions; or "
    "resume it.",
    idempotent=True,
)
DELETE_GROUP = Endpoint(
    "POST",
    "/v1/subjects/{subject}/groups/{group}/delete",
    DeleteGroup,
    GroupDeletion,
    Rights.ADMINISTER,
    "Delete a consumer group; the metaserver completes the deletion, and a repeat reports its "
    "progress.",
    timeout_ms=WORK_MS,
)

# ── to a metaserver: changes of partitions, the cluster as a whole ────────────────────────────────
RESHAPE = Endpoint(
    "POST",
    "/v1/operations",
    Reshape,
    OperationList,
    Rights.ADMINISTER,
    "Begin operations on partitions, or only plan them; the metaserver completes them.",
    timeout_ms=WORK_MS,
)
SET_SUBJECT = Endpoint(
    "POST",
    "/v1/subjects/{subject}/settings",
    SetSubject,
    OperationList,
    Rights.ADMINISTER,
    "Change the settings of a subject, or only plan the change; the metaserver completes it.",
    timeout_ms=WORK_MS,
)
HIDE_SUBJECT = Endpoint(
    "POST",
    "/v1/subjects/{subject}/hidden",
    HideSubject,
    SubjectView,
    Rights.ADMINISTER,
    "Create a hidden subject, to be published in this one; a repeat changes nothing.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
PUBLISH_SUBJECT = Endpoint(
    "POST",
    "/v1/subjects/{subject}/publish",
    PublishSubject,
    Publication,
    Rights.ADMINISTER,
    "Publish a hidden subject; the metaserver completes the publication, and a repeat reports its "
    "progress.",
    idempotent=True,
    timeout_ms=WORK_MS,
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
    Rights.ANY,
    "The latest operations of a subject, the newest first.",
)
WAITING_OPERATIONS = Endpoint(
    "GET",
    "/v1/operations/waiting",
    None,
    OperationList,
    Rights.ANY,
    "The latest operations of all subjects that wait, the newest first.",
)
HISTORY = Endpoint(
    "GET",
    "/v1/subjects/{subject}/history",
    None,
    SubjectHistory,
    Rights.ANY,
    "Every partition that a subject ever had, with parents and end offsets.",
)
BALANCE = Endpoint(
    "GET",
    "/v1/balance",
    None,
    BalancePlan,
    Rights.ADMINISTER,
    "The moves of partitions that balance the broker groups.",
    timeout_ms=WORK_MS,
)
SET_BALANCE = Endpoint(
    "POST",
    "/v1/balance",
    SetBalance,
    BalancePlan,
    Rights.ADMINISTER,
    "Stop the metaservers that balance by themselves, or let them continue.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
VERIFY = Endpoint(
    "GET",
    "/v1/verify",
    None,
    Verification,
    Rights.ADMINISTER,
    "Compare the database with the brokers, check by check.",
    timeout_ms=60_000,
)
RESET_GROUP = Endpoint(
    "POST",
    "/v1/subjects/{subject}/groups/{group}/reset",
    ResetGroup,
    GroupReset,
    Rights.ADMINISTER,
    "Set the progress of a consumer group: one without live consumers, or any group with `live`.",
    timeout_ms=30_000,
)
CANCEL_RESET = Endpoint(
    "DELETE",
    "/v1/subjects/{subject}/groups/{group}/reset",
    None,
    CanceledReset,
    Rights.ADMINISTER,
    "Cancel a reset that is still waiting for live consumers; a repeat changes nothing.",
    idempotent=True,
)

# ── to a metaserver: tokens, rights, quotas, the audit log ────────────────────────────────────────
CREATE_TOKEN = Endpoint(
    "POST",
    "/v1/access/tokens",
    CreateToken,
    MadeToken,
    Rights.ADMINISTER,
    "Create a token.",
    timeout_ms=WORK_MS,
)
TOKENS = Endpoint(
    "GET",
    "/v1/access/tokens",
    None,
    TokenList,
    Rights.ADMINISTER,
    "All tokens, or those of a principal.",
    query=("principal",),
    timeout_ms=WORK_MS,
)
REVOKE_TOKEN = Endpoint(
    "POST",
    "/v1/access/tokens/{id}/revoke",
    None,
    TokenView,
    Rights.ADMINISTER,
    "Revoke a token; it takes effect at brokers within seconds, and a repeat changes nothing.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
GRANT = Endpoint(
    "POST",
    "/v1/access/grants",
    ChangeGrant,
    Done,
    Rights.ADMINISTER,
    "Grant a right; a repeat changes nothing.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
REVOKE_GRANT = Endpoint(
    "POST",
    "/v1/access/grants/revoke",
    ChangeGrant,
    Done,
    Rights.ADMINISTER,
    "Revoke a right; a repeat changes nothing.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
GRANTS = Endpoint(
    "GET",
    "/v1/access/grants",
    None,
    GrantList,
    Rights.ADMINISTER,
    "All granted rights, or those of a principal.",
    query=("principal",),
    timeout_ms=WORK_MS,
)
CHECK_ACCESS = Endpoint(
    "POST",
    "/v1/access/check",
    CheckAccess,
    Decision,
    Rights.ADMINISTER,
    "Whether a principal has a right.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
CAPABILITY = Endpoint(
    "POST",
    "/v1/access/capability",
    AskCapability,
    Capabilities,
    Rights.KNOWN,
    "Signed rights of the caller, which brokers accept for a few minutes.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
ACCESS_NEWS = Endpoint(
    "GET",
    "/v1/access/news",
    None,
    AccessNews,
    Rights.CLUSTER,
    "The keys and versions by which a broker checks capabilities.",
)
SET_QUOTA = Endpoint(
    "POST",
    "/v1/access/quotas",
    SetQuota,
    Done,
    Rights.ADMINISTER,
    "Limit a principal or subjects; it takes effect at brokers within seconds.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
UNSET_QUOTA = Endpoint(
    "POST",
    "/v1/access/quotas/unset",
    UnsetQuota,
    Done,
    Rights.ADMINISTER,
    "Remove the limits of a principal or of subjects; a repeat changes nothing.",
    idempotent=True,
    timeout_ms=WORK_MS,
)
QUOTAS = Endpoint(
    "GET",
    "/v1/access/quotas",
    None,
    QuotaList,
    Rights.ADMINISTER,
    "All quotas and limits.",
    timeout_ms=WORK_MS,
)
NOTE_AUDIT = Endpoint(
    "POST",
    "/v1/access/audit",
    NoteAudit,
    Done,
    Rights.CLUSTER,
    "Store events from a broker in the audit log.",
    timeout_ms=WORK_MS,
)
AUDIT = Endpoint(
    "GET",
    "/v1/access/audit",
    None,
    AuditPage,
    Rights.ADMINISTER,
    "The audit log, the newest events first.",
    query=("who", "subject", "outcome", "since_ms", "before", "limit"),
    timeout_ms=WORK_MS,
)

# ── to a broker ───────────────────────────────────────────────────────────────────────────────────
HOST_PARTITION = Endpoint(
    "POST",
    "/v1/partitions",
    HostPartition,
    PartitionStatus,
    Rights.CLUSTER,
    "Host a partition; a repeat changes nothing, unless the partition is in use.",
    idempotent=True,
)
PARTITIONS = Endpoint(
    "GET",
    "/v1/partitions",
    None,
    PartitionStatusList,
    Rights.ANY,
    "A page of the hosted partitions, by id.",
    query=("after", "limit"),
)
PARTITION = Endpoint(
    "GET",
    "/v1/partitions/{id}",
    None,
    PartitionStatus,
    Rights.ANY,
    "A partition with its groups, or with the requested group.",
    query=("group",),
)
OFFSET_AT = Endpoint(
    "GET",
    "/v1/partitions/{id}/offset",
    None,
    FoundOffset,
    Rights.ANY,
    "The offset of a message by the time at which it was stored; bound is lower or upper.",
    query=("at_ms", "bound"),
)
PARTITION_BOUNDS = Endpoint(
    "POST",
    "/v1/partitions/bounds",
    AskBounds,
    BoundsList,
    Rights.ANY,
    "First and end offsets of partitions, and the offsets of times and consumer groups in them.",
    idempotent=True,
)
NEWEST_MESSAGE = Endpoint(
    "GET",
    "/v1/partitions/{id}/newest",
    None,
    NewestMessage,
    Rights.READ,
    "The newest message, without its value; `key`, in hexadecimal: the newest of this order key. "
    "`group`: whether this group has acked it.",
    query=("key", "group"),
)
SEAL = Endpoint(
    "POST",
    "/v1/partitions/{id}/seal",
    None,
    PartitionStatus,
    Rights.CLUSTER,
    "Seal a partition: next_offset is its end. With empty=1, refused if it has messages.",
    query=("empty",),
    idempotent=True,
)
SET_CURSOR = Endpoint(
    "POST",
    "/v1/partitions/{id}/cursor",
    SetCursor,
    PartitionStatus,
    Rights.CLUSTER,
    "Raise a group's fence and set its cursor.",
    idempotent=True,
)
REGISTER_GROUPS = Endpoint(
    "POST",
    "/v1/partitions/{id}/groups",
    RegisterGroups,
    Done,
    Rights.CLUSTER,
    "Make retention wait for groups that have not read a partition yet.",
    idempotent=True,
)
REGISTER_GROUPS_BATCH = Endpoint(
    "POST",
    "/v1/partitions/groups",
    RegisterGroupsBatch,
    RegisterGroupsResult,
    Rights.CLUSTER,
    "Make retention of several partitions wait for groups that have not read them yet.",
    idempotent=True,
)
FORGET_GROUP = Endpoint(
    "POST",
    "/v1/partitions/{id}/forget",
    ForgetGroup,
    ForgottenGroup,
    Rights.CLUSTER,
    "Forget a deleted consumer group: its progress is removed, and its tokens are refused.",
    idempotent=True,
)
HOLD = Endpoint(
    "POST",
    "/v1/partitions/{id}/holds",
    SetHold,
    Held,
    Rights.READ,
    "Protect messages of a partition against retention for a job: set, renew or end the hold.",
    idempotent=True,
)
GIVE_PLACE = Endpoint(
    "POST",
    "/v1/copies/hand-over",
    HandOver,
    HandedOver,
    Rights.CLUSTER,
    "Hand over to a copy; a metaserver calls this for an operator.",
    timeout_ms=WORK_MS,
)
DROP_PARTITION = Endpoint(
    "POST",
    "/v1/partitions/{id}/drop",
    DropPartition,
    Done,
    Rights.CLUSTER,
    "Drop a partition of a deleted subject, with its messages.",
    idempotent=True,
)
PARKED = Endpoint(
    "GET",
    "/v1/partitions/{id}/parked",
    None,
    ParkedList,
    Rights.READ,
    "A page of the keys that a consumer group has parked on a partition. `key`, in hexadecimal: "
    "only this order key, and unordered messages of any key.",
    query=("group", "first", "count", "key", "retrying"),
)
PARKED_OFFSETS = Endpoint(
    "GET",
    "/v1/partitions/{id}/parked/offsets",
    None,
    ParkedOffsets,
    Rights.READ,
    "The offsets of a key's parked messages, the oldest first; without `key`, of the dead "
    "letters. `after`, such as 7:42: only later ones, with their failures. `tries`: those that "
    "wait for retry.",
    query=("group", "key", "first", "count", "after", "tries"),
)
CHANGE_PARKED = Endpoint(
    "POST",
    "/v1/partitions/{id}/parked",
    ChangeParkedKey,
    ParkedList,
    Rights.ADMINISTER,
    "Redrive a parked key, or skip some of its messages.",
    idempotent=True,
)

POST_MESSAGES = Endpoint(
    "POST",
    "/v1/subjects/{subject}/messages",
    bytes,
    Posted,
    Rights.PRODUCE,
    "Store messages durably, those of a key in the order of the request, and after those of "
    "earlier awaited requests. A repeat with the same Idempotency-Key is stored once.",
    query=("key", "key_base64"),
    headers=(CONTENT_TYPE, KEY_HEADER, IDEMPOTENCY_KEY),
    content=((JSON, MessageObject | list[MessageObject]), (NDJSON, MessageObject), (RAW, bytes)),
)
READ_MESSAGES = Endpoint(
    "GET",
    "/v1/subjects/{subject}/messages",
    None,
    MessagePage,
    Rights.READ,
    "Messages of a partition from an offset on, or of a static subject's logic queue from a "
    "logic offset on; without an offset, from the first message.",
    query=("partition", "queue", "offset", "count"),
)
SCHEDULE_MESSAGES = Endpoint(
    "POST",
    "/v1/subjects/{subject}/scheduled",
    bytes,
    ScheduledList,
    Rights.PRODUCE,
    "Schedule messages without keys, durably. `deliver_at`: ms since 1970, or ISO 8601 with a "
    "zone. A broker schedules each Idempotency-Key once.",
    query=("deliver_at", "key", "key_base64"),
    headers=(CONTENT_TYPE, KEY_HEADER, IDEMPOTENCY_KEY),
    content=((JSON, MessageObject | list[MessageObject]), (NDJSON, MessageObject), (RAW, bytes)),
)
CANCEL_SCHEDULED = Endpoint(
    "POST",
    "/v1/scheduled/{id}/cancel",
    None,
    CanceledScheduled,
    Rights.PRODUCE,
    "Cancel a scheduled message of this broker; the response says whether it was already "
    "delivered.",
    idempotent=True,
)

SCHEDULED = Endpoint(
    "GET",
    "/v1/scheduled",
    None,
    ScheduledPage,
    Rights.READ,
    "The next scheduled messages of this broker, ordered by time; of all subjects, or of one.",
    query=("subject", "limit"),
)

ACCESS: tuple[Endpoint[Any], ...] = (
    CREATE_TOKEN,
    TOKENS,
    REVOKE_TOKEN,
    GRANT,
    REVOKE_GRANT,
    GRANTS,
    CHECK_ACCESS,
    CAPABILITY,
    ACCESS_NEWS,
    SET_QUOTA,
    UNSET_QUOTA,
    QUOTAS,
    NOTE_AUDIT,
    AUDIT,
)
"""The calls for access control. A metaserver without access control refuses them."""
METASERVER: tuple[Endpoint[Any], ...] = (
    BROKER_HEARTBEAT,
    CORDON,
    ACCEPT_FOLDER,
    COPY_SET,
    SET_COPIES,
    FORGET_COPY,
    CHANGE_COPY_SET,
    PROMOTE_COPY,
    TAKE_OVER,
    OFFER_PLACE,
    HAND_OVER,
    CREATE_SUBJECT,
    AUTO_CREATE,
    SUBJECTS,
    SUBJECT,
    ROUTE,
    QUEUES,
    DELETE_SUBJECT,
    JOIN,
    HEARTBEAT,
    RELEASE,
    SUSPEND,
    LEAVE,
    GROUP,
    GROUPS,
    WHY,
    SWITCH_GROUP,
    CREATE_GROUP,
    GROUP_SETTINGS,
    SET_GROUP,
    SUSPEND_GROUP,
    DELETE_GROUP,
    HEALTH,
    LIVE,
    READY,
    RESHAPE,
    SET_SUBJECT,
    HIDE_SUBJECT,
    PUBLISH_SUBJECT,
    CANCEL_OPERATION,
    OPERATIONS,
    WAITING_OPERATIONS,
    HISTORY,
    BALANCE,
    SET_BALANCE,
    VERIFY,
    RESET_GROUP,
    CANCEL_RESET,
    *ACCESS,
)
"""All calls of a metaserver, except FRONT and OPENAPI, whose document describes the others."""
BROKER: tuple[Endpoint[Any], ...] = (
    HOST_PARTITION,
    PARTITIONS,
    PARTITION,
    OFFSET_AT,
    PARTITION_BOUNDS,
    NEWEST_MESSAGE,
    SEAL,
    SET_CURSOR,
    REGISTER_GROUPS,
    REGISTER_GROUPS_BATCH,
    FORGET_GROUP,
    HOLD,
    DROP_PARTITION,
    HEALTH,
    LIVE,
    READY,
    POST_MESSAGES,
    READ_MESSAGES,
    SCHEDULE_MESSAGES,
    CANCEL_SCHEDULED,
    SCHEDULED,
    PARKED,
    PARKED_OFFSETS,
    CHANGE_PARKED,
    GIVE_PLACE,
)


def only_reads(method: str, path: str) -> bool:
    """Return True if a call with this method and path does not change anything."""
    return method == "GET" or path == PARTITION_BOUNDS.path
