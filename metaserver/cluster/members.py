"""Rows of the cluster's members: metaservers at work, and brokers, with their versions.  SQL, synchronous.

Invariants
    A silent broker counts as long as it has partitions: it may come back, and has to read what is written meanwhile.
    The cluster's version is the lowest of all members, and never falls.
"""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.membership.versions import MemberVersion, Version, raised_version
from ..sql.cluster_facts import raise_version, read_facts
from ..sql.dialect import insert_or_replace, now_ms
from ..sql.schema import brokers, metaservers

_at_work = sa.select(metaservers.c.address, metaservers.c.version).where(
    metaservers.c.expires_at > now_ms()
)
_brokers = sa.select(brokers.c.broker_group, brokers.c.version).where(
    sa.or_(brokers.c.expires_at > now_ms(), brokers.c.hosted > 0)
)


class ClusterState(NamedTuple):
    """A cluster, its version and its members."""

    name: str
    version: Version
    members: list[MemberVersion]


def note_metaserver(
    connection: Connection, *, holder: str, address: str, version: str, ttl_ms: int
) -> ClusterState:
    """Note that a metaserver is at work for `ttl_ms`, and raise the cluster's version if every member has a newer one."""
    ends = connection.execute(sa.select(now_ms() + ttl_ms)).scalar_one()
    row = {"holder": holder, "address": address, "version": version, "expires_at": ends}
    insert_or_replace(connection, metaservers, row)
    connection.execute(sa.delete(metaservers).where(metaservers.c.expires_at <= now_ms()))
    state = read_cluster(connection)
    raised = raised_version(state.version, state.members)
    if raised > state.version:
        raise_version(connection, raised)
        return state._replace(version=raised)
    return state


def leave(connection: Connection, *, holder: str) -> None:
    """Forget a metaserver that ends."""
    connection.execute(sa.delete(metaservers).where(metaservers.c.holder == holder))


def read_cluster(connection: Connection) -> ClusterState:
    """The cluster as the database has it."""
    facts = read_facts(connection)
    members = [
        MemberVersion(f"metaserver {row.address}", row.version)
        for row in connection.execute(_at_work)
    ]
    members += [
        MemberVersion(f"broker group {row.broker_group}", row.version)
        for row in connection.execute(_brokers)
    ]
    return ClusterState(facts.name, facts.version, sorted(members))
