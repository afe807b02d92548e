"""Defines the rows of a rebuilt database: subjects, partitions, groups and operations, with the ids
known to the brokers. Pure.
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
    """A broker's address and the partitions that it hosts."""

    address: str
    hosted: PartitionStatusList


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildOptions:
    """What the operator states about brokers that do not take part in the rebuild."""

    complete: bool = False
    """
    True if every broker takes part.

    In this case, an unused subject with partitions that no broker hosts is treated as an unfinished
    creation, which continues.
    """
    gone: Sequence[str] = ()
    """Names of broker groups that no longer exist."""
    lose_unread: bool = False
    """True to give up messages on gone broker groups that consumer groups may not have read yet."""


@dataclass(slots=True, kw_only=True)
class RebuiltPartition:
    """The row of a partition."""

    partition: Partition
    end_offset: int | None = None
    abandoned: bool = False
    lost: bool = False
    replaced: bool = False
    """True if a publication has replaced it, so that its broker must still drop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltOperation:
    """An unfinished operation. `steps` maps each partition id to (action, done)."""

    state: OperationState
    steps: dict[int, tuple[StepAction, bool]]


@dataclass(slots=True, kw_only=True)
class RebuiltGroup:
    """The row of a consumer group. `tokens` maps each partition id to its token."""

    name: str
    last_token: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    drained_ids: set[int] = field(default_factory=set)
    parked_ids: set[int] = field(default_factory=set)
    """Ids of partitions on which the group has parked messages."""
    frozen_ids: set[int] = field(default_factory=set)
    """Ids of partitions whose children have begun to adopt the parked messages after the group had
    drained these partitions and their ancestors.
    """
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """The consume strategy with which the highest token was acquired."""
    ttl_ms: int = 0
    """The longest session ttl known to its brokers, in milliseconds. An earlier session may
    continue to handle messages for this long.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GonePartition:
    """A partition of a broker group that no longer exists."""

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
    """Operations in FENCE, whose route has changed and whose abandoned parents are sealed when
    their brokers return.
    """
    canceled_operation: RebuiltOperation | None = None
    """The operation that seals the children of canceled operations, or None."""
    gone: list[GonePartition] = field(default_factory=list)
    static: bool = False
    opened: bool = True
    """False if the creation is unfinished and continues."""
    deleting: bool = False
    """True if some brokers have dropped partitions of the subject, so that its deletion
    continues.
    """
    tokens_above: int = 0
    """Brokers refuse the tokens of deleted groups up to this one."""
    message_bytes_max: int = MESSAGE_BYTES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltCluster:
    """The rows of the whole rebuilt database."""

    sources: Sequence[BrokerSource]
    subjects: Sequence[RebuiltSubject]
    dropped_id: int = 0
    """The highest id of a dropped partition; new partitions get higher ids."""
    cluster_id: str = ""
    """The identity of the cluster; "" if the brokers have no partitions, so that a new one will
    do.
    """
