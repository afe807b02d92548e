"""Fenced effects in transactions of a user on SQLite: once each, and of the newest owner alone."""

from __future__ import annotations

import pickle

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from keylane import InvalidRequestError
from keylane.errors import ConfigError, EffectDoneError, LeaseLostError, Reason
from keylane.protocol.message import Delivery
from keylane.sink import FencedSession, create_tables, fenced, fenced_batch, forget
from keylane.sink.tables import VERSION, SinkTables
from keylane.sync.consumer import TakenMessage
from support.raising import raises
from support.sink.deliveries import delivered, group_delivery

TABLES = SinkTables()


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "entries"
    id: Mapped[int] = mapped_column(primary_key=True)
    offset: Mapped[int]


class Other(Base):
    __tablename__ = "others"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def engine(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'user.db'}")
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        TABLES.create(connection)
    yield engine
    engine.dispose()


def entries(engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(Entry.offset).order_by(Entry.id)).scalars())


def done(engine) -> list[tuple[int, int]]:
    with engine.connect() as connection:
        ask = sa.select(TABLES.done_ranges.c.first_offset, TABLES.done_ranges.c.next_offset)
        return [
            tuple(row)
            for row in connection.execute(ask.order_by(TABLES.done_ranges.c.first_offset))
        ]


def effect(engine, message, meanwhile=lambda: None) -> bool:
    """True if the effect was done now; `meanwhile` is called in the block."""
    with Session(engine) as session, FencedSession(session, message) as todo:
        meanwhile()
        if todo:
            session.add(Entry(offset=message.offset))
        return todo


def effects(engine, offsets, delivery) -> None:
    """In one transaction, a block for each."""
    with engine.begin() as connection:
        for offset in offsets:
            with fenced(connection, delivered(offset, token=2, delivery=delivery)) as todo:
                assert todo


def test_effect_is_committed_once_when_the_message_comes_again(engine):
    assert effect(engine, delivered(3))
    assert not effect(engine, delivered(3))
    assert not effect(engine, delivered(3, token=2)), "the next owner passes it over"
    assert effect(engine, delivered(4, token=2))
    assert effect(engine, delivered(3, partition_id=8))
    assert effect(engine, delivered(3, delivery=group_delivery(group="another")))
    assert entries(engine) == [3, 4, 3, 3]


def test_transaction_is_rolled_back_when_the_block_ignores_that_it_is_done(engine):
    effect(engine, delivered(3))
    with Session(engine) as session, FencedSession(session, delivered(3)):
        session.add(Entry(offset=3))
    assert entries(engine) == [3]


def test_effect_is_done_again_when_its_transaction_was_rolled_back(engine):
    with pytest.raises(ZeroDivisionError):
        effect(engine, delivered(3), lambda: 1 // 0)
    with Session(engine) as session:
        session.begin()
        with fenced(session, delivered(3)) as todo:
            session.add(Entry(offset=3))
        session.rollback()
    assert (todo, entries(engine), done(engine)) == (True, [], [])
    assert effect(engine, delivered(3))


def test_owner_of_before_is_refused_when_it_begins_late(engine):
    assert effect(engine, delivered(3, token=5))
    with raises(Reason.EFFECT_FENCED) as refused:
        effect(engine, delivered(4, token=4))
    assert (refused.value.token, refused.value.current_token) == (4, 5)
    assert (refused.value.partition_id, refused.value.offset) == (7, 4)
    assert isinstance(refused.value, LeaseLostError)
    assert entries(engine) == [3]


def test_owner_of_before_is_refused_when_it_ends_late(engine):
    """It began before the new owner, which has done its first effect meanwhile; nothing of it is
    committed.
    """
    with raises(Reason.EFFECT_FENCED):
        effect(engine, delivered(4, token=4), lambda: effect(engine, delivered(9, token=5)))
    assert entries(engine) == [9]
    assert effect(engine, delivered(4, token=5))


def test_new_owner_is_refused_when_the_message_was_done_meanwhile(engine):
    with pytest.raises(EffectDoneError) as refused:
        effect(engine, delivered(4, token=5), lambda: effect(engine, delivered(4, token=4)))
    assert (refused.value.partition_id, refused.value.offset) == (7, 4)
    assert entries(engine) == [4]
    assert not effect(engine, delivered(4, token=5))


def test_message_is_recorded_once_when_its_blocks_overlap(engine):
    """A handler tried again while its first try still runs."""
    with pytest.raises(EffectDoneError):
        effect(engine, delivered(4), lambda: effect(engine, delivered(4)))
    assert entries(engine) == [4]


def test_message_is_passed_over_when_it_is_twice_in_a_transaction(engine):
    with Session(engine) as session, session.begin():
        for expected in (True, False):
            with fenced(session, delivered(3)) as todo:
                assert todo is expected
                if todo:
                    session.add(Entry(offset=3))
        with fenced_batch(session, [delivered(5), delivered(5), delivered(3)]) as messages:
            assert [message.offset for message in messages] == [5]
    assert done(engine) == [(3, 4), (5, 6)]


def test_effects_are_done_when_a_block_is_inside_of_another_of_its_connection(engine):
    """The end of the inner block took the event listener of both, and that of the outer one
    failed.
    """
    with engine.begin() as connection:
        with fenced(connection, delivered(1)):
            connection.execute(sa.insert(Entry).values(offset=1))
            with fenced(connection, delivered(2)):
                connection.execute(sa.insert(Entry).values(offset=2))
            with connection.begin_nested():
                connection.execute(sa.insert(Entry).values(offset=3))
    assert entries(engine) == [1, 2, 3]
    assert done(engine) == [(1, 2), (2, 3)]


def test_batch_has_what_is_left_in_order(engine):
    effect(engine, delivered(3))
    batch = [delivered(offset, partition_id=part) for part in (8, 7) for offset in (4, 3, 2)]
    with engine.begin() as connection, fenced_batch(connection, batch) as left:
        assert [(message.partition_id, message.offset) for message in left] == [
            *((7, 2), (7, 4)),
            *((8, 2), (8, 3), (8, 4)),
        ]
        connection.execute(sa.insert(Entry), [{"offset": message.offset} for message in left])
    with engine.begin() as connection, fenced_batch(connection, batch) as left:
        assert left == []
    assert entries(engine) == [3, 2, 4, 2, 3, 4]


def test_batch_is_refused_when_it_has_messages_of_two_owners(engine):
    with engine.begin() as connection, raises(Reason.EFFECT_FENCED):
        fenced_batch(connection, [delivered(3, token=2), delivered(4, token=1)])
    with engine.begin() as connection, fenced_batch(connection, []) as left:
        assert left == []


def test_batch_is_taken_when_children_redrive_what_their_parent_has_parked(engine):
    """Their tokens are of two partitions, and say nothing about each other; two of one child do."""
    left, right = group_delivery(leased_id=20), group_delivery(leased_id=21)
    batch = [delivered(1, token=3, delivery=left), delivered(2, token=5, delivery=right)]
    with engine.begin() as connection, fenced_batch(connection, batch) as todo:
        assert todo == batch
    with engine.begin() as connection, fenced_batch(connection, batch) as todo:
        assert todo == []
    with engine.begin() as connection, raises(Reason.EFFECT_FENCED):
        fenced_batch(
            connection,
            [delivered(3, token=3, delivery=left), delivered(1, token=4, partition_id=20)],
        )


def test_rows_are_merged_below_the_cursor(engine):
    delivery = group_delivery()
    effects(engine, [*range(100), *range(101, 255)], delivery)
    assert len(done(engine)) == 254
    delivery.acked.cursor = 250
    effects(engine, [256], delivery)
    assert done(engine)[:3] == [(0, 100), (101, 250), (250, 251)]
    for offset in (0, 99, 101, 200, 249, 256):
        assert not effect(engine, delivered(offset, token=2))
    assert effect(engine, delivered(100, token=2))
    effects(engine, range(257, 513), group_delivery(cursor=512))
    assert done(engine) == [(0, 255), (256, 512), (512, 513)]


def test_rows_of_an_owner_are_merged_when_many_below_cannot_be(engine):
    """Consumers that are replaced soon merged only the oldest rows, and left a row for each of
    their messages.
    """
    effects(engine, [0], group_delivery())
    left_out = [
        {"fence_id": 1, "first_offset": offset, "next_offset": offset + 1}
        for offset in range(2, 50_000, 2)
    ]
    with engine.begin() as connection:
        connection.execute(sa.insert(TABLES.done_ranges), left_out)
    rows_before = len(done(engine))
    for first in range(50_000, 58_000, 2_000):
        delivery = group_delivery()
        with engine.begin() as connection:
            for start in range(first, first + 2_000, 50):
                delivery.acked.cursor = start
                messages = [
                    delivered(offset, token=2, delivery=delivery)
                    for offset in range(start, start + 50, 2)
                ]
                with fenced_batch(connection, messages):
                    pass
                messages = [
                    delivered(message.offset + 1, token=2, delivery=delivery)
                    for message in messages
                ]
                with fenced_batch(connection, messages):
                    pass
    assert len(done(engine)) - rows_before < 1_000


def test_late_effect_is_refused_when_another_try_of_its_message_was_merged(engine):
    """Its handler gave up a thread or a process that went on, and handled the message again, under
    the same token.
    """
    delivery = group_delivery()
    effects(engine, [900], delivery)
    for late, first in ((delivery, 0), (group_delivery(cursor=0, is_copied=True), 1_024)):

        def merge(first=first):
            effects(engine, range(first, first + 300), delivery)
            delivery.acked.cursor = first + 300
            effects(engine, range(first + 500, first + 520), delivery)
            assert (first, first + 300) in done(engine)

        message = delivered(first + 5, token=2, delivery=late)
        with pytest.raises(EffectDoneError) as caught:
            effect(engine, message, merge)
        assert (caught.value.partition_id, caught.value.offset) == (7, first + 5)
        several = [delivered(first + each, token=2, delivery=late) for each in (299, 300, 301)]
        with engine.begin() as connection, fenced_batch(connection, several) as left:
            assert [message.offset for message in left] == [first + 300, first + 301]
    assert entries(engine) == []


async def test_effects_are_forgotten_when_an_operator_asks(engine):
    effect(engine, delivered(3, token=2))
    effect(engine, delivered(3, token=2, delivery=group_delivery(group="another")))
    assert await forget(engine, "s", "g") == 1
    assert await forget(engine, "s", "unknown") == 0
    assert effect(engine, delivered(3, token=2))
    assert not effect(engine, delivered(3, token=2, delivery=group_delivery(group="another")))
    with raises(Reason.EFFECT_FENCED):
        effect(engine, delivered(9, token=1))


def of_another_cluster(**given) -> Delivery:
    return group_delivery(cluster_id="b0b", **given)


@pytest.mark.parametrize("partition_id", [7, 8])
def test_group_of_another_cluster_is_refused_at_any_partition_and_token(engine, partition_id):
    effect(engine, delivered(3, token=2))
    for token in (1, 2, 9):
        message = delivered(
            3, token=token, partition_id=partition_id, delivery=of_another_cluster()
        )
        with raises(Reason.SINK_OTHER_CLUSTER, match="group 'g' of 's' from another") as refused:
            effect(engine, message)
        assert "fences=True" in refused.value.hint
    assert entries(engine) == [3]
    assert effect(engine, delivered(4, token=2)), "the group of the first cluster goes on"
    assert effect(engine, delivered(3, delivery=of_another_cluster(group="other")))


def test_cluster_that_writes_during_a_block_of_another_one_refuses_it(engine):
    with engine.begin() as connection, raises(Reason.SINK_OTHER_CLUSTER):
        with fenced(connection, delivered(3, delivery=of_another_cluster())) as todo:
            assert todo
            rows = sa.insert(TABLES.fences).values(
                subject="s", consumer_group="g", partition_id=7, token=1, cluster_id="5ea"
            )
            connection.execute(rows)
    assert done(engine) == []


async def test_group_of_another_cluster_takes_the_tables_over_when_the_fences_are_forgotten(engine):
    effect(engine, delivered(3, token=9))
    effect(engine, delivered(3, token=9, delivery=group_delivery(group="another")))
    assert await forget(engine, "s", "g", fences=True) == 1
    new = delivered(3, token=1, delivery=of_another_cluster())
    assert effect(engine, new)
    assert not effect(engine, new)
    with raises(Reason.SINK_OTHER_CLUSTER):
        effect(engine, delivered(4, token=9))
    assert not effect(engine, delivered(3, token=9, delivery=group_delivery(group="another")))


async def test_cluster_is_remembered_when_only_effects_are_forgotten(engine):
    effect(engine, delivered(3))
    await forget(engine, "s", "g")
    with raises(Reason.SINK_OTHER_CLUSTER):
        effect(engine, delivered(3, delivery=of_another_cluster()))


async def test_async_session_and_connection_are_fenced(tmp_path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'user.db'}")
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await create_tables(engine)
    for expected in (True, False):
        async with AsyncSession(engine) as session:
            async with FencedSession(session, delivered(3)) as todo:
                assert todo is expected
                session.add(Entry(offset=3))
        async with engine.begin() as connection, fenced(connection, delivered(4)) as todo:
            assert todo is expected
            if todo:
                await connection.execute(sa.insert(Entry).values(offset=4))
        async with engine.connect() as connection:
            async with FencedSession(connection, delivered(5)) as todo:
                await connection.execute(sa.insert(Entry).values(offset=5))
    async with engine.connect() as connection:
        found_offsets = (await connection.execute(sa.select(Entry.offset))).scalars().all()
    assert found_offsets == [3, 4, 5]
    await engine.dispose()


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("message", "not str"),
        (delivered(3, token=0), "no lease"),
        (delivered(3, delivery=group_delivery(group="")), "no lease"),
        (delivered(3, delivery=group_delivery(exclusive=False)), "is shared"),
    ],
)
def test_message_without_a_lease_of_its_own_is_refused(engine, message, text):
    with Session(engine) as session:
        for make in (FencedSession, fenced):
            with pytest.raises(InvalidRequestError, match=text):
                make(session, message)
        with pytest.raises(InvalidRequestError, match=text):
            fenced_batch(session, [message])


async def test_block_takes_only_what_it_can_work_with(engine):
    message = delivered(3)
    with pytest.raises(InvalidRequestError, match="not in a Engine"):
        fenced(engine, message)
    with pytest.raises(ConfigError):
        fenced(Session(engine), message, prefix="No Prefix")
    with Session(engine) as session:
        with pytest.raises(InvalidRequestError, match="use `with`"):
            async with FencedSession(session, message):
                raise AssertionError
        with pytest.raises(InvalidRequestError, match="no transaction has begun"):
            with fenced(session, message):
                raise AssertionError
        session.begin()
        with pytest.raises(InvalidRequestError, match="use `fenced`"):
            with FencedSession(session, message):
                raise AssertionError
    with pytest.raises(InvalidRequestError, match="use `async with`"):
        with fenced(AsyncSession(), message):
            raise AssertionError


def test_block_is_refused_when_its_transaction_ends_inside(engine):
    def commit_inside(session: Session) -> None:
        with fenced(session, delivered(3)):
            session.commit()
            session.begin()

    with Session(engine) as session:
        session.begin()
        with pytest.raises(InvalidRequestError, match="commit after the block"):
            commit_inside(session)


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("of", [Session, sa.Connection])
def test_commit_inside_of_a_block_writes_nothing(engine, of, caught: bool):
    """Its effect would be there again after each try; a savepoint is no commit, and later
    transactions are free.
    """

    def write_once(target: Session | sa.Connection) -> None:
        with FencedSession(target, delivered(3)) as todo:
            assert todo
            target.execute(sa.insert(Entry).values(offset=3))
            with target.begin_nested():
                target.execute(sa.insert(Entry).values(offset=3))
            try:
                target.commit()
            except InvalidRequestError:
                if not caught:
                    raise

    with Session(engine) if of is Session else engine.connect() as target:
        for _ in range(3):
            with pytest.raises(InvalidRequestError, match="commit after the block"):
                write_once(target)
        assert entries(engine) == [] == done(engine)
        with FencedSession(target, delivered(3)) as todo:
            assert todo
            target.execute(sa.insert(Entry).values(offset=3))
        target.execute(sa.insert(Entry).values(offset=4))
        target.commit()
    assert (entries(engine), done(engine)) == ([3, 4], [(3, 4)])


async def test_commit_of_an_async_session_inside_of_a_block_writes_nothing(tmp_path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'async.db'}")
    await create_tables(engine)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)

    async def write_once(session: AsyncSession, message) -> None:
        async with FencedSession(session, message):
            session.add(Entry(offset=3))
            await session.commit()

    async with AsyncSession(engine) as session:
        with pytest.raises(InvalidRequestError, match="commit after the block"):
            await write_once(session, delivered(3))
    async with AsyncSession(engine) as session:
        assert list((await session.execute(sa.select(Entry.offset))).scalars()) == []
    await engine.dispose()


def test_session_of_two_databases_is_refused(engine, tmp_path):
    second = sa.create_engine(f"sqlite:///{tmp_path / 'second.db'}")
    Base.metadata.create_all(second)
    with Session(binds={Entry: engine, Other: second}) as session:
        with pytest.raises(InvalidRequestError, match="not bound to one database"):
            with FencedSession(session, delivered(3)):
                raise AssertionError
    with Session(engine, binds={Other: second}) as session:
        with pytest.raises(InvalidRequestError, match="two databases"):
            with FencedSession(session, delivered(3)):
                session.add_all([Entry(offset=3), Other()])
    assert (entries(engine), entries(second)) == ([], [])
    second.dispose()


def test_tables_are_refused_when_they_are_missing_or_of_another_version(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'user.db'}")
    with Session(engine) as session, raises(Reason.SINK_MISSING, match="create_tables"):
        with FencedSession(session, delivered(3)):
            raise AssertionError
    with engine.begin() as connection:
        TABLES.create(connection)
    for version, kind in ((VERSION - 1, Reason.SINK_OLDER), (VERSION + 1, Reason.SINK_NEWER)):
        with engine.begin() as connection:
            connection.execute(sa.update(TABLES.version_table).values(version=version))
        with Session(engine) as session, raises(kind) as refused:
            with FencedSession(session, delivered(3)):
                raise AssertionError
        assert refused.value.version == version
    engine.dispose()


def test_parked_message_of_an_ancestor_is_fenced_by_the_child_that_has_it(engine):
    """Children of one parent have tokens of their own, which do not fence each other; an earlier
    owner of one is refused.
    """
    left, right = group_delivery(leased_id=20), group_delivery(leased_id=21)
    assert effect(engine, delivered(1, token=4))
    assert effect(engine, delivered(2, token=6, delivery=right))
    assert effect(engine, delivered(3, token=5, delivery=left))
    assert not effect(engine, delivered(1, token=5, delivery=left)), (
        "the parent's owner has done it"
    )
    assert not effect(engine, delivered(3, token=7, delivery=left))
    with raises(Reason.EFFECT_FENCED):
        effect(engine, delivered(5, token=5, delivery=right))
    assert effect(engine, delivered(8, token=7, partition_id=20, delivery=left))
    with raises(Reason.EFFECT_FENCED):
        effect(engine, delivered(5, token=5, delivery=left))
    assert entries(engine) == [1, 2, 3, 8]


def test_session_keeps_a_mark_for_every_kind_of_delivery():
    assert Delivery.__weakrefoffset__


def test_message_in_hand_of_sync_is_fenced_as_the_message_it_has(engine):
    taken = TakenMessage(None, delivered(1))
    with Session(engine) as session, FencedSession(session, taken) as todo:
        assert todo
        session.add(Entry(offset=taken.offset))
    with engine.begin() as connection, fenced(connection, taken) as todo:
        assert not todo, "it is done"
    assert entries(engine) == [1]


def test_pickled_message_is_fenced_as_the_message(engine):
    """As a pool of processes has it: done once, refused under an older token, also where rows are
    merged.
    """
    for offset in range(70):
        copied = group_delivery(cursor=offset, is_copied=True)
        carried = pickle.loads(pickle.dumps(delivered(offset, token=2, delivery=copied)))
        assert effect(engine, carried)
    assert not effect(engine, delivered(69, token=2))
    late = group_delivery(cursor=0, is_copied=True)
    with raises(Reason.EFFECT_FENCED):
        effect(engine, pickle.loads(pickle.dumps(delivered(70, token=1, delivery=late))))
    assert entries(engine) == list(range(70))


@pytest.mark.parametrize("messages", [None, 5, object(), delivered(3)])
def test_batch_takes_a_list_of_messages(engine, messages):
    with Session(engine) as session:
        with pytest.raises(
            InvalidRequestError, match="fenced_batch takes a list of messages, not "
        ):
            fenced_batch(session, messages)


def test_block_works_again_after_a_commit_inside_of_it(engine):
    """It was refused for good, although nothing ended its next transaction."""
    with Session(engine) as session:
        block = FencedSession(session, delivered(3))
        with pytest.raises(InvalidRequestError, match="commit after the block"), block:
            session.commit()
        with block as todo:
            assert todo
    assert done(engine) == [(3, 4)]


# ── transactions that are none ────────────────────────────────────────────────────────────────────
def test_effect_is_refused_when_its_engine_has_autocommit(engine):
    """Each statement was committed by itself: effects without their offset, and nothing said so."""
    alone = engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
        effect(alone, delivered(1))
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
            with FencedSession(connection, delivered(1)):
                raise AssertionError
    made = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with made.begin() as connection:
        with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
            with fenced(connection, delivered(1)):
                raise AssertionError
    made.dispose()
    assert (entries(engine), done(engine)) == ([], [])
    assert effect(engine, delivered(1))


async def test_effect_is_refused_when_its_async_engine_has_autocommit(engine):
    alone = create_async_engine(
        engine.url.set(drivername="sqlite+aiosqlite"), isolation_level="AUTOCOMMIT"
    )
    with pytest.raises(InvalidRequestError, match="AUTOCOMMIT"):
        async with AsyncSession(alone) as session, FencedSession(session, delivered(1)):
            raise AssertionError
    await alone.dispose()
    assert entries(engine) == []


def test_effect_is_taken_when_the_driver_begins_nothing_and_an_event_does(engine):
    """As SQLAlchemy's page about SQLite advises."""
    own_transaction = sa.create_engine(engine.url, connect_args={"isolation_level": None})
    sa.event.listen(
        own_transaction, "begin", lambda connection: connection.exec_driver_sql("BEGIN")
    )
    assert effect(own_transaction, delivered(1))
    own_transaction.dispose()
    assert entries(engine) == [1]


@pytest.mark.parametrize("isolation_level", ["", None])
def test_effect_is_rolled_back_when_its_first_statement_is_in_a_savepoint(engine, isolation_level):
    """The driver had begun no transaction, and the end of the savepoint committed."""
    own_transaction = sa.create_engine(
        engine.url, connect_args={"isolation_level": isolation_level}
    )
    if isolation_level is None:
        sa.event.listen(
            own_transaction, "begin", lambda connection: connection.exec_driver_sql("BEGIN")
        )

    def fail() -> None:
        with Session(own_transaction) as session, FencedSession(session, delivered(1)):
            with session.begin_nested():
                session.add(Entry(offset=1))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (entries(engine), done(engine)) == ([], [])
    with Session(own_transaction) as session, FencedSession(session, delivered(1)):
        with session.begin_nested():
            session.add(Entry(offset=1))
    own_transaction.dispose()
    assert (entries(engine), done(engine)) == ([1], [(1, 2)])


async def test_effect_is_rolled_back_when_its_first_statement_is_in_a_savepoint_of_an_async_session(
    engine,
):
    own_transaction = create_async_engine(engine.url.set(drivername="sqlite+aiosqlite"))

    async def fail() -> None:
        async with AsyncSession(own_transaction) as session, FencedSession(session, delivered(1)):
            async with session.begin_nested():
                session.add(Entry(offset=1))
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    await own_transaction.dispose()
    assert (entries(engine), done(engine)) == ([], [])


def test_error_of_a_block_is_raised_when_it_is_inside_of_another_of_its_connection(engine):
    with engine.begin() as connection, pytest.raises(KeyError):
        with fenced(connection, delivered(3)), fenced(connection, delivered(4)):
            raise KeyError
    assert done(engine) == []


def test_preparation_of_a_commit_is_refused_inside_of_a_block(engine):
    """As a session with `twophase` asks for it; SQLite has none, so the event is told here."""

    def prepare(connection) -> None:
        with fenced(connection, delivered(1)):
            connection.dispatch.prepare_twophase(connection, "xid")

    with engine.begin() as connection:
        with pytest.raises(InvalidRequestError, match="commit after the block"):
            prepare(connection)
        connection.dispatch.prepare_twophase(connection, "xid")
    assert done(engine) == []
