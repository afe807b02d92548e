"""Changes of a subject's partitions: requests of operators, operations and their steps, lineage.
Pure.

    PLAN ──children hosted──▶ SEAL ──parents sealed──▶ OPEN ──route changed──▶ DONE
      │                                                 └─without a source─▶ FENCE ─▶ DONE
      └─an operator cancels─▶ CANCELED

A state names the step under way.  Before the first seal the operation has changed nothing and can
be canceled; after it the operation can only be completed.  CANCELED: the children are never opened,
and brokers that host a child seal it. FENCE: the route has changed, and a broker that was silent is
asked to seal when it is available again.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

from .control import MessageBytesMax, Retention
from .ids import HIDDEN, MAX_I64, NAME_CHARS_MAX
from .limits import GROUPS_PER_SUBJECT_MAX, MESSAGE_BYTES_MAX, PARTITIONS_MAX
from .routing import OrderStrategy, Partition, PartitionState


class OperationKind(enum.StrEnum):
    """How the open partitions of a subject are changed."""

    RESIZE = "resize"
    GROW = "grow"
    SPLIT = "split"
    MERGE = "merge"
    MOVE = "move"
    EVACUATE = "evacuate"
    SET = "set"
    PUBLISH = "publish"
    """Requested by PublishSubject: the partitions of a hidden subject, which have messages,
    continue all open ones.
    """
    CUT = "cut"
    """Requested by HideSubject: as a move of every partition, with children that also continue
    those of a hidden subject.
    """
    CREATE = "create"
    """Never requested: the cleanup after a failed creation, of partitions that a silent broker may
    host.
    """


class OperationState(enum.StrEnum):
    """The step under way; the module's docstring has the transitions."""

    PLAN = "plan"
    SEAL = "seal"
    OPEN = "open"
    FENCE = "fence"
    DONE = "done"
    CANCELED = "canceled"


ROUTE_FINAL = frozenset({OperationState.FENCE, OperationState.DONE, OperationState.CANCELED})
"""The states in which the operation no longer changes the subject's route."""


class StepAction(enum.StrEnum):
    """What a step asks a broker to do."""

    HOST = "host"
    SEAL = "seal"


class Reshape(Struct, frozen=True, kw_only=True):
    """
    Change partitions.  The kind decides which fields are read:

        resize      subject; partitions: the new count
        grow        subject, a static one; partitions: the new number of logic queues, or queues: those to cut in the middle
        split       partition_ids: one partition, cut in the middle
        merge       partition_ids: neighbours
        move        partition_ids: partitions of one subject; broker_group: the destination
        evacuate    broker_group: all its partitions move, of every subject
                    without_source: do not wait for the broker group, which is silent
                    accept_loss: the broker group never returns; messages that only it has are lost
    """

    kind: OperationKind
    subject: str = ""
    partitions: int = 0
    partition_ids: tuple[int, ...] = ()
    queues: tuple[int, ...] = ()
    broker_group: str = ""
    without_source: bool = False
    dry_run: bool = False
    """Answer with the plan; change nothing."""
    accept_loss: bool = False


class SetSubject(Reshape, frozen=True, kw_only=True):
    """Change settings of a subject; None: as it is.  Its open partitions are continued by others
    with the new ones.
    """

    kind: OperationKind = OperationKind.SET
    order_strategy: OrderStrategy | None = None
    retention: Retention | None = None
    message_bytes_max: MessageBytesMax | None = None


class Cordon(Struct, frozen=True, kw_only=True):
    """
    Keep a broker group from new partitions, or stop keeping it from them.

    Partitions that it has stay there.  An evacuation cordons its broker group as well.
    """

    cordoned: bool = True


class StepView(Struct, frozen=True, kw_only=True):
    """A step: one request to one broker."""

    action: StepAction
    partition_id: int
    broker_group: str
    done: bool = False
    end_offset: int | None = None
    """Where a sealed partition ends: it never has a message at or above this offset."""


class GroupLoss(Struct, frozen=True, kw_only=True):
    """What a consumer group loses with a partition."""

    group: str
    messages_max: int | None = None
    """It loses at most this many messages; None: not known, as where the partition was open."""


class LossView(Struct, frozen=True, kw_only=True):
    """A partition whose loss is accepted."""

    partition_id: int
    end_offset: int | None = None
    """Where it ended; None: it was open, and its end is unknown."""
    unread_by: tuple[str, ...] = ()
    """The consumer groups that had not acked it to its end."""
    losses: tuple[GroupLoss, ...] = ()
    """What each of them loses, in the same order; () from an earlier metaserver."""


class OperationView(Struct, frozen=True, kw_only=True):
    """An operation and its progress.  The id is 0 if the operation is only planned, or there is
    nothing to do.
    """

    operation_id: int
    subject: str
    kind: OperationKind
    state: OperationState
    sealed: tuple[int, ...]
    """The partitions that take no more messages, among them sealed ones of a broker group left
    behind.
    """
    children: tuple[Partition, ...]
    steps: tuple[StepView, ...] = ()
    without_source: bool = False
    reordered: tuple[int, ...] = ()
    """Partitions whose children were opened while the partition's end was unknown: groups may have
    read messages of the children before messages that remain in these.
    """
    problem: str = ""
    """Why the operation waits."""
    cordoned: str = ""
    """The broker group that an evacuation leaves, while the group is cordoned; also after the
    operation has ended.
    """
    losses: tuple[LossView, ...] = ()
    """The losses that the plan or the operation accepts."""


class BusySubject(Struct, frozen=True, kw_only=True):
    """A subject that an evacuation did not move: another operation runs on it, or its order must be
    kept.
    """

    subject: str
    operation_id: int
    """The operation that runs on it; 0: its creation, or none."""
    problem: str
    """Why it was not moved, and what to do."""


class OperationList(Struct, frozen=True, kw_only=True):
    """Operations, the newest first."""

    operations: list[OperationView]
    busy: list[BusySubject] = []
    """The subjects that an evacuation without its source did not move."""
    cordoned: str = ""
    """The broker group that an evacuation has cordoned."""


class PartitionHistory(Struct, frozen=True, kw_only=True):
    """A partition, open or not."""

    partition: Partition
    end_offset: int | None = None
    """Where it ends; None if it is open, or its end is unknown."""
    abandoned: bool = False
    """Its children were opened while its broker was silent."""
    lost: bool = False
    """Its loss was accepted: its messages are no longer read."""

    @property
    def is_gone(self) -> bool:
        """Its messages are gone: it has expired, or was on a disk whose loss was accepted."""
        return self.lost or self.partition.state is PartitionState.EXPIRED


class SubjectHistory(Struct, frozen=True, kw_only=True):
    """Every partition that a subject ever had, by age.  Their parents are the lineage."""

    subject: str
    route_version: int
    partitions: list[PartitionHistory]


# ── hidden subjects, and their publication ────────────────────────────────────────────────────────
FILLED_BY_CHARS_MAX = 200
REVISION_CHARS_MAX = 100
ENDS_MAX = 65_536
"""The most partitions of a replaced subject whose ends are compared."""


class HideSubject(Struct, frozen=True, kw_only=True):
    """
    Create a hidden subject whose messages are to be published in `subject` of the path; a repeat
    changes nothing.

    It gets the settings and ranges of its target.  If there is no target, publishing creates it.
    """

    hidden: str
    partitions: Annotated[int, Meta(ge=0, le=PARTITIONS_MAX)] = 0
    """Of a target that does not exist; 0: it must exist."""
    static: bool = False
    """As `partitions`."""
    message_bytes_max: MessageBytesMax = MESSAGE_BYTES_MAX
    """As `partitions`."""
    cut: bool = False
    """
    Also seal the target's open partitions, and continue them by others; a repeat changes nothing.

    Then the hidden subject is to take the place of what was stored before: messages that are sent
    meanwhile lie behind both.
    """
    filled_by: Annotated[str, Meta(max_length=FILLED_BY_CHARS_MAX)] = ""
    """What fills it, in words for people, and of no other job: the hidden subject of another one is
    refused.  "": not said.
    """


class PublishSubject(Struct, frozen=True, kw_only=True):
    """Publish a hidden subject in its target; a repeat changes nothing."""

    target: str
    replace: bool = False
    """The target's present messages are deleted: the hidden subject takes the name."""
    starts: Annotated[
        dict[
            Annotated[str, Meta(max_length=NAME_CHARS_MAX)],
            dict[int, Annotated[int, Meta(ge=0, le=MAX_I64)]],
        ],
        Meta(max_length=GROUPS_PER_SUBJECT_MAX),
    ] = {}
    """With `replace`: consumer group → partition id → first offset that it has not handled."""
    ends: (
        Annotated[dict[int, Annotated[int, Meta(ge=0, le=MAX_I64)]], Meta(max_length=ENDS_MAX)]
        | None
    ) = None
    """
    With `replace`, of a hidden subject with a cut: partition id of the target → where the messages
    end of which the hidden subject has the rows.  A partition that is not named has to be empty.
    None: what is replaced is not looked at.
    """
    subject_id: Annotated[int, Meta(ge=0, le=MAX_I64)] = 0
    """Of the hidden subject: another one of its name is not published.  0: the one that has the
    name.
    """
    revisions: Annotated[
        dict[
            Annotated[str, Meta(max_length=NAME_CHARS_MAX)],
            Annotated[str, Meta(max_length=REVISION_CHARS_MAX)],
        ],
        Meta(max_length=GROUPS_PER_SUBJECT_MAX),
    ] = {}
    """With `starts`: consumer group → `GroupView.revision` before its cursors were looked at; one
    that differs now is refused.
    """


class Publication(Struct, frozen=True, kw_only=True):
    """A publication, and how far it is."""

    hidden: str
    target: str
    operation_id: int = 0
    """The operation on the target's partitions; 0: there was no target, and nothing is left to
    do.
    """
    state: OperationState = OperationState.DONE
    problem: str = ""
    """Why it waits."""


def hidden_name(target: str, job: str) -> str:
    """The name of the hidden subject of a job; the target's name is cut if the whole were too
    long.
    """
    return f"{target[: NAME_CHARS_MAX - len(HIDDEN) - len(job)]}{HIDDEN}{job}"
