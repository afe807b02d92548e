"""Settles, releases and drains leases: SQL around the decisions of `leases.py`, synchronous.

Invariants
    Every change of a group's leases holds the lock of the group's row, so that it sees the whole of
    the previous change.
    A token is stored in the transaction that grants it.

Stores the brokers to which sessions cannot connect.

A consumer that a broker refuses, or that the network separates from it, can still renew its leases
at the metaserver. It reports the broker in its heartbeats, and its partitions there are granted to
sessions that can connect.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import Grant, Grants, Heartbeat, ReleaseGrant, Retention
from ...protocol.errors import (
    GroupUnknownError,
    KeylaneError,
    SessionUnknownError,
    TokenUnknownError,
)
from ...protocol.groups import OperatorSwitch
from ...protocol.ids import FencingToken, PartitionId, SessionId
from ...protocol.routing import ConsumeStrategy, Partition, PartitionState
from ..cluster.heard import mark_unsettled
from ..cluster.partitions import (
    HAS_PARENTS,
    blocking_parents,
    granted_partitions,
    is_gone,
    select_granted,
)
from ..sql.dialect import insert_new
from ..sql.duties import DUTY_LEFT_MS, rebuilt_duty
from ..sql.schema import (
    drained,
    heard,
    leases,
    live_resets,
    operations,
    partitions,
    sessions,
    starts,
    subjects,
)
from .leases import (
    EVERYBODY,
    PartitionFacts,
    PartitionLease,
    grant,
    raise_token_floor,
    readable_partitions,
    release,
    renew_token,
    settle_leases,
    settle_shared,
)
from .locked_group import (
    LockedGroup,
    lock_able_sessions,
    lock_group,
    raise_versions,
    read_leases,
    read_leases_of,
    read_members,
    set_group,
    store_leases,
    sweep_members,
    valid_ids,
)
from .parked_ancestors import TakenOver, read_taken_over
from .sessions import live_members, live_session, live_sessions

_set_unreached = sa.update(sessions).where(sessions.c.session == sa.bindparam("of_session"))
_unreached = sa.select(sessions.c.session, sessions.c.unreached).where(
    sessions.c.group_id == sa.bindparam("of_group"), sessions.c.unreached != ""
)
_hosted = sa.select(partitions.c.partition_id, partitions.c.broker_group).where(
    partitions.c.subject_id == sa.bindparam("of_subject"),
    partitions.c.broker_group.in_(sa.bindparam("names", expanding=True)),
    partitions.c.state.in_([PartitionState.OPEN, PartitionState.SEALED]),
)


def note_unreached(connection: Connection, session: str, broker_groups: Collection[str]) -> int:
    """
    Store the broker groups to which a session cannot connect, and mark its group unsettled; returns
    the group's id.

    Raises:
        SessionUnknownError: the session has ended.
    """
    group_id = live_session(connection, session).group_id
    lock_group(connection, group_id)
    live_session(connection, session)  # the session may have ended before the group was locked
    names = " ".join(sorted(set(broker_groups)))
    connection.execute(_set_unreached, {"of_session": session, "unreached": names})
    mark_unsettled(connection, group_id)
    return group_id


def read_unreached(
    connection: Connection, group_id: int, subject_id: int
) -> dict[PartitionId, set[SessionId]]:
    """Return partition → sessions of the group that get no connection to its broker."""
    rows = connection.execute(_unreached, {"of_group": group_id}).all()
    if not rows:
        return {}
    shut_out: dict[str, set[SessionId]] = {}
    for session, names in rows:
        for name in names.split():
            shut_out.setdefault(name, set()).add(SessionId(session))
    which = {"of_subject": subject_id, "names": sorted(shut_out)}
    hosted = connection.execute(_hosted, which)
    return {PartitionId(partition_id): shut_out[name] for partition_id, name in hosted}


log = logging.getLogger("keylane.metaserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes that waiting heartbeats need: new versions of sessions' grants, and sessions that
    ended.
    """

    versions: Mapping[SessionId, int]
    ended: Collection[SessionId] = ()


NO_CHANGES = Changes(versions={})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOutcome:
    """The result of releases: the changes, and the error of each refused one."""

    changes: Changes
    refused: Mapping[ReleaseGrant, KeylaneError]


def settle_group(connection: Connection, group_id: int, *, anew: bool = False) -> Changes:
    """
    End expired sessions, then withdraw and grant leases so that they fit the sessions and
    partitions.

    Does nothing if the group was deleted.

    Args:
        anew: settle the group even if it is settled already.
    """
    try:
        group = lock_group(connection, group_id)
    except GroupUnknownError:
        return NO_CHANGES
    members, ended = sweep_members(connection, group_id)
    now = _circumstances(connection, group)
    if not group.shared and now.rebuilt_left_ms > 0:
        if anew:
            mark_unsettled(connection, group_id)
        return Changes(versions={}, ended=ended)  # it stays unsettled, and is settled again later
    moved = group.route_version != now.route_version
    if group.settled and not ended and not moved and not anew:
        return NO_CHANGES
    held = read_leases(connection, group_id)
    begun = {key for key, lease in held.items() if lease.session or lease.wanted}
    waits = now.resetting or now.being_replaced
    readable = [] if waits else _read_readable(connection, group, begun, now.retention)
    if group.shared:
        settlement = settle_shared(held, readable, last_token=group.last_token)
        moved = moved or bool(settlement.leases)
    else:
        settlement = settle_leases(
            held,
            list(members),
            readable,
            suspended={session for session, suspended in members.items() if suspended},
            unreached=read_unreached(connection, group_id, group.subject_id),
            last_token=group.last_token,
        )
    store_leases(connection, group_id, settlement.leases)
    # A new route version may mean a new address: the grants of every session are sent again.
    changed = set(members) if moved else settlement.sessions
    version = group.version + 1
    set_group(
        connection,
        group_id,
        version=version,
        last_token=settlement.last_token,
        settled=True,
        route_version=now.route_version,
    )
    raise_versions(connection, changed, version)
    return Changes(versions=dict.fromkeys(changed, version), ended=ended)


def release_leases(connection: Connection, asks: Sequence[ReleaseGrant]) -> ReleaseOutcome:
    """
    Release leases that sessions have handed over, and grant each to the session for which it was
    withdrawn.

    One transaction serves all of them, because a hand-over often concerns many partitions, and a
    new session gets partitions from many others.

    Args:
        asks: the releases; `refused` of the result has those with a token that their session
            was not granted, and those of sessions that have ended.
    """
    refused: dict[ReleaseGrant, KeylaneError] = {}
    versions: dict[SessionId, int] = {}
    ids = {ask.session for ask in asks}
    for group_id in sorted({row.group_id for row in live_sessions(connection, ids).values()}):
        try:
            group = lock_group(connection, group_id)
        except GroupUnknownError:
            continue
        # Some sessions may have ended before the group was locked.
        live = live_sessions(connection, ids)
        here = [
            ask for ask in asks if ask.session in live and live[ask.session].group_id == group_id
        ]
        release_here = _renew_tokens if group.shared else _release
        outcome = release_here(connection, group, here)
        ids -= {ask.session for ask in here}
        refused |= outcome.refused
        versions |= outcome.changes.versions
    refused |= {ask: SessionUnknownError(session=ask.session) for ask in asks if ask.session in ids}
    return ReleaseOutcome(changes=Changes(versions=versions), refused=refused)


def _release(
    connection: Connection, group: LockedGroup, asks: Sequence[ReleaseGrant]
) -> ReleaseOutcome:
    refused: dict[ReleaseGrant, KeylaneError] = {}
    free: dict[PartitionId, PartitionLease] = {}
    last_token = group.last_token
    held = read_leases_of(connection, group.group_id, [ask.partition_id for ask in asks])
    for ask in asks:
        partition_id = PartitionId(ask.partition_id)
        try:
            lease = free.get(partition_id, held.get(partition_id))
            left = release(lease, SessionId(ask.session), ask.token)
        except TokenUnknownError as error:
            refused[ask] = error
        else:
            free |= {} if left is None else {partition_id: left}
            last_token = _token_floor(last_token, ask.fence)
    if not free:
        return ReleaseOutcome(changes=NO_CHANGES, refused=refused)
    # The session for which a lease was withdrawn may have been suspended since, before the group is
    # settled.
    wanted = {lease.wanted for lease in free.values() if lease.wanted}
    able = lock_able_sessions(connection, wanted)
    changed: set[SessionId] = set()
    for partition_id, lease in sorted(free.items()):
        granted = grant(lease, last_token=last_token) if lease.wanted in able else None
        if granted is not None and granted.session is not None:
            free[partition_id] = granted
            last_token = granted.token
            changed.add(granted.session)
    store_leases(connection, group.group_id, free.values())
    version = group.version + 1
    settled = group.settled and all(lease.session for lease in free.values())
    set_group(connection, group.group_id, version=version, last_token=last_token, settled=settled)
    raise_versions(connection, changed, version)
    return ReleaseOutcome(
        changes=Changes(versions=dict.fromkeys(changed, version)), refused=refused
    )


def _renew_tokens(
    connection: Connection, group: LockedGroup, asks: Sequence[ReleaseGrant]
) -> ReleaseOutcome:
    """Replace tokens of a shared group that brokers refuse; every session of the group gets new
    ones.
    """
    held = read_leases_of(connection, group.group_id, [ask.partition_id for ask in asks])
    refused: dict[ReleaseGrant, KeylaneError] = {}
    renewed: dict[PartitionId, PartitionLease] = {}
    last_token = group.last_token
    for ask in asks:
        partition_id = PartitionId(ask.partition_id)
        floor = _token_floor(last_token, ask.fence)
        try:
            lease = renew_token(held.get(partition_id), ask.token, last_token=floor)
        except TokenUnknownError as error:
            refused[ask] = error
            continue
        if lease is not None:
            renewed[partition_id] = held[partition_id] = lease
            last_token = lease.token
    if not renewed:
        return ReleaseOutcome(changes=NO_CHANGES, refused=refused)
    store_leases(connection, group.group_id, renewed.values())
    version = group.version + 1
    set_group(connection, group.group_id, version=version, last_token=last_token)
    members = set(read_members(connection, group.group_id))
    raise_versions(connection, members, version)
    return ReleaseOutcome(
        changes=Changes(versions=dict.fromkeys(members, version)), refused=refused
    )


_withdrawn = (
    sa.select(leases.c.session, leases.c.partition_id, leases.c.token)
    .where(leases.c.session.in_(sa.bindparam("ids")), leases.c.withdrawn)
    .order_by(leases.c.partition_id)
)


def release_unheld(connection: Connection, asks: Sequence[Heartbeat]) -> Changes:
    """
    Release the leases that sessions were asked to hand over and do not hold.

    Either the grant was withdrawn before its session learned of it, or the release was lost.
    Sessions that have ended, or do not know their latest grants and may still take them, are
    skipped.
    """
    by_session = {ask.session: ask for ask in asks}
    for group_id in sorted(
        {row.group_id for row in live_sessions(connection, by_session).values()}
    ):
        try:
            lock_group(connection, group_id)
        except GroupUnknownError:
            continue
    current = [
        session
        for session, row in live_sessions(connection, by_session).items()
        if row.grants_version == by_session[session].known_version
    ]
    lost = [
        ReleaseGrant(session=row.session, partition_id=row.partition_id, token=row.token)
        for row in connection.execute(_withdrawn, {"ids": current})
        if (row.partition_id, row.token) not in set(by_session[row.session].holding or ())
    ]
    return release_leases(connection, lost).changes if lost else NO_CHANGES


_drained = sa.select(drained.c.partition_id).where(drained.c.group_id == sa.bindparam("of_group"))
_drained_of = _drained.where(drained.c.partition_id.in_(sa.bindparam("ids", expanding=True)))
_heard = sa.select(heard.c.partition_id).where(heard.c.group_id == sa.bindparam("of_group"))
_newly_drained = (
    sa.select(leases.c.partition_id, leases.c.token)
    .join(partitions, partitions.c.partition_id == leases.c.partition_id)
    .where(
        leases.c.group_id == sa.bindparam("of_group"),
        sa.or_(leases.c.session == sa.bindparam("of_session"), leases.c.wanted == EVERYBODY),
        leases.c.partition_id.in_(sa.bindparam("ids")),
        leases.c.partition_id.not_in(_drained),
        partitions.c.state == PartitionState.SEALED,
    )
)


def note_drained(
    connection: Connection,
    session: str,
    ids: Collection[int],
    parked: Collection[int] = (),
    holding: Collection[tuple[int, int]] | None = None,
) -> int | None:
    """
    Store that a group has acked sealed partitions to their end, as reported by a session that holds
    or shares them.

    Partitions that are not SEALED or not held by the session are ignored: their present owner will
    report them.

    Args:
        parked: ids of those partitions on which the group has parked messages.
        holding: (partition id, token) of the leases that the session reports; None: it reports
            none. A report under an earlier token may be older than a reset of the cursor during the
            session.

    Returns:
        The id of the group if a partition is newly drained, else None.

    Raises:
        SessionUnknownError: the session has ended.
    """
    group_id = live_session(connection, session).group_id
    lock_group(connection, group_id)
    live_session(
        connection, session
    )  # a reset may have ended the session before the group was locked
    which = {"of_group": group_id, "of_session": session, "ids": valid_ids(ids)}
    rows = [
        {"group_id": group_id, "partition_id": partition_id, "parked": partition_id in parked}
        for partition_id, token in connection.execute(_newly_drained, which)
        if holding is None or (partition_id, token) in holding
    ]
    insert_new(connection, drained, rows)
    if not rows:
        return None
    mark_unsettled(connection, group_id)
    return group_id


_held = select_granted(
    sa.and_(leases.c.session.in_(sa.bindparam("ids")), sa.not_(leases.c.withdrawn))
)
_shared = select_granted(
    sa.and_(leases.c.group_id == sa.bindparam("of_group"), leases.c.wanted == EVERYBODY)
)


def read_grants(connection: Connection, session: str) -> Grants:
    """
    Return the grants of a live session.

    Raises:
        SessionUnknownError: the session has ended.
    """
    grants = read_many_grants(connection, [session]).get(SessionId(session))
    if grants is None:
        raise SessionUnknownError(session=session)
    return grants


def read_many_grants(connection: Connection, ids: Collection[str]) -> dict[SessionId, Grants]:
    """Return the grants of sessions of one group; sessions that have ended are left out."""
    # The versions are read first: after a change in between, the grants are newer than their
    # version, and are sent once more.
    members = live_members(connection, ids)
    if not members:
        return {}
    row, settings = members[0]
    if settings.strategy is ConsumeStrategy.SHARED:
        granted = granted_partitions(connection, _shared, of_group=row.group_id)
        to_all = [(partition, token) for partition, token, _ in granted]
        off = OperatorSwitch.OFF
        held = {
            row.session: to_all
            for row, settings in members
            if settings.suspended_by is off and not row.suspended
        }
    else:
        held = {}
        granted = granted_partitions(connection, _held, ids=[row.session for row, _ in members])
        for partition, token, session in granted:
            held.setdefault(SessionId(session or ""), []).append((partition, token))
    parked = read_taken_over(connection, row.group_id, [partition for partition, *_ in granted])
    return {
        row.session: Grants(
            version=row.grants_version,
            ttl_ms=row.ttl_ms,
            grants=tuple(
                _grant(partition, token, parked.get(partition.partition_id, ()))
                for partition, token in held.get(row.session, ())
            ),
            policy=settings.policy,
            suspended_by=settings.suspended_by,
            order_strategy=settings.order_strategy,
            group_id=row.group_id,
        )
        for row, settings in members
    }


def _grant(partition: Partition, token: int, parked: Collection[TakenOver]) -> Grant:
    ranges = tuple(each.ranges for each in parked)
    return Grant(
        partition=partition,
        token=token,
        parked_parents=tuple(each.partition for each in parked),
        parked_tokens=tuple(each.token for each in parked),
        parked_ranges=ranges if any(ranges) else (),
    )


class _Circumstances(NamedTuple):
    """The facts outside a group's own rows on which its leases depend; read once the group is
    locked.
    """

    route_version: int
    """The route version of the group's subject."""
    retention: Retention
    """The retention of the group's subject."""
    resetting: bool
    """True while an operator resets the group's cursors under live sessions, which are granted
    nothing meanwhile.
    """
    rebuilt_left_ms: int
    """Time, in milliseconds, for which sessions from before a rebuild may still be at work."""
    being_replaced: bool
    """True while a publication replaces the subject's messages. The place where its groups continue
    is fixed already, so that nothing is granted until they continue there.
    """


_around = sa.select(
    subjects.c.route_version,
    subjects.c.retention,
    sa.exists()
    .where(live_resets.c.group_id == sa.bindparam("of_group"), live_resets.c.answer.is_(None))
    .label("resetting"),
    sa.func.coalesce(DUTY_LEFT_MS.scalar_subquery(), 0).label("rebuilt_left_ms"),
    sa.exists()
    .where(operations.c.running == sa.bindparam("of_subject"), operations.c.replaces)
    .label("being_replaced"),
).where(subjects.c.subject_id == sa.bindparam("of_subject"))


def _circumstances(connection: Connection, group: LockedGroup) -> _Circumstances:
    which = {"of_group": group.group_id, "of_subject": group.subject_id}
    row = connection.execute(_around, which | {"of_name": rebuilt_duty(group.group_id)}).one()
    return _Circumstances(
        route_version=row.route_version,
        retention=Retention(row.retention),
        resetting=bool(row.resetting),
        rebuilt_left_ms=row.rebuilt_left_ms,
        being_replaced=bool(row.being_replaced),
    )


_partition_facts = (
    sa.select(
        partitions.c.partition_id,
        partitions.c.state,
        partitions.c.abandoned,
        partitions.c.end_offset,
        partitions.c.lost,
        HAS_PARENTS.label("has_parents"),
        sa.exists(_heard.where(heard.c.partition_id == partitions.c.partition_id)).label("heard"),
        sa.exists()
        .where(
            starts.c.group_id == sa.bindparam("of_group"),
            starts.c.partition_id == partitions.c.partition_id,
        )
        .label("starting"),
        sa.exists(_drained.where(drained.c.partition_id == partitions.c.partition_id)).label(
            "drained"
        ),
    )
    .where(
        partitions.c.subject_id == sa.bindparam("of_subject"),
        partitions.c.state != PartitionState.PLANNED,
        sa.not_(
            is_gone(partitions)
        ),  # expired ones block nothing, and there are more and more of them
    )
    .order_by(partitions.c.range_start, partitions.c.partition_id)
)


def _read_readable(
    connection: Connection,
    group: LockedGroup,
    begun: Collection[PartitionId],
    retention: Retention,
) -> list[PartitionFacts]:
    here = {"of_group": group.group_id}
    rows = connection.execute(_partition_facts, here | {"of_subject": group.subject_id}).all()
    # Lineage is read after the facts, because it is written before its partition and never changes.
    has_parents = any(row.has_parents for row in rows)
    parents = blocking_parents(connection, group.subject_id) if has_parents else {}
    facts = [
        PartitionFacts(
            partition_id=PartitionId(row.partition_id),
            state=PartitionState(row.state),
            parents=parents.get(row.partition_id, ()),
            abandoned=row.abandoned,
            ended=row.abandoned and row.end_offset is not None and not row.lost,
            begun=row.partition_id in begun,
            lost=row.lost,
            heard=row.heard or retention is not Retention.ACKED,
            starting=row.starting,
        )
        for row in rows
    ]
    passed = {PartitionId(row.partition_id) for row in rows if row.drained}
    # Some parents are not among the facts. Other drained partitions are not read: nothing depends
    # on them.
    if outside := {parent for each in facts for parent in each.parents} - {
        row.partition_id for row in rows
    }:
        of_parents = connection.execute(_drained_of, here | {"ids": sorted(outside)})
        passed |= set(of_parents.scalars())
    return readable_partitions(facts, passed)


def _token_floor(last_token: FencingToken, fence: int) -> FencingToken:
    floor = raise_token_floor(last_token, fence)
    if fence > last_token:
        log.warning(
            "a session reports that a broker has seen token %d, above the last one granted, %d; "
            "the next token follows %d",
            fence,
            last_token,
            floor,
        )
    return floor
