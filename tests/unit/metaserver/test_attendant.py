"""The periodic work of a metaserver: failed work is retried, a bug ends it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.engine import Connection

from keylane.metaserver import attendant as attendant_module
from keylane.metaserver.attendant import Attendant
from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.groups.service import GroupService
from keylane.metaserver.groups.views import DueWork, due_work
from keylane.metaserver.operations.driver import OperationDriver
from keylane.metaserver.removals.service import RemovalService
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.database import open_database
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
        attendant = Attendant(
            database, groups, catalogue, settings, operations, duties, removals=removals
        )
        task = asyncio.create_task(attendant.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            await operations.stop()
            await network.close()


@pytest.mark.parametrize("error", [InternalError, OverloadedError, StorageError])
async def test_failed_work_is_logged_and_retried(
    tmp_path: Path, error: type[KeylaneError], caplog: pytest.LogCaptureFixture
) -> None:
    """A KeylaneError of a duty is logged, not each time, and the duty called again; the other work continues."""
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
        return replace(due_work(connection), removals=True)

    monkeypatch.setattr(GroupService, "check_for_changes", noted)
    monkeypatch.setattr(RemovalService, "run_once", hangs)
    monkeypatch.setattr(attendant_module, "due_work", removals_due)
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
        return replace(due_work(connection), creations=rounds[-1])

    async def repair(_catalogue: Catalogue) -> None:
        repaired.append(len(rounds))

    monkeypatch.setattr(attendant_module, "due_work", creations_due)
    monkeypatch.setattr(Catalogue, "repair", repair)
    async with attending(tmp_path, []), asyncio.timeout(30):
        while not repaired:
            await asyncio.sleep(0.01)
    assert repaired[0] > 50


async def test_database_that_answers_again_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it does not, each round fails, twice a second; the log has one line of that at first."""
    rounds: list[int] = []

    def fails_at_first(connection: Connection) -> DueWork:
        rounds.append(1)
        if len(rounds) < 20:
            raise StorageError("disk I/O error")
        return due_work(connection)

    monkeypatch.setattr(attendant_module, "due_work", fails_at_first)
    async with attending(tmp_path, []), asyncio.timeout(30):
        while len(rounds) < 30:
            await asyncio.sleep(0.01)
    assert caplog.text.count("the database does not answer: disk I/O error") == 1
    assert caplog.text.count("the database answers again, after 0 s") == 1
