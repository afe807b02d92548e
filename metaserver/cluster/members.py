"""Tracks the members of a cluster (metaservers and brokers) and their versions. Runs SQL
synchronously.

Invariants
    A silent broker remains a member as long as it has partitions: it may return, and must then
    understand what was written in the meantime.
    The cluster's version is the lowest of all members' versions, and never decreases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.membership.versions import MemberVersion, Version, decide_cluster_version
from ..sql.cluster_facts import OF_CLUSTER, build_facts, raise_version
from ..sql.dialect import insert_or_replace, now_ms
from ..sql.schema import brokers, facts, metaservers

_renew = (
    sa.update(metaservers)
    .where(metaservers.c.holder == sa.bindparam("of_holder"))
    .values(
        address=sa.bindparam("at_address"),
        version=sa.bindparam("of_version"),
        expires_at=now_ms() + sa.bindparam("for_ms", type_=sa.BigInteger),
    )
)
_METASERVER, _BROKER, _FACT, _EXPIRED = "metaserver", "broker group", "fact", "expired"
_state_query = sa.union_all(
    sa.select(
        sa.case((metaservers.c.expires_at > now_ms(), _METASERVER), else_=_EXPIRED).label("kind"),
        metaservers.c.address.label("name"),
        metaservers.c.version.label("value"),
    ),
    sa.select(sa.literal(_BROKER), brokers.c.broker_group, brokers.c.version).where(
        sa.or_(brokers.c.expires_at > now_ms(), brokers.c.hosted > 0)
    ),
    sa.select(sa.literal(_FACT), facts.c.name, facts.c.value).where(facts.c.name.in_(OF_CLUSTER)),
)
"""Reads the cluster's members and facts with a single statement, because every metaserver runs it
every few seconds.
"""


class ClusterState(NamedTuple):
    """A cluster's name, its version and its members."""

    name: str
    version: Version
    members: list[MemberVersion]

    @property
    def raised_version(self) -> Version:
        """The version to which the cluster could be raised with these members."""
        return decide_cluster_version(self.version, self.members)


def renew_metaserver(
    connection: Connection, *, holder: str, address: str, version: str, ttl_ms: int
) -> ClusterState:
    """Register a metaserver for `ttl_ms` and return the cluster's state. The write need not be
    durable, because nothing durable depends on it.
    """
    parameters = {
        "of_holder": holder,
        "at_address": address,
        "of_version": version,
        "for_ms": ttl_ms,
    }
    if not connection.execute(_renew, parameters).rowcount:
        row = {"holder": holder, "address": address, "version": version, "expires_at": 0}
        insert_or_replace(connection, metaservers, row)
        connection.execute(_renew, parameters)
    rows = connection.execute(_state_query).all()
    if any(row.kind == _EXPIRED for row in rows):
        connection.execute(sa.delete(metaservers).where(metaservers.c.expires_at <= now_ms()))
    return _build_state(rows)


def register_metaserver(
    connection: Connection, *, holder: str, address: str, version: str, ttl_ms: int
) -> ClusterState:
    """Call `renew_metaserver` and raise the cluster's version if all members have a newer one."""
    state = renew_metaserver(
        connection, holder=holder, address=address, version=version, ttl_ms=ttl_ms
    )
    if state.raised_version > state.version:
        raise_version(connection, state.raised_version)
        return state._replace(version=state.raised_version)
    return state


def remove_metaserver(connection: Connection, *, holder: str) -> None:
    """Delete the registration of a metaserver that is stopping."""
    connection.execute(sa.delete(metaservers).where(metaservers.c.holder == holder))


def read_cluster(connection: Connection) -> ClusterState:
    """Return the cluster's name, version and members."""
    return _build_state(connection.execute(_state_query).all())


def _build_state(rows: Sequence[sa.Row[Any]]) -> ClusterState:
    facts = build_facts({row.name: row.value for row in rows if row.kind == _FACT})
    members = [
        MemberVersion(f"{row.kind} {row.name}", row.value)
        for row in rows
        if row.kind in {_METASERVER, _BROKER}
    ]
    return ClusterState(facts.name, facts.version, sorted(members))
