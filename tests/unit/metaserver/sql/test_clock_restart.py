"""Stored times are restarted after a jump of the clock, and an outage is given back."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.copy_sets import read_copy_set
from keylane.metaserver.sql.clock_restart import (
    AWAY_MS_MIN,
    give_time_back,
    restart_times_after_boot,
)
from keylane.metaserver.sql.dialect import prepare_sqlite
from keylane.metaserver.sql.schema import brokers, copy_sets, duties, facts, metadata, sessions
from sim.machines.clock import ManualClock

TTL_MS = 30_000


@pytest.fixture
def clock() -> ManualClock:
    clock = ManualClock()
    clock.advance(1_000_000)
    return clock


@pytest.fixture
def connection(clock: ManualClock):
    engine = sa.create_engine("sqlite://")
    prepare_sqlite(engine, clock=clock)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")  # there are no groups
        metadata.create_all(connection)
        yield connection
    engine.dispose()


def insert(connection: sa.Connection, table: sa.Table, **values: object) -> None:
    for kind, empty in ((sa.String, ""), (sa.Integer, 0), (sa.Boolean, False)):
        for column in table.columns:
            if isinstance(column.type, kind):
                values.setdefault(column.name, empty)
    connection.execute(sa.insert(table).values(values))


def begin_session(connection: sa.Connection, name: str, renewed_ms: int) -> None:
    insert(connection, sessions, session=name, ttl_ms=TTL_MS, expires_at=renewed_ms + TTL_MS)


def left_ms(connection: sa.Connection, clock: ManualClock) -> dict[str, int]:
    rows = connection.execute(sa.select(sessions.c.session, sessions.c.expires_at))
    return {name: expires_at - clock.boot_ms() for name, expires_at in rows}


def test_everybody_alive_has_a_whole_ttl_after_a_long_outage(connection, clock) -> None:
    begin_session(connection, "a", clock.boot_ms())
    begin_session(connection, "b", clock.boot_ms() - 7_000)
    clock.advance(10 * TTL_MS)
    assert give_time_back(connection, away_ms=10 * TTL_MS, broker_ttl_ms=1) == 10 * TTL_MS
    assert left_ms(connection, clock) == {"a": TTL_MS, "b": TTL_MS}


def test_session_has_as_much_time_as_a_short_outage_took(connection, clock) -> None:
    begin_session(connection, "a", clock.boot_ms())
    begin_session(connection, "dead", clock.boot_ms() - TTL_MS + 1)
    clock.advance(5_000)
    assert give_time_back(connection, away_ms=5_000, broker_ttl_ms=1) == 5_000
    assert left_ms(connection, clock) == {"a": TTL_MS, "dead": 5_001}


def test_time_is_not_given_back_when_another_metaserver_renewed_sessions(connection, clock) -> None:
    begin_session(connection, "dead", clock.boot_ms() - TTL_MS)
    clock.advance(60_000)
    begin_session(connection, "a", clock.boot_ms() - AWAY_MS_MIN + 1)
    assert give_time_back(connection, away_ms=60_000, broker_ttl_ms=1) == 0
    assert left_ms(connection, clock)["dead"] == -60_000


def test_start_gives_back_the_time_since_the_last_renewal(connection, clock) -> None:
    begin_session(connection, "a", clock.boot_ms())
    clock.advance(600_000)
    assert give_time_back(connection, away_ms=None, broker_ttl_ms=1) == 600_000
    assert left_ms(connection, clock) == {"a": TTL_MS}


def test_database_without_sessions_needs_nothing(connection) -> None:
    assert give_time_back(connection, away_ms=None, broker_ttl_ms=1) == 0


def test_session_that_had_expired_before_the_outage_gets_no_time(connection, clock) -> None:
    begin_session(connection, "expired", clock.boot_ms() - TTL_MS - 1)
    begin_session(connection, "a", clock.boot_ms())
    clock.advance(5_000)
    assert give_time_back(connection, away_ms=None, broker_ttl_ms=1) == 5_000
    assert left_ms(connection, clock) == {"expired": -5_001, "a": TTL_MS}


def test_start_restarts_all_times_when_the_clock_was_set_back_meanwhile(connection, clock) -> None:
    begin_session(connection, "a", clock.boot_ms() + 600_000)
    insert(connection, duties, name="d", holder="before", held_until=clock.boot_ms() + 600_000)
    assert give_time_back(connection, away_ms=None, broker_ttl_ms=TTL_MS) == 0
    assert left_ms(connection, clock) == {"a": TTL_MS}
    assert connection.execute(sa.select(duties)).all() == []


def test_offer_of_a_place_ends_with_the_boot_of_the_machine(connection, clock) -> None:
    insert(connection, brokers, broker_group="g1", expires_at=clock.boot_ms() + TTL_MS)
    until_ms = clock.boot_ms() + 5_000
    offered = {"members": '["a"]', "handing_to": "a", "handing_until": until_ms}
    insert(connection, copy_sets, broker_group="g1", **offered)
    restart_times_after_boot(connection, "boot 1", broker_ttl_ms=TTL_MS)
    assert read_copy_set(connection, "g1").handing_to == ""


def test_dead_session_ends_though_the_connection_breaks_again_and_again(connection, clock) -> None:
    begin_session(connection, "dead", clock.boot_ms())
    passed_ms = 0
    while left_ms(connection, clock)["dead"] > 0:
        clock.advance(10_000)
        passed_ms += 10_000
        give_time_back(connection, away_ms=AWAY_MS_MIN, broker_ttl_ms=1)
        assert passed_ms < 4 * TTL_MS


def restart_metaserver(connection, clock, *, every_ms: int, broker_ttl_ms: int = TTL_MS) -> None:
    """Let a metaserver start, and be killed before it has heard of anybody."""
    clock.advance(every_ms)
    give_time_back(connection, away_ms=None, broker_ttl_ms=broker_ttl_ms)


@pytest.mark.parametrize("every_ms", [100, 1_000, 10_000, 25_000])
def test_dead_session_ends_though_a_metaserver_is_started_again_and_again(
    connection, clock, every_ms
) -> None:
    begin_session(connection, "dead", clock.boot_ms())
    began_ms, starts = clock.boot_ms(), 0
    while left_ms(connection, clock)["dead"] > 0:
        restart_metaserver(connection, clock, every_ms=every_ms)
        starts += 1
        assert clock.boot_ms() - began_ms <= 2 * TTL_MS or starts <= 5


@pytest.mark.parametrize("every_ms", [1_000, 10_000])
def test_dead_broker_is_noticed_though_a_metaserver_is_started_again_and_again(
    connection, clock, every_ms
) -> None:
    begin_session(connection, "a", clock.boot_ms())
    insert(connection, brokers, broker_group="g1", expires_at=clock.boot_ms() + TTL_MS)
    expires_at = sa.select(brokers.c.expires_at)
    began_ms, starts = clock.boot_ms(), 0
    while connection.execute(expires_at).scalar_one() > clock.boot_ms():
        restart_metaserver(connection, clock, every_ms=every_ms)
        starts += 1
        assert clock.boot_ms() - began_ms <= 2 * TTL_MS or starts <= 5


def test_session_outlives_two_long_outages_between_which_nobody_was_heard(
    connection, clock
) -> None:
    begin_session(connection, "a", clock.boot_ms())
    for _ in range(2):
        clock.advance(10 * TTL_MS)
        assert give_time_back(connection, away_ms=None, broker_ttl_ms=1) == 10 * TTL_MS
    assert left_ms(connection, clock) == {"a": TTL_MS - TTL_MS // 4}


def test_session_that_was_heard_again_has_a_whole_ttl_after_each_outage(connection, clock) -> None:
    begin_session(connection, "a", clock.boot_ms())
    for _ in range(3):
        clock.advance(10 * TTL_MS)
        give_time_back(connection, away_ms=None, broker_ttl_ms=1)
        assert left_ms(connection, clock) == {"a": TTL_MS}
        clock.advance(5_000)
        connection.execute(sa.update(sessions).values(expires_at=clock.boot_ms() + TTL_MS))


def test_time_is_given_back_as_at_first_when_the_clock_was_set_back(connection, clock) -> None:
    begin_session(connection, "a", clock.boot_ms())
    clock.advance(TTL_MS)
    give_time_back(connection, away_ms=None, broker_ttl_ms=1)
    connection.execute(sa.update(facts).values(value=str(clock.boot_ms() + 600_000)))
    connection.execute(sa.update(sessions).values(expires_at=clock.boot_ms() + 600_000 + TTL_MS))
    assert give_time_back(connection, away_ms=None, broker_ttl_ms=1) == 0
    clock.advance(TTL_MS)
    assert give_time_back(connection, away_ms=None, broker_ttl_ms=1) == TTL_MS
    assert left_ms(connection, clock) == {"a": TTL_MS}


def test_dead_broker_is_noticed_though_the_connection_breaks_again_and_again(
    connection, clock
) -> None:
    insert(connection, brokers, broker_group="g1", expires_at=clock.boot_ms() + TTL_MS)
    expires_at = sa.select(brokers.c.expires_at)
    passed_ms = 0
    while connection.execute(expires_at).scalar_one() > clock.boot_ms():
        begin_session(connection, str(passed_ms), clock.boot_ms())
        clock.advance(10_000)
        passed_ms += 10_000
        give_time_back(connection, away_ms=AWAY_MS_MIN, broker_ttl_ms=TTL_MS)
        assert passed_ms < 4 * TTL_MS


def test_brokers_that_were_alive_get_the_time_of_an_outage_and_others_do_not(
    connection, clock
) -> None:
    begin_session(connection, "a", clock.boot_ms())
    for name, left in (("alive", 1_000), ("silent", -1), ("lost", -clock.boot_ms())):
        insert(connection, brokers, broker_group=name, expires_at=clock.boot_ms() + left)
    clock.advance(60_000)
    give_time_back(connection, away_ms=60_000, broker_ttl_ms=TTL_MS)
    rows = connection.execute(sa.select(brokers.c.broker_group, brokers.c.expires_at))
    left = {name: expires_at - clock.boot_ms() for name, expires_at in rows}
    assert left == {"alive": TTL_MS, "silent": -60_001, "lost": -clock.boot_ms()}
