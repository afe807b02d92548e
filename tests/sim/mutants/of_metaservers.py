"""Bugs of a metaserver: tokens, leases, sessions, routes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from keylane.metaserver.catalogue import service as catalogue_service
from keylane.metaserver.cluster import brokers as cluster_brokers
from keylane.metaserver.groups import lease_rows
from keylane.metaserver.groups import leases as leases_module
from keylane.metaserver.groups import service as groups_service
from keylane.metaserver.groups import sessions as group_sessions
from keylane.metaserver.operations import driver as operations_driver
from keylane.metaserver.operations import journal as operations_journal
from keylane.metaserver.operations.driver import OperationDriver
from keylane.metaserver.sql.dialect import now_ms
from keylane.metaserver.sql.schema import partitions, sessions, steps, subjects
from keylane.protocol.operations import OperationState, StepAction
from keylane.protocol.routing import PartitionState
from keylane.testing.machines.database import CurrentClock
from sim.actors import hosts
from sim.mutants.mutant import Breaks, Patches


def _grants(patches: Patches, grant: Any) -> None:
    patches.set(leases_module, "grant_lease", grant)
    patches.set(lease_rows, "grant_lease", grant)


def token_reused(patches: Patches) -> None:
    def grant(lease: Any, *, last_token: int) -> Any:
        if lease.session is not None or lease.wanted is None:
            return None
        return replace(lease, session=lease.wanted, token=max(lease.token, 1), withdrawn=False)

    _grants(patches, grant)


def granted_before_it_is_free(patches: Patches) -> None:
    def grant(lease: Any, *, last_token: int) -> Any:
        if lease.wanted is None or lease.wanted == lease.session:
            return None
        return replace(lease, session=lease.wanted, token=last_token + 1, withdrawn=False)

    _grants(patches, grant)


def any_release_frees_the_lease(patches: Patches) -> None:
    """A late release of an old token frees the lease of the new one."""

    def release(lease: Any, session: Any, token: int, **_more: Any) -> Any:
        if lease is None or lease.session is None:
            return None
        return replace(lease, session=None, withdrawn=False)

    patches.set(lease_rows, "release_lease", release)


def lease_by_the_calendar(patches: Patches) -> None:
    patches.set(CurrentClock, "boot_ms_of", lambda self, machine: machine.wall_ms())


def session_renewed_after_expiry(patches: Patches) -> None:
    """A session whose ttl has passed is renewed as any other until the next sweep."""

    def renew(connection: Any, ids: Any) -> Any:
        later = now_ms() + sessions.c.ttl_ms
        these = sessions.c.session.in_(ids)
        connection.execute(sa.update(sessions).where(these).values(expires_at=later))
        return real(connection, ids)

    real = patches.set(group_sessions, "renew_sessions", renew)


def sessions_never_expire(patches: Patches) -> None:
    """The first heartbeat keeps a session for a day, not for its ttl."""
    _keep_sessions(patches, 86_400_000)


def sessions_expire_late(patches: Patches) -> None:
    """A dead consumer's session lasts half a minute, not its ttl."""
    _keep_sessions(patches, 30_000)


def _keep_sessions(patches: Patches, ms: int) -> None:
    def renew(connection: Any, ids: Any) -> Any:
        rows = real(connection, ids)
        kept = sessions.c.session.in_(rows)
        connection.execute(sa.update(sessions).where(kept).values(expires_at=now_ms() + ms))
        return rows

    real = patches.set(group_sessions, "renew_sessions", renew)


def sessions_expire_early(patches: Patches) -> None:
    def sweep(connection: Any, group_id: int) -> Any:
        early = sa.and_(
            sessions.c.group_id == group_id,
            sessions.c.expires_at <= now_ms() + sessions.c.ttl_ms / 2,
        )
        connection.execute(sa.update(sessions).where(early).values(expires_at=now_ms()))
        return real(connection, group_id)

    real = patches.set(lease_rows, "end_expired_members", sweep)


def unheard_grants_stay(patches: Patches) -> None:
    """A lease that was withdrawn before its holder heard of it, or whose release was lost, is never
    granted again.
    """
    patches.set(
        groups_service, "release_unreported", lambda connection, asks: lease_rows.NO_CHANGES
    )


def releases_ignored(patches: Patches) -> None:
    nothing = lease_rows.ReleaseOutcome(changes=lease_rows.NO_CHANGES, errors={})
    patches.set(groups_service, "release_leases", lambda connection, asks: nothing)
    unheard_grants_stay(patches)


def moved_broker_is_not_told(patches: Patches) -> None:
    patches.set(cluster_brokers, "_raise_route_versions", lambda connection, broker_group: [])


def changed_grants_are_not_told(patches: Patches) -> None:
    patches.set(lease_rows, "raise_versions", lambda connection, changed, version: None)


def another_boot_is_not_noticed(patches: Patches) -> None:
    patches.set(hosts, "restart_times_after_boot", lambda connection, boot, *, broker_ttl_ms: False)


def no_drain_rule(patches: Patches) -> None:
    """A group reads children before it has drained their parents."""
    patches.set(
        lease_rows,
        "readable_partitions",
        lambda partitions, drained: [
            partition
            for partition in partitions
            if partition.state in {PartitionState.OPEN, PartitionState.SEALED}
            and partition.partition_id not in drained
        ],
    )


def route_version_not_raised(patches: Patches) -> None:
    """The children are opened, and the route keeps its old version."""

    def opened(connection: Any, operation: Any, rule: Any) -> None:
        real(connection, operation, rule)
        connection.execute(
            sa.update(subjects)
            .where(subjects.c.subject_id == operation.subject_id)
            .values(route_version=subjects.c.route_version - 1)
        )

    real = patches.set(operations_journal, "_change_route", opened)


def child_opened_before_seal(patches: Patches) -> None:
    """The route changes before the brokers of the parents are told to seal; they are told
    afterwards.
    """

    def opened(connection: Any, operation: Any) -> bool:
        mine = steps.c.operation_id == operation.operation_id
        ids = {
            action: sa.select(steps.c.partition_id).where(mine, steps.c.action == action)
            for action in StepAction
        }
        children = partitions.c.partition_id.in_(ids[StepAction.HOST])
        planned = sa.and_(children, partitions.c.state == PartitionState.PLANNED)
        if connection.execute(sa.select(partitions.c.partition_id).where(planned)).first() is None:
            return False
        parents = partitions.c.partition_id.in_(ids[StepAction.SEAL])
        for which, state in (
            (parents, PartitionState.SEALED),
            (children, PartitionState.OPEN),
        ):
            connection.execute(sa.update(partitions).where(which).values(state=state))
        here = subjects.c.subject_id == operation.subject_id
        raised = {"route_version": subjects.c.route_version + 1}
        connection.execute(sa.update(subjects).where(here).values(raised))
        return True

    async def ask(self: Any, operation: Any) -> Any:
        early = operation.state is OperationState.SEAL and not operation.static
        if early and await self._database.write(opened, operation):
            await self._announce_route(operation)
        return await real(self, operation)

    real = patches.set(OperationDriver, "_request_steps", ask)


def older_copy_is_taken(patches: Patches) -> None:
    patches.set(cluster_brokers, "_check_not_behind", lambda report, known: None)


def creations_wait_for_their_brokers(patches: Patches) -> None:
    """Partitions planned on a broker are hosted there, even when it is gone."""
    patches.set(catalogue_service, "replan_creation", lambda connection, subject_id: False)


def children_begin_by_their_calendar(patches: Patches) -> None:
    """No broker is told when the parents of a child ended on another one."""
    patches.set(operations_driver, "find_start_times", lambda children, parents, ended_ms: [])


BREAKS: tuple[Breaks, ...] = (
    token_reused,
    granted_before_it_is_free,
    any_release_frees_the_lease,
    lease_by_the_calendar,
    session_renewed_after_expiry,
    sessions_never_expire,
    sessions_expire_late,
    sessions_expire_early,
    unheard_grants_stay,
    releases_ignored,
    moved_broker_is_not_told,
    changed_grants_are_not_told,
    another_boot_is_not_noticed,
    no_drain_rule,
    route_version_not_raised,
    child_opened_before_seal,
    older_copy_is_taken,
    creations_wait_for_their_brokers,
    children_begin_by_their_calendar,
)
