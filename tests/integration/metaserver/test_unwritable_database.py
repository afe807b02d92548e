"""A database that can be read and not written: the metaserver is not ready until it can be written
again.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from keylane.metaserver.running import running_metaserver
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.protocol.errors import Reason, StorageError
from keylane.protocol.membership.versions import VERSION
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Program
from support.postgres import Postgres
from support.raising import raises


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[MetaClient]:
    network = HttpNetwork()
    try:
        yield MetaClient(network, [address])
    finally:
        await network.close()


async def becomes(meta: MetaClient, *, ready: bool) -> str:
    """Wait until the metaserver says that it is ready, or is not; its reason."""
    async with asyncio.timeout(60):
        while (health := await meta.health()).ready is not ready:
            await asyncio.sleep(0.1)
    return health.reason


@pytest.mark.parametrize("used", [True, False])
async def test_metaserver_is_not_ready_while_its_disk_takes_nothing(
    tmp_path: Path, used: bool
) -> None:
    """The process may not lengthen a file: health says why, with and without other writes, until it
    may again.
    """
    program = Program("keylane.metaserver", "--data", str(tmp_path / "meta")).ready()
    pid = program.process.pid
    try:
        async with client_of(program.address) as meta:
            assert await becomes(meta, ready=True) == ""
            limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            if used:
                with raises((StorageError, Reason.NOT_ENOUGH_BROKERS)):
                    await meta.create_subject(CreateSubject(subject="s"))
            reason = await becomes(meta, ready=False)
            assert "cannot be written" in reason
            assert (await meta.call(endpoints.SUBJECTS)).subjects == []
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
            assert await becomes(meta, ready=True) == ""
    finally:
        program.stop()


async def test_metaserver_is_not_ready_while_its_database_is_locked(tmp_path: Path) -> None:
    """Another program keeps the write lock: health answers in time that it is not ready."""
    settings = MetaserverSettings(data=tmp_path / "meta", port=0)
    async with running_metaserver(settings) as running, client_of(running.address) as meta:
        other = sqlite3.connect(tmp_path / "meta" / "meta.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        reason = await becomes(meta, ready=False)
        assert "written" in reason
        other.execute("ROLLBACK")
        other.close()
        await becomes(meta, ready=True)


async def test_metaserver_stays_ready_when_it_refuses_a_brokers_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker on another folder of a group that is alive is refused; the database was written all
    the same.
    """
    settings = MetaserverSettings(data=tmp_path / "meta", port=0)
    own = BrokerHeartbeat(version=VERSION, broker_group="g", broker_id="own", address="127.0.0.1:9")
    stray = BrokerHeartbeat(
        version=VERSION, broker_group="g", broker_id="stray", address="127.0.0.1:8"
    )
    async with running_metaserver(settings) as running, client_of(running.address) as meta:
        assert await becomes(meta, ready=True) == ""
        await meta.broker_heartbeat(own)
        with caplog.at_level(logging.WARNING, "keylane.metaserver"):
            for _ in range(3):
                with raises(Reason.BROKER_GROUP_TAKEN):
                    await meta.broker_heartbeat(stray)
                assert (await meta.health()).reason == ""
        assert "cannot be written" not in caplog.text


async def test_metaserver_is_not_ready_while_its_postgresql_only_reads(
    tmp_path: Path, postgres: Postgres
) -> None:
    """Like a standby it refuses every write; health reports it, until writes succeed again."""
    url = postgres.url()
    settings = MetaserverSettings(data=tmp_path / "meta", port=0, database_url=url)
    async with running_metaserver(settings) as running, client_of(running.address) as meta:
        await becomes(meta, ready=True)
        postgres.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        postgres.execute("SELECT pg_reload_conf()")
        try:
            reason = await becomes(meta, ready=False)
            assert "read-only" in reason
        finally:
            postgres.execute("ALTER SYSTEM RESET default_transaction_read_only")
            postgres.execute("SELECT pg_reload_conf()")
        await becomes(meta, ready=True)


async def test_metaserver_is_not_ready_when_its_database_file_is_removed(tmp_path: Path) -> None:
    """Writes to a removed file would be lost at the next start."""
    program = Program("keylane.metaserver", "--data", str(tmp_path / "meta")).ready()
    try:
        async with client_of(program.address) as meta:
            assert await becomes(meta, ready=True) == ""
            (tmp_path / "meta" / "meta.db").rename(tmp_path / "elsewhere.db")
            assert "was removed or replaced" in await becomes(meta, ready=False)
            (tmp_path / "elsewhere.db").rename(tmp_path / "meta" / "meta.db")
            assert await becomes(meta, ready=True) == ""
    finally:
        program.kill()
