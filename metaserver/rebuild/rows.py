"""What a lost database is made of anew: rows of subjects, partitions, groups and operations, by the brokers' ids.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...protocol.control import PartitionStatusList, Retention
from ...protocol.operations import OperationState, StepAction
from ...protocol.routing import ConsumeStrategy, OrderStrategy, Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A broker that was asked."""

    address: str
    hosted: PartitionStatusList


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What the operator says of brokers that are not asked."""

    complete: bool = False
    """There are none; so the creation of a subject that nobody has used, and that has partitions on no broker, was
    cut short, and goes on."""
    gone: Sequence[str] = ()
    """Broker groups that exist no more."""
    lose_unread: bool = False
    """What groups may have left unread there is given up."""


@dataclass(slots=True, kw_only=True)
class RebuiltPartition:
    """A partition's row."""

    partition: Partition
    end_offset: int | None = None
    abandoned: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltOperation:
    """An operation that goes on; steps by partition id, with whether they are done."""

    state: OperationState
    steps: dict[int, tuple[StepAction, bool]]


@dataclass(slots=True, kw_only=True)
class RebuiltGroup:
    """A consumer group's row; tokens by partition id."""

    name: str
    last_token: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """As which its highest token was brought to a broker."""
    ttl_ms: int = 0
    """The longest of its sessions that its brokers know: for so long an old one may handle what it was granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GonePartition:
    """A partition that was on a broker group that exists no more."""

    partition: Partition
    unread_by: tuple[str, ...]
    """The consumer groups that may not have been through with it."""


@dataclass(slots=True, kw_only=True)
class RebuiltSubject:
    """A subject's row and all that hangs on it."""

    name: str
    order_strategy: OrderStrategy
    partitions_wanted: int
    partitions_named: int
    partitions: list[RebuiltPartition]
    groups: list[RebuiltGroup]
    retention: Retention = Retention.ACKED
    operation: RebuiltOperation | None = None
    """The one that runs."""
    fences: list[RebuiltOperation] = field(default_factory=list)
    """Those that have their route, and a abandoned source to be sealed when it is back."""
    canceled: RebuiltOperation | None = None
    """All that is never opened, to be sealed where that has not been done."""
    gone: list[GonePartition] = field(default_factory=list)
    static: bool = False
    opened: bool = True
    """False: its creation was cut short before anybody could send, and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltCluster:
    """Everything."""

    sources: Sequence[Source]
    subjects: Sequence[RebuiltSubject]
