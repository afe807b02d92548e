"""The inputs of the checks: the database at one moment, and the brokers' own answers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ...protocol.control import PartitionStatusList
from ...protocol.operations import OperationState, StepAction
from ...protocol.routing import Partition
from ..cluster.rows import SubjectRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """The row of a partition."""

    subject_id: int
    partition: Partition
    end_offset: int | None = None
    abandoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """The row of a consumer group, with the tokens of its leases by partition id."""

    group_id: int
    subject_id: int
    name: str
    last_token: int
    route_version: int
    tokens: Mapping[int, int] = field(default_factory=dict)
    drained: Collection[int] = ()
    heard: Collection[int] = ()
    """Ids of partitions whose brokers have stored the group on their disks."""
    deleting: bool = False
    """True while brokers are forgetting it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """An unfinished operation."""

    operation_id: int
    subject_id: int
    state: OperationState
    running: bool
    """True if its row blocks other operations on the subject."""
    idle_ms: int
    """Time without a driver, in milliseconds; 0 or less while it has a driver."""
    problem: str = ""
    steps: Mapping[int, StepAction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRow:
    """The row of a broker group, or of a broker that was refused under its name."""

    broker_group: str
    broker_id: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlView:
    """The database at one moment."""

    subjects: Mapping[int, SubjectRow] = field(default_factory=dict)
    partitions: Mapping[int, PartitionView] = field(default_factory=dict)
    groups: Sequence[GroupRow] = ()
    operations: Sequence[OperationRow] = ()
    brokers: Sequence[BrokerRow] = ()
    refused: Sequence[BrokerRow] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAnswer:
    """The partitions that a broker hosts; if it did not answer, `hosted` is None and `problem` has
    the reason.
    """

    broker_group: str
    address: str
    hosted: PartitionStatusList | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """
    The database, then the brokers, then the database again.

    A broker must have what was in SQL before it was asked, and SQL must have afterwards what the
    broker has, so that changes between the two views of the database are no violations.
    """

    before: SqlView
    answers: Sequence[BrokerAnswer]
    after: SqlView
