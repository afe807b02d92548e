"""Rows of leases: settled, released, drained.  SQL around the deciders of `leases.py`, synchronous.

Invariants
    Every change of a group's leases holds the lock of the group's row, so that it sees the last one whole.
    A token is stored in the same transaction as the grant that carries it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..protocol.control import Grant, Grants, Heartbeat, ReleaseGrant
from ..protocol.errors import TokenUnknownError
from ..protocol.ids import MAX_I64, FencingToken, PartitionId, SessionId
from ..protocol.limits import TOKEN_STEP_MAX
from ..protocol.routing import ConsumeStrategy, PartitionState
from .dialect import insert_new, insert_or_replace
from .leases import (
    EVERYBODY,
    Lease,
    Readable,
    grant,
    readable_partitions,
    release,
    renew_token,
    settle_leases,
    settle_shared,
)
from .schema import drained, groups, leases, partitions, sessions, subjects
from .store_partitions import granted_partitions, subject_parents
from .store_sessions import live_session, mark_unsettled, sweep_sessions

log = logging.getLogger("keylane.metaserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What the clients should hear of: new versions of sessions' grants, and sessions that ended."""

    versions: Mapping[SessionId, int]
    ended: Collection[SessionId] = ()


NOTHING = Changes(versions={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """What came of some releases."""

    changes: Changes
    refused: Mapping[ReleaseGrant, TokenUnknownError]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    group_id: int
    subject_id: int
    last_token: FencingToken
    version: int
    settled: bool
    route_version: int
    """The one the group was settled with."""
    subject_version: int
    """The one the subject has now."""
    shared: bool


def settle_group(connection: Connection, group_id: int) -> Changes:
    """Sweep dead sessions, then withdraw and grant until the leases fit the sessions and the partitions."""
    group = _lock_group(connection, group_id)
    ended = sweep_sessions(connection, group_id)
    moved = group.route_version != group.subject_version
    if group.settled and not ended and not moved:
        return NOTHING
    found = sa.select(sessions.c.session, sessions.c.suspended).order_by(sessions.c.joined)
    members = connection.execute(found.where(sessions.c.group_id == group_id)).all()
    live = [SessionId(one.session) for one in members]
    rows = sa.select(leases).where(leases.c.group_id == group_id)
    held = {row.partition_id: _lease(row) for row in connection.execute(rows)}
    begun = {key for key, lease in held.items() if lease.session or lease.wanted}
    readable = _readable(connection, group, begun)
    if group.shared:
        settlement = settle_shared(held, readable, last_token=group.last_token)
        moved = moved or bool(settlement.leases)
    else:
        settlement = settle_leases(
            held,
            live,
            readable,
            suspended={SessionId(one.session) for one in members if one.suspended},
            last_token=group.last_token,
        )
    _store_leases(connection, group_id, settlement.leases)
    # A new route version may mean a new address: everybody's grants are told again.
    changed = set(live) if moved else settlement.sessions
    version = group.version + 1
    connection.execute(
        sa.update(groups)
        .where(groups.c.group_id == group_id)
        .values(
            version=version,
            last_token=settlement.last_token,
            settled=True,
            route_version=group.subject_version,
        )
    )
    _raise_versions(connection, changed, version)
    return Changes(versions=dict.fromkeys(changed, version), ended=ended)


def release_leases(connection: Connection, asks: Sequence[ReleaseGrant]) -> Released:
    """
    A session is through with hand-overs: grant each of these partitions to whom it was withdrawn for.

    Args:
        asks: all of one session; those of a token that is not its own are in the answer's `refused`.

    Raises:
        SessionUnknownError
    """
    session = SessionId(asks[0].session)
    assert all(ask.session == session for ask in asks)
    group = _lock_group(connection, live_session(connection, session).group_id)
    live_session(connection, session)  # it may have been swept while the lock was waited for
    if group.shared:
        return _renew_tokens(connection, group, asks)
    refused: dict[ReleaseGrant, TokenUnknownError] = {}
    free: dict[PartitionId, Lease] = {}
    last_token = group.last_token
    held = _some_leases(connection, group.group_id, [ask.partition_id for ask in asks])
    for ask in asks:
        partition_id = PartitionId(ask.partition_id)
        try:
            left = release(free.get(partition_id, held.get(partition_id)), session, ask.token)
        except TokenUnknownError as error:
            refused[ask] = error
        else:
            free |= {} if left is None else {partition_id: left}
            last_token = _counted_on(last_token, ask.fence)
    if not free:
        return Released(changes=NOTHING, refused=refused)
    able = _locked_sessions(connection, {one.wanted for one in free.values() if one.wanted})
    changed: set[SessionId] = set()
    for partition_id, lease in sorted(free.items()):
        granted = grant(lease, last_token=last_token) if lease.wanted in able else None
        if granted is not None and granted.session is not None:
            free[partition_id] = granted
            last_token = granted.token
            changed.add(granted.session)
    _store_leases(connection, group.group_id, free.values())
    version = group.version + 1
    connection.execute(
        sa.update(groups)
        .where(groups.c.group_id == group.group_id)
        .values(
            version=version,
            last_token=last_token,
            settled=group.settled and all(one.session for one in free.values()),
        )
    )
    _raise_versions(connection, changed, version)
    return Released(changes=Changes(versions=dict.fromkeys(changed, version)), refused=refused)


def _renew_tokens(connection: Connection, group: _Group, asks: Sequence[ReleaseGrant]) -> Released:
    """Brokers take these shared tokens no more, says a session: everybody gets the next ones."""
    held = _some_leases(connection, group.group_id, [ask.partition_id for ask in asks])
    refused: dict[ReleaseGrant, TokenUnknownError] = {}
    renewed: dict[PartitionId, Lease] = {}
    last_token = group.last_token
    for ask in asks:
        partition_id = PartitionId(ask.partition_id)
        counted = _counted_on(last_token, ask.fence)
        try:
            lease = renew_token(held.get(partition_id), ask.token, last_token=counted)
        except TokenUnknownError as error:
            refused[ask] = error
            continue
        if lease is not None:
            renewed[partition_id] = held[partition_id] = lease
            last_token = lease.token
    if not renewed:
        return Released(changes=NOTHING, refused=refused)
    _store_leases(connection, group.group_id, renewed.values())
    version = group.version + 1
    connection.execute(
        sa.update(groups)
        .where(groups.c.group_id == group.group_id)
        .values(version=version, last_token=last_token)
    )
    found = sa.select(sessions.c.session).where(sessions.c.group_id == group.group_id)
    everybody = set(connection.execute(found).scalars())
    _raise_versions(connection, everybody, version)
    return Released(changes=Changes(versions=dict.fromkeys(everybody, version)), refused=refused)


def release_unheld(
    connection: Connection, ask: Heartbeat, holding: Collection[tuple[int, int]]
) -> Changes:
    """
    Release what the session was asked to hand over and does not hold: it never heard of the grant, because that
    was taken back before the answer, or its release did not arrive.

    A session that has not heard of the latest grants yet is passed over: it may be about to take what it holds.

    Raises:
        SessionUnknownError
    """
    row = live_session(connection, ask.session)
    _lock_group(connection, row.group_id)
    if live_session(connection, ask.session).grants_version != ask.known_version:
        return NOTHING
    asked = sa.select(leases.c.partition_id, leases.c.token).where(
        leases.c.session == ask.session, leases.c.withdrawn
    )
    lost = [
        ReleaseGrant(session=ask.session, partition_id=partition_id, token=token)
        for partition_id, token in connection.execute(asked.order_by(leases.c.partition_id))
        if (partition_id, token) not in holding
    ]
    return release_leases(connection, lost).changes if lost else NOTHING


def note_drained(connection: Connection, session: str, ids: Collection[int]) -> int | None:
    """
    The group has acked these sealed partitions to their end, says the session that holds them, or shares them.

    Others than SEALED ones of the session's own are passed over: their present owner will say it.

    Returns:
        The id of the group if that was news, else None.

    Raises:
        SessionUnknownError
    """
    group_id = live_session(connection, session).group_id
    _lock_group(connection, group_id)
    wanted = [one for one in ids if 0 < one <= MAX_I64]
    known = sa.select(drained.c.partition_id).where(drained.c.group_id == group_id)
    found = (
        sa.select(leases.c.partition_id)
        .join(partitions, partitions.c.partition_id == leases.c.partition_id)
        .where(
            leases.c.group_id == group_id,
            sa.or_(leases.c.session == session, leases.c.wanted == EVERYBODY),
            leases.c.partition_id.in_(wanted),
            leases.c.partition_id.not_in(known),
            partitions.c.state == PartitionState.SEALED,
        )
    )
    news = [
        {"group_id": group_id, "partition_id": one} for one in connection.execute(found).scalars()
    ]
    insert_new(connection, drained, news)
    if not news:
        return None
    mark_unsettled(connection, group_id)
    return group_id


def read_grants(connection: Connection, session: str) -> Grants:
    """
    What a live session holds.

    Raises:
        SessionUnknownError
    """
    # The version first: if a change comes between, the grants are newer than it says, and are told again.
    row = live_session(connection, session)
    found = sa.select(groups.c.strategy).where(groups.c.group_id == row.group_id)
    mine = sa.and_(leases.c.session == session, sa.not_(leases.c.withdrawn))
    if connection.execute(found).scalar_one() == ConsumeStrategy.SHARED:
        suspended = sa.select(sessions.c.suspended).where(sessions.c.session == session)
        mine = sa.and_(
            leases.c.group_id == row.group_id,
            leases.c.wanted == EVERYBODY,
            sa.not_(suspended.scalar_subquery()),
        )
    held = granted_partitions(connection, mine)
    return Grants(
        version=row.grants_version,
        ttl_ms=row.ttl_ms,
        grants=tuple(Grant(partition=partition, token=token) for partition, token in held),
    )


def _lock_group(connection: Connection, group_id: int) -> _Group:
    row = connection.execute(
        sa.select(groups, subjects.c.route_version.label("subject_version"))
        .join(subjects, subjects.c.subject_id == groups.c.subject_id)
        .where(groups.c.group_id == group_id)
        .with_for_update(of=groups)
    ).one()
    return _Group(
        group_id=row.group_id,
        subject_id=row.subject_id,
        last_token=FencingToken(row.last_token),
        version=row.version,
        settled=row.settled,
        route_version=row.route_version,
        subject_version=row.subject_version,
        shared=row.strategy == ConsumeStrategy.SHARED,
    )


def _readable(
    connection: Connection, group: _Group, begun: Collection[PartitionId]
) -> list[Readable]:
    of_subject = partitions.c.subject_id == group.subject_id
    parents = subject_parents(connection, of_subject)
    rows = connection.execute(
        sa.select(
            partitions.c.partition_id,
            partitions.c.state,
            partitions.c.forsaken,
            partitions.c.end_offset,
        )
        .where(of_subject, partitions.c.state != PartitionState.PLANNED)
        .order_by(partitions.c.range_start, partitions.c.partition_id)
    )
    facts = [
        Readable(
            partition_id=PartitionId(row.partition_id),
            state=PartitionState(row.state),
            parents=parents.get(row.partition_id, ()),
            forsaken=row.forsaken,
            ended=row.forsaken and row.end_offset is not None,
            begun=row.partition_id in begun,
        )
        for row in rows
    ]
    passed = sa.select(drained.c.partition_id).where(drained.c.group_id == group.group_id)
    return readable_partitions(facts, set(connection.execute(passed).scalars()))


def _counted_on(last_token: FencingToken, fence: int) -> FencingToken:
    """The token to count on from, when a broker has seen `fence`: a database restored from a copy is behind it."""
    if not last_token < fence <= last_token + TOKEN_STEP_MAX:
        return last_token
    log.warning("a broker has seen token %d, above our last one, %d", fence, last_token)
    return FencingToken(fence)


def _some_leases(
    connection: Connection, group_id: int, ids: Collection[int]
) -> dict[PartitionId, Lease]:
    known = [one for one in ids if 0 < one <= MAX_I64]
    found = sa.select(leases).where(leases.c.group_id == group_id, leases.c.partition_id.in_(known))
    return {row.partition_id: _lease(row) for row in connection.execute(found)}


def _locked_sessions(connection: Connection, ids: Collection[SessionId]) -> set[SessionId]:
    """Those of these sessions that exist; they stay until the transaction ends."""
    found = sa.select(sessions.c.session).where(sessions.c.session.in_(ids))
    rows = connection.execute(found.order_by(sessions.c.session).with_for_update())
    return {SessionId(one) for one in rows.scalars()}


def _lease(row: sa.Row[Any]) -> Lease:
    return Lease(
        partition_id=row.partition_id,
        token=row.token,
        session=row.session,
        wanted=row.wanted,
        withdrawn=row.withdrawn,
    )


def _store_leases(connection: Connection, group_id: int, rows: Collection[Lease]) -> None:
    insert_or_replace(connection, leases, [{"group_id": group_id, **asdict(row)} for row in rows])


def _raise_versions(connection: Connection, changed: Collection[SessionId], version: int) -> None:
    if changed:
        told = sessions.c.session.in_(changed)
        connection.execute(sa.update(sessions).where(told).values(grants_version=version))
