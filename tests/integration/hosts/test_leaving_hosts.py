"""A host leaves today: its broker group moves to another host as a whole, under load, with sealed
partitions that nobody has read yet.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from integration.hosts.test_year_of_operating import (
    FIRST,
    SECOND,
    THIRD,
    OperatedCluster,
    SteadySender,
    health,
    one_is_silent,
    problems,
    run,
    wait_until,
)
from keylane import Admin, Consumer, Producer
from keylane.admin import PartitionState
from support.server_process import ForkedProcess, run_keylane

pytestmark = pytest.mark.timeout(300)
KEYS = 20
"""Of a steady sender."""
INTERRUPTED_S = (0.05, 0.1, 0.2, 0.4, 0.7)
"""After how long a command is killed; it is begun again afterwards."""
LEAVE = ("remove-host", SECOND, "--to", FIRST, "--yes")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OperatedCluster]:
    operated = OperatedCluster(tmp_path, FIRST, SECOND)
    yield operated
    operated.stop()


async def seal_some(cluster: OperatedCluster) -> int:
    """Leave messages in sealed partitions that no group has read; returns how many."""
    await cluster.ready(2, "sealed")
    async with cluster.admin() as admin:
        await admin.set_copies("g2", 1, may_share_machine=True)
        async with Producer(cluster.meta, **cluster.access) as producer:
            sends = [producer.send("sealed", b"%d" % n, key=b"%d" % (n % KEYS)) for n in range(400)]
            await asyncio.gather(*sends)
        await admin.wait(await admin.resize("sealed", 2))
        parts = (await admin.describe_subject("sealed")).partitions
        there = [part for part in parts if part.broker_group == "g2"]
        assert PartitionState.SEALED in {part.state for part in there}
        await admin.create_subject("orders", partitions=4)
    return 400


async def handled(cluster: OperatedCluster, subject: str, count: int) -> list[int]:
    """The numbers that a new group gets from the beginning; each key's are in order."""
    by_key: dict[bytes, list[int]] = defaultdict(list)
    where = {"subject": subject, "group": "late", "start": "earliest"}
    async with (
        asyncio.timeout(60),
        Consumer(cluster.meta, **where, **cluster.access) as consumer,
    ):
        async for message in consumer:
            by_key[message.key].append(int(message.value))
            await message.ack()
            if sum(map(len, by_key.values())) == count:
                break
    for numbers in by_key.values():
        assert all(one < two for one, two in pairwise(numbers)), "out of order"
    return sorted(number for numbers in by_key.values() for number in numbers)


async def start_copy(cluster: OperatedCluster, name: str, health_port: int) -> None:
    """Start the follower on a host, and wait until it answers."""
    cluster.start(name, "broker")
    host = name.partition("/")[0]
    await wait_until(partial(health, cluster, host, health_port))


async def serves(admin: Admin, group: str) -> str:
    """The address of the group's broker."""
    return next(
        broker.address
        for broker in (await admin.list_brokers()).brokers
        if broker.broker_group == group
    )


async def interrupted(cluster: OperatedCluster, *arguments: str, after_s: float) -> None:
    """Run a command, and kill it after some time, at the end at the latest."""
    words = ("cluster", arguments[0], str(cluster.made), *arguments[1:])
    with open(os.devnull, "r+b") as nothing:
        files = dict.fromkeys(range(3), nothing.fileno())
        command = ForkedProcess("keylane.cli", words, os.environ | cluster.environment, files)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(command.wait, after_s)
        command.kill()
        await asyncio.to_thread(command.wait)


async def test_broker_group_moves_to_a_host_that_has_a_broker(cluster: OperatedCluster) -> None:
    """All that the host stored is read elsewhere after its disk was emptied."""
    sealed_count = await seal_some(cluster)
    with SteadySender(cluster, "orders") as sender:
        for after_s in INTERRUPTED_S:
            await interrupted(cluster, *LEAVE, after_s=after_s)
        # Nothing is delivered: the files are there, and the next call continues with them.
        status, step = await run(cluster, *LEAVE)
        assert (status, "it does not know the new token" in problems(step)) == (1, True), step
        second = cluster.made / FIRST / "g2"
        settings = tomllib.loads((second / "keylane.toml").read_text())["broker"]
        assert settings["port"] == cluster.ports[1] + 1, "beside that of the host's own broker"
        assert (settings["follow"], settings["failover"]) == (True, True)
        assert stat.S_IMODE((second / "broker.token").stat().st_mode) == 0o600
        unit = (second / "keylane-broker-g2.service").read_text()
        assert "--config /etc/keylane/g2/keylane.toml" in unit
        token = (second / "broker.token").read_text()
        status, error = await run(cluster, "remove-host", SECOND, "--to", THIRD, "--yes")
        assert (status, error["code"]) == (1, 1371), "it moves elsewhere already"
        status, error = await run(cluster, "remove-host", FIRST, "--to", SECOND, "--yes")
        assert (status, error["code"]) == (1, 1371), "it has the only metaserver"

        status, step = await run(cluster, "remove-host", SECOND, delivered=True)
        assert (status, problems(step)) == (1, ["it has not been started yet"]), step
        assert "/etc/keylane/g2 on 127.0.0.1" in step["left"][0]["advice"]
        assert "enable --now keylane-broker-g2" in step["left"][0]["advice"]
        assert (second / "broker.token").read_text() == token, "its files are made once"

        await start_copy(cluster, f"{FIRST}/g2", cluster.ports[1] + 2)
        for after_s in INTERRUPTED_S:
            await interrupted(cluster, "remove-host", SECOND, after_s=after_s)
        status, step = await run(cluster, "remove-host", SECOND)
        assert (status, problems(step)) == (1, ["it still runs"]), step
        assert step["done"] == [
            f"{FIRST} serves broker group g2, with all that {SECOND} stores",
        ]
        async with cluster.admin() as admin:
            assert await serves(admin, "g2") == f"{FIRST}:{cluster.ports[1] + 1}"
            assert (await admin.copies("g2")).wanted == 1, "as before"
        cluster.kill(SECOND)  # with its disk
        status, step = await run(cluster, "remove-host", SECOND, delivered=True)
        assert (status, problems(step)) == (0, []), step
    assert not list(cluster.made.glob(f"{SECOND}*"))
    assert await handled(cluster, "sealed", sealed_count) == list(range(sealed_count))
    assert await handled(cluster, "orders", sender.sent) == list(range(sender.sent))

    # The second broker is a host as the others.
    status, step = await run(cluster, "cert renew", "--all", delivered=True)
    assert (status, step["left"]) == (0, []), step
    status, error = await run(cluster, "remove-host", f"{FIRST}/g2", "--yes")
    assert (status, error["name"]) == (1, "ConfigError")


async def test_copy_of_a_group_moves_to_a_new_host(cluster: OperatedCluster) -> None:
    """The host that leaves serves a group of two data folders, which has as many afterwards."""
    await cluster.ready(2, "orders")
    async with cluster.admin() as admin:
        await admin.set_copies("g2", 1, may_share_machine=True)
    for to in (THIRD, "127.0.0.4"):  # the second time, the host that came the first time leaves
        leaving = SECOND if to == THIRD else THIRD
        words = ("remove-host", leaving, "--to", to, "--yes", "--data", str(cluster.data / to))
        with SteadySender(cluster, "orders"):
            status, step = await run(cluster, *words, delivered=True)
            assert (status, problems(step)) == (1, ["it has not been started yet"]), step
            cluster.copy(to)
            await start_copy(cluster, to, cluster.ports[1] + 1)
            status, step = await run(cluster, *words)
            assert (status, problems(step)) == (1, ["it still runs"]), step
            cluster.end(leaving, "broker")
            status, step = await run(cluster, *words, delivered=True)
            assert (status, problems(step)) == (0, []), step
        async with cluster.admin() as admin:
            assert (await serves(admin, "g2")).startswith(f"{to}:")
    shutil.rmtree(cluster.data / SECOND)
    shutil.rmtree(cluster.data / THIRD)
    with SteadySender(cluster, "orders"):
        pass


@pytest.fixture
def grouped(tmp_path: Path) -> Iterator[OperatedCluster]:
    operated = OperatedCluster(tmp_path, FIRST, SECOND, THIRD, options=("--one-group",))
    yield operated
    operated.stop()


async def test_host_with_a_copy_moves_and_the_set_is_as_large_as_before(grouped) -> None:
    await grouped.ready(1, "orders")
    async with grouped.admin() as admin:
        await admin.set_copies("g1", 3, may_share_machine=True)

        async def has_copies() -> bool:
            (group,) = (await admin.list_brokers()).brokers
            return group.available and group.folders == 3

        await wait_until(has_copies)
        words = ("remove-host", THIRD, "--to", "127.0.0.4", "--yes")
        words += ("--data", str(grouped.data / "fourth"))
        with SteadySender(grouped, "orders"):
            status, step = await run(grouped, *words, delivered=True)
            assert (status, problems(step)) == (1, ["it has not been started yet"]), step
            grouped.copy("127.0.0.4")
            await start_copy(grouped, "127.0.0.4", grouped.ports[1] + 1)
            status, step = await run(grouped, *words)
            assert (status, problems(step)) == (1, ["it still runs"]), step
            assert (await admin.copies("g1")).wanted == 4
            grouped.end(THIRD, "broker")
            status, step = await run(grouped, *words, delivered=True)
            assert (status, problems(step)) == (0, []), step
            assert ((await admin.copies("g1")).wanted, (await admin.copies("g1")).least) == (3, 2)
            await wait_until(has_copies)
        follower = await health(grouped, "127.0.0.4")
        assert follower is not None
        assert follower.details["copy_id"] in (await admin.copies("g1")).members


async def test_move_is_refused_and_changes_nothing_where_it_cannot_be_done(
    cluster: OperatedCluster,
) -> None:
    await cluster.ready(2, "orders")
    before = cluster.files()
    for to, code in ((SECOND, 1001), ("not/a host", 1001), ("0.0.0.0", 1001)):
        status, error = await run(cluster, "remove-host", SECOND, "--to", to, "--yes")
        assert (status, error["code"]) == (1, code), error
    status, error = await run(cluster, "remove-host", SECOND, "--to", FIRST)
    assert (status, error["name"]) == (1, "ConfigError"), "it asks first"
    async with cluster.admin() as admin:
        await admin.set_copies("g2", 5, least=1)
        status, error = await run(cluster, *LEAVE)
        assert (status, error["code"]) == (1, 1371)
        assert "--wanted 4" in error["message"]
        await admin.set_copies("g2", 1)
        cluster.programs[SECOND, "broker"].send_signal(signal.SIGSTOP)
        await wait_until(partial(one_is_silent, admin))
        status, error = await run(cluster, *LEAVE)
        assert (status, error["code"]) == (1, 1371)
        assert "start it" in error["message"]
        cluster.programs[SECOND, "broker"].send_signal(signal.SIGCONT)
    assert cluster.files() == before


async def test_move_ends_when_the_copy_is_removed(cluster: OperatedCluster) -> None:
    await cluster.ready(2, "orders")
    status, step = await run(cluster, *LEAVE, delivered=True)
    assert (status, problems(step)) == (1, ["it has not been started yet"]), step
    async with cluster.admin() as admin:
        await admin.set_copies("g2", 2, least=1)  # as an interrupted command leaves it
        status, error = await run(cluster, "remove-host", FIRST, "--yes")
        assert (status, error["code"]) == (1, 1371)
        status, step = await run(cluster, "remove-host", f"{FIRST}/g2", "--yes", delivered=True)
        assert (status, problems(step)) == (0, []), step
        assert (await admin.copies("g2")).wanted == 1
    assert not list(cluster.made.glob("*.leaving.json"))
    assert not (cluster.made / FIRST / "g2").exists()


def test_folder_names_what_is_missing_when_a_command_is_given_another_host(
    cluster: OperatedCluster,
) -> None:
    done = run_keylane(
        *("cluster", "remove-host", str(cluster.made), "127.0.0.9", "--to", FIRST, "-o", "json"),
        environment=os.environ | cluster.environment,
    )
    assert json.loads(done.stderr)["code"] == 1370
