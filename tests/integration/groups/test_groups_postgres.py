"""The statements about members that differ, live resets and idle groups, on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.lease_rows import read_grants, release_leases, settle_group
from keylane.metaserver.groups.parked_ancestors import read_adopted, read_finished_partitions
from keylane.metaserver.groups.sessions import join_group, leave_group
from keylane.metaserver.resets.live import (
    abandon_live_reset,
    pending_live_resets,
    plan_live_reset,
    read_live_reset,
)
from keylane.metaserver.resets.rows import begin_reset, end_reset, read_reset_scope
from keylane.metaserver.retention.idle_groups import list_idle_groups, start_idle_times
from keylane.metaserver.sql.database import open_database
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Join, ReleaseGrant
from keylane.protocol.errors import Reason
from keylane.protocol.progress import ResetGroup, ResetTo
from support.postgres import Postgres
from support.raising import raises
from support.sql.told_groups import hear

A = "a" * 16
ASK = ResetGroup(to=ResetTo.EARLIEST, live=True)
ANSWER = b'{"subject":"s","group":"g","cursors":[]}'.decode()


async def test_statements_work_on_postgresql(postgres: Postgres, tmp_path: Path):
    """A join that differs, a reset given up and one that is done, and a group that becomes idle;
    what is parked.
    """
    options = {"clock": SystemClock(), "boot": "", "broker_ttl_ms": 60_000}
    async with open_database(folder=tmp_path, url=postgres.url(), **options) as database:
        report = BrokerHeartbeat(broker_group="g1", broker_id="g1", address="g1:1")
        await database.write(store_report, report, ttl_ms=60_000)
        await database.write(plan_subject, CreateSubject(subject="s", partitions=1), subjects_max=9)
        await database.write(open_subject, "s")
        ask = Join(subject="s", group="g", session=A, filter="tags paid")
        group_id = (await database.write(join_group, ask, sessions_max=9)).group_id
        other = Join(subject="s", group="g", session="b" * 16)
        with raises(Reason.GROUP_FILTER):
            await database.write(join_group, other, sessions_max=9)
        await database.write(hear, group_id)
        await database.write(settle_group, group_id)
        given_up = await database.write(plan_live_reset, group_id, ASK)
        assert await database.write(abandon_live_reset, given_up, group_id)
        reset_id = await database.write(plan_live_reset, group_id, ASK)
        (grant,) = (await database.read(read_grants, A)).grants
        partition_id = int(grant.partition.partition_id)
        await database.write(settle_group, group_id)
        assert (await database.read(read_live_reset, reset_id)).owners == ("",)
        release = ReleaseGrant(session=A, partition_id=partition_id, token=grant.token)
        await database.write(release_leases, [release])
        scope = await database.read(read_reset_scope, "s", "g", ASK)
        known = {"holder": "h", "lease_ms": 5_000}
        tokens = await database.write(begin_reset, scope, reset_id=reset_id, **known)
        answered = (reset_id, ANSWER)
        await database.write(
            end_reset, group_id, tokens, {partition_id: 0}, holder="h", recorded_answer=answered
        )
        assert await database.read(pending_live_resets) == []
        await database.write(settle_group, group_id)
        (again,) = (await database.read(read_grants, A)).grants
        assert again.token > tokens[partition_id] > grant.token
        noted = await database.read(
            read_finished_partitions, group_id, [partition_id], [partition_id]
        )
        assert noted == [partition_id]
        child = replace(again.partition, parents=(partition_id,))
        assert await database.read(read_adopted, group_id, [child]) == {}
        await database.write(start_idle_times)
        assert await database.read(list_idle_groups, at_least_ms=0) == []
        await database.write(leave_group, A)
        await database.write(start_idle_times)
        (idle,) = await database.read(list_idle_groups, at_least_ms=0)
        assert (idle.subject, idle.group, idle.group_id) == ("s", "g", group_id)
