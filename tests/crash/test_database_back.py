"""The metaservers' database is replaced by an older state of itself, which names a copy that was
left out since: no copy takes the place of its broker until that has said which copies count.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from crash.test_copies_kills import COPIES, SUBJECT, FolderHost, cluster_of_one, stored_numbers
from crash.test_promises_and_copies import PromisedStage
from integration.metaserver.test_lost_commits import copy_database
from keylane.admin import Admin
from support.cluster import eventually

TTL_S = 1.0
"""`broker_ttl_ms` of these clusters."""
pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]


class FallenStage(PromisedStage):
    """A broker with copies, whose database is put back to before one of them was left out."""

    @property
    def _database(self) -> Path:
        return self._folder / "meta-0" / "meta.db"

    @property
    def _older(self) -> Path:
        return self._folder / "older.db"

    async def keep_database(self) -> None:
        """Keep the database as it is now."""
        await asyncio.to_thread(copy_database, self._database, self._older)

    async def leave_one_out(self) -> FolderHost:
        """Stop a copy until acks wait for it no more."""
        out = self.copies[0]
        await asyncio.to_thread(out.kill)
        async with asyncio.timeout(60):
            while len(await self.members()) == COPIES:
                await asyncio.sleep(0.1)
        await self.wait_for_acks(200)
        return out

    async def put_back(self) -> None:
        """As an operator does: the metaserver is stopped meanwhile."""
        await asyncio.to_thread(self.cluster.meta_program.kill)
        for file in self._database.parent.glob("meta.db*"):
            file.unlink()
        await asyncio.to_thread(copy_database, self._older, self._database)
        await asyncio.to_thread(self.cluster.meta_program.restart)

    async def quarantine(self) -> str:
        async with Admin(self.cluster.meta) as admin:
            return (await admin.copies("g1")).quarantine

    async def wait_for_quarantine(self, *, ends: bool) -> None:
        async with asyncio.timeout(60):
            while bool(await self.quarantine()) == ends:
                await asyncio.sleep(0.1)

    async def recover(self) -> None:
        """Wait until the quarantine is over and everything is handled; every copy is judged."""
        await self.wait_for_quarantine(ends=True)
        await self.wait_for_members(COPIES)
        await self.wait_for_new()
        await self.judge_members()
        await self.end_sending()
        await self.wait_until_handled()

    async def wait_until_handled(self) -> None:
        """Wait until everything that was acked was handled."""
        acked = set(self.acked)
        await eventually(lambda: {int(each.message.value) for each in self.handled} >= acked)


async def test_acks_go_on_when_the_database_is_put_back(tmp_path: Path) -> None:
    """The broker lives, and says which copies count."""
    with cluster_of_one(tmp_path) as cluster:
        stage = FallenStage(cluster, tmp_path)
        async with stage.running(), stage.consumer("a"):
            await stage.wait_for_members(COPIES)
            await stage.keep_database()
            out = await stage.leave_one_out()
            await stage.put_back()
            await stage.wait_for_quarantine(ends=False)
            await stage.wait_for_quarantine(ends=True)
            assert out not in await stage.members()
            await stage.wait_for_acks(100)
            await asyncio.to_thread(out.start, follows=True)
            await stage.wait_for_members(COPIES)
            await stage.take_over()
            await stage.wait_for_new()
            await stage.judge_members()
            await stage.end_sending()
            await stage.wait_until_handled()
    stage.judge()
    assert stage.errors == []


async def test_copy_that_was_left_out_takes_no_place_when_the_database_is_put_back(
    tmp_path: Path,
) -> None:
    """The broker is gone, and only the file beside the database knows of a newer one; acks go on
    when the broker returns.
    """
    with cluster_of_one(tmp_path) as cluster:
        stage = FallenStage(cluster, tmp_path)
        async with stage.running(), stage.consumer("a"):
            await stage.wait_for_members(COPIES)
            await stage.keep_database()
            out = await stage.leave_one_out()
            await asyncio.to_thread(stage.broker.kill)
            for copy in stage.copies:
                await asyncio.to_thread(copy.kill)
            await stage.put_back()
            await asyncio.to_thread(out.start, follows=True)
            await asyncio.sleep(5 * TTL_S)
            assert stage.promotions == 0
            assert out.copy_id, "it is still a copy"
            assert "changes of copies" in await stage.quarantine()
            async with Admin(cluster.meta) as admin:
                told = await admin.why(SUBJECT, "billing")
            assert any("No copy takes its place" in cause.text for cause in told.causes)
            lacking = set(stage.acked) - await asyncio.to_thread(stored_numbers, out.folder)
            assert lacking, "it would have lost these"
            for host in (stage.broker, stage.copies[1]):
                await asyncio.to_thread(host.start, follows=True)
            await stage.recover()
    stage.judge()
