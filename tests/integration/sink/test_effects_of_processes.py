"""Consumer processes that are stopped past their lease, and killed in mid-transaction: each effect
once, in order.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from keylane import Producer
from support.cluster import Cluster, eventually, pause, resume
from support.server_process import ForkedProcess
from support.sink import entries
from support.sink.entries import entries_by_key

TTL_MS = 1_000
KEYS = [b"key-%d" % number for number in range(8)]
ROUNDS = 12


OPEN_TRANSACTIONS = sa.text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
)


@contextmanager
def consumer_process(*arguments: str) -> Iterator[ForkedProcess]:
    """A consumer that writes entries; killed at the end."""
    process = ForkedProcess(entries.__file__, arguments, os.environ, {})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def state(pid: int) -> str:
    """The kernel's letter for what a process does; T: it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def pause_between_transactions(pid: int, engine: AsyncEngine) -> None:
    """Stop the only program on this database; inside a transaction it would keep its locks, and
    others out.
    """
    async with asyncio.timeout(60):
        while True:
            pause(pid)
            await eventually(lambda: state(pid) == "T", what="a stop")
            async with engine.connect() as connection:
                if not (await connection.scalars(OPEN_TRANSACTIONS)).one():
                    return
            resume(pid)
            await asyncio.sleep(0.02)


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize("ends", ["stopped", "killed"])
async def test_effects_are_done_once_when_their_owner_is(
    shared_cluster: Cluster, postgres_url: str, tmp_path: Path, ends: str
):
    subject = f"effects-{ends}"
    await shared_cluster.create(subject, partitions=2)
    first, second = tmp_path / "first", tmp_path / "second"
    common = (shared_cluster.meta, subject, "g", str(TTL_MS), postgres_url)
    sent: dict[bytes, list[bytes]] = {key: [] for key in KEYS}
    async with Producer(shared_cluster.meta) as producer:
        for number in range(ROUNDS):
            for key in KEYS:
                sent[key].append(b"%s %d" % (key, number))
                producer.send(subject, sent[key][-1], key=key)
        await producer.flush()
    engine = create_async_engine(postgres_url, poolclass=NullPool)  # nothing stays open
    with consumer_process(*common, str(first), "0.2") as old:
        await eventually(lambda: lines(first) >= 2 * len(KEYS), what="entries of the first")
        if ends == "stopped":
            await pause_between_transactions(old.pid, engine)
        else:
            old.kill()
            old.wait()
        stopped_at = lines(first)
        with consumer_process(*common, str(second), "0"):
            async with asyncio.timeout(60):
                while await entries_by_key(engine) != sent:
                    assert lines(first) == stopped_at
                    await asyncio.sleep(0.05)
                if ends == "stopped":
                    resume(old.pid)
                    await asyncio.sleep(1.5)  # its handlers end now, and must change nothing
        assert await entries_by_key(engine) == sent
