"""Consumption goes on while the database is frozen: brokers witness that the owners live."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest
import sqlalchemy as sa

from integration.postgres.test_frozen_database import frozen
from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.metaserver.sql.clock_restart import AWAY_MS_MIN
from keylane.metaserver.sql.database import open_database
from keylane.protocol.clock import SystemClock
from support.cluster import Cluster, eventually
from support.postgres import running_postgres

TTL_MS = 3_000
FROZEN_S = 60.0
GAP_MS_MAX = 1_000
EACH_S = 0.02
KEYS = 16
AWAY_S = AWAY_MS_MIN / 1000 + 0.2


@pytest.mark.crash
async def test_consumers_handle_on_when_the_database_is_frozen_for_twenty_ttls(
    tmp_path: Path,
) -> None:
    """With the same tokens, also when it is back; and then a consumer that ends loses its
    partitions.
    """
    handled: dict[str, list[tuple[float, Message]]] = {"a": [], "b": []}

    def consumer(name: str) -> Consumer:
        async def handle(message: Message) -> None:
            handled[name].append((time.monotonic(), message))

        settings = ConsumerSettings(ttl_ms=TTL_MS, concurrency=4)
        return Consumer(
            cluster.meta, subject="orders", group="billing", handler=handle, settings=settings
        )

    def tokens() -> set[tuple[int, int]]:
        recent_s = time.monotonic() - 1.0
        return {
            (message.partition_id, message.fencing_token)
            for each in handled.values()
            for at_s, message in each
            if at_s > recent_s
        }

    sent = 0

    async def send(producer: Producer) -> None:
        nonlocal sent
        while True:
            await producer.send("orders", b"%d" % sent, key=b"%d" % (sent % KEYS))
            sent += 1
            await asyncio.sleep(EACH_S)

    with (
        running_postgres() as server,
        Cluster(tmp_path, 1, meta_settings=f'database_url = "{server.url()}"') as cluster,
    ):
        await cluster.create("orders", partitions=4)
        async with Producer(cluster.meta) as producer, consumer("a"):
            async with consumer("b"):
                sending = asyncio.create_task(send(producer))
                await eventually(lambda: len(tokens()) == 4 and handled["a"] and handled["b"])
                await eventually(lambda: all(len(each) > 50 for each in handled.values()))
                before, began_s = tokens(), time.monotonic()
                with frozen(server):
                    await asyncio.sleep(FROZEN_S)
                    await eventually(lambda: tokens() == before)  # nothing changes hands
                ended_s = time.monotonic()
                await asyncio.sleep(2 * TTL_MS / 1000)
                await eventually(lambda: tokens() == before)  # everybody keeps what it has
                b_ended = len(handled["a"])
            await eventually(lambda: {message.partition_id for _, message in handled["a"][b_ended:]}
                             == {partition for partition, _ in before})  # fmt: skip
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await eventually(lambda: sum(map(len, handled.values())) >= sent)
    gaps = [
        gap_ms(sorted(at_s for at_s, message in both(handled) if message.partition_id == partition),
               began_s, ended_s + 2 * TTL_MS / 1000)
        for partition, _ in before
    ]  # fmt: skip
    print(f"handling_gap_while_database_frozen_ms {max(gaps):.0f}")
    assert max(gaps) <= GAP_MS_MAX
    by_key: dict[bytes, list[int]] = {}
    for _, message in both(handled):
        by_key.setdefault(message.key or b"", []).append(int(message.value))
    for numbers in by_key.values():
        assert numbers == sorted(set(numbers)), "each once, in order"


@pytest.mark.crash
async def test_work_is_repeated_once_when_the_database_was_frozen_within_it(tmp_path: Path) -> None:
    """It may have ended sessions that nobody could renew. One that takes long by itself is not
    repeated for ever.
    """
    tries: list[str] = []

    def frozen_work(connection: sa.Connection) -> None:
        tries.append("frozen")
        if len(tries) == 1:
            with frozen(server):
                time.sleep(AWAY_S)

    def slow_work(connection: sa.Connection) -> None:
        tries.append("slow")
        connection.execute(sa.select(sa.func.pg_sleep(AWAY_S)))

    with running_postgres() as server:
        async with open_database(
            folder=tmp_path, url=server.url(), clock=SystemClock(), boot="", broker_ttl_ms=1_000
        ) as database:
            await database.write(frozen_work)
            await database.write(slow_work)
    assert tries == ["frozen", "frozen", "slow", "slow"]


def both(handled: dict[str, list[tuple[float, Message]]]) -> list[tuple[float, Message]]:
    """Return what all consumers handled, in the order of time."""
    return sorted((each for some in handled.values() for each in some), key=lambda each: each[0])


def gap_ms(times: list[float], began_s: float, ended_s: float) -> float:
    """Return the longest time without a handled message in between, in milliseconds."""
    inside = [began_s, *(at_s for at_s in times if began_s <= at_s <= ended_s), ended_s]
    return max(later - earlier for earlier, later in pairwise(inside)) * 1000
