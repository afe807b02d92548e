"""Changes of a subject's partitions: what an operator asks for, how far it is, what became of it.  Pure.

    PLAN ──children hosted──▶ SEAL ──parents sealed──▶ OPEN ──route changed──▶ DONE
      │                                                 └─without a source─▶ FENCE ─▶ DONE
      └─an operator says so─▶ CANCELED

The state names the step under way.  Up to SEAL nothing has changed for anybody; from the first seal on the operation
only goes forward.  CANCELED: its children are never opened; brokers that may host one seal it.  FENCE: the route has changed, and a broker that was silent is told to seal once it is back.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from .routing import Partition


class OperationKind(enum.StrEnum):
    """What is done to the open partitions of a subject."""

    RESIZE = "resize"
    SPLIT = "split"
    MERGE = "merge"
    MOVE = "move"
    EVACUATE = "evacuate"
    CREATE = "create"
    """Not to be asked for: what a creation left on a silent broker is canceled under this name."""


class OperationState(enum.StrEnum):
    """The step under way; see above."""

    PLAN = "plan"
    SEAL = "seal"
    OPEN = "open"
    FENCE = "fence"
    DONE = "done"
    CANCELED = "canceled"


class StepAction(enum.StrEnum):
    """What a broker is asked for."""

    HOST = "host"
    SEAL = "seal"


class Reshape(Struct, frozen=True, kw_only=True):
    """
    Change partitions.  Which fields count depends on the kind:

        resize      subject, partitions: the count wanted
        split       partition_ids: one, cut in the middle
        merge       partition_ids: neighbours
        move        partition_ids: one or more of a subject; broker_group: where to
        evacuate    broker_group: leave it, in all subjects; without_source: although it is silent; accept_loss:
                    it never comes back, and what only it had is given up
    """

    kind: OperationKind
    subject: str = ""
    partitions: int = 0
    partition_ids: tuple[int, ...] = ()
    broker_group: str = ""
    without_source: bool = False
    dry_run: bool = False
    """Answer with the plan, change nothing."""
    accept_loss: bool = False


class Cordon(Struct, frozen=True, kw_only=True):
    """Whether a broker group is kept from new partitions; what it has goes on.  An evacuation cordons it as well."""

    cordoned: bool = True


class StepView(Struct, frozen=True, kw_only=True):
    """One step at one broker."""

    action: StepAction
    partition_id: int
    broker_group: str
    done: bool = False
    end_offset: int | None = None
    """Of a sealed partition; no message at or above it, ever."""


class LossView(Struct, frozen=True, kw_only=True):
    """A partition whose loss is accepted."""

    partition_id: int
    end_offset: int | None = None
    """Where it ended; None: it was open, and nobody knows."""
    unread_by: tuple[str, ...] = ()
    """The consumer groups that were not through with it."""


class OperationView(Struct, frozen=True, kw_only=True):
    """An operation as far as it is.  Its id is 0 while it is only a plan, or when there is nothing to do."""

    operation_id: int
    subject: str
    kind: OperationKind
    state: OperationState
    sealed: tuple[int, ...]
    """The partitions that take no more messages; of a group left behind also those that took none before."""
    children: tuple[Partition, ...]
    steps: tuple[StepView, ...] = ()
    without_source: bool = False
    reordered: tuple[int, ...] = ()
    """Partitions whose children were opened although their end was not known: groups may have read the children
    before what is left in these."""
    problem: str = ""
    """Why it waits."""
    cordoned: str = ""
    """Of an evacuation, canceled and done ones too: the broker group it leaves, as long as that gets no new
    partitions."""
    losses: tuple[LossView, ...] = ()
    """Of a plan that accepts a loss: what would be given up.  Of an operation: what was."""


class BusySubject(Struct, frozen=True, kw_only=True):
    """A subject of which an evacuation leaves something there, or held: something else runs on it, or it keeps order."""

    subject: str
    operation_id: int
    """What runs; 0: its creation, or nothing."""
    problem: str
    """Why, and what to do."""


class OperationList(Struct, frozen=True, kw_only=True):
    """Operations, the newest first."""

    operations: list[OperationView]
    busy: list[BusySubject] = []
    """Of an evacuation without its source: the subjects that it did not empty there."""
    cordoned: str = ""
    """Of an evacuation that was begun: the broker group, which gets no new partitions from now on."""


class PartitionHistory(Struct, frozen=True, kw_only=True):
    """A partition, open or not."""

    partition: Partition
    end_offset: int | None = None
    """Where it ends; None while it is open, or its end is not known."""
    abandoned: bool = False
    """Its children were opened while its broker was silent."""
    lost: bool = False
    """Its loss was accepted: what may have been stored there is read by nobody any more."""


class SubjectHistory(Struct, frozen=True, kw_only=True):
    """Every partition a subject ever had, by age; their parents make the lineage."""

    subject: str
    route_version: int
    partitions: list[PartitionHistory]
