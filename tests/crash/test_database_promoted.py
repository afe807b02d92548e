"""A standby of the metaservers' PostgreSQL is promoted under load: nothing more than a pause if it
was synchronous; otherwise no copy takes the place of its broker until that has said which count.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from crash.test_copies_kills import COPIES, META_SETTINGS, stored_numbers
from crash.test_database_back import TTL_S, FallenStage
from support.cluster import Cluster
from support.postgres import PostgresPair, running_pair

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]


def cluster_on(pair: PostgresPair, folder: Path) -> Cluster:
    settings = f'{META_SETTINGS}database_url = "{pair.url()}"\n'
    return Cluster(folder, 0, meta_settings=settings)


async def test_promotion_of_a_synchronous_standby_is_a_pause(tmp_path: Path) -> None:
    """No call fails, and a copy takes the place of a broker that is killed afterwards."""
    with running_pair(synchronous=True) as pair, cluster_on(pair, tmp_path) as cluster:
        stage = FallenStage(cluster, tmp_path)
        async with stage.running(), stage.consumer("a"):
            await stage.wait_for_members(COPIES)
            await stage.wait_for_acks(50)
            await asyncio.to_thread(pair.fail)
            await stage.wait_for_acks(50)
            await asyncio.to_thread(pair.promote)
            await stage.wait_for_members(COPIES)
            await stage.wait_for_acks(50)
            assert await stage.quarantine() == ""
            assert stage.errors == []
            await stage.take_over()
            await stage.wait_for_new()
            await stage.judge_members()
            await stage.end_sending()
            await stage.wait_until_handled()
    stage.judge()


async def test_copy_takes_no_place_when_an_asynchronous_standby_is_promoted(
    tmp_path: Path,
) -> None:
    """The server is gone together with the broker; the standby has not heard that a copy was left
    out.
    """
    with running_pair(synchronous=False) as pair, cluster_on(pair, tmp_path) as cluster:
        stage = FallenStage(cluster, tmp_path)
        async with stage.running(), stage.consumer("a"):
            await stage.wait_for_members(COPIES)
            await asyncio.to_thread(pair.cut_standby)
            out = await stage.leave_one_out()
            for host in (stage.broker, *stage.copies):
                await asyncio.to_thread(host.kill)
            await asyncio.to_thread(pair.fail)
            await asyncio.to_thread(pair.promote)
            await asyncio.to_thread(out.start, follows=True)
            await stage.wait_for_quarantine(ends=False)
            await asyncio.sleep(5 * TTL_S)
            assert stage.promotions == 0
            assert out.copy_id, "it is still a copy"
            lacking = set(stage.acked) - await asyncio.to_thread(stored_numbers, out.folder)
            assert lacking, "it would have lost these"
            for host in (stage.broker, *(copy for copy in stage.copies if copy is not out)):
                await asyncio.to_thread(host.start, follows=True)
            await stage.recover()
    stage.judge()
