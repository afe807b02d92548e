"""A broker hands over to a copy while a producer sends and a consumer handles: on command, on
SIGTERM, and in a restart of every program. No client sees an error, and nothing is lost, doubled or
out of order.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from crash.test_copies_kills import (
    COPIES,
    META_SETTINGS,
    SUBJECT,
    CopiesStage,
    cluster_of_one,
)
from keylane import Consumer
from keylane.admin import Admin
from keylane.errors import BusyError, KeylaneError, NotFoundError, Reason
from support.cluster import Cluster, eventually
from support.postgres import running_postgres
from support.raising import raises

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]
PAUSE_MS_MAX = 1_500
"""Far above what a hand-over takes on a machine that does nothing else: see `make bench-copies`."""


class ServingStage(CopiesStage):
    """A stage with a consumer, which notes what it handles and what fails."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster, folder, fails_over=True)
        self.handled: list[int] = []
        self.consumer_errors: list[str] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.running():
            await self.wait_for_members(COPIES)
            consuming = asyncio.create_task(self._consume())
            await eventually(lambda: len(self.handled) > 100, seconds=60)
            yield
            await self.end_sending()
            await eventually(lambda: set(self.acked) <= set(self.handled), seconds=60)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)

    async def _consume(self) -> None:
        meta = ",".join(self.cluster.addresses)
        async with Consumer(meta, subject=SUBJECT, group="billing") as consumer:
            while True:
                try:
                    async for message in consumer:
                        self.handled.append(int(message.value))
                        await message.ack()
                except KeylaneError as error:
                    self.consumer_errors.append(repr(error))

    def judge_clients(self) -> None:
        """No error, and each key's messages were handled for the first time in order of sending."""
        assert not self.errors, self.errors[:3]
        assert not self.consumer_errors, self.consumer_errors[:3]
        by_key: dict[int, list[int]] = defaultdict(list)
        for number in dict.fromkeys(self.handled):
            by_key[number % 50].append(number)
        assert all(one < two for each in by_key.values() for one, two in pairwise(each))
        assert set(self.acked) == set(self.handled)


async def keylane(stage: CopiesStage, *arguments: str) -> dict[str, Any]:
    """Run a command that asks the cluster, and return what it prints as JSON."""
    command = [sys.executable, "-m", "keylane.cli", *arguments, "--output", "json"]
    command += ["--meta", ",".join(stage.cluster.addresses)]
    run = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    assert not run.returncode, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


async def test_copy_serves_after_a_hand_over_and_clients_see_no_error(tmp_path: Path) -> None:
    with cluster_of_one(tmp_path) as cluster:
        stage = ServingStage(cluster, tmp_path)
        async with stage.serving():
            first, (copy, other) = stage.broker, stage.copies
            done = await keylane(stage, "broker", "hand-over", "g1", "--to", copy.copy_id)
            assert done["paused_ms"] < PAUSE_MS_MAX
            await eventually(lambda: not copy.copy_id, seconds=30)
            async with asyncio.timeout(30):  # until it has reported itself
                while stage.broker is not copy:
                    await stage.find_broker()
                    await asyncio.sleep(0.05)
            await stage.wait_for_members(COPIES)
            assert first.copy_id, "the broker before is a copy now"
            assert other.copy_id
            # A broker that is asked to stop hands over by itself.
            before = time.monotonic()
            await asyncio.to_thread(stage.broker.stop)
            assert time.monotonic() - before < 10
            await stage.find_broker()
            assert stage.broker is not copy
            assert copy.copy_id
            await stage.wait_for_acks(100)
            await asyncio.to_thread(copy.start, follows=True)
            await stage.wait_for_members(COPIES)
        stage.judge_clients()
    assert stage.promotions == 2


async def test_hand_over_is_refused_and_changes_nothing_where_no_copy_could_take_the_place(
    tmp_path: Path,
) -> None:
    with cluster_of_one(tmp_path) as cluster:
        stage = ServingStage(cluster, tmp_path)
        async with stage.serving(), Admin(cluster.meta) as admin:
            broker, (copy, dead) = stage.broker, stage.copies
            with raises(Reason.BROKER_GROUP_UNKNOWN):
                await admin.hand_over("g9")
            with raises(Reason.COPY_UNKNOWN):
                await admin.hand_over("g1", copy_id="e" * 32)
            outcomes = await asyncio.gather(
                *(admin.hand_over("g1", copy_id="e" * 32) for _ in range(3)),
                return_exceptions=True,
            )
            assert {type(each) for each in outcomes} == {NotFoundError}
            dead_id = dead.copy_id
            await asyncio.to_thread(dead.kill)
            await asyncio.sleep(2.5)
            with raises(Reason.COPY_NOT_READY):
                await admin.hand_over("g1", copy_id=dead_id)
            await admin.set_copies("g1", 1)
            await eventually_no_members(admin)
            with raises(Reason.COPY_NOT_READY):
                await admin.hand_over("g1", copy_id=copy.copy_id)
            with raises(Reason.NO_COPY_IN_SET):
                await admin.hand_over("g1")
            await stage.find_broker()
            assert stage.broker is broker
            assert (await admin.copies("g1")).term == 0
            await admin.set_copies("g1", 1 + COPIES, may_share_machine=True)
            await stage.wait_for_members(1)
            both = await asyncio.gather(
                admin.hand_over("g1"), admin.hand_over("g1"), return_exceptions=True
            )
            refused = [each for each in both if isinstance(each, KeylaneError)]
            assert len(refused) == 1
            assert isinstance(refused[0], BusyError), refused
            await asyncio.to_thread(dead.start, follows=True)
            await stage.wait_for_acks(100)
        stage.judge_clients()


async def eventually_no_members(admin: Admin) -> None:
    async with asyncio.timeout(30):
        while (await admin.copies("g1")).members:
            await asyncio.sleep(0.1)


async def restart_all(stage: ServingStage) -> None:
    """Restart every program, one after another, as an operator does who upgrades."""
    for metaserver in stage.cluster.metas:
        await asyncio.to_thread(metaserver.stop)
        await asyncio.to_thread(metaserver.restart)
        await stage.wait_for_acks(50)
    await stage.find_broker()
    for host in (*stage.copies, stage.broker):
        await stage.find_broker()
        await stage.wait_for_members(COPIES)
        await asyncio.to_thread(host.stop)
        await asyncio.to_thread(host.start, follows=True)
        await stage.wait_for_acks(50)
    await stage.wait_for_members(COPIES)


async def test_rolling_restart_shows_no_error_to_clients(tmp_path: Path) -> None:
    with running_postgres() as server:
        settings = f'{META_SETTINGS}database_url = "{server.url()}"\n'
        with Cluster(tmp_path, 0, meta_settings=settings, metas=2) as cluster:
            stage = ServingStage(cluster, tmp_path)
            async with stage.serving():
                await restart_all(stage)
            stage.judge_clients()
    assert stage.promotions >= 1
