"""The rows of a rebuilt database: subjects, partitions, groups and operations, with the brokers'
ids.  Pure.
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
    """A broker that was asked for its partitions, and its answer."""

    address: str
    hosted: PartitionStatusList


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildOptions:
    """The operator's statements about brokers that are not asked."""

    complete: bool = False
    """
    Every broker is named.

    Then an unused subject with partitions that no broker hosts is an unfinished creation, and the
    creation continues.
    """
    gone: Sequence[str] = ()
    """Broker groups that are gone for good."""
    lose_unread: bool = False
    """Give up messages on gone broker groups that consumer groups may not have read."""


@dataclass(slots=True, kw_only=True)
class RebuiltPartition:
    """A partition's row."""

    partition: Partition
    end_offset: int | None = None
    abandoned: bool = False
    lost: bool = False
    replaced: bool = False
    """A publication has replaced it: brokers still have to drop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltOperation:
    """An unfinished operation; steps: partition id → (action, done)."""

    state: OperationState
    steps: dict[int, tuple[StepAction, bool]]


@dataclass(slots=True, kw_only=True)
class RebuiltGroup:
    """A consumer group's row; tokens by partition id."""

    name: str
    last_token: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    parked: set[int] = field(default_factory=set)
    """Partitions on which the group has parked messages."""
    frozen: set[int] = field(default_factory=set)
    """Those of which children have begun to take these over, once the group had drained them and
    what is before them.
    """
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The consume strategy under which its highest token was acquired."""
    ttl_ms: int = 0
    """The longest session ttl that its brokers know: an old session may handle messages for this
    long.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GonePartition:
    """A partition of a broker group that is gone for good."""

    partition: Partition
    unread_by: tuple[str, ...]
    """The consumer groups that may not have drained it."""


@dataclass(slots=True, kw_only=True)
class RebuiltSubject:
    """A subject's row with its partitions, groups and operations."""

    name: str
    order_strategy: OrderStrategy
    partitions_wanted: int
    partitions_named: int
    partitions: list[RebuiltPartition]
    groups: list[RebuiltGroup]
    retention: Retention = Retention.ACKED
    operation: RebuiltOperation | None = None
    """The running operation, if there is one."""
    fences: list[RebuiltOperation] = field(default_factory=list)
    """Operations in FENCE: the route has changed, and an abandoned parent is sealed when its broker
    is back.
    """
    canceled: RebuiltOperation | None = None
    """The operation that seals the children of canceled operations, if there are any."""
    gone: list[GonePartition] = field(default_factory=list)
    static: bool = False
    opened: bool = True
    """False: the creation is unfinished and continues."""
    deleting: bool = False
    """Some brokers have dropped their partitions of it: the deletion continues."""
    tokens_above: int = 0
    """Brokers refuse tokens up to this one of its deleted groups."""
    message_bytes_max: int = MESSAGE_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltCluster:
    """The whole database."""

    sources: Sequence[BrokerSource]
    subjects: Sequence[RebuiltSubject]
    dropped_id: int = 0
    """The highest id of a dropped partition: later partitions get higher ids."""
