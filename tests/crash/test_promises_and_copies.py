"""The database freezes, and consumers live on promises of their broker; when it is back, the broker
is killed at once, and a copy takes its place: it keeps what the broker has promised.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from crash.test_copies_kills import COPIES, KEYS, META_SETTINGS, SUBJECT, CopiesStage
from integration.clients.test_cut_off import CutNetwork
from integration.postgres.test_frozen_database import frozen
from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.rpc.environment import Environment
from support.cluster import Cluster, eventually
from support.postgres import Postgres, running_postgres

TTL_MS = 4_000
TTL_S = TTL_MS / 1000
FROZEN_S = 2 * TTL_S
PARTITIONS = 3
EACH_S = 0.01
RECENT_S = 1.0
SLOW_S = 0.5
"""A handler that takes so long leaves messages for the time after its broker was killed."""
# They compare times of fractions of a ttl, which a machine with much other work does not keep; the
# simulation has the same story in its worlds with copies.
pytestmark = [pytest.mark.crash, pytest.mark.whole, pytest.mark.timeout(300)]


class HandledMessage(NamedTuple):
    """What a consumer has handled, and when, in seconds of the monotonic clock."""

    began_s: float
    ended_s: float
    consumer: str
    message: Message


class PromisedStage(CopiesStage):
    """A broker with copies, a producer that sends steadily, and consumers of one group."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster, folder, fails_over=True)
        self.handled: list[HandledMessage] = []

    async def _send(self) -> None:
        async with Producer(self.cluster.meta) as producer:
            for number in itertools.count():
                if not self._sends:
                    return
                await producer.send(SUBJECT, b"%d" % number, key=b"key-%d" % (number % KEYS))
                self.acked.append(number)
                await asyncio.sleep(EACH_S)

    def consumer(self, name: str, handler_s: float = 0.02, **more: Any) -> Consumer:
        async def handle(message: Message) -> None:
            began_s = time.monotonic()
            try:
                await asyncio.sleep(handler_s)
            finally:
                self.handled.append(HandledMessage(began_s, time.monotonic(), name, message))

        settings = ConsumerSettings(ttl_ms=TTL_MS, concurrency=8)
        return Consumer(
            self.cluster.meta,
            subject=SUBJECT,
            group="billing",
            handler=handle,
            settings=settings,
            **more,
        )

    def owners(self, since_s: float) -> set[tuple[str, int, int]]:
        """Return (consumer, partition, token) of what was begun since then."""
        return {
            (consumer, message.partition_id, message.fencing_token)
            for began_s, _, consumer, message in self.handled
            if began_s > since_s
        }

    def recent_owners(self) -> set[tuple[str, int, int]]:
        return self.owners(time.monotonic() - RECENT_S)

    async def wait_for_new(self) -> None:
        """Wait until messages that are sent from now on were handled in each partition."""
        sent = self.acked[-1]

        def partitions() -> set[int]:
            return {each.message.partition_id for each in self.handled
                    if int(each.message.value) > sent}  # fmt: skip

        await eventually(lambda: len(partitions()) == PARTITIONS)

    async def take_over(self) -> None:
        """Kill the broker, and wait until a copy has its place."""
        await asyncio.to_thread(self.broker.kill)
        async with asyncio.timeout(60):
            while not self.promotions:
                await self.find_broker()

    def judge(self) -> None:
        """No two consumers handle messages of a partition at once, and each key is in order."""
        ends: dict[int, dict[str, float]] = defaultdict(dict)
        newest: dict[bytes, int] = defaultdict(lambda: -1)
        seen: set[int] = set()
        for began_s, ended_s, consumer, message in sorted(self.handled, key=lambda each: each[0]):
            ends_here = ends[message.partition_id]
            for other, end_s in ends_here.items():
                assert other == consumer or end_s <= began_s, f"two owners of {message}"
            ends_here[consumer] = max(ended_s, ends_here.get(consumer, 0.0))
            number, key = int(message.value), message.key or b""
            assert number > newest[key] or number in seen, f"out of order: {message}"
            newest[key] = max(number, newest[key])
            seen.add(number)
        assert set(self.acked) <= seen


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[tuple[PromisedStage, Postgres]]:
    with running_postgres() as server:
        settings = f'{META_SETTINGS}database_url = "{server.url()}"\n'
        with Cluster(folder, 0, meta_settings=settings) as cluster:
            stage = PromisedStage(cluster, folder)
            async with stage.running():
                await stage.wait_for_members(COPIES)
                yield stage, server


async def test_owners_go_on_when_a_copy_takes_over_right_after_the_database_was_frozen(
    tmp_path: Path,
) -> None:
    """Under the same tokens."""
    async with staged(tmp_path) as (stage, server), stage.consumer("a"):
        async with stage.consumer("b"):
            await eventually(lambda: len({owner for owner, *_ in stage.recent_owners()}) == 2)
            await stage.wait_for_new()
            await asyncio.sleep(RECENT_S)
            before = stage.recent_owners()
            assert len(before) == PARTITIONS
            with frozen(server):
                await asyncio.sleep(FROZEN_S)
                assert stage.recent_owners() == before, "nothing changes hands"
            killed_s = time.monotonic()
            await stage.take_over()
            await stage.wait_for_new()
            print(f"owners_back_after_take_over_ms {(time.monotonic() - killed_s) * 1000:.0f}")
            await asyncio.sleep(2 * TTL_S)
            assert stage.owners(killed_s) == before, "everybody keeps what it has"
        await stage.end_sending()
        await eventually(lambda: {int(each.message.value) for each in stage.handled}
                         >= set(stage.acked))  # fmt: skip
    stage.judge()


async def test_next_owner_waits_for_a_promise_when_the_broker_that_gave_it_is_killed(
    tmp_path: Path,
) -> None:
    """The owner is cut off from the metaserver alone, whose session of it ends just then."""
    network = CutNetwork()
    environment = Environment(network=network)
    async with (
        staged(tmp_path) as (stage, server),
        stage.consumer("next"),
        stage.consumer("cut", SLOW_S, _environment=environment),
    ):
        await eventually(lambda: {owner for owner, *_ in stage.recent_owners()} == {"cut", "next"})
        await stage.wait_for_new()
        with frozen(server):
            network.cut = True
            await asyncio.sleep(FROZEN_S)
        await asyncio.sleep(TTL_S - 0.3)  # every session has a whole ttl since the database is back
        assert "cut" in {owner for owner, *_ in stage.recent_owners()}, "it lives on promises"
        killed_s = time.monotonic()
        await stage.take_over()
        await stage.wait_for_new()
        assert {owner for owner, *_ in stage.owners(time.monotonic() - 0.5)} == {"next"}
        last_s = max(each.ended_s for each in stage.handled if each.consumer == "cut")
        print(f"cut_owner_stops_after_ms {(last_s - killed_s) * 1000:.0f}")
        assert SLOW_S < last_s - killed_s < TTL_S, "it handles on, and its partitions are not stuck"
        await stage.end_sending()
        await eventually(lambda: {int(each.message.value) for each in stage.handled}
                         >= set(stage.acked))  # fmt: skip
    await network.close()
    stage.judge()
