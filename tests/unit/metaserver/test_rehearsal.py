"""The opening that a metaserver rehearses."""

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import report_broker
from keylane.metaserver.cluster.heard import note_heard
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.groups.lease_rows import read_grants, settle_group
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.rehearsal import rehearse
from keylane.metaserver.sql import quick_connection
from keylane.metaserver.sql.database import open_database
from keylane.metaserver.sql.schema import metadata
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Join
from sim.machines.clock import ManualClock


@pytest.fixture
async def database(tmp_path):
    async with open_database(
        folder=tmp_path, url=None, clock=ManualClock(), boot="b", broker_ttl_ms=10_000
    ) as opened:
        yield opened


@pytest.fixture
def long_ways(monkeypatch):
    """The statements that SQLAlchemy itself executed, in a process that knows none."""
    monkeypatch.setattr(quick_connection, "_MEMO", "_memo_of_this_test")
    executed = []
    real = sa.Connection.execute

    def noted(self, statement, *args, **kwargs):
        executed.append(statement)
        return real(self, statement, *args, **kwargs)

    monkeypatch.setattr(sa.Connection, "execute", noted)
    return executed


def _rows(connection):
    return {
        table.name: connection.execute(sa.select(table)).all() for table in metadata.sorted_tables
    }


def _open(connection):
    """What a consumer's opening does."""
    ask = Join(subject="s", group="g", session="a" * 16, client="c", ttl_ms=10_000)
    joined = join_group(connection, ask, sessions_max=10)
    note_heard(connection, joined.unheard, settling=joined.group_id)
    settle_group(connection, joined.group_id, anew=True)
    return read_grants(connection, ask.session)


async def test_rehearsal_leaves_the_database_as_it_was(database):
    """No row, and no id is used."""
    before = await database.read(_rows)
    await rehearse(database)
    assert await database.read(_rows) == before
    await _make_subject(database)
    grants = await database.write(_open)
    assert [grant.partition.partition_id for grant in grants.grants] == [1, 2]


async def _make_subject(database):
    broker = BrokerHeartbeat(broker_group="b", broker_id="x", address="b:1")
    await database.write(report_broker, broker, ttl_ms=10_000)
    await database.write(plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=10)
    await database.write(open_subject, "s")


async def test_first_opening_finds_its_statements_known_after_the_rehearsal(database, long_ways):
    await rehearse(database)
    assert long_ways
    await _make_subject(database)
    long_ways.clear()
    await database.write(_open)
    assert not long_ways
