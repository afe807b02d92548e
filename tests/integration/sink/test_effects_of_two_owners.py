"""Transactions of two owners at the same time, on database servers: at every isolation level, one
effect a message.
"""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from keylane import InvalidRequestError, Message
from keylane.errors import EffectDoneError, LeaseLostError, Reason
from keylane.protocol.message import Delivery
from keylane.sink import FencedSession, fenced, fenced_batch
from support.sink.deliveries import delivered, group_delivery
from support.sink.entries import ENTRIES, entries_by_key, entry

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


def levelled(engine: AsyncEngine, level: str) -> AsyncEngine:
    """The engine at an isolation level; InnoDB, where a SELECT of a serializable transaction locks,
    one level lower.
    """
    if engine.dialect.name != "postgresql" and level == "SERIALIZABLE":
        level = "REPEATABLE READ"
    return engine.execution_options(isolation_level=level)


async def effect(
    engine: AsyncEngine,
    message: Message,
    inside: asyncio.Event | None = None,
    go: asyncio.Event | None = None,
) -> bool:
    """Write an entry; in the middle of the transaction set `inside`, and wait for `go`."""
    async with AsyncSession(engine) as session, FencedSession(session, message) as todo:
        if todo:
            await session.execute(sa.insert(ENTRIES).values(entry(message)))
        if inside is not None and go is not None:
            inside.set()
            await go.wait()
        return todo


def numbered(offset: int, *, token: int, delivery: Delivery | None = None) -> Message:
    return delivered(offset, token=token, value=b"%d" % offset, delivery=delivery)


@pytest.mark.parametrize("level", LEVELS)
async def test_old_owner_is_refused_when_the_new_one_was_first(engine, level):
    """The new owner does not wait for the transaction of the old one, which is refused whatever it
    has done.
    """
    at_level = levelled(engine, level)
    await effect(at_level, numbered(0, token=1))
    inside, go = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        old = tasks.create_task(_outcome(at_level, numbered(1, token=1), inside, go))
        await inside.wait()
        assert await effect(at_level, numbered(2, token=2))
        assert await effect(at_level, numbered(1, token=2))
        go.set()
    assert isinstance(old.result(), LeaseLostError | DBAPIError), old.result()
    if level == "READ COMMITTED":
        assert old.result().reason is Reason.EFFECT_FENCED
    assert await entries_by_key(engine) == {b"k": [b"0", b"2", b"1"]}


async def _outcome(
    engine: AsyncEngine, message: Message, inside: asyncio.Event, go: asyncio.Event
) -> object:
    try:
        return await effect(engine, message, inside, go)
    except (LeaseLostError, EffectDoneError, DBAPIError) as error:
        return error


@pytest.mark.parametrize("level", LEVELS)
async def test_new_owner_passes_over_what_the_old_one_commits_first(engine, level):
    """The old owner ends while the new one is in its block, and has merged its rows."""
    at_level = levelled(engine, level)
    delivery = group_delivery(cursor=300)
    batch = [numbered(offset, token=1, delivery=delivery) for offset in range(255)]
    inside, go = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        new = tasks.create_task(_outcome(at_level, numbered(254, token=2), inside, go))
        await inside.wait()
        async with at_level.begin() as connection, fenced_batch(connection, batch) as left:
            await connection.execute(sa.insert(ENTRIES), [entry(message) for message in left])
        await effect(at_level, numbered(256, token=1, delivery=delivery))
        go.set()
    assert isinstance(new.result(), EffectDoneError | DBAPIError), new.result()
    assert not await effect(at_level, numbered(254, token=2))
    values = [b"%d" % offset for offset in (*range(255), 256)]
    assert await entries_by_key(engine) == {b"k": values}


@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
async def test_first_try_of_a_message_is_refused_when_a_second_one_was_merged(engine, level):
    """A handler gave up a process that went on; rows were merged while that was in its block, under
    the same token.
    """
    at_level = levelled(engine, level)
    delivery = group_delivery(cursor=300)
    await effect(at_level, numbered(400, token=1))
    batch = [numbered(offset, token=1, delivery=delivery) for offset in range(255)]
    inside, go = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        late = numbered(254, token=1, delivery=group_delivery(is_copied=True))
        first = tasks.create_task(_outcome(at_level, late, inside, go))
        await inside.wait()
        # The first try has written an entry, and no row of the fence yet.
        async with at_level.begin() as connection, fenced_batch(connection, batch) as left:
            await connection.execute(sa.insert(ENTRIES), [entry(message) for message in left])
        await effect(at_level, numbered(256, token=1, delivery=delivery))
        go.set()
    assert isinstance(first.result(), EffectDoneError | DBAPIError), first.result()
    values = [b"%d" % offset for offset in (400, *range(255), 256)]
    assert await entries_by_key(engine) == {b"k": values}


async def test_lanes_of_an_owner_do_not_fail_each_other(engine):
    """
    Many at once, from the first effect of the partition on; the rows are merged meanwhile.

    As at a consumer, the cursor is the first offset that is not done, and no lane is further ahead
    of it than the messages that are pulled at once: a lane that is slow holds back the others, and
    not only the merge.
    """
    delivery = group_delivery()
    ahead: set[int] = set()
    moved = asyncio.Condition()

    async def lane(first: int) -> None:
        for offset in range(first, 600, 8):
            async with moved:
                while offset >= delivery.cursor + 64:
                    await moved.wait()
            message = numbered(offset, token=3, delivery=delivery)
            while True:
                try:
                    assert await effect(engine, message)
                    break
                except DBAPIError:  # InnoDB takes two first lanes for a deadlock
                    if engine.dialect.name == "postgresql":
                        raise
            async with moved:
                ahead.add(offset)
                while delivery.cursor in ahead:
                    ahead.remove(delivery.cursor)
                    delivery.acked.cursor += 1
                moved.notify_all()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for first in range(8):
            tasks.create_task(lane(first))
    assert {key: len(values) for key, values in (await entries_by_key(engine)).items()} == {
        b"k": 600
    }
    async with engine.connect() as connection:
        rows = (
            await connection.exec_driver_sql("SELECT count(*) FROM keylane_sink_done")
        ).scalar_one()
    assert rows < 300, "they are merged"
    for offset in (0, 255, 300, 599):
        assert not await effect(engine, numbered(offset, token=4))


async def test_effect_is_refused_when_the_connection_commits_each_statement(engine):
    """Also where the driver alone knows it: asyncmy is told by `connect_args`, of which SQLAlchemy
    sees nothing.
    """
    told = {} if engine.dialect.name == "postgresql" else {"connect_args": {"autocommit": True}}
    level = {} if told else {"isolation_level": "AUTOCOMMIT"}
    alone = create_async_engine(engine.url, **told, **level)
    for each in (alone, engine.execution_options(isolation_level="AUTOCOMMIT")):
        with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
            await effect(each, numbered(0, token=1))
    await alone.dispose()
    assert await entries_by_key(engine) == {}
    assert await effect(engine, numbered(0, token=1))


# asyncpg has no transactions in two phases.
@pytest.mark.parametrize(
    "engine", [pytest.param("mariadb", marks=pytest.mark.whole)], indirect=True
)
async def test_effect_is_not_committed_when_a_commit_in_two_phases_is_inside_of_its_block(engine):
    """It was refused when its effect was written, without its offset: once more at each try."""
    message = numbered(0, token=1)
    add = sa.insert(ENTRIES).values(entry(message))

    async def of_a_session() -> None:
        async with AsyncSession(engine, twophase=True) as session, FencedSession(session, message):
            await session.execute(add)
            await session.commit()

    async def of_a_connection() -> None:
        async with engine.connect() as connection:
            transaction = await connection.run_sync(lambda real: real.begin_twophase())
            async with fenced(connection, message):
                await connection.execute(add)
                await connection.run_sync(lambda _: transaction.commit())

    for commits_inside in (of_a_session, of_a_connection):
        with pytest.raises(InvalidRequestError, match="commit after the block"):
            await commits_inside()
        assert await entries_by_key(engine) == {}
    async with AsyncSession(engine, twophase=True) as session, FencedSession(session, message):
        await session.execute(add)
    assert await entries_by_key(engine) == {b"k": [b"0"]}
