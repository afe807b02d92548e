"""Programs with one outbox killed at their statements: each committed order is stored once, in
order, and no other.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
import sqlalchemy as sa

from keylane.outbox import Outbox, create_tables
from keylane.protocol.operations import OperationKind, Reshape
from proof.second_opinion import second_opinion
from support.brokers.broker_forks import Forks
from support.cluster import Cluster
from support.outbox.writer import ORDERS, SETTINGS, SUBJECT, user_engine

STEPS = 120
"""A life ends at one of its first 119 steps: each of its first transactions is killed at every
statement.
"""
PROGRAMS = 2
LIFE_S = 30

pytestmark = pytest.mark.crash


@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("kills", [pytest.param(12), pytest.param(200, marks=pytest.mark.whole)])
async def test_committed_orders_are_stored_once_in_order_when_programs_are_killed(
    folder: Path, kills: int
):
    database = folder / "user.orders"
    engine = user_engine(database)
    with engine.begin() as connection:
        connection.exec_driver_sql(ORDERS)
        connection.exec_driver_sql("CREATE TABLE turns (number INTEGER)")
        connection.exec_driver_sql("INSERT INTO turns VALUES (0)")
    await create_tables(engine)
    with Cluster(folder) as cluster:
        await cluster.create(SUBJECT, partitions=2)
        await kill_programs(cluster, database, kills)
        async with Outbox(cluster.meta, engine, settings=SETTINGS), asyncio.timeout(60):
            while left(engine):
                await asyncio.sleep(0.05)
    engine.dispose()
    verdict = second_opinion(folder)
    assert verdict["findings"] == {}, verdict["examples"]
    assert verdict["stored"] >= kills


async def kill_programs(cluster: Cluster, database: Path, kills: int) -> None:
    """Run several programs at a time until `kills` of them have killed themselves; resize and kill
    a broker meanwhile.
    """
    rng = random.Random(kills)
    begun = 0

    async def live(forks: Forks) -> None:
        nonlocal begun
        while begun < kills:
            begun += 1
            if begun == kills // 3:
                await cluster.reshape(
                    Reshape(kind=OperationKind.RESIZE, subject=SUBJECT, partitions=3)
                )
            if begun == kills // 2:
                cluster.brokers[0].kill()
                cluster.brokers[0].restart()
            step = rng.randrange(1, STEPS)
            async with asyncio.timeout(LIFE_S):
                ended = await asyncio.to_thread(
                    forks.write_orders, cluster.meta, database, begun, step
                )
            assert ended == -signal.SIGKILL

    every_forks = [Forks() for _ in range(PROGRAMS)]
    try:
        await asyncio.gather(*map(live, every_forks))
    finally:
        for forks in every_forks:
            forks.close()


def left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        rows: int = connection.exec_driver_sql("SELECT count(*) FROM keylane_outbox").scalar_one()
    return rows
