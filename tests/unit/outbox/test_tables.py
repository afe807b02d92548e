"""The tables of an outbox: rounds on them, their versions, their migration."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import keylane.outbox.alembic as registered  # noqa: F401 - it registers operations
from keylane import CodecError, JsonCodec, TextCodec
from keylane.outbox import (
    Outbox,
    OutboxSettings,
    RowChange,
    create_tables,
    outbox_status,
    purge_failed,
    redrive_failed,
)
from keylane.outbox.assignment import Capacity, capacity_table
from keylane.outbox.batches import SendSession
from keylane.outbox.lease import TokenChangedError
from keylane.outbox.round import RoundInput, RoundOutcome, SettledBatches, run_round
from keylane.outbox.tables import VERSION, OutboxTables
from keylane.outbox.upkeep import SETTLED, change_rows, read_status, requeue_rows
from keylane.protocol.errors import (
    ConfigError,
    InvalidRequestError,
    MessageTooLargeError,
    Reason,
)
from keylane.protocol.message import unpack_properties
from keylane.rpc.environment import AMBIENT, Environment
from sim.machines.clock import ManualClock
from support.raising import raises
from support.sql.user_migrations import migrating, written_as_sql

META = "127.0.0.1:1"
TABLES = OutboxTables()
SETTINGS = OutboxSettings(batch_count=2)


@pytest.fixture
def engine(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'user.db'}")
    with engine.begin() as connection:
        TABLES.create(connection)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(engine) -> Outbox:
    return Outbox(META, engine)


def add(engine, outbox, *values: bytes, key: bytes = b"k") -> list[int]:
    with engine.begin() as connection:
        return [outbox.add_sync(connection, "s", value, key=key) for value in values]


def do(
    engine,
    token: int | None,
    settled: SettledBatches | None = None,
    *,
    owner: str = "a",
    batches: int = 5,
    sequence: int = 0,
    sending: bool = False,
    halted=frozenset(),
    limits=None,
) -> RoundOutcome:
    capacity = Capacity(1, SendSession(7, 0), sequence, batches)
    order = RoundInput(
        owner=owner,
        token=token,
        settled=settled or SettledBatches(),
        sending=sending,
        tables={"s": capacity_table([1] * 1024, {1: capacity} if batches else {}, [])},
        halted_keys=set(halted),
        limits=limits or {},
    )
    with engine.begin() as connection:
        return run_round(connection, TABLES, SETTINGS, order)


def ids(outcome: RoundOutcome) -> list[list[int]]:
    return [[row.id for row in batch.rows] for batch in outcome.recorded]


def count(engine, table: str = "keylane_outbox") -> int:
    with engine.connect() as connection:
        return connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one()


def test_stored_batches_are_deleted_and_the_lease_is_released(engine, outbox):
    first, second, third = add(engine, outbox, b"1", b"2", b"3")
    outcome = do(engine, None)
    assert ids(outcome) == [[first, second], [third]]
    assert do(engine, None, owner="b").token is None, "it is another's"
    outcome = do(engine, outcome.token, SettledBatches(stored=outcome.recorded))
    assert outcome.token is None
    assert (count(engine), count(engine, "keylane_outbox_batch")) == (0, 0)
    assert do(engine, None, owner="b").token is None, "nothing waits, so it is released again"


def test_next_holder_sends_the_same_bytes(engine, outbox):
    add(engine, outbox, b"1", b"2", b"3")
    recorded = do(engine, None).recorded
    inherited = do(engine, None)
    assert inherited.inherited
    assert [batch.encode() for batch in inherited.recorded] == [each.encode() for each in recorded]
    assert all(batch.doubtful for batch in inherited.recorded)


def test_token_of_an_earlier_holder_changes_nothing(engine, outbox):
    add(engine, outbox, b"1")
    zombie = do(engine, None)
    do(engine, None)
    with pytest.raises(TokenChangedError):
        do(engine, zombie.token, SettledBatches(stored=zombie.recorded))
    assert count(engine) == 1


def test_returned_rows_wait_again_and_are_recorded_in_order(engine, outbox):
    first, second = add(engine, outbox, b"1", b"2")
    outcome = do(engine, None, batches=1)
    (third,) = add(engine, outbox, b"3")
    outcome = do(engine, outcome.token, SettledBatches(returned=outcome.recorded))
    assert ids(outcome) == [[first, second], [third]]


def test_rows_behind_a_failed_one_of_their_key_wait_for_an_operator(engine, outbox):
    first, second = add(engine, outbox, b"1", b"2")
    outcome = do(engine, None)
    (later,) = add(engine, outbox, b"3")
    (other,) = add(engine, outbox, b"4", key=b"other")
    outcome = do(engine, outcome.token, SettledBatches(failed={outcome.recorded[0]: "lost"}))
    assert ids(outcome) == [[other]]
    outcome = do(
        engine, outcome.token, SettledBatches(stored=outcome.recorded), halted=outcome.halted_keys
    )
    assert outcome.token is None
    (newer,) = add(engine, outbox, b"5")
    outcome = do(engine, None)
    assert ids(outcome) == []
    with engine.begin() as connection:
        status = read_status(connection, TABLES, now_ns=0)
        assert (status.subjects[0].failed, status.subjects[0].halted) == (2, 2)
        assert [row.failure for row in status.failed_rows] == ["lost", "lost"]
        changed = change_rows(connection, TABLES, requeue_rows, SETTLED)
        assert changed == RowChange(failed=2)
    assert ids(do(engine, None)) == [[first, second], [later, newer]]


async def test_status_tells_ages_by_the_clock_of_the_program_when_it_has_one(engine):
    row = {"subject": "s", "logical": 0, "order_key": b"k", "value": b"", "properties": b""}
    clock = ManualClock()
    with engine.begin() as connection:
        connection.execute(sa.insert(TABLES.rows), row | {"added_at_ns": clock.wall_ns()})
    clock.advance(5_000)
    own = AMBIENT.set(Environment(clock=clock))
    try:
        (subject,) = (await outbox_status(engine)).subjects
    finally:
        AMBIENT.reset(own)
    assert subject.oldest_age_ms == 5_000


async def test_purge_lets_newer_rows_go(engine, outbox):
    add(engine, outbox, b"1")
    outcome = do(engine, None)
    (later,) = add(engine, outbox, b"2")
    do(engine, outcome.token, SettledBatches(failed={outcome.recorded[0]: "lost"}))
    assert (await outbox_status(engine)).rows == 2
    assert await purge_failed(engine, subject="another") == RowChange()
    for dry_run in (True, False):
        assert await purge_failed(engine, subject="s", dry_run=dry_run) == RowChange(failed=1)
    assert ids(do(engine, None)) == [[later]]


async def test_redrive_makes_the_holder_read_again(engine, outbox):
    add(engine, outbox, b"1")
    outcome = do(engine, None)
    assert await redrive_failed(engine) == RowChange()
    with pytest.raises(TokenChangedError):
        do(engine, outcome.token, sending=True)


def test_bytes_limit_what_one_round_reads(engine, outbox):
    rows = add(engine, outbox, *[bytes(1_000)] * 6)
    order_settings = OutboxSettings(read_bytes=2_500)
    capacity = Capacity(1, SendSession(7, 0), 0, 5)
    order = RoundInput(
        owner="a",
        token=None,
        settled=SettledBatches(),
        sending=False,
        tables={"s": capacity_table([1] * 1024, {1: capacity}, [])},
        halted_keys=set(),
        limits={},
    )
    with engine.begin() as connection:
        outcome = run_round(connection, TABLES, order_settings, order)
    assert ids(outcome) == [rows[:2]]
    assert outcome.more


def test_round_records_nothing_when_a_row_is_removed_by_another_program(engine, outbox):
    add(engine, outbox, b"1")

    @sa.event.listens_for(engine, "before_cursor_execute")
    def remove(_connection, cursor, statement, *_args):
        if statement.startswith("UPDATE keylane_outbox SET batch_id"):
            cursor.execute("DELETE FROM keylane_outbox")

    with pytest.raises(TokenChangedError):
        do(engine, None)


# ── adding ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"subject": "not a name"}, Reason.NAME_INVALID),
        ({"value": "text"}, InvalidRequestError),
        ({"key": "\ud800"}, InvalidRequestError),
        ({"key": bytes(1025)}, MessageTooLargeError),
        ({"value": bytes(1 << 20)}, MessageTooLargeError),
        ({"properties": {"a": 1}}, InvalidRequestError),
    ],
)
def test_add_refuses_before_it_inserts(engine, outbox, arguments, kind):
    with engine.begin() as connection, raises(kind):
        outbox.add_sync(connection, **({"subject": "s", "value": b"v", "key": b"k"} | arguments))
    assert count(engine) == 0


def test_value_is_encoded_when_the_outbox_has_a_codec(engine):
    """By subject, too; what cannot be encoded, or is encoded to more than a message may have, is
    not added.
    """
    by_subject = Outbox[Any](META, engine, codec={"orders": JsonCodec(dict[str, int])})
    with engine.begin() as connection:
        by_subject.add_sync(connection, "orders", {"id": 7}, key=b"k")
        by_subject.add_sync(connection, "other", b"bytes")
        with pytest.raises(InvalidRequestError, match="value must be bytes"):
            by_subject.add_sync(connection, "other", {"id": 7})
        with pytest.raises(CodecError):
            by_subject.add_sync(connection, "orders", {"id": object()})
    for_all = Outbox(META, engine, codec=TextCodec())
    with engine.begin() as connection:
        for_all.add_sync(connection, "s", "text")
        with pytest.raises(MessageTooLargeError):
            for_all.add_sync(connection, "s", "x" * ((1 << 20) + 1))
    with engine.connect() as connection:
        values = connection.exec_driver_sql(
            "SELECT value FROM keylane_outbox ORDER BY id"
        ).scalars()
        assert [bytes(value) for value in values] == [b'{"id":7}', b"bytes", b"text"]


@pytest.mark.parametrize("codec", [7, JsonCodec, {"s": "text"}])
def test_outbox_refuses_what_is_no_codec(engine, codec):
    with pytest.raises(ConfigError, match="a codec is"):
        Outbox(META, engine, codec=codec)


def test_tags_are_a_property_of_the_row(engine, outbox):
    """As those that a producer sends."""
    with engine.begin() as connection:
        outbox.add_sync(connection, "s", b"v", properties={"a": "b"}, tags=["paid", "eu"])
        with pytest.raises(InvalidRequestError, match="texts without commas"):
            outbox.add_sync(connection, "s", b"v", tags="paid")
        packed = connection.execute(sa.select(TABLES.rows.c.properties)).scalar_one()
    assert unpack_properties(packed) == {"a": "b", "keylane.tags": "paid,eu"}


async def test_add_takes_only_what_it_can_insert_with(engine, outbox):
    with Session(engine) as session:
        with pytest.raises(InvalidRequestError, match="add_sync takes a Session"):
            outbox.add(session, "s", b"v")  # a program without an event loop awaits nothing
        with pytest.raises(InvalidRequestError, match="not Engine"):
            outbox.add_sync(engine, "s", b"v")


async def test_add_names_the_missing_table(tmp_path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}")
    async with AsyncSession(engine) as session:
        with raises(Reason.OUTBOX_MISSING, match="create_tables"):
            await Outbox(META, engine).add(session, "s", b"v")
    await engine.dispose()


# ── versions ──────────────────────────────────────────────────────────────────────────────────────
async def test_outbox_does_not_open_on_tables_it_cannot_use(tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'user.db'}")
    with raises(Reason.OUTBOX_MISSING):
        await Outbox(META, engine).__aenter__()
    await create_tables(engine)
    await create_tables(engine)
    for version, kind in ((VERSION - 1, Reason.OUTBOX_OLDER), (VERSION + 1, Reason.OUTBOX_NEWER)):
        with engine.begin() as connection:
            connection.execute(sa.update(TABLES.lease).values(version=version))
        for work in (Outbox(META, engine).__aenter__, lambda: create_tables(engine)):
            with raises(kind) as refused:
                await work()
            assert refused.value.version == version
    engine.dispose()


def test_prefix_names_all_tables_and_indexes(engine):
    with engine.begin() as connection:
        OutboxTables("shop_outbox").create(connection)
        schema = sa.inspect(connection)
        assert schema.has_table("shop_outbox_lease")
        assert [index["name"] for index in schema.get_indexes("shop_outbox")] == [
            "shop_outbox_by_batch"
        ]


@pytest.mark.parametrize("prefix", ["", "Shop", "a-b", "a" * 41, 7])
def test_prefix_is_a_name(prefix):
    with pytest.raises(ConfigError):
        OutboxTables(prefix)


@pytest.mark.parametrize("url", ["nonsense", "sqlite+nodriver://", 7])
def test_outbox_needs_an_engine_or_a_url(url):
    with pytest.raises(ConfigError):
        Outbox(META, url)


# ── migrations ────────────────────────────────────────────────────────────────────────────────────
def test_migration_creates_and_drops_the_tables(tmp_path):
    with migrating(tmp_path / "user.db") as (operations, connection):
        operations.keylane_outbox_upgrade()
        operations.keylane_outbox_upgrade()
        TABLES.check(connection)
        operations.keylane_outbox_drop()


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "sqlite"])
def test_migration_can_be_written_as_sql(dialect):
    written = written_as_sql(dialect, lambda to: to.keylane_outbox_upgrade("shop"))
    assert "CREATE TABLE shop_lease" in written
    assert "CREATE INDEX shop_by_batch" in written
    assert "INSERT INTO shop_lease" in written
