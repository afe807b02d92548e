"""`keylane meta rebuild` of a cluster with access control: no metaserver gives capabilities, and
rights are in SQL alone.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from keylane import Admin, Producer
from keylane.cli.connection import wait_for_brokers
from keylane.protocol.access.tokens import make_token
from support.access.guarded import GuardedCluster
from support.access.secured_cluster import NAME, SecuredCluster
from support.cluster import eventually
from support.server_process import run_keylane


class LostRights:
    """A cluster with access control of which the database is lost, with a backup of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = GuardedCluster(folder, brokers=2)
        self.backup = folder / "backup"
        self.meta = folder / "meta-0"
        self.old = folder / "old"

    async def lose(self) -> str:
        """Make a subject and a principal, back up, and lose the database; the principal's token."""
        await self.cluster.made("orders", partitions=2)
        token = await self.cluster.principal("shop", "produce", subject="orders")
        async with self.cluster.admin() as admin:
            await admin.set_quota("shop", bytes_per_s=1_000_000)
        made = run_keylane("meta", "backup", str(self.backup), "--data", str(self.meta))
        assert made.returncode == 0, made.stderr
        self.cluster.meta_program.kill()
        shutil.move(self.meta, self.old)
        return token

    def rebuild(self, token_file: Path | None, *more: str) -> subprocess.CompletedProcess[str]:
        brokers = [f"--broker={broker.address}" for broker in self.cluster.brokers]
        environment = {} if token_file is None else {"KEYLANE_TOKEN_FILE": str(token_file)}
        environment |= {"COLUMNS": "300"}
        return run_keylane(
            "meta", "rebuild", "--data", str(self.meta), *brokers, *more, environment=environment
        )

    def token_file(self, text: str) -> Path:
        path = self.folder / "other.token"
        path.write_text(text)
        return path


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[LostRights]:
    lost = LostRights(tmp_path)
    try:
        yield lost
    finally:
        lost.cluster.stop()


async def test_rebuild_takes_the_token_of_an_administrator_and_rights_of_a_backup(
    lost: LostRights,
) -> None:
    token = await lost.lose()
    # Brokers that start meanwhile know the administrator too.
    lost.cluster.brokers[0].stop()
    lost.cluster.brokers[0].restart()
    done = lost.rebuild(lost.folder / "admin.token", "--access-from", str(lost.backup))
    assert done.returncode == 0, done.stderr
    assert "1 token, 1 grant, 1 quota" in " ".join(done.stdout.split())
    lost.cluster.meta_program.restart()
    await assert_shop_may_produce(lost, token)


@pytest.mark.parametrize("source", ["folder", "url"])
async def test_rebuild_takes_the_token_of_a_broker_and_rights_of_another_database(
    lost: LostRights, source: str
) -> None:
    token = await lost.lose()
    other = str(lost.old) if source == "folder" else f"sqlite+aiosqlite:///{lost.old / 'meta.db'}"
    done = lost.rebuild(lost.folder / "cluster.token", "--access-from", other)
    assert done.returncode == 0, done.stderr
    lost.cluster.meta_program.restart()
    await assert_shop_may_produce(lost, token)


async def test_running_metaserver_sees_rebuilt_rights_when_it_was_started_on_the_empty_database(
    lost: LostRights,
) -> None:
    token = await lost.lose()
    lost.cluster.meta_program.restart()
    done = lost.rebuild(lost.folder / "admin.token", "--access-from", str(lost.backup))
    assert done.returncode == 0, done.stderr
    async with lost.cluster.admin() as admin, asyncio.timeout(60):
        while not (await admin.check_access("shop", "produce", subject="orders")).allowed:
            await asyncio.sleep(0.05)
    await assert_shop_may_produce(lost, token)


async def test_rebuild_is_refused_when_no_operator_asks(lost: LostRights) -> None:
    token = await lost.lose()
    stranger = make_token(lambda bits: (1 << bits) - 1)
    for path in (None, lost.token_file(token), lost.token_file(stranger)):
        refused = lost.rebuild(path)
        assert refused.returncode == 1
        assert "KEYLANE_TOKEN_FILE" in refused.stderr
        assert "administrator's token" in refused.stderr


async def test_rebuild_says_that_tokens_are_lost_when_no_backup_is_named(lost: LostRights) -> None:
    await lost.lose()
    done = lost.rebuild(lost.folder / "admin.token")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    for lacking in ("tokens, grants and quotas", "--access-from", "cordons", "audit log"):
        assert lacking in said


async def assert_shop_may_produce(lost: LostRights, token: str) -> None:
    """The token, the right and the quota are as they were; what was never granted is not."""
    async with lost.cluster.admin() as admin:
        async with asyncio.timeout(60):
            while not all(broker.available for broker in (await admin.list_brokers()).brokers):
                await asyncio.sleep(0.05)
        (quota,) = (await admin.list_quotas()).quotas
        assert (quota.name, quota.bytes_per_s) == ("shop", 1_000_000)
    async with Producer(lost.cluster.meta, token=token) as producer:
        await producer.send("orders", b"value", key=b"key")
    async with Admin(lost.cluster.meta, token=token) as admin:
        assert (await admin.describe_subject("orders")).subject == "orders"


async def test_running_metaserver_signs_anew_when_its_rows_were_replaced_by_hand(
    lost: LostRights,
) -> None:
    """As by an operator who copies the tables of access with the tools of the database."""
    await lost.cluster.made("orders")
    token = await lost.cluster.principal("shop", "produce", subject="orders")
    with closing(sqlite3.connect(lost.meta / "meta.db", timeout=60)) as database:
        database.execute("UPDATE access_state SET cluster = 'copied', version = 1")
        database.execute("DELETE FROM access_keys")
        database.commit()
    with closing(sqlite3.connect(lost.meta / "meta.db", timeout=60)) as database:
        await eventually(lambda: stored_keys(database) == 1, what="another key")
    async with Producer(lost.cluster.meta, token=token) as producer, asyncio.timeout(60):
        await producer.send("orders", b"value", key=b"key")


def stored_keys(database: sqlite3.Connection) -> int:
    """The number of keys by which capabilities are believed."""
    (count,) = database.execute("SELECT count(*) FROM access_keys").fetchone()
    return int(count)


async def test_rebuild_works_on_a_host_that_cluster_init_made(tmp_path: Path) -> None:
    """Over TLS, with a token of its own for each broker: the administrator's is known by its
    hash.
    """
    secured = SecuredCluster(tmp_path)
    try:
        async with secured.admin() as admin:
            await wait_for_brokers(admin, 1)
            await admin.create_subject("orders", partitions=2)
        secured.metaserver.terminate()
        secured.metaserver.wait(20)
        settings = tomllib.loads((tmp_path / "made" / NAME / "keylane.toml").read_text())
        data = Path(settings["metaserver"]["data"])
        shutil.move(data, tmp_path / "lost")
        made = run_keylane(
            "meta",
            "rebuild",
            "--data",
            str(data),
            "--broker",
            secured.broker,
            environment={
                "KEYLANE_TOKEN": secured.admin_token,
                "KEYLANE_TLS_CA": secured.tls.ca,
            },
        )
        assert made.returncode == 0, made.stderr
        assert "orders" in made.stdout
    finally:
        secured.stop()
