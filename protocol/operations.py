"""Changes to a subject's partitions: operators' requests, operations and their steps, and the
lineage. Pure.

    PLAN ──children hosted──▶ SEAL ──parents sealed──▶ OPEN ──route changed──▶ DONE
      │                                                 └─without a source─▶ FENCE ─▶ DONE
      └─an operator cancels─▶ CANCELED

A state names the step in progress. Before the first seal, the operation has not changed anything
and can be canceled; after it, the operation can only be completed.
CANCELED: the children are never opened, and brokers that host a child seal it.
FENCE: the route has changed, and a broker that was silent must seal its partitions when it is
available again.
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
    """The kinds of changes to the open partitions of a subject."""

    RESIZE = "resize"
    GROW = "grow"
    SPLIT = "split"
    MERGE = "merge"
    MOVE = "move"
    EVACUATE = "evacuate"
    SET = "set"
    PUBLISH = "publish"
    """Requested by PublishSubject: the partitions of a hidden subject, with their messages,
    continue all open ones.
    """
    CUT = "cut"
    """Requested by HideSubject: every partition is continued by a child that also continues
    partitions of a hidden subject.
    """
    CREATE = "create"
    """Internal: the cleanup after a failed creation, for partitions that may be hosted by a silent
    broker.
    """


class OperationState(enum.StrEnum):
    """The step in progress; the module's docstring shows the transitions."""

    PLAN = "plan"
    SEAL = "seal"
    OPEN = "open"
    FENCE = "fence"
    DONE = "done"
    CANCELED = "canceled"


ROUTE_FINAL = frozenset({OperationState.FENCE, OperationState.DONE, OperationState.CANCELED})
"""The states in which the operation no longer changes the subject's route."""


class StepAction(enum.StrEnum):
    """The request that a step sends to a broker."""

    HOST = "host"
    SEAL = "seal"


class Reshape(Struct, frozen=True, kw_only=True):
    """
    Change partitions. The kind determines which fields are used:

        resize      subject; partitions: the new count
        grow        subject, a static one; partitions: the new number of logic queues, or
                    queues: those to cut in the middle
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
    """True to return the plan without changing anything."""
    accept_loss: bool = False


class SetSubject(Reshape, frozen=True, kw_only=True):
    """Change settings of a subject. Settings that are None are left unchanged. New partitions with
    the new settings continue the subject's open ones.
    """

    kind: OperationKind = OperationKind.SET
    order_strategy: OrderStrategy | None = None
    retention: Retention | None = None
    message_bytes_max: MessageBytesMax | None = None


class Cordon(Struct, frozen=True, kw_only=True):
    """
    Cordon a broker group, so that it receives no new partitions, or uncordon it.

    Its existing partitions remain. An evacuation cordons its broker group, too.
    """

    cordoned: bool = True


class StepView(Struct, frozen=True, kw_only=True):
    """A step: one request to one broker."""

    action: StepAction
    partition_id: int
    broker_group: str
    done: bool = False
    end_offset: int | None = None
    """The end of a sealed partition, which never has a message at or above this offset."""


class GroupLoss(Struct, frozen=True, kw_only=True):
    """The messages that a consumer group loses with a partition."""

    group: str
    messages_max: int | None = None
    """The maximum number of messages that it may lose; None if unknown, for example because the
    partition was open.
    """


class LossView(Struct, frozen=True, kw_only=True):
    """A partition whose loss is accepted."""

    partition_id: int
    end_offset: int | None = None
    """The end of the partition; None if it was open, so that its end is unknown."""
    unread_by: tuple[str, ...] = ()
    """The consumer groups that had not acked it to its end."""
    losses: tuple[GroupLoss, ...] = ()
    """The loss of each of these groups, in the same order; () if the metaserver is an earlier
    one.
    """


class OperationView(Struct, frozen=True, kw_only=True):
    """An operation and its progress. The id is 0 if the operation is only a plan, or if there is
    nothing to do.
    """

    operation_id: int
    subject: str
    kind: OperationKind
    state: OperationState
    sealed: tuple[int, ...]
    """The partitions that no longer accept messages, including those of a broker group that was
    given up.
    """
    children: tuple[Partition, ...]
    steps: tuple[StepView, ...] = ()
    without_source: bool = False
    reordered: tuple[int, ...] = ()
    """The partitions whose children were opened before their end was known. Groups may have read
    messages of the children before the last messages of these partitions.
    """
    problem: str = ""
    """The reason why the operation is waiting."""
    waiting_since_ms: int | None = None
    """Since when it has waited for whatever reason, in milliseconds since 1970 by the database's
    calendar; None if it does not wait, or if no driver has noticed yet.
    """
    cordoned: str = ""
    """The broker group of an evacuation, as long as it is cordoned, even after the operation has
    ended.
    """
    losses: tuple[LossView, ...] = ()
    """The losses that are accepted by the plan or the operation."""


class BusySubject(Struct, frozen=True, kw_only=True):
    """A subject that an evacuation did not move, because another operation on it is running, or
    because its order must be kept.
    """

    subject: str
    operation_id: int
    """The running operation on it; 0 if it is being created, or if there is none."""
    problem: str
    """The reason why it was not moved, and what to do."""


class OperationList(Struct, frozen=True, kw_only=True):
    """Operations, the newest first."""

    operations: list[OperationView]
    busy: list[BusySubject] = []
    """The subjects that an evacuation without its source did not move."""
    cordoned: str = ""
    """The broker group that an evacuation has cordoned."""


class BalanceMove(Struct, frozen=True, kw_only=True):
    """A partition that is to continue on another broker group."""

    partition_id: int
    subject: str
    source: str
    """The broker group that it is on."""
    target: str
    reason: str


class BalanceHandOver(Struct, frozen=True, kw_only=True):
    """A broker group that is to be served by a copy on another host."""

    broker_group: str
    copy_id: str
    """The copy that is to take the broker's place."""
    source: str
    """The host that serves it."""
    target: str
    reason: str


class LeftOut(Struct, frozen=True, kw_only=True):
    """A subject or a broker group that a plan leaves as it is."""

    name: str
    reason: str


class BalancePlan(Struct, frozen=True, kw_only=True):
    """The moves that balance the broker groups, the first ones if there are very many, and the
    hand-overs that balance their hosts.
    """

    moves: tuple[BalanceMove, ...] = ()
    hand_overs: tuple[BalanceHandOver, ...] = ()
    """They are done one at a time, each when all copies are in their sets."""
    broker_groups: tuple[str, ...] = ()
    """The broker groups that are balanced."""
    left_out_groups: tuple[LeftOut, ...] = ()
    """Broker groups that get no partitions, and whose partitions stay."""
    left_out_subjects: tuple[LeftOut, ...] = ()
    """Subjects whose partitions stay."""
    unknown_rates: tuple[str, ...] = ()
    """Broker groups that have not reported the rates of their partitions, which count as 0."""
    automatic: bool = False
    """True if the metaserver that answers has the setting `balance`."""
    stopped: bool = False
    """True if an operator has stopped the metaservers with that setting."""


class SetBalance(Struct, frozen=True, kw_only=True):
    """Stop the metaservers that balance by themselves, or let them continue."""

    stopped: bool


class PartitionHistory(Struct, frozen=True, kw_only=True):
    """A partition, open or not, and its end."""

    partition: Partition
    end_offset: int | None = None
    """The end offset; None if the partition is open or its end is unknown."""
    abandoned: bool = False
    """True if its children were opened while its broker was silent."""
    lost: bool = False
    """True if its loss was accepted. Its messages are no longer read."""
    opened_ms: int | None = None
    """The time at which the route began to contain it, in milliseconds since 1970 by the database's
    calendar. None if it is not open yet, was opened by keylane 0.2, or was restored by a rebuild.
    """

    @property
    def is_gone(self) -> bool:
        """True if its messages no longer exist, because it has expired or its loss was accepted."""
        return self.lost or self.partition.state is PartitionState.EXPIRED


class SubjectHistory(Struct, frozen=True, kw_only=True):
    """All partitions that a subject has ever had, oldest first. Their parents form the lineage."""

    subject: str
    route_version: int
    partitions: list[PartitionHistory]


# ── hidden subjects, and their publication ────────────────────────────────────────────────────────
FILLED_BY_CHARS_MAX = 200
REVISION_CHARS_MAX = 100
ENDS_MAX = 65_536
"""The maximum number of partitions of a replaced subject whose ends are compared."""


class HideSubject(Struct, frozen=True, kw_only=True):
    """
    Create a hidden subject that can be published as the subject in the path. Idempotent.

    The hidden subject gets the settings and ranges of its target. If the target does not exist, it
    is created when the hidden subject is published.
    """

    hidden: str
    partitions: Annotated[int, Meta(ge=0, le=PARTITIONS_MAX)] = 0
    """The number of partitions of a target that does not exist yet; 0 if it must exist."""
    static: bool = False
    """True if a target that does not exist yet gets logic queues."""
    message_bytes_max: MessageBytesMax = MESSAGE_BYTES_MAX
    """The limit for one message in bytes, for a target that does not exist yet."""
    cut: bool = False
    """
    True to also seal the target's open partitions, and to continue them with new ones. Idempotent.

    The hidden subject can then replace the messages that have been stored so far. Messages that are
    sent in the meantime follow them.
    """
    filled_by: Annotated[str, Meta(max_length=FILLED_BY_CHARS_MAX)] = ""
    """A unique description of the job that fills the subject, for display; "" if not reported. The
    call is refused if the hidden subject belongs to another job.
    """


class PublishSubject(Struct, frozen=True, kw_only=True):
    """Publish a hidden subject as its target. Idempotent."""

    target: str
    replace: bool = False
    """True to replace the target's messages: the hidden subject takes over its name."""
    starts: Annotated[
        dict[
            Annotated[str, Meta(max_length=NAME_CHARS_MAX)],
            dict[int, Annotated[int, Meta(ge=0, le=MAX_I64)]],
        ],
        Meta(max_length=GROUPS_PER_SUBJECT_MAX),
    ] = {}
    """With `replace`, maps each consumer group to a dict from partition ids to the first offset
    that the group has not handled.
    """
    ends: (
        Annotated[dict[int, Annotated[int, Meta(ge=0, le=MAX_I64)]], Meta(max_length=ENDS_MAX)]
        | None
    ) = None
    """With `replace`, for a hidden subject with `cut`: maps partition ids of the target to the end
    offset up to which the hidden subject has rows for its messages. Other partitions must be empty.
    None means that the replaced messages are not checked.
    """
    subject_id: Annotated[int, Meta(ge=0, le=MAX_I64)] = 0
    """The id of the hidden subject, which protects a later one with the same name; 0 means the
    current one with this name.
    """
    revisions: Annotated[
        dict[
            Annotated[str, Meta(max_length=NAME_CHARS_MAX)],
            Annotated[str, Meta(max_length=REVISION_CHARS_MAX)],
        ],
        Meta(max_length=GROUPS_PER_SUBJECT_MAX),
    ] = {}
    """With `starts`, maps each consumer group to its `GroupView.revision` before its cursors were
    read. The call is refused if one of them has changed.
    """


class Publication(Struct, frozen=True, kw_only=True):
    """A publication and its progress."""

    hidden: str
    target: str
    operation_id: int = 0
    """The operation on the target's partitions; 0 if the target did not exist, so that the
    publication is already done.
    """
    state: OperationState = OperationState.DONE
    problem: str = ""
    """The reason why the publication is waiting."""


def hidden_name(target: str, job: str) -> str:
    """Return the name of a job's hidden subject. A long target name is truncated."""
    return f"{target[: NAME_CHARS_MAX - len(HIDDEN) - len(job)]}{HIDDEN}{job}"
