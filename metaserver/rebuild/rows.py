"""The rows of a rebuilt database: subjects, partitions, groups and operations, with the brokers'
ids. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...protocol.control import PartitionStatusList, Retention
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.operations import OperationState, StepAction
from ...protocol.routing import ConsumeStrategy, OrderStrategy, Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSource:
    """A broker that was asked for its partitions, with its answer."""

    address: str
    hosted: PartitionStatusList


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildOptions:
    """What the operator states about brokers that are not asked."""

    complete: bool = False
    """
    True if every broker is named.

    Then an unused subject with partitions that no broker hosts is an unfinished creation, which
    continues.
    """
    gone: Sequence[str] = ()
    """Names of broker groups that are gone for good."""
    lose_unread: bool = False
    """True to give up messages on gone broker groups that consumer groups may not have read."""


@dataclass(slots=True, kw_only=True)
class RebuiltPartition:
    """The row of a partition."""

    partition: Partition
    end_offset: int | None = None
    abandoned: bool = False
    lost: bool = False
    replaced: bool = False
    """True if a publication has replaced it, so that brokers still have to drop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltOperation:
    """An unfinished operation; `steps` are partition id → (action, done)."""

    state: OperationState
    steps: dict[int, tuple[StepAction, bool]]


@dataclass(slots=True, kw_only=True)
class RebuiltGroup:
    """The row of a consumer group; `tokens` are by partition id."""

    name: str
    last_token: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    parked: set[int] = field(default_factory=set)
    """Ids of partitions on which the group has parked messages."""
    frozen: set[int] = field(default_factory=set)
    """Ids of parked partitions whose children have begun to adopt these messages, after the group
    had drained them and their ancestors.
    """
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """Consume strategy under which its highest token was acquired."""
    ttl_ms: int = 0
    """Longest session ttl that its brokers know, in milliseconds: an old session may handle
    messages for this time.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GonePartition:
    """A partition of a broker group that is gone for good."""

    partition: Partition
    unread_by: tuple[str, ...]
    """Names of the consumer groups that may not have drained it."""


@dataclass(slots=True, kw_only=True)
class RebuiltSubject:
    """The row of a subject, with its partitions, groups and operations."""

    name: str
    order_strategy: OrderStrategy
    partitions_wanted: int
    partitions_named: int
    partitions: list[RebuiltPartition]
    groups: list[RebuiltGroup]
    retention: Retention = Retention.ACKED
    operation: RebuiltOperation | None = None
    """The running operation, or None."""
    fences: list[RebuiltOperation] = field(default_factory=list)
    """Operations in FENCE: the route has changed, and an abandoned parent is sealed when its broker
    returns.
    """
    canceled: RebuiltOperation | None = None
    """The operation that seals the children of canceled operations, or None."""
    gone: list[GonePartition] = field(default_factory=list)
    static: bool = False
    opened: bool = True
    """False if the creation is unfinished and continues."""
    deleting: bool = False
    """True if some brokers have dropped their partitions of it, so that the deletion continues."""
    tokens_above: int = 0
    """Token up to which brokers refuse those of its deleted groups."""
    message_bytes_max: int = MESSAGE_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltCluster:
    """The whole rebuilt database."""

    sources: Sequence[BrokerSource]
    subjects: Sequence[RebuiltSubject]
    dropped_id: int = 0
    """Highest id of a dropped partition; later partitions get higher ids."""
