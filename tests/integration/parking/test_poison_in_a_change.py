"""A message that keeps failing while its partition is resized, moved or evacuated: named where
operators look, or out of the way.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from integration.parking.test_parked_keys import Handler, consumer_of, send
from keylane import Admin, Producer
from keylane.protocol.text import key_digest
from support.cluster import Cluster, eventually
from support.server_process import run_keylane


async def shown(cluster: Cluster, *words: str, form: str = "json") -> Any:
    """What a command prints, decoded if it is JSON."""
    done = await asyncio.to_thread(run_keylane, *words, "--meta", cluster.meta, "--output", form)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if form == "json" else done.stdout


async def sealed_behind(admin: Admin, subject: str, change: str) -> None:
    """Seal the only partition of a subject, in one of three ways."""
    (partition,) = (await admin.describe_subject(subject)).partitions
    other = ({"g1", "g2"} - {partition.broker_group}).pop()
    if change == "resize":
        await admin.wait(await admin.resize(subject, 2))
    elif change == "move":
        await admin.wait(await admin.move([partition.partition_id], to=other))
    else:
        evacuation = await admin.evacuate(partition.broker_group)
        for operation in evacuation.operations:
            await admin.wait(operation)
        await admin.uncordon(partition.broker_group)


async def test_poison_is_named_everywhere_when_it_holds_a_resize_up(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    """`operations`, `group describe`, the admin's calls and the consumer's log: where, since when,
    why, and what to do.
    """
    subject, handler = "poison-block", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    caplog.set_level(logging.WARNING, logger="keylane.consumer")
    async with (
        asyncio.timeout(60),
        Admin(shared_cluster.meta) as admin,
        Producer(shared_cluster.meta) as producer,
        consumer_of(shared_cluster, subject, handler, on_failure="block"),
    ):
        await send(producer, subject, b"good", 0)
        await send(producer, subject, b"bad", 0, 1)
        await eventually(lambda: len(handler.tried) > 2)
        await sealed_behind(admin, subject, "resize")
        await send(producer, subject, b"good", 1)
        while not (undrained := await admin.undrained(subject)) or not undrained[0].failing:
            await asyncio.sleep(0.05)
        (part,) = undrained
        failing = part.failing
        assert failing is not None
        assert (part.group, part.offset, part.end_offset) == ("g", 1, 3)
        assert (failing.offset, failing.key_digest) == (1, key_digest(b"bad"))
        assert (failing.kind, failing.text) == ("ValueError", "cannot take 0")
        assert failing.attempts >= 2
        assert 0 < failing.since_ms < failing.at_ms
        described = await admin.describe_group(subject, "g")
        assert [part.failing is not None for part in described.partitions] == [True, False, False]

        (operation,) = await shown(shared_cluster, "subject", "operations", subject)
        (left,) = operation["undrained"]
        assert (left["offset"], left["failing"]["text"]) == (1, "cannot take 0")
        for words in (("subject", "operations", subject), ("group", "describe", subject, "g")):
            text = await shown(shared_cluster, *words, form="table")
            assert (
                f"partition {part.partition_id}: g fails at offset 1, {key_digest(b'bad')}" in text
            )
            assert "ValueError: cannot take 0 (" in text
            assert f"keylane group reset {subject} g --partition {part.partition_id} --to 2" in text
        assert handler.handled[b"good"] == [0], "the children wait"

        handler.poison = set()
        await eventually(lambda: handler.handled[b"good"] == [0, 1])
        assert handler.handled[b"bad"] == [0, 1]
        while await admin.undrained(subject):
            await asyncio.sleep(0.05)
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        f"ValueError on {subject} partition {part.partition_id} offset 1 in group g (" in line
        and "the error says: cannot take 0" in line
        for line in lines
    )


async def check_children_go_on(cluster: Cluster, policy: str, change: str) -> None:
    """Poison at the head of a partition that is changed: it is set aside, and what continues the
    partition goes on.
    """
    subject, handler = f"poison-{policy}-{change}", Handler()
    await cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(60),
        Admin(cluster.meta) as admin,
        Producer(cluster.meta) as producer,
    ):
        await send(producer, subject, b"bad", 0)
        await sealed_behind(admin, subject, change)
        await send(producer, subject, b"good", 0)
        await send(producer, subject, b"bad", 1)
        async with consumer_of(cluster, subject, handler, on_failure=policy):
            await eventually(lambda: handler.handled[b"good"] == [0])
            key = None if policy == "dead" else b"bad"
            while sum([view.messages async for view in admin.parked(subject, "g", key=key)]) < 2:
                await asyncio.sleep(0.05)
            assert await admin.undrained(subject) == []
            handler.poison = set()
            await admin.redrive(subject, "g", all=True)
            await eventually(lambda: sorted(handler.handled[b"bad"]) == [0, 1])
    assert policy == "dead" or handler.handled[b"bad"] == [0, 1]


@pytest.mark.parametrize("policy", ["park", "dead"])
@pytest.mark.parametrize("change", ["resize", "move"])
async def test_children_go_on_when_poison_is_set_aside(
    shared_cluster: Cluster, policy: str, change: str
):
    """The partition drains: what is parked goes along, and later messages of the key follow it;
    dead letters hold none back.
    """
    await check_children_go_on(shared_cluster, policy, change)


async def test_children_go_on_when_a_broker_is_evacuated(tmp_path: Path):
    """As in a move, of all partitions of a broker."""
    with Cluster(tmp_path) as cluster:
        await check_children_go_on(cluster, "park", "evacuate")
