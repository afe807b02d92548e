"""What the console's overview says of groups on a cluster under load."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from keylane import Consumer, Producer
from support.cluster import Cluster
from support.made_causes import under_load

SUBJECT, GROUP = "orders", "billing"
WATCHED_S = 15
"""Longer than it takes to see that a group is stuck."""


async def wrong_now(session: aiohttp.ClientSession, cluster: Cluster) -> str:
    """The part of the overview that says what is wrong."""
    async with session.get(f"http://{cluster.meta}/console") as answer:
        _, _, text = (await answer.text()).partition('id="wrong-title"')
    return text.partition("</section>")[0]


@pytest.mark.cluster(brokers=3)
async def test_overview_names_a_stuck_group_and_none_that_keeps_up_under_load(cluster: Cluster):
    ended = asyncio.Event()

    async def hang(_message: object) -> None:
        await ended.wait()

    await cluster.create(SUBJECT, partitions=1)
    consumer = Consumer(cluster.meta, subject=SUBJECT, group=GROUP, handler=hang)
    running = asyncio.create_task(consumer.run())
    try:
        async with (
            under_load(cluster),
            Producer(cluster.meta) as producer,
            aiohttp.ClientSession() as session,
        ):
            until_s = time.monotonic() + WATCHED_S
            await producer.send(SUBJECT, b"1", key="a")
            while time.monotonic() < until_s:
                assert "load on load" not in await wrong_now(session, cluster)
                await asyncio.sleep(1)
            until_s = time.monotonic() + 60
            while f"{GROUP} on {SUBJECT}" not in (wrong := await wrong_now(session, cluster)):
                assert time.monotonic() < until_s, wrong
                await asyncio.sleep(1)
            assert "load on load" not in wrong
    finally:
        ended.set()
        await consumer.close()
        await running
