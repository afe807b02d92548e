"""A database that lacks what brokers have is noticed, said once, and forgotten when both agree
again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.lost_database import read_missing_data
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.verify import agreement
from keylane.metaserver.verify.agreement import AgreementWatch
from keylane.protocol.control import (
    BrokerHeartbeat,
    CreateSubject,
    PartitionStatus,
    PartitionStatusList,
)
from keylane.protocol.errors import NotSentError
from keylane.protocol.routing import PartitionState
from keylane.testing.machines.database import MemoryDatabase, forget_database
from sim.machines.clock import ManualClock

OPEN, SEALED = PartitionState.OPEN, PartitionState.SEALED


class CountedBroker:
    """A network with one broker, which has partitions by id, or is silent."""

    def __init__(self) -> None:
        self.states: dict[int, PartitionState] = {}
        self.silent = False

    async def control(self, _method: str, address: str, *_rest: Any, **_more: Any) -> Any:
        if self.silent:
            raise NotSentError("silent", address=address)
        statuses = [
            PartitionStatus(
                partition_id=number,
                subject="s",
                name=f"s.p{number}",
                state=state,
                first_offset=0,
                next_offset=0,
            )
            for number, state in self.states.items()
        ]
        return PartitionStatusList(broker_group="g1", broker_id="x", partitions=statuses)


class ComparedCluster:
    """A database with the subject `s` of two partitions, which its broker has, and the watch over
    both.
    """

    def __init__(self) -> None:
        forget_database()
        self.database = MemoryDatabase(ManualClock())
        self.broker = CountedBroker()
        report = BrokerHeartbeat(broker_group="g1", broker_id="x", address="g1:1")
        self.database.transact(store_report, report, ttl_ms=60_000)
        self.database.transact(
            plan_subject, CreateSubject(subject="s", partitions=2), subjects_max=10
        )
        self.database.transact(open_subject, "s")
        self.broker.states = {1: OPEN, 2: OPEN}
        self.watch = AgreementWatch(self.database, self.broker)  # type: ignore[arg-type]

    def behind(self) -> str:
        return self.database.transact(read_missing_data)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> ComparedCluster:
    monkeypatch.setattr(agreement, "CONFIRM_S", 0.0)
    return ComparedCluster()


async def test_database_is_not_behind_when_brokers_have_what_it_has(
    watched: ComparedCluster,
) -> None:
    await watched.watch.check()
    assert not watched.behind()
    await asyncio.wait_for(watched.watch.wait_until_settled(), 1)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({1: OPEN, 2: OPEN, 3: OPEN}, "hosts partition 3 of 's', which SQL does not know"),
        ({1: OPEN, 2: SEALED}, "partition 2 is open in SQL and sealed at its broker"),
        ({1: OPEN}, "partition 2 is not hosted by 'g1'"),
    ],
)
async def test_database_is_behind_when_it_lacks_a_change_that_a_broker_has(
    watched: ComparedCluster,
    states: dict[int, PartitionState],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said in one line, however often it is found, and ends by itself."""
    watched.broker.states = states
    with caplog.at_level(logging.WARNING, "keylane.metaserver"):
        for _ in range(3):
            await watched.watch.check()
        assert said in watched.behind()
        (line,) = caplog.messages
        assert said in line
        assert "keylane meta rebuild" in line
        watched.broker.states = {1: OPEN, 2: OPEN}
        await watched.watch.check()
        assert not watched.behind()
        assert "again" in caplog.messages[1]


async def test_database_stays_behind_while_the_broker_that_showed_it_is_silent(
    watched: ComparedCluster,
) -> None:
    watched.broker.states = {1: OPEN, 2: OPEN, 3: OPEN}
    await watched.watch.check()
    watched.broker.silent = True
    await watched.watch.check()
    assert watched.behind()


async def test_deleted_partition_in_an_older_folder_is_no_sign_of_a_database_behind(
    watched: ComparedCluster,
) -> None:
    """Its id was given before: the database knows higher ones."""
    plan = CreateSubject(subject="t", partitions=2)
    watched.database.transact(plan_subject, plan, subjects_max=10)
    watched.database.transact(open_subject, "t")
    watched.database.transact(
        lambda connection: connection.exec_driver_sql(
            "DELETE FROM partitions WHERE partition_id = 3"
        )
    )
    watched.broker.states = {1: OPEN, 2: OPEN, 3: OPEN, 4: OPEN}
    await watched.watch.check()
    assert not watched.behind()


async def test_watch_asks_no_broker_when_there_is_no_doubt(watched: ComparedCluster) -> None:
    await watched.watch.check()
    watched.broker.states = {1: OPEN}
    await watched.watch.check()
    assert not watched.behind()
    watched.watch.request_comparison("g1")
    await watched.watch.check()
    assert watched.behind()
