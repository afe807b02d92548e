"""The log of a consumer names the members from whom it got its partitions."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message
from support.cluster import Cluster, eventually
from support.server_process import ServerProcess

ZOMBIE = Path(__file__).parents[1] / "consumers" / "zombie.py"
TTL_MS = 2_000


async def handle(_message: Message) -> None:
    """A handler of messages that nobody sends."""


async def has_every_partition(admin: Admin, subject: str) -> bool:
    """True if every partition has an owner."""
    described = await admin.describe_group(subject, "g")
    return all(partition.session for partition in described.partitions)


async def test_log_names_the_worker_that_was_killed_and_the_one_that_hands_over(
    shared_cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    subject = "previous-owners"
    await shared_cluster.create(subject, partitions=2)
    words = (shared_cluster.meta, subject, "g", str(TTL_MS), str(tmp_path / "events"), "0")
    worker = ServerProcess(str(ZOMBIE), words)

    def logged(text: str) -> bool:
        return any(text in message for message in caplog.messages)

    try:
        await eventually(lambda: worker.stdout.readline() == "ready\n")
        async with Admin(shared_cluster.meta) as admin:
            while not await has_every_partition(admin, subject):
                await asyncio.sleep(0.05)
        caplog.set_level(logging.INFO, "keylane.consumer")
        async with Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            handler=handle,
            settings=ConsumerSettings(ttl_ms=TTL_MS),
        ):
            await eventually(lambda: logged(f":{worker.pid} (rebalance)"))
            worker.kill()
            await eventually(lambda: logged(f":{worker.pid}, whose lease ended"))
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
