"""The periodic work of a metaserver: what fails is done again, what is a fault of ours is not hidden."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keylane.metaserver.attendant import Attendant
from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.groups.service import Members
from keylane.metaserver.operations.driver import OperationDriver
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
        members = Members(database, settings)
        operations = OperationDriver(
            database,
            network,
            settings,
            catalogue=catalogue,
            members=members,
            driver="d",
            rng=random.Random(1),
        )
        attendant = Attendant(database, members, catalogue, settings, operations, duties)
        task = asyncio.create_task(attendant.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            await operations.stop()
            await network.close()


@pytest.mark.parametrize("error", [InternalError, OverloadedError, StorageError])
async def test_what_fails_is_done_again(
    tmp_path: Path, error: type[KeylaneError], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever error of ours a duty ends with, it is logged and done again, and the other work goes on."""
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
    assert caplog.text.count("the reason") >= 3


async def test_a_fault_of_ours_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who supervises the process sees it end, with the traceback in the log."""

    async def faulty() -> None:
        raise ZeroDivisionError

    async with attending(tmp_path, [faulty]) as task:
        async with asyncio.timeout(30):
            await asyncio.wait([task])
        with pytest.raises(ExceptionGroup):
            task.result()
    assert "ZeroDivisionError" in caplog.text
