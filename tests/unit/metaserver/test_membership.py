"""A metaserver in its cluster: what it tells of itself, and which brokers it takes."""

from __future__ import annotations

import logging

from keylane.metaserver.cluster.members import read_cluster, register_metaserver
from keylane.metaserver.membership import TTL_MS, ClusterMember, cluster_view
from keylane.metaserver.sql.cluster_facts import CLUSTER, raise_version
from keylane.metaserver.sql.dialect import insert_new
from keylane.metaserver.sql.schema import facts
from keylane.protocol.control import BrokerHeartbeat
from keylane.protocol.errors import InvalidRequestError, Reason
from keylane.protocol.membership.versions import Version
from support.raising import raises
from support.sql.rows import Rows


class Inline:
    """The transactions of a database in memory."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.rows.run(raise_version, Version(0, 4))

    async def read(self, work, *args, **kwargs):
        return self.rows.run(work, *args, **kwargs)

    write = write_urgent = renew = read


def report(version: str = "0.4.0", cluster: str = "") -> BrokerHeartbeat:
    return BrokerHeartbeat(
        broker_group="g1", broker_id="1", address="a:1", version=version, cluster=cluster
    )


async def member_of(database: Inline, version: str = "0.4.0") -> ClusterMember:
    member = ClusterMember(database, version=version)
    await member.load_state()
    return member


async def test_member_is_noted_while_it_is_at_work() -> None:
    database = Inline()
    member = await member_of(database, "0.5.0")
    async with member.registration("m:1"):
        (row,) = database.rows.run(read_cluster).members
        assert (row.name, row.version) == ("metaserver m:1", "0.5.0")
        assert member.version == "0.5"
    assert database.rows.run(read_cluster).members == []


async def test_broker_is_refused_when_its_version_or_cluster_does_not_fit() -> None:
    database = Inline()
    database.rows.run(insert_new, facts, {"name": CLUSTER, "value": "north"})
    member = await member_of(database)
    for fitting in (report(), report("0.5.0"), report(cluster="north")):
        member.check(fitting)
    for other, error in {
        report("0.6.0"): Reason.UPGRADE_SKIPPED,
        report("0.3.0"): Reason.MEMBER_TOO_OLD,
        report("four"): InvalidRequestError,
        report(""): InvalidRequestError,
        report(cluster="south"): Reason.OTHER_CLUSTER,
    }.items():
        with raises(error):
            member.check(other)


async def test_member_that_slept_through_an_upgrade_says_so(caplog) -> None:
    database = Inline()
    member = await member_of(database)
    await member.send_heartbeat("m:1")
    assert not member.problem
    database.rows.run(raise_version, Version(0, 5))
    with caplog.at_level(logging.ERROR):
        await member.send_heartbeat("m:1")
        await member.send_heartbeat("m:1")
    assert "0.5 already" in member.problem
    assert len(caplog.records) == 1, "it is told once"


async def test_view_names_the_members_that_hold_the_cluster_back() -> None:
    database = Inline()
    for holder, version in (("a", "0.4.0"), ("b", "0.5.0")):
        place = {"holder": holder, "address": holder, "ttl_ms": 1_000}
        database.rows.run(register_metaserver, version=version, **place)
    view = cluster_view(database.rows.run(read_cluster))
    assert (view.version, view.held_back_by) == ("0.4", ("metaserver a",))


async def test_version_is_raised_in_a_commit_that_is_on_the_disk() -> None:
    """A heartbeat that raises nothing may be lost with the machine."""
    database = Inline()
    written: list[str] = []

    async def write_urgent(work, *args, **kwargs):
        written.append(work.__name__)
        return database.rows.run(work, *args, **kwargs)

    database.write_urgent = write_urgent
    member = await member_of(database, "0.4.0")
    await member.send_heartbeat("m:1")
    assert written == []
    member = await member_of(database, "0.5.0")
    database.rows.clock.advance(TTL_MS)  # the older one has ended
    await member.send_heartbeat("m:2")
    await member.send_heartbeat("m:2")
    assert written == ["register_metaserver"]
    assert (member.version, database.rows.run(read_cluster).version) == ("0.5", Version(0, 5))
