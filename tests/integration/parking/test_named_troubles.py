"""Messages that hold others up are named where operators look, also when a loop gives them back, or
they are redriven.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from integration.parking.test_parked_keys import Handler, brokers_of, consumer_of, send
from integration.parking.test_poison_in_a_change import sealed_behind, shown
from keylane import Admin, Consumer, ConsumerSettings, Producer
from keylane.protocol.text import key_digest
from support.cluster import Cluster, eventually


@pytest.mark.parametrize("manner", ["iteration", "getmany"])
async def test_message_that_a_loop_always_gives_back_is_named(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture, manner: str
):
    """`group describe`, the admin's calls, `operations` and the log; others of the loop go on."""
    subject, others = f"nacks-{manner}", []
    await shared_cluster.create(subject, partitions=1)
    caplog.set_level(logging.WARNING, logger="keylane.consumer")

    async def loop(consumer: Consumer) -> None:
        while True:
            messages = (
                [await anext(consumer)] if manner == "iteration" else await consumer.getmany()
            )
            bad = [message for message in messages if message.key == b"bad"]
            if bad:  # the later ones in hand go with it
                await bad[0].nack(after_s=0.05)
            for message in messages:
                if message.key != b"bad":
                    others.append(message.value)
                    await message.ack()

    async with (
        asyncio.timeout(60),
        Admin(shared_cluster.meta) as admin,
        Producer(shared_cluster.meta) as producer,
        Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            settings=ConsumerSettings(name="till-1"),
        ) as consumer,
    ):
        looping = asyncio.create_task(loop(consumer))
        await send(producer, subject, b"bad", 0, 1)
        await send(producer, subject, b"good", 0)
        await eventually(lambda: others)
        await sealed_behind(admin, subject, "resize")
        while not (undrained := await admin.undrained(subject)) or not undrained[0].failing:
            await asyncio.sleep(0.05)
        while (failing := (await admin.undrained(subject))[0].failing) is None or (
            failing.attempts < 2
        ):
            await asyncio.sleep(0.05)
        assert (failing.offset, failing.key_digest) == (0, key_digest(b"bad"))
        assert (failing.kind, failing.client) == ("nack", "till-1")
        assert failing.text == "the program gave the message back"
        for words in (("subject", "operations", subject), ("group", "describe", subject, "g")):
            assert f"g fails at offset 0, {key_digest(b'bad')}" in await shown(
                shared_cluster, *words, form="table"
            )
        looping.cancel()
        await asyncio.wait([looping])
    logged = [each.getMessage() for each in caplog.records if key_digest(b"bad") in each.message]
    assert "asked for another try (the program gave the message back)" in logged[0]
    assert "offset 0" in logged[0]
    assert len(logged) < 5


async def test_redriven_message_that_fails_again_under_block_is_named(shared_cluster: Cluster):
    """Until it is skipped, or handled; the partitions that continue its partition wait for it."""
    subject, handler = "redriven-block", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(60),
        Admin(shared_cluster.meta) as admin,
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, b"good", 0)
        await send(producer, subject, b"bad", 0, 1)
        async with consumer_of(shared_cluster, subject, handler):
            while await brokers.count() < 2:
                await asyncio.sleep(0.02)
        async with consumer_of(shared_cluster, subject, handler, on_failure="block"):
            await brokers.redrive(b"bad")

            async def failing() -> object:
                (part,) = (await admin.describe_group(subject, "g")).partitions
                return part.failing

            while (named := await failing()) is None:
                await asyncio.sleep(0.02)
            assert (named.offset, named.key_digest) == (1, key_digest(b"bad"))
            assert (named.kind, named.text) == ("ValueError", "cannot take 0")
            (part,) = (await admin.describe_group(subject, "g")).partitions
            assert named.source == part.partition_id
            text = await shown(shared_cluster, "group", "describe", subject, "g", form="table")
            assert f"g fails at parked offset 1 of partition {part.partition_id}" in text
            assert f"keylane parked skip {subject} g" in text
            handler.poison = set()
            while await failing() is not None or await brokers.count():
                await asyncio.sleep(0.02)
    await eventually(lambda: handler.handled[b"bad"] == [0, 1])
