"""A group that can park no more: with on_full="dead" its keys become dead letters, in order, and
everything else goes on.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from integration.parking.test_parked_keys import Handler, consumer_of, send
from keylane import Admin, Producer
from keylane.admin import ParkedKeyView, ParkState
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import Cluster, eventually
from support.server_process import run_keylane

SMALL_BROKER = Path(__file__).with_name("small_broker.py")
KEYS = [b"bad-%d" % number for number in range(4)]
ROOM = 2
"""Keys that may be parked; as many may be dead keys."""


async def views(admin: Admin, subject: str, **asked: object) -> list[ParkedKeyView]:
    return [view async for view in admin.parked(subject, "g", **asked)]


def with_small_brokers(cluster: Cluster) -> Cluster:
    for broker in cluster.brokers:
        broker.kill()
        broker._module = str(SMALL_BROKER)
        broker.restart()
    return cluster


async def test_keys_without_room_are_dead_letters_in_order_and_others_go_on(cluster: Cluster):
    """Through SIGKILL of the broker, and a resize; a redrive handles them from the oldest message
    on.
    """
    subject, handler = "full", Handler()
    with_small_brokers(cluster)
    await cluster.create(subject, partitions=1)
    handler.poison = set(KEYS)
    async with (
        asyncio.timeout(100),
        Producer(cluster.meta) as producer,
        Admin(cluster.meta) as admin,
        consumer_of(cluster, subject, handler, ttl_ms=2_000),
    ):
        for key in KEYS[:ROOM]:
            await send(producer, subject, key, 0, 1)
        while sum(view.messages for view in await views(admin, subject)) < 2 * ROOM:
            await asyncio.sleep(0.05)
        await send(producer, subject, KEYS[ROOM], 0, 1)
        await eventually(lambda: {(key, 0, 3) for key in KEYS[: ROOM + 1]} <= set(handler.tried))
        # The third key blocks, until an operator says otherwise while the consumer runs.
        set_full = ("group", "set", subject, "g", "--on-full", "dead", "--meta", cluster.meta)
        said = await asyncio.to_thread(run_keylane, *set_full)
        assert "when full dead" in said.stdout, said.stderr
        while len(await views(admin, subject, dead=True)) < 1:
            await asyncio.sleep(0.05)
        await send(producer, subject, KEYS[3], 0, 1)
        await send(producer, subject, b"good", 0, 1)
        await eventually(lambda: handler.handled[b"good"] == [0, 1])
        for broker in cluster.brokers:
            broker.kill()
            broker.restart()
        await cluster.reshape(Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=2))
        for key in (*KEYS, b"good"):
            await send(producer, subject, key, 2)
        await eventually(lambda: handler.handled[b"good"] == [0, 1, 2])
        while sum(view.messages for view in await views(admin, subject)) < 3 * len(KEYS):
            await asyncio.sleep(0.05)
        assert not set(handler.handled) & set(KEYS)
        dead = await views(admin, subject, dead=True)
        assert {view.key for view in dead} == set(KEYS[2:])
        assert {view.state for view in dead} == {ParkState.DEAD}

        handler.poison = set()
        retried = await asyncio.to_thread(
            run_keylane, "dead", "retry", subject, "g", "--key", "bad-2", "--meta", cluster.meta
        )
        assert "3 messages" in retried.stdout, retried.stderr
        await eventually(lambda: handler.handled[KEYS[2]] == [0, 1, 2])
        await admin.redrive(subject, "g", all=True)
        await eventually(lambda: all(handler.handled[key] == [0, 1, 2] for key in KEYS))
        while await views(admin, subject):
            await asyncio.sleep(0.05)
        await send(producer, subject, KEYS[3], 3)
        await eventually(lambda: handler.handled[KEYS[3]] == [0, 1, 2, 3])
