"""Typed administration calls for the subjects, consumer groups, partitions and brokers of a
cluster.
"""

from ..protocol.access.rights import AccessGrant, Rights
from ..protocol.control import (
    BrokerView,
    GivenUpPartition,
    GroupDeletion,
    GroupSummary,
    GroupView,
    Health,
    OwnerView,
    RefusedBroker,
    Retention,
    SubjectDeletion,
    SubjectSummary,
    SubjectView,
    TimeBound,
)
from ..protocol.groups import GroupPolicy, GroupSettings, GroupStart, StartAt
from ..protocol.http.access import (
    AuditEvent,
    AuditPage,
    AuditRow,
    Decision,
    GrantList,
    GrantRow,
    MadeToken,
    QuotaList,
    QuotaRow,
    TokenList,
    TokenView,
)
from ..protocol.membership.views import ClusterView, MemberView
from ..protocol.operations import (
    BusySubject,
    GroupLoss,
    LossView,
    OperationKind,
    OperationList,
    OperationState,
    OperationView,
    PartitionHistory,
    Publication,
    StepAction,
    StepView,
    SubjectHistory,
)
from ..protocol.parked import FailingMessage, Failure, ParkState
from ..protocol.progress import (
    CanceledReset,
    CursorView,
    GroupReset,
    PendingReset,
    ResetGroup,
    ResetTo,
)
from ..protocol.queues import QueueView, SegmentView
from ..protocol.reprocess.holds import HoldView
from ..protocol.routing import Partition, PartitionState, Route
from ..protocol.scheduled.receipt import CancelOutcome, ScheduledView
from ..protocol.verification import CheckView, Verification
from .client import Admin
from .parked_views import ParkedKeyView, ParkedMessage
from .scheduled import ScheduledMessages
from .undrained import UndrainedPartition
from .views import (
    BrokerList,
    GroupDescription,
    PartitionDescription,
    PartitionProgress,
    SubjectChange,
    SubjectDescription,
)

__all__ = [
    "AccessGrant",
    "AuditEvent",
    "AuditPage",
    "AuditRow",
    "ClusterView",
    "Decision",
    "GrantList",
    "GrantRow",
    "MadeToken",
    "MemberView",
    "QuotaList",
    "QuotaRow",
    "Rights",
    "TokenList",
    "TokenView",
    "Admin",
    "BrokerList",
    "BrokerView",
    "BusySubject",
    "CancelOutcome",
    "CanceledReset",
    "CheckView",
    "CursorView",
    "FailingMessage",
    "Failure",
    "GroupDeletion",
    "GroupDescription",
    "GroupPolicy",
    "GroupReset",
    "GroupSettings",
    "GroupStart",
    "GroupSummary",
    "GivenUpPartition",
    "GroupLoss",
    "GroupView",
    "Health",
    "HoldView",
    "LossView",
    "OperationKind",
    "OperationList",
    "OperationState",
    "OperationView",
    "ParkState",
    "ParkedKeyView",
    "ParkedMessage",
    "OwnerView",
    "Partition",
    "PartitionDescription",
    "PartitionHistory",
    "PartitionProgress",
    "PendingReset",
    "PartitionState",
    "Publication",
    "QueueView",
    "RefusedBroker",
    "ResetGroup",
    "ResetTo",
    "Retention",
    "Route",
    "ScheduledMessages",
    "ScheduledView",
    "SegmentView",
    "StartAt",
    "StepAction",
    "StepView",
    "SubjectDeletion",
    "SubjectChange",
    "SubjectDescription",
    "SubjectHistory",
    "SubjectSummary",
    "SubjectView",
    "TimeBound",
    "UndrainedPartition",
    "Verification",
]
