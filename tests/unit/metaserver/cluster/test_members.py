"""Members register their versions; the cluster's version is the lowest of them."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.members import (
    ClusterState,
    read_cluster,
    register_metaserver,
    remove_metaserver,
)
from keylane.metaserver.sql.schema import metaservers
from keylane.protocol.control import BrokerHeartbeat
from keylane.protocol.membership.versions import MemberVersion, Version
from support.sql.rows import Rows

TTL_MS = 1_000


def metaserver(rows: Rows, name: str, version: str) -> ClusterState:
    place: dict[str, Any] = {"holder": name, "address": f"{name}:1", "ttl_ms": TTL_MS}
    state = rows.run(register_metaserver, version=version, **place)
    assert isinstance(state, ClusterState)
    return state


def broker(rows: Rows, group: str, version: str, *, hosted: int = 0) -> None:
    report = BrokerHeartbeat(
        broker_group=group, broker_id=group, address=f"{group}:1", version=version, hosted=hosted
    )
    rows.run(store_report, report, ttl_ms=TTL_MS)


@pytest.fixture
def rows() -> Rows:
    return Rows()


def test_cluster_is_raised_once_the_last_member_has_the_new_version(rows: Rows) -> None:
    metaserver(rows, "m1", "0.2.0")
    metaserver(rows, "m2", "0.2.0")
    broker(rows, "g1", "0.2.0")
    assert metaserver(rows, "m1", "0.3.0").version == Version(0, 2)
    broker(rows, "g1", "0.3.1")
    assert metaserver(rows, "m1", "0.3.0").version == Version(0, 2)
    state = metaserver(rows, "m2", "0.3.0")
    assert state.version == Version(0, 3)
    assert state.members == [
        MemberVersion("broker group g1", "0.3.1"),
        MemberVersion("metaserver m1:1", "0.3.0"),
        MemberVersion("metaserver m2:1", "0.3.0"),
    ]
    assert rows.run(read_cluster).version == Version(0, 3)


def test_silent_broker_with_partitions_holds_the_cluster_back(rows: Rows) -> None:
    """It may return; a silent broker without partitions does not count."""
    broker(rows, "g1", "0.2.0", hosted=3)
    broker(rows, "g2", "0.2.0")
    rows.clock.advance(2 * TTL_MS)
    state = metaserver(rows, "m", "0.3.0")
    assert (state.version, state.members[0].name) == (Version(0, 2), "broker group g1")
    assert len(state.members) == 2
    broker(rows, "g1", "0.3.0", hosted=3)
    assert metaserver(rows, "m", "0.3.0").version == Version(0, 3)


def test_metaserver_that_left_or_was_killed_holds_nothing_back(rows: Rows) -> None:
    metaserver(rows, "old", "0.2.0")
    metaserver(rows, "killed", "0.2.0")
    rows.run(remove_metaserver, holder="old")
    assert metaserver(rows, "new", "0.3.0").version == Version(0, 2)
    rows.clock.advance(TTL_MS)
    assert metaserver(rows, "new", "0.3.0").version == Version(0, 3)


def test_cluster_does_not_fall_when_an_older_member_comes(rows: Rows) -> None:
    metaserver(rows, "m1", "0.4.0")
    assert metaserver(rows, "m2", "0.3.0").version == Version(0, 4)


def test_metaservers_that_have_ended_are_forgotten(rows: Rows) -> None:
    """The next heartbeat of another one deletes them."""
    metaserver(rows, "killed", "0.2.0")
    rows.clock.advance(TTL_MS)
    metaserver(rows, "m", "0.2.0")
    assert rows.run(lambda c: c.execute(sa.select(metaservers.c.holder)).scalars().all()) == ["m"]
