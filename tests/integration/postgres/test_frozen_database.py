"""A database that is stopped in the middle: probes and scrapes are answered from memory, with the age of what they say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.hosts.test_operating import get, samples_of
from support.cluster import Cluster, eventually
from support.postgres import Postgres, running_postgres

ANSWER_S = 2.0
"""One second, and what a busy machine adds."""
SUBJECTS = ("keylane_metaserver_subjects", ())
AGE = ("keylane_metaserver_figures_age_seconds", ())


@contextmanager
def frozen(server: Postgres) -> Iterator[None]:
    """Stop every process of the server until the block ends."""
    first = int((server._folder / "data" / "postmaster.pid").read_text().split()[0])
    stopped = [first]
    os.kill(first, signal.SIGSTOP)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = stat.read_text().partition(" (")
        except OSError:
            continue
        if int(rest.rpartition(") ")[2].split()[1]) == first:
            stopped.append(int(number))
            os.kill(int(number), signal.SIGSTOP)
    try:
        yield
    finally:
        for number in stopped:
            os.kill(number, signal.SIGCONT)


@pytest.mark.crash
async def test_probes_and_scrapes_are_answered_when_the_database_is_frozen(tmp_path: Path) -> None:
    with (
        running_postgres() as server,
        Cluster(tmp_path, 1, meta_settings=f'database_url = "{server.url()}"') as cluster,
    ):
        await cluster.create("orders", partitions=2)
        await eventually(lambda: get(cluster.meta, "/health/ready")[0] == 200)
        assert samples_of(cluster.meta)[AGE] == 0
        with frozen(server):
            await asyncio.sleep(4)
            for _ in range(3):
                asked_s = time.monotonic()
                status, body = await asyncio.to_thread(get, cluster.meta, "/health/ready")
                assert time.monotonic() - asked_s < ANSWER_S
                health = json.loads(body)
                assert status == 503
                assert "database" in health["reason"]
                assert health["details"]["age_ms"] > 1_000
                assert health["details"]["brokers"][0]["broker_group"] == "g1"
                asked_s = time.monotonic()
                samples = await asyncio.to_thread(samples_of, cluster.meta)
                assert time.monotonic() - asked_s < ANSWER_S
                assert samples[SUBJECTS] == 1
                assert samples[AGE] > 1
        await eventually(lambda: get(cluster.meta, "/health/ready")[0] == 200)
        await eventually(lambda: samples_of(cluster.meta)[AGE] == 0)
