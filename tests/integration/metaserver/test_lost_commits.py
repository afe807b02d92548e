"""A database that lost its last commits, as after a fail-over to a standby that was behind."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer.group.membership import Membership
from keylane.protocol import endpoints
from support.cluster import Cluster, eventually

SENT = 40
LOOK_S = 3
BEATS_PER_S_MAX = 10


def copy_database(source: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(source)) as old,
        contextlib.closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)


@pytest.mark.crash
async def test_consumer_continues_when_the_database_went_back(cluster: Cluster, tmp_path: Path):
    """Its session lives and knows newer grants than the database: it takes the older ones, asks
    seldom, and handles.
    """
    await cluster.create("back", partitions=2)
    database = tmp_path / "meta-0" / "meta.db"
    handled: list[Message] = []
    beats = 0

    def consumer() -> Consumer:
        return Consumer(cluster.meta, subject="back", group="g", handler=handled.append)

    async with asyncio.timeout(120), consumer() as opened:
        await eventually(lambda: len(opened.assignment) == 2)
        copy_database(database, tmp_path / "older.db")
        async with consumer() as two:
            await eventually(lambda: len(opened.assignment) == 1 == len(two.assignment))
        await eventually(lambda: len(opened.assignment) == 2)
        cluster.meta_program.kill()
        for file in database.parent.glob("meta.db*"):
            file.unlink()
        copy_database(tmp_path / "older.db", database)

        assert opened._last_opening is not None
        membership = opened._last_opening.membership
        assert isinstance(membership, Membership)
        session, ask = membership.session, membership._meta.call

        async def counted(endpoint, *args, **kwargs):
            nonlocal beats
            beats += endpoint is endpoints.HEARTBEAT
            return await ask(endpoint, *args, **kwargs)

        membership._meta.call = counted  # type: ignore[method-assign]
        cluster.meta_program.restart()
        await asyncio.sleep(LOOK_S)
        async with Producer(cluster.meta) as producer:
            for number in range(SENT):
                producer.send("back", b"%d" % number, key=b"k%d" % number)
        await eventually(lambda: len(handled) == SENT, seconds=60)
        assert membership.session == session
        assert 0 < beats < BEATS_PER_S_MAX * LOOK_S
        assert membership._pauses.regression.failures == 1
