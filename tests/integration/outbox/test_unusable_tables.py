"""Tables of an outbox that are missing or of another version: a typed error, and an outbox beside
it sends on.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from keylane.outbox import Outbox, create_tables
from keylane.outbox.tables import VERSION, OutboxTables
from keylane.protocol.errors import Reason, SchemaError
from support.cluster import Cluster
from support.outbox.rows import SETTINGS, drained
from support.raising import raises

OLD = OutboxTables("old_outbox")
numbers = itertools.count(1)


class Beside:
    """An outbox on usable tables of the same database, which sends before and after something is
    refused.
    """

    def __init__(self, cluster: Cluster, engine: AsyncEngine, subject: str, outbox: Outbox) -> None:
        self.subject = subject
        self._cluster = cluster
        self._engine = engine
        self._outbox = outbox
        self.sent: dict[bytes, list[bytes]] = {}

    async def send(self) -> None:
        async with self._engine.begin() as connection:
            await self.add(connection)

    async def add(self, connection) -> None:
        for key in (b"a", b"b"):
            values = self.sent.setdefault(key, [])
            values.append(b"%d" % len(values))
            await self._outbox.add(connection, self.subject, values[-1], key=key)

    async def check(self) -> None:
        await drained(self._engine)
        await self._cluster.check_history(self.subject, self.sent)


@pytest.fixture
async def beside(shared_cluster: Cluster, engine: AsyncEngine) -> AsyncIterator[Beside]:
    subject = f"outbox-beside-tables-{next(numbers)}"
    await shared_cluster.create(subject, partitions=2)
    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
        beside = Beside(shared_cluster, engine, subject, outbox)
        await beside.send()
        yield beside
        await beside.send()
        await beside.check()


async def set_version(engine: AsyncEngine, version: int) -> None:
    async with engine.begin() as connection:
        await connection.execute(sa.update(OLD.lease).values(version=version))


async def test_rows_beside_are_sent_when_tables_are_missing(
    shared_cluster: Cluster, engine: AsyncEngine, beside: Beside
):
    """A savepoint keeps the user's transaction as it was before the refusal, on every database."""
    missing = Outbox(shared_cluster.meta, engine, prefix="never_made")
    with raises(Reason.OUTBOX_MISSING, match="create_tables"):
        await missing.__aenter__()
    async with engine.begin() as connection:
        await beside.add(connection)
        with raises(Reason.OUTBOX_MISSING, match="create_tables") as refused:
            async with connection.begin_nested():
                await missing.add(connection, beside.subject, b"never", key=b"a")
        assert refused.value.table == "never_made"
        await beside.add(connection)


async def test_outbox_goes_on_when_its_missing_tables_are_made_again(
    shared_cluster: Cluster, engine: AsyncEngine, beside: Beside
):
    """They are dropped while it is open: `send` is refused, and nothing has to be opened again."""
    await create_tables(engine, prefix="old_outbox")
    prefixed = Outbox(shared_cluster.meta, engine, prefix="old_outbox", settings=SETTINGS)
    async with prefixed as outbox:
        await outbox.send(beside.subject, b"before", key=b"c")
        async with engine.begin() as connection:
            await connection.run_sync(OLD.metadata.drop_all)
        with raises(Reason.OUTBOX_MISSING, match="create_tables"):
            await outbox.send(beside.subject, b"never", key=b"c")
        await beside.send()
        await create_tables(engine, prefix="old_outbox")
        await outbox.send(beside.subject, b"after", key=b"c")
    beside.sent[b"c"] = [b"before", b"after"]


@pytest.mark.parametrize(
    ("version", "kind", "advice"),
    [
        (VERSION - 1, Reason.OUTBOX_OLDER, "Upgrade them"),
        (VERSION + 1, Reason.OUTBOX_NEWER, "Install"),
    ],
)
async def test_rows_are_sent_later_when_tables_are_of_another_version(
    shared_cluster: Cluster,
    engine: AsyncEngine,
    beside: Beside,
    version: int,
    kind: type[SchemaError],
    advice: str,
):
    """Nothing of them is changed; they are sent, in order, by a process whose version they have."""
    await create_tables(engine, prefix="old_outbox")
    outbox = Outbox(shared_cluster.meta, engine, prefix="old_outbox", settings=SETTINGS)
    async with engine.begin() as connection:
        for value in (b"1", b"2"):
            await outbox.add(connection, beside.subject, value, key=b"c")
    await set_version(engine, version)
    for refuse in (outbox.__aenter__, outbox.status, outbox.gauges):
        with raises(kind, match=advice) as refused:
            await refuse()
        assert refused.value.version == version
    await beside.send()
    await set_version(engine, VERSION)
    async with outbox:
        await outbox.send(beside.subject, b"3", key=b"c")
    beside.sent[b"c"] = [b"1", b"2", b"3"]
