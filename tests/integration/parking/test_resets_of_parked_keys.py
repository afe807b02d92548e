"""A partition is reset alone behind which others have taken over what was parked: what is parked
anew goes the same way.
"""

from __future__ import annotations

import asyncio
from typing import Any

from integration.parking.test_parked_keys import Handler, brokers_of, consumer_of, hosted, send
from keylane import Admin, Producer
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import Cluster, eventually


async def park_two_keys(producer: Producer, subject: str, brokers: Any) -> int:
    """Have two messages of one key and one of another parked; returns the only partition."""
    await send(producer, subject, b"bad", 0, 1)
    await send(producer, subject, b"worse", 0)
    while await brokers.count() < 3:
        await asyncio.sleep(0.05)
    (parent,) = await brokers.partitions()
    return int(parent)


async def test_key_parked_anew_is_redriven_when_its_parent_alone_was_reset(file_cluster: Cluster):
    """Its child takes it over a second time, and parks what follows; what was handled before the
    reset stays so.
    """
    subject, handler = "reset-parent", Handler()
    await file_cluster.create(subject, partitions=1)
    handler.poison = {b"bad", b"worse"}
    async with (
        asyncio.timeout(60),
        Producer(file_cluster.meta) as producer,
        Admin(file_cluster.meta) as admin,
        consumer_of(file_cluster, subject, handler),
        brokers_of(file_cluster, subject) as brokers,
    ):
        parent = await park_two_keys(producer, subject, brokers)
        resize = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=2)
        await file_cluster.reshape(resize)
        for key in (b"bad", b"worse"):
            await send(producer, subject, key, 2)
        await brokers.adopted(parent, 5)
        handler.poison = set()
        for key in (b"bad", b"worse"):
            await brokers.redrive(key)
        await eventually(lambda: handler.handled[b"bad"] == [0, 1, 2])
        await eventually(lambda: handler.handled[b"worse"] == [0, 2])
        while await brokers.parked():
            await asyncio.sleep(0.05)

        handler.poison = {b"bad"}
        reset = await admin.reset_group(subject, "g", "earliest", partition_id=parent, live=True)
        assert [(each.partition_id, each.parked) for each in reset.cursors] == [(parent, 0)]
        await eventually(lambda: handler.handled[b"worse"] == [0, 2, 0])
        await send(producer, subject, b"bad", 3)
        await brokers.adopted(parent, 3)
        handler.poison = set()
        await brokers.redrive(b"bad")
        await eventually(lambda: handler.handled[b"bad"] == [0, 1, 2, 0, 1, 3])
        while await brokers.parked() or await brokers.kept(parent):
            await asyncio.sleep(0.05)


async def test_key_of_a_parent_stays_parked_when_its_child_alone_was_reset(file_cluster: Cluster):
    """The child has taken two over, and handled one: that is as any other key. The parent keeps
    nothing once both are.
    """
    subject, handler = "reset-child", Handler()
    await file_cluster.create(subject, partitions=1)
    handler.poison = {b"bad", b"worse"}
    async with (
        asyncio.timeout(60),
        Producer(file_cluster.meta) as producer,
        Admin(file_cluster.meta) as admin,
        consumer_of(file_cluster, subject, handler),
        brokers_of(file_cluster, subject) as brokers,
    ):
        parent = await park_two_keys(producer, subject, brokers)
        broker_group = "g2" if await hosted(file_cluster, parent, "g1") else "g1"
        move = Reshape(kind=OperationKind.MOVE, partition_ids=(parent,), broker_group=broker_group)
        await file_cluster.reshape(move)
        await brokers.adopted(parent, 3)
        handler.poison = {b"worse"}
        await brokers.redrive(b"bad")
        while await brokers.count() > 1:
            await asyncio.sleep(0.05)

        (child,) = set(await brokers.partitions()) - {parent}
        reset = await admin.reset_group(subject, "g", "latest", partition_id=child, live=True)
        assert [(each.partition_id, each.parked) for each in reset.cursors] == [(child, 1)]
        await send(producer, subject, b"bad", 2)
        await eventually(lambda: handler.handled[b"bad"] == [0, 1, 2])
        assert await brokers.count() == 1
        handler.poison = set()
        await brokers.redrive(b"worse")
        await eventually(lambda: handler.handled[b"worse"] == [0])
        while await brokers.parked() or await brokers.kept(parent):
            await asyncio.sleep(0.05)


async def test_key_parked_anew_on_a_reset_grandparent_is_redriven_at_its_grandchild(
    file_cluster: Cluster,
):
    """The partitions between are drained and have no owner; nothing newer is handled before."""
    subject, handler = "reset-grandparent", Handler()
    await file_cluster.create(subject, partitions=1)
    handler.poison = {b"bad", b"worse"}
    async with (
        asyncio.timeout(60),
        Producer(file_cluster.meta) as producer,
        Admin(file_cluster.meta) as admin,
        consumer_of(file_cluster, subject, handler),
        brokers_of(file_cluster, subject) as brokers,
    ):
        grandparent = await park_two_keys(producer, subject, brokers)
        for partitions in (2, 1):
            before = set(await brokers.partitions())
            resize = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=partitions)
            await file_cluster.reshape(resize)
            while await brokers.count() < 3 or before.intersection(await brokers.parked()):
                await asyncio.sleep(0.05)
        handler.poison = set()
        for key in (b"bad", b"worse"):
            await brokers.redrive(key)
        await eventually(lambda: handler.handled == {b"bad": [0, 1], b"worse": [0]})
        while await brokers.parked() or await brokers.kept(grandparent):
            await asyncio.sleep(0.05)

        handler.poison = {b"bad"}
        await admin.reset_group(subject, "g", "earliest", partition_id=grandparent, live=True)
        await send(producer, subject, b"bad", 2)
        await send(producer, subject, b"worse", 1)
        await eventually(lambda: handler.handled[b"worse"] == [0, 0, 1])
        await brokers.adopted(grandparent, 3)
        handler.poison = set()
        await brokers.redrive(b"bad")
        await eventually(lambda: handler.handled[b"bad"] == [0, 1, 0, 1, 2])
        while await brokers.parked() or await brokers.kept(grandparent):
            await asyncio.sleep(0.05)
