"""Shared groups with real brokers, metaservers and consumer processes; a switched group fences late
consumers.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.control import SwitchGroup
from keylane.protocol.errors import Reason
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import ConsumeStrategy
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually, pause, resume
from support.raising import raises
from support.server_process import ServerProcess, running_script
from support.written_lines import written_lines

TTL_MS = 1_500
SHARED = ConsumerSettings(
    ttl_ms=TTL_MS, consume_strategy="shared", in_flight_ms=2_000, in_flight_messages=20
)
EXCLUSIVE = ConsumerSettings(ttl_ms=TTL_MS)
Place = tuple[int, int]


async def fill(cluster: Cluster, subject: str, count: int, *, partitions: int = 2) -> set[bytes]:
    await cluster.create(subject, partitions=partitions)
    values = {b"%d" % number for number in range(count)}
    async with Producer(cluster.meta) as producer:
        for number, value in enumerate(sorted(values)):
            producer.send(subject, value, key=b"k%d" % (number % 50))
    return values


async def switch(cluster: Cluster, subject: str, strategy: ConsumeStrategy) -> None:
    network = HttpNetwork()
    try:
        meta = MetaClient(network, [cluster.meta])
        view = await meta.call(
            endpoints.SWITCH_GROUP, SwitchGroup(strategy=strategy), subject=subject, group="g"
        )
        assert view.strategy is strategy
        assert view.sessions == 0
    finally:
        await network.close()


def consumer_process(
    cluster: Cluster,
    subject: str,
    path: Path,
    *,
    sleep_s: float,
    shared: bool,
    in_flight_ms: int = 2_000,
) -> AbstractContextManager[ServerProcess]:
    arguments = (cluster.meta, subject, "g", str(TTL_MS), str(path), str(sleep_s))
    more = ("shared", str(in_flight_ms)) if shared else ()
    return running_script(Path(__file__).with_name("zombie.py"), *arguments, *more)


def places(path: Path, event: str) -> list[Place]:
    lines = [json.loads(line) for line in written_lines(path)]
    return [(line["partition"], line["offset"]) for line in lines if line["event"] == event]


def place(message: Message) -> Place:
    return message.partition_id, message.offset


async def test_sessions_of_a_shared_group_work_on_one_partition(shared_cluster: Cluster):
    """Three consumers take messages of the same partition at once, and each message goes to one of
    them.
    """
    values = await fill(shared_cluster, "one-for-all", 600, partitions=1)
    handled: dict[str, list[Message]] = {"a": [], "b": [], "c": []}
    patient = ConsumerSettings(
        ttl_ms=TTL_MS, consume_strategy="shared", in_flight_ms=600_000, in_flight_messages=20
    )
    busy: set[str] = set()
    all_busy = asyncio.Event()

    def handler(name: str):
        async def handle(message: Message) -> None:
            busy.add(name)
            if len(busy) == 3:
                all_busy.set()
            await all_busy.wait()
            handled[name].append(message)

        return handle

    def consumer(name: str) -> Consumer:
        return Consumer(
            shared_cluster.meta,
            subject="one-for-all",
            group="g",
            handler=handler(name),
            settings=patient,
        )

    async with consumer("a"), consumer("b"), consumer("c"):
        await eventually(lambda: sum(map(len, handled.values())) >= 600)
    every = [message.value for each in handled.values() for message in each]
    assert sorted(every) == sorted(values), "each once, as no consumer failed"
    assert all(handled.values())
    assert (
        len({message.fencing_token for messages in handled.values() for message in messages}) == 1
    )


async def test_closing_consumer_releases_its_messages(shared_cluster: Cluster):
    """Messages that a leaving consumer did not handle are handed out at once, not at the deadline;
    none is handled twice.
    """
    values = await fill(shared_cluster, "given-back", 100, partitions=1)
    settings = ConsumerSettings(
        ttl_ms=TTL_MS, consume_strategy="shared", in_flight_ms=600_000, handover_ms=100
    )
    first: list[Message] = []
    async with Consumer(
        shared_cluster.meta, subject="given-back", group="g", settings=settings
    ) as consumer:
        async for message in consumer:
            first.append(message)
            await message.ack()
            if len(first) == 10:
                break
    second: list[Message] = []
    async with Consumer(
        shared_cluster.meta,
        subject="given-back",
        group="g",
        handler=second.append,
        settings=settings,
    ):
        await eventually(lambda: len(second) >= 90)
    assert sorted(message.value for message in (*first, *second)) == sorted(values)


async def test_failing_message_delays_no_other(shared_cluster: Cluster):
    """Without order, later messages of its key are handled; the message is tried until it
    succeeds.
    """
    values = await fill(shared_cluster, "no-order", 200, partitions=1)
    handled: list[bytes] = []
    tries: Counter[bytes] = Counter()

    async def handle(message: Message) -> None:
        tries[message.value] += 1
        if message.offset == 0 and len(handled) < 199:
            raise RuntimeError("not yet")
        handled.append(message.value)

    async with Consumer(
        shared_cluster.meta, subject="no-order", group="g", handler=handle, settings=SHARED
    ):
        await eventually(lambda: len(handled) >= 200, seconds=60)
    assert set(handled) == values
    assert sum(count > 1 for count in tries.values()) == 1


async def test_strategy_mismatch_is_refused_at_open_with_the_way_to_switch(shared_cluster: Cluster):
    """The group's first consumer has decided the strategy."""
    await shared_cluster.create("decided")
    async with Consumer(
        shared_cluster.meta,
        subject="decided",
        group="g",
        settings=ConsumerSettings(consume_strategy="shared"),
    ):
        with raises(Reason.GROUP_STRATEGY, match="keylane group switch"):
            async with Consumer(shared_cluster.meta, subject="decided", group="g"):
                pass


async def test_shared_groups_follow_a_resize(shared_cluster: Cluster):
    """All consumers drain the parents before any child is begun, and everything is handled."""
    values = await fill(shared_cluster, "resized-shared", 400)
    handled: list[Message] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.002)
        handled.append(message)

    def consumer() -> Consumer:
        return Consumer(
            shared_cluster.meta,
            subject="resized-shared",
            group="g",
            handler=handle,
            settings=SHARED,
        )

    async with consumer(), consumer():
        await eventually(lambda: len(handled) > 50)
        await shared_cluster.reshape(
            Reshape(kind=OperationKind.RESIZE, subject="resized-shared", partitions=3)
        )
        async with Producer(shared_cluster.meta) as producer:
            for number in range(400, 600):
                values.add(b"%d" % number)
                producer.send("resized-shared", b"%d" % number, key=b"k%d" % (number % 50))
        await eventually(lambda: len(handled) >= 600)
    assert {message.value for message in handled} == values
    old = max(
        index for index, message in enumerate(handled) if message.partition_id in _oldest(handled)
    )
    new = min(
        index
        for index, message in enumerate(handled)
        if message.partition_id not in _oldest(handled)
    )
    assert {message.value for message in handled[:new]} <= {
        message.value for message in handled[: old + 1]
    }


def _oldest(handled: list[Message]) -> set[int]:
    return set(sorted({message.partition_id for message in handled})[:2])


# ── real processes ────────────────────────────────────────────────────────────────────────────────
@pytest.mark.crash
async def test_killed_session_repeats_only_its_messages_in_flight(cluster: Cluster, tmp_path: Path):
    """Three consumers, one killed with SIGKILL: every message is handled, and only those of the
    dead one twice.
    """
    await fill(cluster, "killed-shared", 600)
    paths = [tmp_path / f"events-{number}" for number in range(3)]

    def consumer(number: int):
        path = paths[number]
        return consumer_process(cluster, "killed-shared", path, sleep_s=0.05, shared=True)

    with consumer(0) as victim, consumer(1), consumer(2):
        await eventually(lambda: all(len(places(path, "end")) > 10 for path in paths))
        victim.kill()
        await eventually(
            lambda: len({where for path in paths for where in places(path, "end")}) >= 600,
            seconds=60,
        )
    started = Counter(where for path in paths for where in places(path, "start"))
    again = {where for where, count in started.items() if count > 1}
    assert again <= set(places(paths[0], "start")), "messages in flight came to no other consumer"
    # 2 partitions with 20 messages in flight each, and messages handled but not acked yet.
    assert len(again) <= 2 * 20 + 20


@pytest.mark.crash
async def test_messages_of_a_killed_session_are_free_after_its_ttl(
    cluster: Cluster, tmp_path: Path
):
    """However long `in_flight_ms` is: ten minutes here. Messages of the other consumer are not
    handled twice.
    """
    await fill(cluster, "dead-shared", 300)
    paths = [tmp_path / f"events-{number}" for number in range(2)]

    def consumer(number: int):
        return consumer_process(
            cluster, "dead-shared", paths[number], sleep_s=0.03, shared=True, in_flight_ms=600_000
        )

    with consumer(0) as victim, consumer(1):
        await eventually(lambda: all(len(places(path, "end")) > 10 for path in paths))
        victim.kill()
        await eventually(
            lambda: len({where for path in paths for where in places(path, "end")}) >= 300
        )
    started = Counter(where for path in paths for where in places(path, "start"))
    again = {where for where, count in started.items() if count > 1}
    assert again <= set(places(paths[0], "start"))


async def test_handlers_that_take_longer_than_the_ttl_keep_their_messages(
    shared_cluster: Cluster,
):
    """Empty acks renew the session at the broker, so no message is handed out to another consumer
    too.
    """
    values = await fill(shared_cluster, "slow-shared", 8, partitions=2)
    settings = ConsumerSettings(
        ttl_ms=TTL_MS, consume_strategy="shared", in_flight_ms=600_000, in_flight_messages=2
    )
    handled: Counter[bytes] = Counter()

    async def handle(message: Message) -> None:
        await asyncio.sleep(3 * TTL_MS / 1000)
        handled[message.value] += 1

    def consumer() -> Consumer:
        return Consumer(
            shared_cluster.meta, subject="slow-shared", group="g", handler=handle, settings=settings
        )

    async with consumer(), consumer():
        await eventually(lambda: len(handled) == 8, seconds=60)
        await asyncio.sleep(1)
    assert handled == Counter(values)


@pytest.mark.crash
async def test_broker_restart_hands_out_unacked_messages_again(cluster: Cluster):
    """Acks survive the restart; messages in flight are handled, once or again; none is left
    over.
    """
    values = await fill(cluster, "restarted-shared", 600)
    handled: Counter[bytes] = Counter()

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.01)
        handled[message.value] += 1

    def consumer() -> Consumer:
        return Consumer(
            cluster.meta,
            subject="restarted-shared",
            group="g",
            handler=handle,
            settings=SHARED,
        )

    async with consumer(), consumer():
        await eventually(lambda: len(handled) > 100)
        cluster.brokers[0].kill()
        await asyncio.sleep(0.3)
        cluster.brokers[0].restart()
        await eventually(lambda: len(handled) >= 600, seconds=60)
    assert set(handled) == values
    assert sum(count > 1 for count in handled.values()) <= 2 * 2 * 20 + 40


@pytest.mark.crash
@pytest.mark.parametrize(
    "shared", [False, True], ids=["exclusive-to-shared", "shared-to-exclusive"]
)
async def test_zombie_is_fenced_across_a_switch(cluster: Cluster, tmp_path: Path, *, shared: bool):
    """A consumer frozen before a switch moves no cursor after it, in either direction, and ends by
    itself.
    """
    await fill(cluster, "switched", 300)
    path = tmp_path / "events"
    handled: list[Message] = []
    with consumer_process(cluster, "switched", path, sleep_s=0.02, shared=shared) as zombie:
        await eventually(lambda: len(places(path, "end")) > 20)
        pause(zombie.pid)
        await switch(
            cluster,
            "switched",
            ConsumeStrategy.EXCLUSIVE if shared else ConsumeStrategy.SHARED,
        )
        async with Consumer(
            cluster.meta,
            subject="switched",
            group="g",
            handler=handled.append,
            settings=EXCLUSIVE if shared else SHARED,
        ) as consumer:
            await eventually(lambda: len(consumer.assignment) == 2)
            await eventually(
                lambda: (
                    len({place(message) for message in handled} | set(places(path, "end"))) >= 300
                )
            )
            resume(zombie.pid)
            assert await asyncio.to_thread(zombie.wait, 30) != 0, "it is refused and ends"
    events = [json.loads(line) for line in written_lines(path)]
    late = [
        event
        for event in events
        if event["event"] == "start" and event["boot_ms"] >= event["deadline_ms"]
    ]
    assert late == [], "no handler starts after its deadline"
    assert min(message.fencing_token for message in handled) > max(
        event["token"] for event in events
    )
