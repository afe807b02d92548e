"""Groups that no consumer joins are deleted by the cluster itself, and hold nothing back any
more.
"""

from __future__ import annotations

import asyncio

import pytest

from keylane import Admin, Consumer, Producer
from keylane.errors import GroupDeletedError
from support.cluster import Cluster

pytestmark = pytest.mark.cluster(
    meta_settings="expire_ms = 200\ngroup_expires_ms = 600\n", brokers=1
)


async def test_group_goes_with_its_progress_while_another_is_in_use(file_cluster: Cluster):
    """A later consumer of the name begins with the first message, as in a new group."""
    await file_cluster.create("s", partitions=1)
    async with asyncio.timeout(60), Producer(file_cluster.meta) as producer:
        await producer.send("s", b"1")
        async with (
            Consumer(file_cluster.meta, subject="s", group="stays") as stays,
            Admin(file_cluster.meta) as admin,
        ):
            async with Consumer(file_cluster.meta, subject="s", group="goes") as goes:
                await (await anext(goes)).ack()
            while [view.group for view in await admin.list_groups("s")] != ["stays"]:
                await asyncio.sleep(0.05)
            assert len(stays.assignment) == 1
            while True:
                try:
                    async with Consumer(file_cluster.meta, subject="s", group="goes") as again:
                        assert (await anext(again)).value == b"1"
                        break
                except (
                    GroupDeletedError
                ):  # no longer listed, and its brokers have not forgotten it yet
                    await asyncio.sleep(0.05)
