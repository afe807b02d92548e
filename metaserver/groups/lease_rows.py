"""Settles and releases leases, and stores what sessions report about them. Runs SQL synchronously;
the decisions are made in `leases.py`.

Invariants
    Every transaction that changes a group's leases locks the group's row, so that it sees the
    previous change completely.
    A token is stored in the same transaction that grants it.

A consumer that cannot connect to a broker can still renew its leases at the metaserver. It reports
the broker in its heartbeats, and its partitions there are granted to sessions that can connect.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.control import Grant, Grants, Heartbeat, PreviousOwner, ReleaseGrant, Retention
from ...protocol.errors import (
    GroupUnknownError,
    KeylaneError,
    SessionUnknownError,
    TokenUnknownError,
)
from ...protocol.groups import OperatorSwitch
from ...protocol.ids import FencingToken, PartitionId, SessionId
from ...protocol.routing import ConsumeStrategy, Partition, PartitionState
from ...protocol.text import counted
from ..cluster.announcements import mark_unsettled
from ..cluster.partitions import (
    HAS_PARENTS,
    blocking_parents,
    granted_partitions,
    is_expired_by_retention,
    select_granted,
)
from ..sql.dialect import insert_new, read_calendar_ms
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
    GroupPartition,
    PartitionLease,
    Settlement,
    grant_lease,
    raise_token_floor,
    readable_partitions,
    release_lease,
    renew_token,
    settle_leases,
    settle_shared_leases,
)
from .locked_group import (
    LockedGroup,
    end_expired_members,
    lock_active_sessions,
    lock_group,
    raise_versions,
    read_holders,
    read_leases,
    read_leases_of,
    read_members,
    set_group,
    store_leases,
    valid_ids,
)
from .parked_ancestors import AdoptedAncestor, read_adopted
from .sessions import read_live_members, read_live_session, read_live_sessions

_update_unreached = sa.update(sessions).where(sessions.c.session == sa.bindparam("of_session"))
_unreached_query = sa.select(sessions.c.session, sessions.c.unreached).where(
    sessions.c.group_id == sa.bindparam("of_group"), sessions.c.unreached != ""
)
_unreached_since_query = sa.select(sessions.c.unreached, sessions.c.unreached_since).where(
    sessions.c.session == sa.bindparam("of_session")
)
_hosted_query = sa.select(partitions.c.partition_id, partitions.c.broker_group).where(
    partitions.c.subject_id == sa.bindparam("of_subject"),
    partitions.c.broker_group.in_(sa.bindparam("names", expanding=True)),
    partitions.c.state.in_([PartitionState.OPEN, PartitionState.SEALED]),
)


def store_unreached(connection: Connection, session: str, broker_groups: Collection[str]) -> int:
    """
    Store the broker groups to which a session cannot connect, and mark its group as unsettled.

    Returns:
        The group's id.

    Raises:
        SessionUnknownError: the session has ended.
    """
    group_id = read_live_session(connection, session).group_id
    lock_group(connection, group_id)
    read_live_session(connection, session)  # the session may have ended before the group was locked
    stored = connection.execute(_unreached_since_query, {"of_session": session}).one()
    known = dict(zip(stored.unreached.split(), stored.unreached_since.split(), strict=False))
    now = read_calendar_ms(connection)
    names = sorted(set(broker_groups))
    row = {
        "of_session": session,
        "unreached": " ".join(names),
        "unreached_since": " ".join(str(known.get(name, now)) for name in names),
    }
    connection.execute(_update_unreached, row)
    mark_unsettled(connection, group_id)
    return group_id


def read_unreached(
    connection: Connection, group_id: int, subject_id: int
) -> dict[PartitionId, set[SessionId]]:
    """Return a dict that maps a partition to the sessions of the group that cannot connect to its
    broker.
    """
    rows = connection.execute(_unreached_query, {"of_group": group_id}).all()
    if not rows:
        return {}
    sessions_by_group: dict[str, set[SessionId]] = {}
    for session, names in rows:
        for name in names.split():
            sessions_by_group.setdefault(name, set()).add(SessionId(session))
    parameters = {"of_subject": subject_id, "names": sorted(sessions_by_group)}
    hosted_rows = connection.execute(_hosted_query, parameters)
    return {
        PartitionId(partition_id): sessions_by_group[name] for partition_id, name in hosted_rows
    }


log = logging.getLogger("keylane.metaserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes to publish to waiting heartbeats: new versions of the grants of sessions, and
    sessions that have ended.
    """

    versions: Mapping[SessionId, int]
    ended_sessions: Collection[SessionId] = ()
    lost_leases: int = 0
    """The number of leases that the ended sessions held."""
    hand_overs: int = 0
    """The number of partitions that were granted after another session had held them."""
    rebalance: str = ""
    """A sentence for the log, if partitions were granted or withdrawn."""


NO_CHANGES = Changes(versions={})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOutcome:
    """The result of a batch of releases: the changes, and the error of each refused release."""

    changes: Changes
    errors: Mapping[ReleaseGrant, KeylaneError]


def settle_group(connection: Connection, group_id: int, *, force: bool = False) -> Changes:
    """
    End expired sessions, then withdraw and grant leases according to the live sessions and the
    readable partitions.

    Does nothing if the group was deleted.

    Args:
        force: settle the group even if it is marked as settled.
    """
    try:
        group = lock_group(connection, group_id)
    except GroupUnknownError:
        return NO_CHANGES
    members, ended_sessions, lost_leases = end_expired_members(connection, group_id)
    context = _read_context(connection, group)
    if not group.shared and context.rebuilt_left_ms > 0:
        if force:
            mark_unsettled(connection, group_id)
        return Changes(  # it stays unsettled, and is retried later
            versions={}, ended_sessions=ended_sessions, lost_leases=lost_leases
        )
    route_changed = group.route_version != context.route_version
    if group.settled and not ended_sessions and not route_changed and not force:
        return NO_CHANGES
    stored_leases = read_leases(connection, group_id)
    assigned_ids = {key for key, lease in stored_leases.items() if lease.session or lease.wanted}
    is_paused = context.resetting or context.being_replaced
    readable = (
        []
        if is_paused
        else _read_readable_partitions(connection, group, assigned_ids, context.retention)
    )
    if group.shared:
        settlement = settle_shared_leases(stored_leases, readable, last_token=group.last_token)
        route_changed = route_changed or bool(settlement.leases)
    else:
        settlement = settle_leases(
            stored_leases,
            list(members),
            readable,
            suspended={session for session, suspended in members.items() if suspended},
            unreachable=read_unreached(connection, group_id, group.subject_id),
            last_token=group.last_token,
        )
    store_leases(connection, group_id, settlement.leases)
    # A new route version may contain a new broker address, so all sessions are sent their grants
    # again.
    changed_sessions = set(members) if route_changed else settlement.sessions
    version = group.version + 1
    set_group(
        connection,
        group_id,
        version=version,
        last_token=settlement.last_token,
        settled=True,
        route_version=context.route_version,
    )
    raise_versions(connection, changed_sessions, version)
    granted_tokens = [
        stored_leases[lease.partition_id].token if lease.partition_id in stored_leases else 0
        for lease in settlement.leases
        if lease.session is not None and lease.token > group.last_token
    ]
    return Changes(
        versions=dict.fromkeys(changed_sessions, version),
        ended_sessions=ended_sessions,
        lost_leases=lost_leases,
        hand_overs=sum(token > 0 for token in granted_tokens),
        rebalance=_rebalance_line(group, context.subject, members, settlement, granted_tokens),
    )


def _rebalance_line(
    group: LockedGroup,
    subject: str,
    members: Collection[SessionId],
    settlement: Settlement,
    granted_tokens: Collection[int],
) -> str:
    """Return the sentence of `Changes.rebalance`."""
    withdrawn = sum(lease.withdrawn for lease in settlement.leases)
    if not granted_tokens and not withdrawn:
        return ""
    return (
        f"group {group.name} of {subject} is rebalanced among {counted(len(members), 'consumer')}: "
        f"{counted(len(granted_tokens), 'partition')} granted, {withdrawn} withdrawn"
    )


def release_leases(connection: Connection, requests: Sequence[ReleaseGrant]) -> ReleaseOutcome:
    """
    Release leases that sessions have handed over, and grant each one to the session it was
    withdrawn for.

    All releases share one transaction, because a hand-over often concerns many partitions, and a
    new session gets partitions from many others.

    Releases by sessions that have ended, and those with a token that the session was never granted,
    are listed in `errors` of the result.
    """
    errors: dict[ReleaseGrant, KeylaneError] = {}
    versions: dict[SessionId, int] = {}
    hand_overs = 0
    ids = {request.session for request in requests}
    for group_id in sorted({row.group_id for row in read_live_sessions(connection, ids).values()}):
        try:
            group = lock_group(connection, group_id)
        except GroupUnknownError:
            continue
        # Some sessions may have ended before the group was locked.
        live_rows = read_live_sessions(connection, ids)
        group_requests = [
            request
            for request in requests
            if request.session in live_rows and live_rows[request.session].group_id == group_id
        ]
        release_in_group = _renew_tokens if group.shared else _release_exclusive
        outcome = release_in_group(connection, group, group_requests)
        ids -= {request.session for request in group_requests}
        errors |= outcome.errors
        versions |= outcome.changes.versions
        hand_overs += outcome.changes.hand_overs
    errors |= {
        request: SessionUnknownError(session=request.session)
        for request in requests
        if request.session in ids
    }
    return ReleaseOutcome(changes=Changes(versions=versions, hand_overs=hand_overs), errors=errors)


def _release_exclusive(
    connection: Connection, group: LockedGroup, requests: Sequence[ReleaseGrant]
) -> ReleaseOutcome:
    """Free the leases of an exclusive group, and grant each one to the session that wants it,
    unless that session is suspended or has ended.
    """
    errors: dict[ReleaseGrant, KeylaneError] = {}
    freed_leases: dict[PartitionId, PartitionLease] = {}
    last_token = group.last_token
    stored_leases = read_leases_of(
        connection, group.group_id, [request.partition_id for request in requests]
    )
    holders = read_holders(connection, {request.session for request in requests})
    for request in requests:
        partition_id = PartitionId(request.partition_id)
        try:
            lease = freed_leases.get(partition_id, stored_leases.get(partition_id))
            client, suspended = holders.get(SessionId(request.session), ("", False))
            freed_lease = release_lease(
                lease,
                SessionId(request.session),
                request.token,
                client=client,
                suspended=suspended,
            )
        except TokenUnknownError as error:
            errors[request] = error
        else:
            freed_leases |= {} if freed_lease is None else {partition_id: freed_lease}
            last_token = _raise_token_floor_and_warn(last_token, request.fence)
    if not freed_leases:
        return ReleaseOutcome(changes=NO_CHANGES, errors=errors)
    # The session that a lease was withdrawn for may have been suspended in the meantime.
    wanted_sessions = {lease.wanted for lease in freed_leases.values() if lease.wanted}
    active_sessions = lock_active_sessions(connection, wanted_sessions)
    changed_sessions: set[SessionId] = set()
    hand_overs = 0
    for partition_id, lease in sorted(freed_leases.items()):
        granted_lease = (
            grant_lease(lease, last_token=last_token) if lease.wanted in active_sessions else None
        )
        if granted_lease is not None and granted_lease.session is not None:
            freed_leases[partition_id] = granted_lease
            last_token = granted_lease.token
            changed_sessions.add(granted_lease.session)
            hand_overs += 1
    store_leases(connection, group.group_id, freed_leases.values())
    version = group.version + 1
    is_settled = group.settled and all(lease.session for lease in freed_leases.values())
    set_group(
        connection, group.group_id, version=version, last_token=last_token, settled=is_settled
    )
    raise_versions(connection, changed_sessions, version)
    return ReleaseOutcome(
        changes=Changes(versions=dict.fromkeys(changed_sessions, version), hand_overs=hand_overs),
        errors=errors,
    )


def _renew_tokens(
    connection: Connection, group: LockedGroup, requests: Sequence[ReleaseGrant]
) -> ReleaseOutcome:
    """Replace tokens of a shared group that brokers refuse. All sessions of the group get the new
    ones.
    """
    stored_leases = read_leases_of(
        connection, group.group_id, [request.partition_id for request in requests]
    )
    errors: dict[ReleaseGrant, KeylaneError] = {}
    renewed_leases: dict[PartitionId, PartitionLease] = {}
    last_token = group.last_token
    for request in requests:
        partition_id = PartitionId(request.partition_id)
        token_floor = _raise_token_floor_and_warn(last_token, request.fence)
        try:
            lease = renew_token(
                stored_leases.get(partition_id), request.token, last_token=token_floor
            )
        except TokenUnknownError as error:
            errors[request] = error
            continue
        if lease is not None:
            renewed_leases[partition_id] = stored_leases[partition_id] = lease
            last_token = lease.token
    if not renewed_leases:
        return ReleaseOutcome(changes=NO_CHANGES, errors=errors)
    store_leases(connection, group.group_id, renewed_leases.values())
    version = group.version + 1
    set_group(connection, group.group_id, version=version, last_token=last_token)
    members = set(read_members(connection, group.group_id))
    raise_versions(connection, members, version)
    return ReleaseOutcome(changes=Changes(versions=dict.fromkeys(members, version)), errors=errors)


_withdrawn_query = (
    sa.select(leases.c.session, leases.c.partition_id, leases.c.token)
    .where(leases.c.session.in_(sa.bindparam("ids")), leases.c.withdrawn)
    .order_by(leases.c.partition_id)
)


def release_unreported(connection: Connection, heartbeats: Sequence[Heartbeat]) -> Changes:
    """
    Release withdrawn leases that their sessions do not report as held.

    Either the grant was withdrawn before the session received it, or the release request was lost.
    Sessions that have ended are skipped, and so are those that have not received their latest
    grants, because they may still start to use them.
    """
    heartbeats_by_session = {heartbeat.session: heartbeat for heartbeat in heartbeats}
    for group_id in sorted(
        {row.group_id for row in read_live_sessions(connection, heartbeats_by_session).values()}
    ):
        try:
            lock_group(connection, group_id)
        except GroupUnknownError:
            continue
    current_sessions = [
        session
        for session, row in read_live_sessions(connection, heartbeats_by_session).items()
        if row.grants_version == heartbeats_by_session[session].known_version
    ]
    releases = [
        ReleaseGrant(session=row.session, partition_id=row.partition_id, token=row.token)
        for row in connection.execute(_withdrawn_query, {"ids": current_sessions})
        if (row.partition_id, row.token)
        not in set(heartbeats_by_session[row.session].holding or ())
    ]
    return release_leases(connection, releases).changes if releases else NO_CHANGES


_drained_query = sa.select(drained.c.partition_id).where(
    drained.c.group_id == sa.bindparam("of_group")
)
_drained_by_id = _drained_query.where(
    drained.c.partition_id.in_(sa.bindparam("ids", expanding=True))
)
_heard_query = sa.select(heard.c.partition_id).where(heard.c.group_id == sa.bindparam("of_group"))
_newly_drained_query = (
    sa.select(leases.c.partition_id, leases.c.token)
    .join(partitions, partitions.c.partition_id == leases.c.partition_id)
    .where(
        leases.c.group_id == sa.bindparam("of_group"),
        sa.or_(leases.c.session == sa.bindparam("of_session"), leases.c.wanted == EVERYBODY),
        leases.c.partition_id.in_(sa.bindparam("ids")),
        leases.c.partition_id.not_in(_drained_query),
        partitions.c.state == PartitionState.SEALED,
    )
)


def store_drained(
    connection: Connection,
    session: str,
    ids: Collection[int],
    parked_ids: Collection[int] = (),
    holding: Collection[tuple[int, int]] | None = None,
) -> int | None:
    """
    Record that a group has fully acked sealed partitions, as reported by a session.

    Partitions that are not SEALED, or not granted to the session, are ignored: their current owner
    will report them.

    Args:
        ids: the drained partitions.
        parked_ids: ids of those drained partitions on which the group has parked messages.
        holding: the leases that the session reports as held, as (partition id, token), or None if
            it does not report them. A drained partition with a different token is ignored, because
            its report may be older than a reset of the cursor.

    Returns:
        The id of the group if any partition is newly drained, else None.

    Raises:
        SessionUnknownError: the session has ended.
    """
    group_id = read_live_session(connection, session).group_id
    lock_group(connection, group_id)
    read_live_session(connection, session)  # it may have ended before the group was locked
    parameters = {"of_group": group_id, "of_session": session, "ids": valid_ids(ids)}
    rows = [
        {"group_id": group_id, "partition_id": partition_id, "parked": partition_id in parked_ids}
        for partition_id, token in connection.execute(_newly_drained_query, parameters)
        if holding is None or (partition_id, token) in holding
    ]
    insert_new(connection, drained, rows)
    if not rows:
        return None
    mark_unsettled(connection, group_id)
    return group_id


_held_query = select_granted(
    sa.and_(leases.c.session.in_(sa.bindparam("ids")), sa.not_(leases.c.withdrawn))
)
_shared_query = select_granted(
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
    """Return a dict that maps each session to its grants, for sessions of one group. Sessions that
    have ended are omitted.
    """
    # Versions are read before grants. If a change comes in between, the grants are newer than their
    # version, and are merely sent once more.
    members = read_live_members(connection, ids)
    if not members:
        return {}
    row, settings = members[0]
    if settings.strategy is ConsumeStrategy.SHARED:
        granted_rows = granted_partitions(connection, _shared_query, of_group=row.group_id)
        shared_grants: list[_GrantParts] = [
            (partition, token, None) for partition, token, *_ in granted_rows
        ]
        not_suspended = OperatorSwitch.OFF
        grants_by_session: dict[SessionId, list[_GrantParts]] = {
            row.session: shared_grants
            for row, settings in members
            if settings.suspended_by is not_suspended and not row.suspended
        }
    else:
        grants_by_session = {}
        granted_rows = granted_partitions(
            connection, _held_query, ids=[row.session for row, _ in members]
        )
        for partition, token, session, previous in granted_rows:
            grant = (partition, token, previous)
            grants_by_session.setdefault(SessionId(session or ""), []).append(grant)
    adopted = read_adopted(connection, row.group_id, [partition for partition, *_ in granted_rows])
    return {
        row.session: Grants(
            version=row.grants_version,
            ttl_ms=row.ttl_ms,
            grants=tuple(
                _build_grant(partition, token, previous, adopted.get(partition.partition_id, ()))
                for partition, token, previous in grants_by_session.get(row.session, ())
            ),
            policy=settings.policy,
            suspended_by=settings.suspended_by,
            order_strategy=settings.order_strategy,
            group_id=row.group_id,
        )
        for row, settings in members
    }


_GrantParts = tuple[Partition, int, PreviousOwner | None]
"""The partition, the token and the previous owner of a grant."""


def _build_grant(
    partition: Partition,
    token: int,
    previous: PreviousOwner | None,
    parked: Collection[AdoptedAncestor],
) -> Grant:
    ranges = tuple(ancestor.ranges for ancestor in parked)
    return Grant(
        partition=partition,
        token=token,
        parked_parents=tuple(ancestor.partition for ancestor in parked),
        parked_tokens=tuple(ancestor.token for ancestor in parked),
        parked_ranges=ranges if any(ranges) else (),
        previous=previous,
    )


class _GroupContext(NamedTuple):
    """State outside the group's own rows on which its leases depend. It is read after the group has
    been locked.
    """

    subject: str
    """The name of the group's subject."""
    route_version: int
    """The route version of the group's subject."""
    retention: Retention
    """The retention of the group's subject."""
    resetting: bool
    """True while an operator is resetting the group's cursors with live sessions; nothing is
    granted meanwhile.
    """
    rebuilt_left_ms: int
    """How much longer, in milliseconds, sessions from before a rebuild may still be active."""
    being_replaced: bool
    """True while a publication is replacing the subject's messages. The offsets at which its groups
    continue are already fixed, so nothing is granted until they are in effect.
    """


_context_query = sa.select(
    subjects.c.name.label("subject"),
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


def _read_context(connection: Connection, group: LockedGroup) -> _GroupContext:
    parameters = {"of_group": group.group_id, "of_subject": group.subject_id}
    row = connection.execute(
        _context_query, parameters | {"of_name": rebuilt_duty(group.group_id)}
    ).one()
    return _GroupContext(
        subject=row.subject,
        route_version=row.route_version,
        retention=Retention(row.retention),
        resetting=bool(row.resetting),
        rebuilt_left_ms=row.rebuilt_left_ms,
        being_replaced=bool(row.being_replaced),
    )


_candidates_query = (
    sa.select(
        partitions.c.partition_id,
        partitions.c.state,
        partitions.c.abandoned,
        partitions.c.end_offset,
        partitions.c.lost,
        HAS_PARENTS.label("has_parents"),
        sa.exists(_heard_query.where(heard.c.partition_id == partitions.c.partition_id)).label(
            "heard"
        ),
        sa.exists()
        .where(
            starts.c.group_id == sa.bindparam("of_group"),
            starts.c.partition_id == partitions.c.partition_id,
        )
        .label("start_pending"),
        sa.exists(_drained_query.where(drained.c.partition_id == partitions.c.partition_id)).label(
            "drained"
        ),
    )
    .where(
        partitions.c.subject_id == sa.bindparam("of_subject"),
        partitions.c.state != PartitionState.PLANNED,
        sa.not_(is_expired_by_retention(partitions)),  # they block nothing, but accumulate
    )
    .order_by(partitions.c.range_start, partitions.c.partition_id)
)


def _read_readable_partitions(
    connection: Connection,
    group: LockedGroup,
    assigned_ids: Collection[PartitionId],
    retention: Retention,
) -> list[GroupPartition]:
    """Read the state that `readable_partitions` needs and return its result."""
    parameters = {"of_group": group.group_id}
    rows = connection.execute(
        _candidates_query, parameters | {"of_subject": group.subject_id}
    ).all()
    # The lineage is read after the partitions, because it is written before its partition and never
    # changes.
    has_parents = any(row.has_parents for row in rows)
    parents = blocking_parents(connection, group.subject_id) if has_parents else {}
    candidates = [
        GroupPartition(
            partition_id=PartitionId(row.partition_id),
            state=PartitionState(row.state),
            parents=parents.get(row.partition_id, ()),
            abandoned=row.abandoned,
            ended=row.abandoned and row.end_offset is not None and not row.lost,
            assigned=row.partition_id in assigned_ids,
            lost=row.lost,
            is_announced=row.heard or retention is not Retention.ACKED,
            start_pending=row.start_pending,
        )
        for row in rows
    ]
    drained_ids = {PartitionId(row.partition_id) for row in rows if row.drained}
    # Some parents are not among the candidates. All other drained partitions are irrelevant.
    if other_parents := {parent for candidate in candidates for parent in candidate.parents} - {
        row.partition_id for row in rows
    }:
        drained_parents = connection.execute(
            _drained_by_id, parameters | {"ids": sorted(other_parents)}
        )
        drained_ids |= set(drained_parents.scalars())
    return readable_partitions(candidates, drained_ids)


def _raise_token_floor_and_warn(last_token: FencingToken, fence: int) -> FencingToken:
    """Call `raise_token_floor`. Log a warning if a broker has seen a token that was never
    granted.
    """
    floor = raise_token_floor(last_token, fence)
    if fence > last_token:
        log.warning(
            "a session reports that a broker has seen token %d, above the last granted token %d; "
            "tokens continue after %d",
            fence,
            last_token,
            floor,
        )
    return floor
