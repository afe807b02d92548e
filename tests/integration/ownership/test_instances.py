"""A consumer with an instance name that is killed and started again continues at once; its ttl is
not waited for.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.protocol.errors import ConfigError, Reason
from support.cluster import Cluster, eventually
from support.postgres import Postgres
from support.raising import raises
from support.server_process import ServerProcess

ZOMBIE = Path(__file__).parents[1] / "consumers" / "zombie.py"
TTL_MS = 20_000


class Instance:
    """A consumer process of a named instance, and what its handlers noted."""

    def __init__(self, meta: str, subject: str, path: Path, name: str) -> None:
        words = (meta, subject, "g", str(TTL_MS), str(path), "0", "instance", name)
        self.process = ServerProcess(str(ZOMBIE), words)
        self._path = path

    def events(self) -> list[dict[str, Any]]:
        """Lines that a killed process did not finish are left out."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


async def test_killed_instance_takes_over_below_its_ttl(shared_cluster: Cluster, tmp_path: Path):
    """The same partitions, under higher tokens, in the order of each key; the other consumer keeps
    its own.
    """
    subject = "instance-killed"
    await shared_cluster.create(subject, partitions=4)
    first = Instance(shared_cluster.meta, subject, tmp_path / "first", "a")
    other = Instance(shared_cluster.meta, subject, tmp_path / "other", "b")
    again: Instance | None = None
    try:
        async with (
            asyncio.timeout(60),
            Producer(shared_cluster.meta) as producer,
            Admin(shared_cluster.meta) as admin,
        ):
            await eventually(lambda: first.process.stdout.readline() == "ready\n")
            await eventually(lambda: other.process.stdout.readline() == "ready\n")
            while await owners(admin, subject) != [2, 2]:
                await asyncio.sleep(0.05)
            sent = 0

            async def send_more(count: int) -> None:
                nonlocal sent
                for _ in range(count):
                    for key in range(20):
                        await producer.send(subject, b"%d" % sent, key=b"k%d" % key)
                    sent += 1

            await send_more(5)
            await eventually(lambda: len({event["partition"] for event in first.events()}) == 2)
            held = {event["partition"]: event["token"] for event in first.events()}
            first.end()
            killed_at = time.monotonic()
            await send_more(5)
            again = Instance(shared_cluster.meta, subject, tmp_path / "again", "a")
            await eventually(lambda: {event["partition"] for event in again.events()} == set(held))
            took_s = time.monotonic() - killed_at
            assert took_s < TTL_MS / 1000 / 3, "the ttl of the killed process is not waited for"
            await eventually(lambda: len(done(first) + done(again) + done(other)) >= 20 * sent)
        for event in again.events():
            assert event["token"] > held[event["partition"]]
        by_key: dict[str, list[int]] = defaultdict(list)
        for event in [*done(first), *done(again)]:
            by_key[event["key"]].append(event["offset"])
        for offsets in by_key.values():
            fresh = list(dict.fromkeys(offsets))  # what was not acked comes again
            assert fresh == sorted(fresh)
    finally:
        for each in (first, other, again):
            if each is not None and each.process.poll() is None:
                each.end()


def done(instance: Instance) -> list[dict[str, Any]]:
    return [event for event in instance.events() if event["event"] == "end"]


async def owners(admin: Admin, subject: str) -> list[int]:
    """How many partitions each owner has."""
    try:
        described = await admin.describe_group(subject, "g")
    except Exception:  # noqa: BLE001 - the group begins with its first consumer
        return []
    counts: dict[str, int] = defaultdict(int)
    for part in described.partitions:
        counts[str(part.session)] += 1
    return sorted(counts.values())


async def check_newer_wins(metas: list[str], subject: str) -> None:
    """Two live consumers of an instance: the one that was opened later goes on, and is not ended in
    turn.
    """
    handled: list[tuple[str, bytes]] = []

    def consumer(name: str, meta: str) -> Consumer:
        async def handle(message: Message) -> None:
            handled.append((name, message.value))

        return Consumer(
            meta,
            subject=subject,
            group="g",
            handler=handle,
            settings=ConsumerSettings(instance="a"),
        )

    async with asyncio.timeout(30), Producer(metas[0]) as producer:
        older, newer = consumer("older", metas[0]), consumer("newer", metas[-1])
        await older.__aenter__()
        await producer.send(subject, b"0", key=b"k")
        await eventually(lambda: handled == [("older", b"0")])
        async with newer:
            began = time.monotonic()
            with raises(Reason.INSTANCE_TAKEN) as refused:
                await older.wait()
            assert time.monotonic() - began < 5, "its long poll is answered at once"
            assert refused.value.code == 1267
            assert refused.value.instance == "a"
            for value in (b"1", b"2"):
                await producer.send(subject, value, key=b"k")
                await eventually(lambda: handled[-1] == ("newer", value))  # noqa: B023
        await older.close()


async def test_live_predecessor_ends_with_an_error_and_does_not_come_back(shared_cluster: Cluster):
    """Its heartbeat, which waits, is answered at once."""
    await shared_cluster.create("instance-twice", partitions=2)
    await check_newer_wins([shared_cluster.meta], "instance-twice")


async def test_live_predecessor_at_another_metaserver_ends(tmp_path: Path, postgres: Postgres):
    """Two metaservers on PostgreSQL: the one with the older session learns of the newer one from
    the database.
    """
    settings = f'database_url = "{postgres.url()}"'
    with Cluster(tmp_path, brokers=1, metas=2, meta_settings=settings) as cluster:
        await cluster.create("orders", partitions=2)
        await check_newer_wins(cluster.addresses, "orders")


@pytest.mark.parametrize(
    "given",
    [{"instance": "no spaces"}, {"instance": 7}, {"instance": "a", "consume_strategy": "shared"}],
)
def test_impossible_instance_is_refused(given: dict[str, Any]):
    with pytest.raises(ConfigError, match="instance"):
        ConsumerSettings(**given)
