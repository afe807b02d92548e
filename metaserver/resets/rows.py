"""Rows of a reset: its partitions, their new tokens, and what is drained afterwards. SQL,
synchronous.

Invariants
    A group with a live session is not reset, and while a reset holds a group, no session begins.
    A live reset is an exception: it begins once no session holds a lease, and while it is pending
    no session is granted one.
    A reset sets all partitions that the group could read when it began, except abandoned ones on
    silent brokers. These are listed in the answer, and can be reset by name once their broker is
    back.
    Drained partitions are forgotten before any cursor is set back, and stored again after a cursor
    was set to the end. The start of a new group is forgotten too: its broker refuses that cursor's
    token once it has seen the reset's.
    An empty partition is always at its end, and counts as drained only if its parents are, because
    otherwise its children would be read too early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.engine import Connection

from ...protocol.errors import (
    BusyError,
    ConflictError,
    GroupUnknownError,
    NotFoundError,
    PartitionUnknownError,
    Reason,
)
from ...protocol.ids import FencingToken, PartitionId, check_name
from ...protocol.progress import ResetGroup
from ...protocol.reading.bounds import nearest_ancestors
from ...protocol.routing import ConsumeStrategy, Partition, PartitionState
from ...protocol.text import counted
from ..cluster.heard import mark_unsettled
from ..cluster.partitions import SEEN_PARENT, subject_parents, subject_partitions
from ..cluster.subjects import SERVED, open_subject_row
from ..groups.leases import drained_through, raise_token_floor
from ..groups.parked_ancestors import need_no_owner
from ..groups.sessions import sweep_sessions
from ..sql.dialect import insert_new, insert_or_replace
from ..sql.duties import duty_left_ms, leave_duty, rebuilt_duty, reset_duty, take_duty
from ..sql.schema import (
    drained,
    groups,
    leases,
    live_resets,
    partition_parents,
    partitions,
    sessions,
    starts,
)
from .cursors import check_ask


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetScope:
    """The group and the partitions that a reset concerns."""

    group_id: int
    subject_id: int
    static: bool
    strategy: ConsumeStrategy
    ask: ResetGroup
    partitions: tuple[Partition, ...]
    left_out: tuple[Partition, ...] = ()
    """Abandoned partitions on silent brokers."""
    others: tuple[Partition, ...] = ()
    """Partitions of the subject that a reset of a part of it does not change."""
    lineage: Mapping[PartitionId, tuple[PartitionId, ...]] = field(default_factory=dict)
    """For a reset of a part: partition id → its parents, including partitions whose data is
    gone.
    """

    def kept_children(self, partition: Partition) -> tuple[tuple[int, int], ...]:
        """
        Return the ranges of the nearest descendants that the reset does not change.

        They may have adopted its parked messages by way of partitions that are reset too, or whose
        data is gone.
        """
        others = {each.partition_id: each for each in self.others}
        kept: list[tuple[int, int]] = []
        above = {partition.partition_id}
        for child, parents in sorted(self.lineage.items()):
            if above.isdisjoint(parents):
                continue
            if child in others:
                kept.append((others[child].range_start, others[child].range_end))
            else:
                above.add(child)
        return tuple(kept)

    def kept_parents(self, partition: Partition) -> tuple[int, ...]:
        """Return the ancestors of a partition that a reset of a part of the subject does not
        change.
        """
        others = {each.partition_id for each in self.others}
        ancestors: set[PartitionId] = set()
        todo = [partition.partition_id]
        while todo:
            above = set(self.lineage.get(todo.pop(), ())) - ancestors
            ancestors |= above
            todo += above
        direct = set(self.lineage.get(partition.partition_id, ())).difference(self.ids)
        return tuple(sorted(int(each) for each in ancestors & others | direct))

    @property
    def ids(self) -> list[int]:
        """Ids of the partitions of the reset."""
        return sorted(int(partition.partition_id) for partition in self.partitions)


def reset_scope(
    connection: Connection, subject: str, group: str, ask: ResetGroup, *, begun: bool = False
) -> ResetScope:
    """
    Return the partitions that a request selects.

    Args:
        begun: True if cursors may be set already, so that partitions that were selected then may
            have expired.

    Raises:
        InvalidRequestError, SubjectUnknownError, GroupUnknownError,
        NotFoundError, PartitionUnknownError, ConflictError
    """
    row = open_subject_row(connection, subject)
    check_name("consumer group", group)
    if ask.queue is not None and not row.static:
        raise ConflictError(Reason.SUBJECT_NOT_STATIC, subject=subject)
    check_ask(ask, static=row.static)
    named = sa.and_(
        groups.c.subject_id == row.subject_id, groups.c.name == group, sa.not_(groups.c.deleting)
    )
    chosen = sa.select(groups.c.group_id, groups.c.strategy).where(named)
    known = connection.execute(chosen).one_or_none()
    if known is None:
        raise GroupUnknownError(subject=subject, group=group)
    selected, left_out = _selected(connection, row.subject_id, ask)
    if not selected and not begun and ask.queue is not None:
        raise NotFoundError(Reason.QUEUE_UNKNOWN, subject=subject, queue=ask.queue)
    if not selected and not begun and ask.partition_id is not None:
        raise PartitionUnknownError(
            f"{subject!r} has no partition {ask.partition_id} with data",
            partition_id=ask.partition_id,
        )
    others: tuple[Partition, ...] = ()
    lineage: dict[PartitionId, tuple[PartitionId, ...]] = {}
    if ask.queue is not None or ask.partition_id is not None:
        ids = {each.partition_id for each in selected}
        served = subject_partitions(connection, row.subject_id, SERVED)
        others = tuple(each for each in served if each.partition_id not in ids)
        lineage = subject_parents(connection, row.subject_id)
    return ResetScope(
        group_id=known.group_id,
        strategy=ConsumeStrategy(known.strategy),
        subject_id=row.subject_id,
        static=row.static,
        ask=ask,
        partitions=selected,
        left_out=left_out,
        others=others,
        lineage=lineage,
    )


def _selected(
    connection: Connection, subject_id: int, ask: ResetGroup
) -> tuple[tuple[Partition, ...], tuple[Partition, ...]]:
    return settable_partitions(
        connection, subject_id, queue=ask.queue, partition_id=ask.partition_id
    )


_abandoned = sa.select(partitions.c.partition_id).where(
    partitions.c.subject_id == sa.bindparam("of_subject"),
    partitions.c.abandoned,
    partitions.c.end_offset.is_(None),
)


def settable_partitions(
    connection: Connection,
    subject_id: int,
    *,
    queue: int | None = None,
    partition_id: int | None = None,
) -> tuple[tuple[Partition, ...], tuple[Partition, ...]]:
    """
    Return the partitions to reset, all or the named ones, and those that are left out.

    A parent whose data is gone is replaced by the nearest ancestors with data, because their
    cursors count.
    """
    abandoned = set(connection.execute(_abandoned, {"of_subject": subject_id}).scalars())
    selected: list[Partition] = []
    left_out: list[Partition] = []
    served = subject_partitions(connection, subject_id, SERVED)
    for partition in _past_gone(connection, subject_id, served):
        here = int(partition.partition_id)
        if queue not in {None, partition.queue} or partition_id not in {None, here}:
            continue
        silent = here in abandoned and partition.address is None
        (left_out if silent and partition_id is None else selected).append(partition)
    return tuple(selected), tuple(left_out)


def _past_gone(
    connection: Connection, subject_id: int, served: Sequence[Partition]
) -> list[Partition]:
    ids = {partition.partition_id for partition in served}
    if all(ids.issuperset(partition.parents) for partition in served):
        return list(served)
    nearest = nearest_ancestors(subject_parents(connection, subject_id), ids)
    return [
        replace(each, parents=tuple(sorted(nearest.get(each.partition_id, ())))) for each in served
    ]


def begin_reset(
    connection: Connection,
    scope: ResetScope,
    *,
    holder: str,
    lease_ms: int,
    fence: int = 0,
    reset_id: int = 0,
) -> dict[int, int] | None:
    """
    Keep sessions from joining for `lease_ms`, and give each partition a token above all granted
    ones.

    Args:
        fence: highest token that the brokers have seen; it is above SQL's if the database was
            restored from a copy.
        reset_id: id of the live reset that is carried out; 0: it is not a live one.

    Returns:
        Partition id → token; None if the scope has changed and the reset has to be planned again.

    Raises:
        BusyError: the group has live sessions, or, for a live reset, a session that holds a
            lease; another reset holds the group or is pending; or the database was just rebuilt.
    """
    group_id, ids = scope.group_id, scope.ids
    here = sa.and_(groups.c.group_id == group_id, sa.not_(groups.c.deleting))
    locked = sa.select(groups.c.last_token, groups.c.strategy).where(here).with_for_update()
    row = connection.execute(locked).one_or_none()
    if row is None:
        return None
    last, strategy = row
    sweep_sessions(connection, group_id)
    _check_free(connection, group_id, reset_id)
    selected, _ = _selected(connection, scope.subject_id, scope.ask)
    if {part.partition_id for part in selected} != set(ids) or strategy != scope.strategy:
        return None
    if not take_duty(connection, reset_duty(group_id), holder=holder, lease_ms=lease_ms):
        raise BusyError(Reason.GROUP_BUSY, "another reset of this consumer group is running")
    last_token = raise_token_floor(FencingToken(last), fence)
    tokens = {partition_id: last_token + number for number, partition_id in enumerate(ids, 1)}
    free = {"group_id": group_id, "session": None, "wanted": None, "withdrawn": False}
    rows = [
        {"partition_id": partition_id, "token": token, **free}
        for partition_id, token in tokens.items()
    ]
    insert_or_replace(connection, leases, rows)
    for table in (drained, starts):
        these = sa.and_(table.c.group_id == group_id, table.c.partition_id.in_(ids))
        connection.execute(sa.delete(table).where(these))
    # Brokers of partitions that are no longer drained may have to be told of the group.
    values = {"last_token": last_token + len(tokens), "told": False}
    connection.execute(sa.update(groups).where(here).values(values))
    mark_unsettled(connection, group_id)
    begun = sa.update(live_resets).where(live_resets.c.reset_id == reset_id)
    connection.execute(begun.values(begun=True))
    return tokens


_pending = sa.select(live_resets.c.reset_id).where(
    live_resets.c.group_id == sa.bindparam("of_group"), live_resets.c.answer.is_(None)
)
_live = sa.select(sa.func.count()).where(sessions.c.group_id == sa.bindparam("of_group"))
_held = sa.select(sa.func.count()).where(
    leases.c.group_id == sa.bindparam("of_group"), leases.c.session.is_not(None)
)


def _check_free(connection: Connection, group_id: int, reset_id: int) -> None:
    """Check that no session or other reset prevents a reset, and that the database was not just
    rebuilt. Raises BusyError.
    """
    left_ms = duty_left_ms(connection, rebuilt_duty(group_id))
    if left_ms:
        raise BusyError(
            Reason.GROUP_BUSY,
            "the database was rebuilt, and earlier consumers may still be at work",
            left_ms=left_ms,
        )
    which = {"of_group": group_id}
    pending = connection.execute(_pending, which).scalar_one_or_none() or 0
    if pending != reset_id:
        raise BusyError(
            Reason.GROUP_BUSY,
            "another reset of this consumer group is pending, or this one is done",
        )
    if reset_id:
        held = connection.execute(_held, which).scalar_one()
        if held:
            raise BusyError(
                Reason.GROUP_BUSY, f"{counted(held, 'partition')} of the group are not handed over"
            )
        return
    live = connection.execute(_live, which).scalar_one()
    if live:
        raise BusyError(
            Reason.GROUP_BUSY,
            f"the consumer group has {counted(live, 'live consumer')}: stop them, or reset the "
            "group anyway with live=True (--live), while no other reset runs",
            sessions=live,
        )


def end_reset(
    connection: Connection,
    group_id: int,
    tokens: Mapping[int, int],
    cursors: Mapping[int, int],
    *,
    holder: str,
    answered: tuple[int, str] = (0, ""),
    parked: Collection[int] = (),
) -> None:
    """
    Let sessions join again, and store which partitions are drained.

    Args:
        tokens: the result of `begin_reset`.
        cursors: partition id → cursor that its broker has set; empty if the reset is unfinished.
        answered: id of the finished live reset, and its answer as JSON; 0: there is none.
        parked: ids of partitions that leave parked messages to their children, as their brokers
            report.
    """
    here = groups.c.group_id == group_id
    connection.execute(sa.select(groups.c.group_id).where(here).with_for_update()).one()
    alone = leave_duty(connection, reset_duty(group_id), holder=holder)
    sealed = connection.execute(
        sa.select(partitions.c.partition_id, partitions.c.end_offset, leases.c.token)
        .join(leases, leases.c.partition_id == partitions.c.partition_id)
        .where(
            leases.c.group_id == group_id,
            leases.c.partition_id.in_(cursors),
            partitions.c.state == PartitionState.SEALED,
        )
    )
    at_end = [
        row.partition_id
        for row in sealed
        # A session that was granted it since reads the same cursor from the broker, and reports it
        # as drained.
        if (alone or row.token == tokens[row.partition_id])
        and cursors[row.partition_id] == row.end_offset
    ]
    note_at_end(connection, group_id, at_end, parked)
    reset_id, answer = answered
    done = sa.update(live_resets).where(live_resets.c.reset_id == reset_id)
    connection.execute(done.values(answer=answer))
    mark_unsettled(connection, group_id)


def note_at_end(
    connection: Connection, group_id: int, at_end: Sequence[int], parked: Collection[int] = ()
) -> None:
    """
    Store as drained the sealed partitions at whose end a locked group is, if it has drained their
    parents.

    Partitions that adopt parked messages of ancestors first need an owner.

    Args:
        parked: ids of those that leave parked messages to their children.
    """
    passed = need_no_owner(connection, group_id, _through(connection, group_id, at_end), parked)
    rows = [
        {"group_id": group_id, "partition_id": number, "parked": number in parked}
        for number in passed
    ]
    insert_new(connection, drained, rows)


_not_drained_before = (
    sa.select(partition_parents, partitions.c.lost)
    .join(partitions, partitions.c.partition_id == partition_parents.c.parent_id)
    .outerjoin(
        drained,
        sa.and_(
            drained.c.group_id == sa.bindparam("of_group"),
            drained.c.partition_id == partition_parents.c.parent_id,
        ),
    )
    .where(
        partition_parents.c.partition_id.in_(sa.bindparam("ids")),
        sa.or_(partitions.c.state != PartitionState.EXPIRED, partitions.c.lost),
        SEEN_PARENT,
        drained.c.partition_id.is_(None),
    )
)
"""The parents that block these partitions for a group; a lost parent blocks through its own
parents.
"""


def _through(connection: Connection, group_id: int, at_end: Sequence[int]) -> list[int]:
    """Return, among the partitions whose end a group has reached, those that it has drained,
    because it has drained their parents.
    """
    waits: dict[int, set[int]] = {}
    lost: set[int] = set()
    todo = set(at_end)
    while todo:
        which = {"of_group": group_id, "ids": sorted(todo)}
        rows = connection.execute(_not_drained_before, which).all()
        for row in rows:
            waits.setdefault(row.partition_id, set()).add(row.parent_id)
        todo = {row.parent_id for row in rows if row.lost} - lost
        lost |= todo
    passed = drained_through({*at_end, *lost}, waits)
    return [partition_id for partition_id in sorted(passed) if partition_id not in lost]
