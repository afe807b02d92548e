"""`subject set` in a real cluster: the strategy changes under producers, through kills, and shows
before and after.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin, Producer
from keylane.errors import Reason
from keylane.protocol.routing import OrderStrategy, PartitionState
from support.cluster import Cluster
from support.raising import raises
from support.server_process import run_keylane

META = "broker_heartbeat_ms = 200\nbroker_ttl_ms = 1500\n"
pytestmark = pytest.mark.cluster(meta_settings=META)
KEYS = [b"%d" % number for number in range(16)]


async def test_strategy_changes_under_producers_and_ends_one_that_names_the_old(cluster: Cluster):
    """Keys keep their order; what was acked before and after is stored, in partitions of either
    strategy.
    """
    await cluster.create("s", partitions=2)
    sent: dict[bytes, list[bytes]] = {key: [] for key in KEYS}
    changed = asyncio.Event()

    async def work(producer: Producer) -> None:
        number = 0
        while not (changed.is_set() and number % 50 == 0):
            key = KEYS[number % len(KEYS)]
            value = b"%d" % number
            await producer.send("s", value, key=key)
            sent[key].append(value)
            number += 1

    async with asyncio.timeout(60), Admin(cluster.meta) as admin:
        async with (
            Producer(cluster.meta) as producer,
            Producer(cluster.meta, order_strategy="strict") as stubborn,
        ):
            await stubborn.send("s", b"first", key=b"stubborn")
            sent[b"stubborn"] = [b"first"]
            working = asyncio.create_task(work(producer))
            change = await admin.set_subject("s", order_strategy="best_tried")
            await admin.wait(change.operation)
            changed.set()
            await working
            with raises(Reason.ORDER_STRATEGY):
                await stubborn.send("s", b"late", key=b"stubborn")
        assert (change.before["order_strategy"], change.after["order_strategy"]) == (
            "strict",
            "best_tried",
        )
        described = await admin.describe_subject("s")
        assert described.order_strategy is OrderStrategy.BEST_TRIED
        states = [partition.state for partition in described.partitions]
        assert sorted(states) == [PartitionState.OPEN] * 2 + [PartitionState.SEALED] * 2
        assert (await admin.verify()).ok
    await cluster.check_history("s", sent)


async def test_change_ends_when_the_metaserver_and_a_broker_are_killed_meanwhile(cluster: Cluster):
    await cluster.create("s", partitions=4)
    async with asyncio.timeout(60), Admin(cluster.meta) as admin:
        cluster.brokers[1].kill()
        change = await admin.set_subject("s", retention="time")
        assert change.operation.operation_id
        cluster.meta_program.kill()
        cluster.meta_program.restart()
        cluster.brokers[1].restart()
        await admin.wait(change.operation)
        assert (await admin.describe_subject("s")).retention == "time"
        again = await admin.set_subject("s", retention="time")
        assert (again.operation.operation_id, again.before) == (0, again.after)
        assert (await admin.verify()).ok


async def test_command_shows_settings_before_and_after(cluster: Cluster):
    await cluster.create("s", partitions=1)

    async def keylane(*words: str) -> str:
        done = await asyncio.to_thread(run_keylane, "subject", *words, "--meta", cluster.meta)
        return done.stdout + done.stderr

    shown = await keylane("set", "s", "--order-strategy", "best_tried", "--dry-run")
    assert "s: order_strategy strict -> best_tried" in shown
    assert "s: order_strategy strict -> best_tried" in await keylane(
        "set", "s", "--order-strategy", "best_tried"
    )
    again = await keylane("set", "s", "--order-strategy", "best_tried", "--retention", "acked")
    assert again.splitlines() == [
        "s: order_strategy best_tried",
        "s: retention acked",
        "s: message_bytes_max 1048576",
        "nothing to do",
    ]
    assert "pass at least one of" in await keylane("set", "s")
