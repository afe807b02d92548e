"""A database that is stopped, or has gone: probes and scrapes are answered from memory, with the
age of what they say.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import msgspec
import pytest

from integration.hosts.test_operating import get, samples_of
from keylane.protocol.control import ErrorBody
from keylane.protocol.errors import Fate, StorageError
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
            with suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.kill(int(number), signal.SIGSTOP)
    try:
        yield
    finally:
        for number in stopped:
            with suppress(ProcessLookupError):
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


@pytest.mark.crash
async def test_call_is_refused_for_now_when_the_database_is_away(tmp_path: Path) -> None:
    """Each of them with 503, nothing done and advice."""
    with (
        running_postgres() as server,
        Cluster(tmp_path, 1, meta_settings=f'database_url = "{server.url()}"') as cluster,
    ):
        await cluster.create("orders", partitions=2)
        first = int((server._folder / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(first, signal.SIGINT)
        await eventually(lambda: not (server._folder / "data" / "postmaster.pid").exists())
        calls = [
            ("GET", "/v1/subjects", None),
            ("GET", "/v1/subjects/orders/route", None),
            ("GET", "/v1/verify", None),
            ("POST", "/v1/subjects", {"subject": "new"}),
            (
                "POST",
                "/v1/consumers/join",
                {"subject": "orders", "group": "g", "session": "a" * 16},
            ),
            ("POST", "/v1/consumers/heartbeat", {"session": "a" * 16}),
            ("POST", "/v1/consumers/leave", {"session": "a" * 16}),
            ("POST", "/v1/subjects/orders/settings", {"retention": "time"}),
            ("POST", "/v1/brokers/g1/cordon", {"cordoned": True}),
        ]
        async with aiohttp.ClientSession() as session:
            for method, path, body in calls:
                url = f"http://{cluster.meta}{path}"
                async with session.request(method, url, json=body) as answer:
                    error = msgspec.json.decode(await answer.read(), type=ErrorBody).error()
                assert (answer.status, error.fate) == (503, Fate.NOT_DONE), (path, error)
                assert isinstance(error, StorageError)
                assert error.hint
