"""The metrics of a metaserver: the state of the cluster as stored in the database, and the
database's latency.

While the database does not respond, a scrape gets cached figures together with their age.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.sql.elements import ColumnElement

from ..protocol.operations import OperationState
from ..rpc.operating.metrics import Labels, counter, gauge, histograms, labelled, largest
from .cached_read import CachedRead
from .cluster.brokers import broker_views
from .cluster.lost_database import database_lost_error
from .groups.service import GroupCounts
from .sql.dialect import now_ms
from .sql.schema import brokers, given_up, groups, leases, operations, sessions, subjects
from .sql.write_watch import WatchedDatabase

if TYPE_CHECKING:
    from prometheus_client import Metric

_ENDED = (OperationState.DONE, OperationState.CANCELED)


class _ClusterFigures(NamedTuple):
    """The figures obtained by one read of the database."""

    brokers: dict[Labels, float]
    """Maps each broker group to 1 if it is available, or else to 0."""
    cordoned: int
    subjects: int
    groups: int
    sessions: dict[Labels, float]
    """Number of live sessions by subject and group."""
    given_up: dict[Labels, float]
    """Upper bound, by group, of the number of unread messages in lost partitions. Partitions with
    an unknown number of messages are not included.
    """
    given_up_partitions: dict[Labels, float]
    """Number, by group, of lost partitions that the group had not fully read."""
    leases: int
    """Number of leases held by live sessions."""
    operations: int
    """Number of unfinished operations."""
    behind: bool
    """True if the database lacks partitions or changes that brokers have."""
    waiting: int
    """Number of stalled operations; `keylane subject operations` shows the reasons."""


class MetaserverMetrics:
    """Collects the figures of one metaserver."""

    def __init__(self, database: WatchedDatabase, counts: GroupCounts) -> None:
        self._database = database
        self._counts = counts
        self._cache = CachedRead(self._read)

    async def collect(self) -> Iterable[Metric]:
        """Return all metrics. They are read from the database, or from the cache if the database
        does not respond.
        """
        result = await self._cache.get()
        families = [*self._database_metrics(), *self._group_metrics()]
        if result.value is not None:
            age = gauge(
                "keylane_metaserver_figures_age_seconds",
                "Age of the figures of the cluster; 0: they were just read.",
                result.age_s,
            )
            families += [*_families(result.value), age]
        return families

    async def close(self) -> None:
        """Cancel a running read."""
        await self._cache.close()

    async def _read(self) -> _ClusterFigures:
        """Read the figures from the database. Raises StorageError."""
        return await self._database.read(_read)

    def _database_metrics(self) -> Iterable[Metric]:
        database = self._database
        yield histograms(
            "keylane_metaserver_database_seconds",
            "From the call of a transaction to its result, by kind; waits for a connection count.",
            {(("kind", kind),): values for kind, values in database.durations.items()},
        )
        yield labelled(
            "keylane_metaserver_database_errors_total",
            "Transactions that the database failed.",
            {(("kind", kind),): count for kind, count in database.failures.items()},
            counts=True,
        )
        yield gauge(
            "keylane_metaserver_database_transactions",
            "Transactions that run, or wait for a connection.",
            database.open_count,
        )
        yield gauge(
            "keylane_metaserver_database_connections",
            "Transactions that can run at the same time.",
            database.connections,
        )

    def _group_metrics(self) -> Iterable[Metric]:
        counts = self._counts
        yield counter(
            "keylane_metaserver_expired_sessions_total",
            "Consumers that were silent for their ttl.",
            counts.expired_sessions,
        )
        yield counter(
            "keylane_metaserver_lost_leases_total",
            "Leases that ended with such a consumer.",
            counts.lost_leases,
        )
        yield counter(
            "keylane_metaserver_hand_overs_total",
            "Partitions that were granted after another consumer of the group had held them.",
            counts.hand_overs,
        )


def _families(cluster: _ClusterFigures) -> Iterable[Metric]:
    yield labelled(
        "keylane_metaserver_broker_available",
        "1 if the broker group reports itself in time.",
        largest(cluster.brokers),
    )
    yield gauge("keylane_metaserver_cordoned_brokers", "Cordoned broker groups.", cluster.cordoned)
    yield gauge(
        "keylane_metaserver_database_behind",
        "1 while the database lacks partitions or changes that brokers have: it is older, or "
        "empty.",
        cluster.behind,
    )
    yield gauge("keylane_metaserver_subjects", "Subjects.", cluster.subjects)
    yield gauge("keylane_metaserver_groups", "Consumer groups.", cluster.groups)
    yield labelled(
        "keylane_group_sessions", "Live consumers of a group.", largest(cluster.sessions)
    )
    yield labelled(
        "keylane_group_given_up_messages",
        "Messages, at most, that a group had not read of partitions whose loss was accepted; those "
        "of known number.",
        largest(cluster.given_up),
    )
    yield labelled(
        "keylane_group_given_up_partitions",
        "Partitions whose loss was accepted and that a group had not read to their ends.",
        largest(cluster.given_up_partitions),
    )
    yield gauge("keylane_metaserver_leases", "Leases of live consumers.", cluster.leases)
    yield gauge(
        "keylane_metaserver_operations",
        "Operations on partitions that are not finished.",
        cluster.operations,
    )
    yield gauge(
        "keylane_metaserver_waiting_operations",
        "Operations that wait; `keylane subject operations` shows the reasons.",
        cluster.waiting,
    )


def _read(connection: Connection) -> _ClusterFigures:
    views = broker_views(connection)
    is_live = sessions.c.expires_at > now_ms()
    live_by_group = (
        sa.select(subjects.c.name.label("subject"), groups.c.name, sa.func.count().label("live"))
        .select_from(sessions.join(groups).join(subjects))
        .where(is_live)
        .group_by(subjects.c.name, groups.c.name)
    )
    loss_rows = connection.execute(
        sa.select(
            subjects.c.name.label("subject"),
            groups.c.name,
            sa.func.coalesce(sa.func.sum(given_up.c.messages_max), 0).label("messages"),
            sa.func.count().label("partitions"),
        )
        .select_from(given_up.join(groups).join(subjects))
        .group_by(subjects.c.name, groups.c.name)
    ).all()
    is_unfinished = operations.c.state.not_in(_ENDED)
    is_held = sa.and_(leases.c.session == sessions.c.session, is_live)
    return _ClusterFigures(
        brokers={(("broker_group", view.broker_group),): int(view.available) for view in views},
        cordoned=_count(connection, brokers, brokers.c.cordoned),
        subjects=_count(connection, subjects),
        groups=_count(connection, groups),
        sessions={
            (("subject", row.subject), ("group", row.name)): row.live
            for row in connection.execute(live_by_group)
        },
        given_up={
            (("subject", row.subject), ("group", row.name)): int(row.messages) for row in loss_rows
        },
        given_up_partitions={
            (("subject", row.subject), ("group", row.name)): row.partitions for row in loss_rows
        },
        leases=_count(connection, leases.join(sessions, is_held)),
        operations=_count(connection, operations, is_unfinished),
        behind=database_lost_error(connection) is not None,
        waiting=_count(connection, operations, sa.and_(is_unfinished, operations.c.problem != "")),
    )


def _count(
    connection: Connection, table: sa.FromClause, condition: ColumnElement[bool] | None = None
) -> int:
    query = sa.select(sa.func.count()).select_from(table)
    return connection.execute(query if condition is None else query.where(condition)).scalar_one()
