"""Where a new group begins: fixed once, by its first consumer or by an operator, and kept through
crashes and resizes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.admin import GroupStart, StartAt
from keylane.errors import GroupUnknownError, KeylaneError, NotSentError, Reason
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import ALERT, Cluster, eventually
from support.postgres import Postgres
from support.raising import raises


async def send(cluster: Cluster, subject: str, *numbers: int) -> None:
    """Numbers as values, on as many keys."""
    async with Producer(cluster.meta) as producer:
        for number in numbers:
            await producer.send(subject, b"%d" % number, key=b"k%d" % (number % 16))


def numbers(messages: list[Message]) -> list[int]:
    return sorted(int(message.value) for message in messages)


async def test_group_that_starts_at_latest_gets_what_is_sent_once_it_is_open(
    shared_cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    """A second member that says another start changes nothing, and says so in its log."""
    await shared_cluster.create("start-latest", partitions=4)
    await send(shared_cluster, "start-latest", *range(20))
    seen: list[Message] = []

    def consumer(start: str) -> Consumer:
        return Consumer(
            shared_cluster.meta, subject="start-latest", group="g", handler=seen.append, start=start
        )

    async with consumer("latest"):
        await send(shared_cluster, "start-latest", *range(20, 40))
        await eventually(lambda: len(seen) == 20)
    await send(shared_cluster, "start-latest", *range(40, 60))
    with caplog.at_level(logging.INFO, "keylane.consumer"):
        async with consumer("earliest"):
            await eventually(lambda: len(seen) == 40)
    assert numbers(seen) == list(range(20, 60))
    assert (
        "already exists and began at latest; start=earliest applies to new groups only"
        in caplog.text
    )


async def test_created_group_gets_everything_sent_after_its_creation(shared_cluster: Cluster):
    """Also what parents of a resize got before it, and what their children got, with no consumer
    until then.
    """
    await shared_cluster.create("start-created", partitions=2)
    await send(shared_cluster, "start-created", *range(20))
    async with Admin(shared_cluster.meta) as admin:
        with pytest.raises(GroupUnknownError):
            await admin.describe_group("start-created", "g")  # looking makes no group
        assert await admin.list_groups("start-created") == []
        made = await admin.create_group("start-created", "g", start="latest")
        assert made == await admin.create_group("start-created", "g", start="latest")
        assert (made.start, made.unstarted) == (GroupStart(at=StartAt.LATEST), ())
        with raises(Reason.GROUP_EXISTS, match="began at latest"):
            await admin.create_group("start-created", "g")
        assert await admin.lag("start-created", "g") == 0
        await send(shared_cluster, "start-created", *range(20, 40))
        assert await admin.lag("start-created", "g") == 20
        resize = Reshape(kind=OperationKind.RESIZE, subject="start-created", partitions=3)
        await shared_cluster.reshape(resize)
        await send(shared_cluster, "start-created", *range(40, 60))
    seen: list[Message] = []
    async with Consumer(
        shared_cluster.meta, subject="start-created", group="g", handler=seen.append
    ):
        await eventually(lambda: len(seen) >= 40)
    assert numbers(seen) == list(range(20, 60))


async def test_group_that_starts_at_latest_after_a_resize_reads_no_parent(shared_cluster: Cluster):
    """Sealed partitions are at their end, and count as drained."""
    await shared_cluster.create("start-resized", partitions=2)
    await send(shared_cluster, "start-resized", *range(20))
    resize = Reshape(kind=OperationKind.RESIZE, subject="start-resized", partitions=3)
    await shared_cluster.reshape(resize)
    await send(shared_cluster, "start-resized", *range(20, 40))
    seen: list[Message] = []
    async with Consumer(
        shared_cluster.meta, subject="start-resized", group="g", handler=seen.append, start="latest"
    ) as consumer:
        await eventually(lambda: len(consumer.assignment) == 3)
        await send(shared_cluster, "start-resized", *range(40, 60))
        await eventually(lambda: len(seen) == 20)
    assert numbers(seen) == list(range(40, 60))


@pytest.mark.parametrize("shared", [False, True])
async def test_group_starts_at_a_time(shared_cluster: Cluster, shared: bool):
    """It gets what was stored at or after it, in an exclusive group and in a shared one."""
    subject = f"start-time-{shared}"
    await shared_cluster.create(subject, partitions=2)
    await send(shared_cluster, subject, *range(10))
    await asyncio.sleep(0.02)
    at_ms = time.time_ns() // 1_000_000
    await send(shared_cluster, subject, *range(10, 20))
    strategy = "shared" if shared else "exclusive"
    async with Admin(shared_cluster.meta) as admin:
        made = await admin.create_group(
            subject, "g", start="time", at_ms=at_ms, consume_strategy=strategy
        )
        assert made.start == GroupStart(at=StartAt.TIME, at_ms=at_ms)
    seen: list[Message] = []
    async with Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        handler=seen.append,
        settings=ConsumerSettings(consume_strategy=strategy),
    ):
        await eventually(lambda: len(seen) >= 10)
    assert numbers(seen) == list(range(10, 20))


@pytest.fixture(params=["sqlite", "postgresql"])
def mortal(request: pytest.FixtureRequest, tmp_path) -> Cluster:
    """A cluster whose programs the test ends."""
    settings = ALERT
    if request.param == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        settings += f"database_url = {json.dumps(postgres.url())}\n"
    with Cluster(tmp_path, meta_settings=settings) as cluster:
        yield cluster


async def test_start_that_a_crash_cuts_short_stays_where_it_was_fixed(mortal: Cluster):
    """No broker was told when the metaserver died; it ends the work, and messages sent meanwhile
    belong to the group.
    """
    await mortal.create("s", partitions=4)
    async with Producer(mortal.meta) as producer:
        for number in range(20):
            await producer.send("s", b"%d" % number, key=b"k%d" % (number % 16))
        mortal.meta_program.restart_to_die_after("start-fixed")
        async with asyncio.timeout(60), Admin(mortal.meta) as admin:
            # A broker that was silent for its ttl of 1.5 seconds has it refused: nothing is fixed,
            # and the metaserver goes on.
            while mortal.meta_program.process.poll() is None:
                with pytest.raises(KeylaneError):
                    await admin.create_group("s", "g", start="latest")
                await asyncio.sleep(0.05)
        await mortal.meta_program.died()
        for number in range(20, 40):
            await producer.send("s", b"%d" % number, key=b"k%d" % (number % 16))
        mortal.meta_program.restart()
    seen: list[Message] = []
    async with Consumer(
        mortal.meta, subject="s", group="g", handler=seen.append, start="latest", wait_s=20
    ):
        await eventually(lambda: len(seen) >= 20)
    assert numbers(seen) == list(range(20, 40))
    async with Admin(mortal.meta) as admin:
        assert (await admin.group_settings("s", "g")).unstarted == ()
        verification = await admin.verify()
        assert verification.ok, verification


async def test_group_is_not_made_while_a_broker_cannot_say_where_it_begins(mortal: Cluster):
    """Its consumer is refused, and told why; nothing is stored."""
    await mortal.create("s", partitions=2)
    mortal.brokers[1].kill()
    with pytest.raises(NotSentError, match="nothing was changed"):
        async with Consumer(mortal.meta, subject="s", group="g", start="latest", handler=print):
            pass
    async with Admin(mortal.meta) as admin:
        assert await admin.list_groups("s") == []
