"""Fenced effects of a group that had tens of thousands of partitions in its life."""

from __future__ import annotations

import sqlalchemy as sa

from keylane.sink import forget
from keylane.sink.tables import SinkTables

TABLES = SinkTables()
PARTITIONS = 33_000
"""PostgreSQL takes 32,767 parameters of a statement."""


async def test_effects_are_forgotten_when_the_group_had_more_partitions_than_a_statement_parameters(
    engine,
):
    common = {"subject": "s", "token": 1, "cluster_id": "5ea"}
    fences = [
        common | {"consumer_group": "g", "partition_id": number} for number in range(PARTITIONS)
    ]
    kept = common | {"consumer_group": "other", "partition_id": 1}
    async with engine.begin() as connection:
        for first in range(0, PARTITIONS, 1_000):
            await connection.execute(sa.insert(TABLES.fences), fences[first : first + 1_000])
        await connection.execute(sa.insert(TABLES.fences), [kept])
        every = sa.select(TABLES.fences.c.id, sa.literal(0), sa.literal(9))
        columns = ["fence_id", "first_offset", "next_offset"]
        await connection.execute(sa.insert(TABLES.done_ranges).from_select(columns, every))
    assert await forget(engine, "s", "g") == PARTITIONS
    async with engine.connect() as connection:
        left = await connection.execute(sa.select(sa.func.count()).select_from(TABLES.done_ranges))
        assert left.scalar_one() == 1
