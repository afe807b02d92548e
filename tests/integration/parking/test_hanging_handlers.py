"""A handler that does not return, or a message that a loop holds, is named where operators look."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from integration.parking.test_parked_keys import send
from integration.parking.test_poison_in_a_change import sealed_behind, shown
from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.admin import FailingMessage
from keylane.protocol.text import key_digest
from keylane.testing import VirtualCluster, run
from support.cluster import Cluster, eventually


class Hanging:
    """A handler that does not return for one key until it is let go."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.handled: list[tuple[bytes, bytes]] = []

    async def handle(self, message: Message) -> None:
        if message.key == b"bad":
            await self.free.wait()
        self.handled.append((message.key, message.value))


async def test_hanging_handler_that_holds_a_resize_up_is_named_everywhere(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    """`operations`, `group describe`, the admin's calls and the log, while the policy is park;
    until it returns.
    """
    subject, hanging = "hangs-resize", Hanging()
    await shared_cluster.create(subject, partitions=1)
    caplog.set_level(logging.WARNING, logger="keylane.consumer")
    async with (
        asyncio.timeout(90),
        Admin(shared_cluster.meta) as admin,
        Producer(shared_cluster.meta) as producer,
        Consumer(
            shared_cluster.meta,
            handler=hanging.handle,
            subject=subject,
            group="g",
            settings=ConsumerSettings(name="till-1"),
            on_failure="park",
        ),
    ):
        await send(producer, subject, b"good", 0)
        await send(producer, subject, b"bad", 0)
        await eventually(lambda: hanging.handled)
        await sealed_behind(admin, subject, "resize")
        await send(producer, subject, b"good", 1)
        while not (undrained := await admin.undrained(subject)) or not undrained[0].failing:
            await asyncio.sleep(0.2)
        (part,) = undrained
        failing = part.failing
        assert failing is not None
        assert (part.group, part.offset, part.end_offset) == ("g", 1, 2)
        assert (failing.offset, failing.key_digest) == (1, key_digest(b"bad"))
        assert (failing.kind, failing.attempts, failing.client) == ("running", 0, "till-1")
        assert failing.running_ms is not None
        assert 10_000 <= failing.running_ms < 60_000
        (operation,) = await shown(shared_cluster, "subject", "operations", subject)
        assert operation["undrained"][0]["failing"]["running_ms"] >= 10_000
        for words in (("subject", "operations", subject), ("group", "describe", subject, "g")):
            text = await shown(shared_cluster, *words, form="table")
            assert (
                f"partition {part.partition_id}: g waits at offset 1, {key_digest(b'bad')}" in text
            )
            assert "its handler has not returned for" in text
            assert f"keylane group reset {subject} g --partition {part.partition_id} --to 2" in text
        assert hanging.handled == [(b"good", b"0")], "the children wait"

        hanging.free.set()
        await eventually(lambda: (b"good", b"1") in hanging.handled)
        while await admin.undrained(subject):
            await asyncio.sleep(0.05)
    lines = [record.getMessage() for record in caplog.records]
    matches = [re.search(r"handler has been running for (\d+) s", line) for line in lines]
    assert any(10 <= int(match[1]) < 60 for match in matches if match)


async def hanging_of(admin: Admin) -> FailingMessage | None:
    (part,) = (await admin.describe_group("orders", "g")).partitions
    return part.failing


@pytest.mark.parametrize("manner", ["iteration", "getmany"])
def test_message_that_a_loop_holds_is_named(manner: str):
    """While others of the loop go on; not any more once it is acked."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)
        held: list[Message] = []

        async def loop(consumer: Consumer) -> None:
            while True:
                messages = (
                    [await anext(consumer)] if manner == "iteration" else await consumer.getmany()
                )
                for message in messages:
                    if message.key == b"bad":
                        held.append(message)
                    else:
                        await message.ack()

        async with (
            Producer(cluster.address) as producer,
            Admin(cluster.address) as admin,
            Consumer(
                cluster.address,
                subject="orders",
                group="g",
                settings=ConsumerSettings(name="till-1"),
            ) as consumer,
        ):
            looping = asyncio.create_task(loop(consumer))
            for key in (b"good", b"bad", b"good"):
                await producer.send("orders", b"", key=key)
            await asyncio.sleep(9)
            assert await hanging_of(admin) is None
            await asyncio.sleep(60)
            named = await hanging_of(admin)
            assert named is not None
            assert (named.offset, named.client) == (1, "till-1")
            assert named.key_digest == key_digest(b"bad")
            assert (named.kind, named.text) == ("running", "the program has not acked it")
            assert named.running_ms is not None
            assert 45_000 <= named.running_ms <= 70_000, "as of the last renewal of the lock"
            await held[0].ack()
            await cluster.until(lambda: cluster_lag_is_none(cluster))
            assert await hanging_of(admin) is None
            looping.cancel()
            await asyncio.wait([looping])

    run(story)


async def cluster_lag_is_none(cluster: VirtualCluster) -> bool:
    return await cluster.lag("orders", "g") == 0


def test_handler_that_hung_is_not_named_under_its_next_owner():
    """The consumer is killed, and the next one handles the message."""

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=1)

        async def hang(address: str) -> None:
            async def handle(_message: Message) -> None:
                await asyncio.sleep(10_000)

            await Consumer(address, subject="orders", group="g", handler=handle).run()

        async def slow(address: str) -> None:
            async def handle(_message: Message) -> None:
                await asyncio.sleep(8)

            await Consumer(address, subject="orders", group="g", handler=handle).run()

        program = cluster.start(hang, cluster.address)
        async with Producer(cluster.address) as producer, Admin(cluster.address) as admin:
            await producer.send("orders", b"", key=b"k")
            await cluster.until(lambda: hanging_of(admin))
            program.kill()
            cluster.start(slow, cluster.address)

            async def has_next_owner() -> bool:
                return await hanging_of(admin) is None

            await cluster.until(has_next_owner)
            assert await cluster.lag("orders", "g") == 1, "it is not handled yet"
            await cluster.until(lambda: cluster_lag_is_none(cluster))

    run(story)
