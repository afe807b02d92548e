"""A user's database that outlives its cluster: what docs/EFFECTS.md says of another cluster."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.errors import Reason, SchemaError
from keylane.sink import FencedSession, create_tables, forget
from keylane.testing import VirtualCluster
from support.cluster import Cluster, eventually
from support.server_process import run_keylane
from support.sink.entries import ENTRIES, entry

CREATE = sa.text("CREATE TABLE entries (id INTEGER PRIMARY KEY, order_key, value, token)")


async def engine_at(path: Path) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{path}")
    await create_tables(engine)
    with engine.begin() as connection:
        connection.execute(CREATE)
    return engine


def entries(engine: sa.Engine) -> list[bytes]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(ENTRIES.c.value).order_by(ENTRIES.c.id)).scalars())


def enter(engine: sa.Engine, message: Message) -> None:
    with Session(engine) as session, FencedSession(session, message) as todo:
        if todo:
            session.execute(sa.insert(ENTRIES).values(entry(message)))


def consumer_at(address: str, engine: sa.Engine) -> Consumer:
    async def handle(message: Message) -> None:
        enter(engine, message)

    return Consumer(
        address,
        subject="orders",
        group="billing",
        handler=handle,
        on_failure="park",
        tries_max=1,
        settings=ConsumerSettings(ttl_ms=1_500),
    )


async def send(address: str, *values: bytes) -> None:
    async with Producer(address) as producer:
        for value in values:
            await producer.send("orders", value, key=b"ada")


async def test_new_cluster_is_refused_until_the_fences_of_the_old_one_are_forgotten(
    tmp_path: Path,
):
    engine = await engine_at(tmp_path / "billing.db")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    with Cluster(tmp_path / "old", brokers=1) as old:
        await old.create("orders", partitions=1)
        await send(old.meta, b"1", b"2")
        async with consumer_at(old.meta, engine):
            await eventually(lambda: entries(engine) == [b"1", b"2"])
    with Cluster(tmp_path / "new", brokers=1) as new:
        await new.create("orders", partitions=1)
        await send(new.meta, b"3")
        async with Admin(new.meta) as admin:
            async with consumer_at(new.meta, engine):
                parked = []
                while not parked:
                    parked = [view async for view in admin.parked("orders", "billing")]
            assert parked[0].failure is not None
            assert parked[0].failure.kind == "SchemaError"
            assert "from another cluster" in parked[0].failure.text
            assert entries(engine) == [b"1", b"2"]
            assert await forget(engine, "orders", "billing", fences=True) == 1
            async with consumer_at(new.meta, engine):
                await admin.redrive("orders", "billing", all=True)
                await eventually(lambda: entries(engine) == [b"1", b"2", b"3"])
    engine.dispose()


async def test_cluster_is_the_same_one_when_its_database_is_rebuilt(tmp_path: Path):
    engine = await engine_at(tmp_path / "billing.db")
    with Cluster(tmp_path, brokers=1) as cluster:
        await cluster.create("orders", partitions=2)
        await send(cluster.meta, b"1")
        async with consumer_at(cluster.meta, engine):
            await eventually(lambda: entries(engine) == [b"1"])
        data = tmp_path / "meta-0"
        cluster.meta_program.kill()
        shutil.rmtree(data)
        rebuilt = run_keylane(
            *("meta", "rebuild", "--data", str(data), "--broker", cluster.brokers[0].address)
        )
        assert rebuilt.returncode == 0, rebuilt.stderr
        cluster.meta_program.restart()
        await send(cluster.meta, b"2")
        async with consumer_at(cluster.meta, engine):
            await eventually(lambda: entries(engine) == [b"1", b"2"])
    engine.dispose()


def test_virtual_clusters_of_one_seed_refuse_each_other(tmp_path: Path):
    engine = asyncio.run(engine_at(tmp_path / "billing.db"))
    refused: list[SchemaError] = []

    async def story(cluster: VirtualCluster, value: bytes) -> None:
        await cluster.create_subject("orders", partitions=1)
        await send(cluster.address, value)
        async with Consumer(cluster.address, subject="orders", group="billing") as consumer:
            async for message in consumer:
                try:
                    enter(engine, message)
                except SchemaError as error:
                    refused.append(error)
                break

    for value in (b"1", b"2"):
        cluster = VirtualCluster(seed=7)
        cluster.run(story, cluster, value)
    assert [error.reason for error in refused] == [Reason.SINK_OTHER_CLUSTER]
    assert entries(engine) == [b"1"]
    engine.dispose()
