"""`keylane meta backup|restore`: from either database to either one, online, and nothing that does
not fit.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import make_url

from keylane import Admin, Consumer, Producer
from keylane.cli.connection import wait_for_brokers
from support.cluster import Cluster
from support.postgres import Postgres
from support.server_process import run_keylane


def where(folder: Path, url: str | None) -> list[str]:
    return ["--data", str(folder)] if url is None else ["--database-url", url]


HOLD_MS = 30_000
"""How long a restored group is granted nothing."""
HOLD_LEFT_MS = 2_000


def shorten_holds(folder: Path, postgres: Postgres, url: str | None) -> None:
    """Let all but the end of the time pass in which restored groups are granted nothing."""
    earlier = (
        f"UPDATE duties SET held_until = held_until - {HOLD_MS - HOLD_LEFT_MS}"
        " WHERE holder = 'restore' RETURNING name"
    )
    if url is None:
        with contextlib.closing(sqlite3.connect(folder / "meta.db")) as database, database:
            held = database.execute(earlier).fetchall()
    else:
        held = postgres.execute(earlier, database=make_url(url).database or "")
    assert len(held) == 1, "the group is held"


async def sent_and_handled(address: str, values: list[bytes], handled: int) -> list[bytes]:
    async with Producer(address) as producer:
        for value in values:
            await producer.send("orders", value, key=b"k")
    got: list[bytes] = []
    async with Consumer(address, subject="orders", group="audit") as consumer:
        async for message in consumer:
            got.append(message.value)
            await message.ack()
            if len(got) == handled:
                break
    return got


@pytest.mark.parametrize(("source", "target"), [("sqlite", "postgresql"), ("postgresql", "sqlite")])
async def test_cluster_goes_on_from_a_backup(
    tmp_path: Path, postgres: Postgres, source: str, target: str
) -> None:
    """Taken while the cluster runs; subjects, groups and settings are there, and no token is given
    twice.
    """
    url = postgres.url() if source == "postgresql" else None
    settings = "" if url is None else f'database_url = "{url}"'
    file = tmp_path / "backup"
    (tmp_path / "a").mkdir()
    with Cluster(tmp_path / "a", meta_settings=settings) as cluster:
        address = cluster.meta_program.address
        async with Admin(address, wait_s=30) as admin:
            await wait_for_brokers(admin, 2)
            await admin.create_subject("orders", partitions=3)
            await admin.cordon("g2")
        assert await sent_and_handled(address, [b"1", b"2"], 2) == [b"1", b"2"]
        done = run_keylane("meta", "backup", str(file), *where(tmp_path / "a" / "meta-0", url))
        assert done.returncode == 0, done.stderr
        # Messages and grants after the backup: the restored database must not repeat their tokens.
        assert await sent_and_handled(address, [b"3"], 1) == [b"3"]
        cluster.meta_program.stop()
        shutil.rmtree(tmp_path / "a" / "meta-0", ignore_errors=True)
        other = postgres.url() if target == "postgresql" else None
        place = where(tmp_path / "a" / "meta-0", other)
        done = run_keylane("meta", "restore", str(file), *place)
        assert done.returncode == 0, done.stderr
        again = run_keylane("meta", "restore", str(file), *place)
        assert again.returncode == 1
        assert "ConfigError 1367" in again.stderr
        shorten_holds(tmp_path / "a" / "meta-0", postgres, other)
        config = tmp_path / "restored.toml"
        config.write_text(f'database_url = "{other}"' if other else "")
        cluster.meta_program._arguments = (
            *("--config", str(config), "--data", str(tmp_path / "a" / "meta-0")),
        )
        cluster.meta_program.restart()
        async with Admin(address, wait_s=30) as admin:
            await wait_for_brokers(admin, 2)
            assert [view.cordoned for view in (await admin.list_brokers()).brokers] == [False, True]
        assert await sent_and_handled(address, [b"4"], 1) == [b"4"]
        checked = run_keylane("meta", "verify", "--meta", address)
        assert checked.returncode == 0, checked.stdout


def test_backup_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """Cut off, damaged, of another cluster or schema, or where a file is already."""
    data, file = tmp_path / "data", tmp_path / "backup"
    assert run_keylane("meta", "backup", str(file), "--data", str(data)).returncode == 1
    assert not data.exists()
    assert run_keylane("meta", "migrate", "--data", str(data)).returncode == 0
    assert run_keylane("meta", "backup", str(file), "--data", str(data)).returncode == 0
    again = run_keylane("meta", "backup", str(file), "--data", str(data))
    assert "ConfigError 1366" in again.stderr
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    for broken in (
        b"",
        whole[: len(whole) // 2],
        b"".join(lines[:-1]),
        whole.replace(b'"cluster version"', b'"cluster versiom"'),
        whole.replace(b'"revision":"', b'"revision":"9'),
        b"\xff" + whole,
    ):
        bad = tmp_path / "bad"
        bad.write_bytes(broken)
        done = run_keylane("meta", "restore", str(bad), "--data", str(tmp_path / "new"))
        assert (done.returncode, "ConfigError 1366" in done.stderr) == (1, True), done.stderr
        assert not (tmp_path / "new").exists()
    done = run_keylane("meta", "restore", str(file), "--data", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
