"""What two members say, and what is said of them, when the metaserver is away for longer than their
ttl.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message
from keylane.cli.commands.group_description import member_lines
from keylane.testing import VirtualCluster, run

AWAY_S = 29


async def handle(_message: Message) -> None:
    """No message is sent."""


def test_members_are_not_dead_when_the_metaserver_was_away_for_longer_than_their_ttl(
    caplog: pytest.LogCaptureFixture,
):
    """Their brokers know that they live, so they keep their partitions meanwhile."""

    async def consume(cluster: VirtualCluster, name: str) -> None:
        settings = ConsumerSettings(ttl_ms=6_000, name=name)
        consumer = Consumer(
            cluster.address, subject="orders", group="billing", handler=handle, settings=settings
        )
        await consumer.run()

    async def story(cluster: VirtualCluster) -> None:
        await cluster.create_subject("orders", partitions=2)
        for name in ("a", "b"):
            cluster.start(consume, cluster, name)
        await asyncio.sleep(10)
        cluster.metaserver.kill()
        await asyncio.sleep(AWAY_S)
        cluster.metaserver.start()
        async with Admin(cluster.address) as admin:

            async def has_both() -> bool:
                group = await admin.describe_group("orders", "billing")
                return sorted(each.partitions for each in group.members) == [1, 1]

            await cluster.until(has_both)
            group = await admin.describe_group("orders", "billing")
        assert group.ended is None
        assert member_lines(group) == []

    with caplog.at_level(logging.INFO, "keylane.consumer"):
        run(story)
    assert not [text for text in caplog.messages if "has no partition now" in text]
