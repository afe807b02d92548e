"""Outboxes on SQLite, PostgreSQL and MariaDB, beside a cluster of real processes."""

import asyncio
import itertools

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from keylane import CodecError, Consumer, JsonCodec
from keylane.outbox import Outbox, OutboxSettings, create_tables, drainer, upkeep
from keylane.protocol.errors import ClosedError, Fate, InvalidRequestError
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import Cluster
from support.outbox.rows import SETTINGS, drained, rows_left

numbers = itertools.count(1)


@pytest.fixture
async def subject(shared_cluster: Cluster) -> str:
    name = f"outbox-{next(numbers)}"
    await shared_cluster.create(name, partitions=4)
    return name


async def test_committed_rows_are_stored_in_order_each_once(shared_cluster, engine, subject):
    sent: dict[bytes, list[bytes]] = {}
    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
        for turn in range(20):
            async with AsyncSession(engine) as session, session.begin():
                for number in range(10):
                    key = b"key-%d" % (number % 7)
                    value = b"%d-%d" % (turn, number)
                    await outbox.add(session, subject, value, key=key)
                    sent.setdefault(key, []).append(value)
        await drained(engine)
    await shared_cluster.check_history(subject, sent)


async def test_values_of_a_codec_are_stored_and_decoded(shared_cluster, engine, subject):
    """`add`, `add_sync` and `send` encode alike; a consumer with the codec gets the values."""
    codec = JsonCodec(dict[str, int])
    async with Outbox(shared_cluster.meta, engine, codec=codec, settings=SETTINGS) as outbox:
        async with AsyncSession(engine) as session, session.begin():
            await outbox.add(session, subject, {"n": 0}, key=b"k")
        async with engine.begin() as connection:
            await connection.run_sync(
                lambda sync: outbox.add_sync(sync, subject, {"n": 1}, key=b"k")
            )
        await outbox.send(subject, {"n": 2}, key=b"k")
        with pytest.raises(CodecError):
            await outbox.send(subject, {"n": object()}, key=b"k")
        await drained(engine)
    got: list[dict[str, int]] = []
    async with (
        asyncio.timeout(30),
        Consumer(shared_cluster.meta, subject=subject, group="g", codec=codec) as consumer,
    ):
        async for message in consumer:
            got.append(message.decode())
            await message.ack()
            if len(got) == 3:
                break
    assert got == [{"n": 0}, {"n": 1}, {"n": 2}]


async def test_rows_of_a_rollback_are_never_stored(shared_cluster, engine, subject):
    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
        async with AsyncSession(engine) as session:
            await outbox.add(session, subject, b"rolled back", key=b"k")
            await session.rollback()
            async with session.begin_nested():
                await outbox.add(session, subject, b"rolled back behind a savepoint", key=b"k")
            await session.rollback()
            await outbox.add(session, subject, b"first", key=b"k")
            async with session.begin_nested() as savepoint:
                await outbox.add(session, subject, b"undone", key=b"k")
                await savepoint.rollback()
            async with session.begin_nested():
                await outbox.add(session, subject, b"second", key=b"k")
            await session.commit()
        await drained(engine)
    await shared_cluster.check_history(subject, {b"k": [b"first", b"second"]})


async def test_row_is_refused_when_its_connection_has_autocommit(shared_cluster, engine, subject):
    """It was stored at once, and sent whatever became of the transaction."""
    alone = engine.execution_options(isolation_level="AUTOCOMMIT")
    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
        async with AsyncSession(alone) as session, alone.connect() as connection:
            for target in (session, connection):
                with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
                    await outbox.add(target, subject, b"never", key=b"k")
        assert await rows_left(engine) == 0


async def test_rows_are_sent_at_once_when_a_connection_commits(shared_cluster, engine, subject):
    """Without a wake they would wait for the next rescan."""
    settings = OutboxSettings(rescan_ms=3_600_000)
    async with Outbox(shared_cluster.meta, engine, settings=settings) as outbox:
        async with engine.begin() as connection:
            await outbox.add(connection, subject, b"a", key=b"k")
        async with engine.begin() as connection:
            await connection.run_sync(lambda sync: outbox.add_sync(sync, subject, b"b", key=b"k"))
        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(lambda sync: outbox.add_sync(sync, subject, b"c", key=b"k"))
        await drained(engine)
        async with AsyncSession(engine) as session, session.begin():
            await outbox.add(session, subject, b"d", key=b"k")
            async with session.begin_nested() as savepoint:
                await savepoint.rollback()
        await drained(engine)
    await shared_cluster.check_history(subject, {b"k": [b"a", b"b", b"c", b"d"]})


async def test_outbox_keeps_no_sender_for_each_subject_of_its_life(
    shared_cluster, sqlite, monkeypatch
):
    """A program that names a subject for each customer had the tasks of all partitions that it ever
    sent to.
    """
    monkeypatch.setattr(drainer, "CACHED_SUBJECTS_MAX", 2)
    life = f"life-{next(numbers)}"
    sent: dict[str, list[bytes]] = {}
    async with Outbox(shared_cluster.meta, sqlite, settings=SETTINGS) as outbox:
        for turn in range(9):
            name = f"{life}.{turn % 8}"
            if name not in sent:
                await shared_cluster.create(name, partitions=1)
            await outbox.send(name, b"%d" % turn, key=b"k")
            sent.setdefault(name, []).append(b"%d" % turn)
            await drained(sqlite)
        async with asyncio.timeout(60):
            while len(_senders(life)) > 3:
                await asyncio.sleep(0.02)
    for name, values in sent.items():
        await shared_cluster.check_history(name, {b"k": values})


async def test_outbox_keeps_no_sender_for_each_subject_of_its_life_when_it_never_rests(
    shared_cluster, sqlite, monkeypatch
):
    """A program that always has rows of some subject kept the routes and senders of all, and read
    through them each round.
    """
    monkeypatch.setattr(drainer, "CACHED_SUBJECTS_MAX", 2)
    life = f"busy-{next(numbers)}"
    absent = f"{life}.absent"  # its row keeps the lease
    async with Outbox(shared_cluster.meta, sqlite, settings=SETTINGS) as outbox:
        async with sqlite.begin() as connection:
            await outbox.add(connection, absent, b"waits", key=b"k")
        for turn in range(9):
            name = f"{life}.{turn}"
            await shared_cluster.create(name, partitions=1)
            await outbox.send(name, b"v", key=b"k")
        async with asyncio.timeout(60):
            while len(_senders(life)) > 6:
                await asyncio.sleep(0.02)
        assert outbox._drainer.token is not None
        assert len(outbox._routes.states) <= 5
        assert outbox._drainer._by_subject.keys() <= outbox._routes.states.keys()
        await shared_cluster.create(absent, partitions=1)
        await drained(sqlite)
    for name in (absent, *(f"{life}.{turn}" for turn in range(9))):
        await shared_cluster.check_history(name, {b"k": [b"waits" if name == absent else b"v"]})


def _senders(prefix: str) -> list[str]:
    """The running tasks that send to partitions of these subjects."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith(f"outbox {prefix}")]


async def test_rows_of_threads_are_sent_from_a_plain_engine(shared_cluster, tmp_path, subject):
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'plain.db'}")
    await create_tables(engine)

    def work(outbox: Outbox) -> None:
        with Session(engine) as session, session.begin():
            outbox.add_sync(session, subject, b"a", key=b"k")
        with engine.begin() as connection:
            outbox.add_sync(connection, subject, b"b", key=b"k")

    def left() -> int:
        with engine.connect() as connection:
            return connection.exec_driver_sql("SELECT count(*) FROM keylane_outbox").scalar_one()

    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
        await asyncio.to_thread(work, outbox)
        async with asyncio.timeout(20):
            while left():
                await asyncio.sleep(0.01)
    engine.dispose()
    await shared_cluster.check_history(subject, {b"k": [b"a", b"b"]})


async def test_row_committed_late_precedes_newer_rows_of_its_key(shared_cluster, engine, subject):
    """A transaction that takes an id early and commits late; SQLite has no second writer."""
    if engine.dialect.name == "sqlite":
        async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
            for value in (b"other", b"late", b"newer"):
                await outbox.send(subject, value, key=b"o" if value == b"other" else b"k")
    else:
        async with (
            Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox,
            engine.connect() as early,
        ):
            await outbox.add(early, subject, b"late", key=b"k")
            await outbox.send(subject, b"other", key=b"o")
            await early.commit()
            async with engine.begin() as connection:
                await outbox.add(connection, subject, b"newer", key=b"k")
            await drained(engine)
    await shared_cluster.check_history(subject, {b"o": [b"other"], b"k": [b"late", b"newer"]})


async def test_several_outboxes_send_each_row_once(shared_cluster, engine, subject):
    sent: dict[bytes, list[bytes]] = {}

    async def add(outbox: Outbox, key: bytes) -> None:
        for number in range(30):
            async with engine.begin() as connection:
                await outbox.add(connection, subject, b"%d" % number, key=key)
            sent.setdefault(key, []).append(b"%d" % number)

    async with (
        Outbox(shared_cluster.meta, engine, settings=SETTINGS) as first,
        Outbox(shared_cluster.meta, engine, settings=SETTINGS) as second,
    ):
        await asyncio.gather(*(add(box, b"%d" % id(box)) for box in (first, second)))
        await drained(engine)
    await shared_cluster.check_history(subject, sent)


async def test_rows_wait_for_their_subject_and_others_do_not(
    shared_cluster, engine, subject, monkeypatch
):
    unknown = f"outbox-later-{next(numbers)}"
    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
        async with engine.begin() as connection:
            await outbox.add(connection, unknown, b"waits", key=b"k")
            await outbox.add(connection, subject, b"goes", key=b"k")
        async with asyncio.timeout(20):
            while await rows_left(engine) > 1:
                await asyncio.sleep(0.01)
        for counted_max, counted in ((1, True), (0, False)):
            monkeypatch.setattr(upkeep, "COUNTED_MAX", counted_max)
            gauges = await outbox.gauges()
            assert (gauges.rows, gauges.counted, gauges.failed) == (1, counted, 0)
        await shared_cluster.create(unknown, partitions=1)
        await drained(engine)
    await shared_cluster.check_history(subject, {b"k": [b"goes"]})
    await shared_cluster.check_history(unknown, {b"k": [b"waits"]})


async def test_rows_keep_their_order_through_a_resize(shared_cluster, engine, subject):
    sent: dict[bytes, list[bytes]] = {}
    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:

        async def add() -> None:
            for turn in range(60):
                async with engine.begin() as connection:
                    for number in range(5):
                        await outbox.add(connection, subject, b"%d" % turn, key=b"%d" % number)
                        sent.setdefault(b"%d" % number, []).append(b"%d" % turn)

        ask = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=7)
        await asyncio.gather(add(), shared_cluster.reshape(ask))
        await drained(engine)
    await shared_cluster.check_history(subject, sent)


async def test_send_returns_when_the_message_is_stored(shared_cluster, engine, subject):
    async with Outbox(shared_cluster.meta, engine, settings=SETTINGS) as outbox:
        async with engine.begin() as connection:
            await outbox.add(connection, subject, b"older", key=b"k")
        await outbox.send(subject, b"newer", key=b"k", properties={"kind": "live"})
        await shared_cluster.check_history(subject, {b"k": [b"older", b"newer"]})


async def test_outbox_leaves_no_task_when_it_is_closed(shared_cluster, sqlite, subject):
    """A program may open and close many; a task that waits for ever would be destroyed and logged
    some time later.
    """
    before = asyncio.all_tasks()
    for _ in range(2):
        async with Outbox(shared_cluster.meta, sqlite, settings=SETTINGS) as outbox:
            await outbox.send(subject, b"v", key=b"k")
    assert asyncio.all_tasks() == before


async def test_send_returns_when_another_process_sends(shared_cluster, sqlite, subject):
    """The second outbox finds the lease taken by the first, which has a row that waits for its
    subject.
    """
    async with Outbox(shared_cluster.meta, sqlite, settings=SETTINGS) as first:
        async with sqlite.begin() as connection:
            await first.add(connection, f"outbox-never-{next(numbers)}", b"waits")
        while first._drainer is not None and first._drainer.token is None:
            await asyncio.sleep(0.01)
        async with Outbox(shared_cluster.meta, sqlite, settings=SETTINGS) as second:
            await second.send(subject, b"stored", key=b"k")
    await shared_cluster.check_history(subject, {b"k": [b"stored"]})


async def test_send_fails_with_an_unknown_fate_when_the_outbox_is_closed(shared_cluster, sqlite):
    """The message stays in the table."""
    outbox = Outbox(shared_cluster.meta, sqlite, settings=SETTINGS)
    async with outbox:
        call = asyncio.create_task(outbox.send(f"outbox-never-{next(numbers)}", b"waits"))
        while not outbox.waiting:
            await asyncio.sleep(0.01)
    with pytest.raises(ClosedError) as refused:
        await call
    assert refused.value.fate is Fate.UNKNOWN
    assert await rows_left(sqlite) == 1


@pytest.mark.cluster(brokers=1)
async def test_rows_are_stored_once_when_a_broker_is_killed(cluster: Cluster, sqlite):
    await cluster.create("killed", partitions=2)
    sent: dict[bytes, list[bytes]] = {}
    async with Outbox(cluster.meta, sqlite, settings=SETTINGS) as outbox:

        async def add(connection: AsyncConnection, turn: int) -> None:
            for number in range(20):
                await outbox.add(connection, "killed", b"%d" % turn, key=b"%d" % number)
                sent.setdefault(b"%d" % number, []).append(b"%d" % turn)

        for turn in range(30):
            async with sqlite.begin() as connection:
                await add(connection, turn)
            if turn in (5, 15):
                cluster.brokers[0].kill()
            if turn in (10, 20):
                cluster.brokers[0].restart()
        await drained(sqlite)
    await cluster.check_history("killed", sent)
