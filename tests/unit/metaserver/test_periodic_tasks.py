"""The periodic work of a metaserver: failed work is retried, a bug ends it."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.engine import Connection

from keylane.metaserver import periodic_tasks as periodic_tasks_module
from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.groups.service import GroupService
from keylane.metaserver.groups.views import DueWork, read_due_work
from keylane.metaserver.operations.driver import OperationDriver
from keylane.metaserver.periodic_tasks import PeriodicTasks
from keylane.metaserver.removals.service import RemovalService
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.database import open_database
from keylane.protocol import log_filter
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import InternalError, KeylaneError, OverloadedError, StorageError
from keylane.rpc.http_network import HttpNetwork


@asynccontextmanager
async def attending(
    folder: Path, duties: Sequence[Callable[[], Awaitable[object]]]
) -> AsyncIterator[asyncio.Task[None]]:
    """The work of a metaserver on an empty database, begun."""
    settings = MetaserverSettings(data=folder, poll_ms=10, repair_ms=100, expire_ms=100)
    network = HttpNetwork()
    async with open_database(
        folder=folder, url=None, clock=SystemClock(), boot="boot", broker_ttl_ms=10_000
    ) as database:
        catalogue = Catalogue(database, network, settings)
        groups = GroupService(database, settings)
        operations = OperationDriver(
            database,
            network,
            settings,
            catalogue=catalogue,
            groups=groups,
            driver="d",
            rng=random.Random(1),
        )
        removals = RemovalService(database, network, catalogue=catalogue, groups=groups)
        periodic_tasks = PeriodicTasks(
            database, groups, catalogue, settings, operations, duties, removals=removals
        )
        task = asyncio.create_task(periodic_tasks.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            await operations.stop()
            await network.close()


def without_counts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the log, with N for how many failures there were in how many seconds."""
    return [re.sub(r"\d+ failures? in [\d.]+ s", "N failures", line) for line in caplog.messages]


@pytest.mark.parametrize("error", [InternalError, OverloadedError, StorageError])
async def test_failed_work_is_logged_and_retried(
    tmp_path: Path, error: type[KeylaneError], caplog: pytest.LogCaptureFixture
) -> None:
    """A KeylaneError of a duty is logged, not each time, and the duty called again; the other work
    continues.
    """
    failed: list[int] = []
    done: list[int] = []

    async def fails() -> None:
        failed.append(1)
        raise error("the reason")

    async def works() -> None:
        done.append(1)

    async with attending(tmp_path, [fails, works]) as task, asyncio.timeout(30):
        while len(failed) < 3 or len(done) < 4:
            await asyncio.sleep(0.01)
            assert not task.done()
    assert caplog.text.count("the reason") == 1, (
        "it is told again after 10 s, then ever more seldom"
    )


async def test_bug_in_periodic_work_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends, with the traceback in the log."""

    async def faulty() -> None:
        raise ZeroDivisionError

    async with attending(tmp_path, [faulty]) as task:
        async with asyncio.timeout(30):
            await asyncio.wait([task])
        with pytest.raises(ExceptionGroup):
            task.result()
    assert "ZeroDivisionError" in caplog.text


async def test_periodic_work_goes_on_while_a_removal_waits_for_a_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that hangs holds up neither changes nor expired sessions."""
    looked: list[tuple[int, ...]] = []
    removing = asyncio.Event()
    real = GroupService.check_for_changes

    async def noted(self: GroupService, seen: tuple[int, ...] = ()) -> None:
        looked.append(seen)
        await real(self, seen)

    async def hangs(self: RemovalService) -> None:
        removing.set()
        await asyncio.Event().wait()

    def removals_due(connection: Connection) -> DueWork:
        return replace(read_due_work(connection), removals=True)

    monkeypatch.setattr(GroupService, "check_for_changes", noted)
    monkeypatch.setattr(RemovalService, "run_once", hangs)
    monkeypatch.setattr(periodic_tasks_module, "read_due_work", removals_due)
    async with attending(tmp_path, []), asyncio.timeout(30):
        await removing.wait()
        before = len(looked)
        while len(looked) < before + 3:
            await asyncio.sleep(0.01)


async def test_creations_are_repaired_when_a_round_has_seen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one nothing is read for them."""
    rounds: list[bool] = []
    repaired: list[int] = []

    def creations_due(connection: Connection) -> DueWork:
        rounds.append(len(rounds) > 50)
        return replace(read_due_work(connection), creations=rounds[-1])

    async def repair(_catalogue: Catalogue) -> None:
        repaired.append(len(rounds))

    monkeypatch.setattr(periodic_tasks_module, "read_due_work", creations_due)
    monkeypatch.setattr(Catalogue, "continue_creations", repair)
    async with attending(tmp_path, []), asyncio.timeout(30):
        while not repaired:
            await asyncio.sleep(0.01)
    assert repaired[0] > 50


async def test_reason_is_logged_once_when_rounds_fail_for_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounds are many a second, and a database may be away for hours; the end of it is told too."""
    rounds: list[int] = []

    def fail_at_first(connection: Connection) -> DueWork:
        rounds.append(1)
        if len(rounds) <= 20:
            raise StorageError("it only reads" if len(rounds) % 2 else "it is away")
        return read_due_work(connection)

    monkeypatch.setattr(periodic_tasks_module, "read_due_work", fail_at_first)
    async with attending(tmp_path, []), asyncio.timeout(30):
        while len(rounds) < 25:
            await asyncio.sleep(0.01)
    assert without_counts(caplog) == [
        "periodic work failed and will be retried: it only reads",
        "periodic work failed and will be retried: it is away",
        "the periodic work succeeds again, after N failures",
    ]


async def test_log_is_not_filled_when_rounds_fail_and_succeed_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a proxy of which one of two databases is away: only the end of what the log said is
    told.
    """
    rounds: list[int] = []

    def fail_each_second(connection: Connection) -> DueWork:
        rounds.append(1)
        if len(rounds) % 2:
            raise StorageError("it is away")
        return read_due_work(connection)

    monkeypatch.setattr(periodic_tasks_module, "read_due_work", fail_each_second)
    async with attending(tmp_path, []), asyncio.timeout(30):
        while len(rounds) < 20:
            await asyncio.sleep(0.01)
    assert without_counts(caplog) == [
        "periodic work failed and will be retried: it is away",
        "the periodic work succeeds again, after N failures",
    ]


async def test_end_is_logged_when_a_duty_has_told_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database is away for duties and rounds alike, and whichever meets it first says so for
    both.
    """
    away = True
    rounds: list[int] = []

    def read(connection: Connection) -> DueWork:
        rounds.append(1)
        if away and caplog.messages:
            raise StorageError("it is away")
        return read_due_work(connection)

    async def duty() -> None:
        if away:
            raise StorageError("it is away")

    monkeypatch.setattr(periodic_tasks_module, "read_due_work", read)
    async with attending(tmp_path, [duty]), asyncio.timeout(30):
        while not caplog.messages:
            await asyncio.sleep(0.01)
        before = len(rounds)
        while len(rounds) < before + 3:
            await asyncio.sleep(0.01)
        away, before = False, len(rounds)
        while len(rounds) < before + 3:
            await asyncio.sleep(0.01)
    assert without_counts(caplog) == [
        "periodic work failed and will be retried: it is away",
        "the periodic work succeeds again, after N failures",
    ]


async def test_reason_is_logged_again_when_rounds_fail_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who looks at the last lines of the log sees it."""

    def fail(_connection: Connection) -> DueWork:
        raise StorageError("it is away")

    monkeypatch.setattr(periodic_tasks_module, "read_due_work", fail)
    monkeypatch.setattr(log_filter, "FIRST_GAP_MS", 50)
    async with attending(tmp_path, []), asyncio.timeout(30):
        while caplog.text.count("it is away") < 3:
            await asyncio.sleep(0.01)


async def test_groups_are_settled_when_one_before_them_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The row of the first is held elsewhere, and the second fails."""
    settled: list[int] = []
    looked: list[int] = []

    async def settle(_groups: GroupService, group_id: int) -> None:
        if group_id == 1:
            await asyncio.Event().wait()
        if group_id == 2:
            raise OverloadedError("too much")
        settled.append(group_id)

    async def look(_groups: GroupService, _seen: tuple[int, ...] = ()) -> None:
        looked.append(len(settled))

    def three_due(connection: Connection) -> DueWork:
        return replace(read_due_work(connection), groups=(1, 2, 3))

    monkeypatch.setattr(periodic_tasks_module, "SETTLE_S", 0.02)
    monkeypatch.setattr(periodic_tasks_module, "UNSETTLED_LOG_S", 0.05)
    monkeypatch.setattr(periodic_tasks_module, "read_due_work", three_due)
    monkeypatch.setattr(GroupService, "settle", settle)
    monkeypatch.setattr(GroupService, "check_for_changes", look)
    async with attending(tmp_path, []), asyncio.timeout(30):
        while len(looked) < 10:
            await asyncio.sleep(0.01)
    assert settled[:2] == [3, 3]
    assert caplog.messages == [
        "periodic work failed and will be retried: too much",
        "periodic work failed and will be retried: consumer group 1 is not settled after 0.05 s",
    ]
