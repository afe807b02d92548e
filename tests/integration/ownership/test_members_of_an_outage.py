"""What two members say, and what is said of them, when the metaserver is away for longer than their
ttl.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message
from keylane.admin import EndedMember
from keylane.cli.commands.group_description import member_lines
from keylane.testing import VirtualCluster, run

AWAY_S = 29


async def handle(_message: Message) -> None:
    """No message is sent."""


def test_members_wait_for_the_metaserver_and_are_not_dead_when_they_have_joined_again(
    caplog: pytest.LogCaptureFixture,
):
    """They named other members, or leases of dead ones, as what they waited for."""

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
        assert isinstance(group.ended, EndedMember)
        assert not group.ended.left
        assert member_lines(group) == []

    with caplog.at_level(logging.INFO, "keylane.consumer"):
        run(story)
    lines = [text for text in caplog.messages if "has no partition now" in text]
    assert len(lines) == 2
    assert all(
        "; the metaserver, which grants them, does not answer: " in text
        and text.endswith("(lease ran out)")
        for text in lines
    ), lines
