"""Consumers against real brokers and a real metaserver."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import (
    ConfigError,
    LeaseLostError,
    NotSentError,
    Reason,
    SubjectUnknownError,
)
from support.cluster import Cluster, eventually, pause, resume
from support.raising import raises
from support.server_process import ServerProcess, running_script
from support.written_lines import written_lines

TTL_MS = 1_500
QUICK = ConsumerSettings(ttl_ms=TTL_MS, handler_backoff=Backoff(first_ms=10, max_ms=50))


async def fill(cluster: Cluster, subject: str, count: int, *, keys: int = 50, partitions: int = 4):
    """Send `count` numbered messages; returns what each key was sent."""
    await cluster.create(subject, partitions=partitions)
    sent: dict[bytes, list[bytes]] = {}
    async with Producer(cluster.meta) as producer:
        for number in range(count):
            key, value = b"k%d" % (number % keys), b"%d" % number
            sent.setdefault(key, []).append(value)
            producer.send(subject, value, key=key)
    return sent


def ended_in(path: Path) -> set[tuple[int, int]]:
    """Partition and offset of each message whose handler has ended in a process."""
    return {
        (event["partition"], event["offset"]) for event in events(path) if event["event"] == "end"
    }


def by_key(messages: list[Message]) -> dict[bytes, list[bytes]]:
    values: dict[bytes, list[bytes]] = {}
    for message in messages:
        values.setdefault(message.key, []).append(message.value)
    return values


async def test_messages_are_handled_in_the_order_of_their_key(shared_cluster: Cluster):
    """Sixteen handlers at once, some slow: each key keeps the order of sending, and no message is
    handled twice.
    """
    sent = await fill(shared_cluster, "handled", 4_000)
    handled: list[Message] = []
    at_once = most = 0

    async def handle(message: Message) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001 * (int(message.value) % 3))
        handled.append(message)
        at_once -= 1

    async with Consumer(shared_cluster.meta, subject="handled", group="g", handler=handle):
        await eventually(lambda: len(handled) >= 4_000)
    assert by_key(handled) == sent
    assert most > 1
    assert len({(message.partition_id, message.fencing_token) for message in handled}) == 4


async def test_acked_messages_are_not_delivered_again(shared_cluster: Cluster):
    """A second consumer of the group begins where the first one ended."""
    await fill(shared_cluster, "twice", 1_000)
    first: list[Message] = []
    async with Consumer(shared_cluster.meta, subject="twice", group="g", handler=first.append):
        await eventually(lambda: len(first) >= 1_000)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send("twice", b"later", key=b"k0")
    second: list[Message] = []
    async with Consumer(shared_cluster.meta, subject="twice", group="g", handler=second.append):
        await eventually(lambda: second)
        await asyncio.sleep(0.1)
    assert [message.value for message in second] == [b"later"]
    assert second[0].fencing_token > 1


async def test_two_groups_each_get_everything(shared_cluster: Cluster):
    """Progress belongs to the group."""
    await fill(shared_cluster, "shared", 500)
    first: list[Message] = []
    second: list[Message] = []
    async with (
        Consumer(shared_cluster.meta, subject="shared", group="one", handler=first.append),
        Consumer(shared_cluster.meta, subject="shared", group="two", handler=second.append),
    ):
        await eventually(lambda: len(first) >= 500 and len(second) >= 500)
    assert by_key(first) == by_key(second)


async def test_iteration_redelivers_only_unacked_messages(shared_cluster: Cluster):
    """Messages without an ack are redelivered to the next consumer; acked ones are not."""
    await fill(shared_cluster, "iterated", 100, partitions=1)
    async with Consumer(
        shared_cluster.meta,
        subject="iterated",
        group="g",
        settings=ConsumerSettings(handover_ms=10),
    ) as consumer:
        seen = []
        async for message in consumer:
            seen.append(message)
            if message.offset not in (95, 96, 99):
                await message.ack()
            if len(seen) == 100:
                break
    with pytest.raises(LeaseLostError):
        await seen[95].ack()
    async with Consumer(shared_cluster.meta, subject="iterated", group="g") as consumer:
        again = []
        async for message in consumer:
            again.append(message.offset)
            await message.ack()
            if len(again) == 3:
                break
    assert [message.offset for message in seen] == list(range(100))
    assert again == [95, 96, 99]


async def test_failing_message_is_tried_again_in_place(shared_cluster: Cluster):
    """Later messages of its key wait; other keys are handled meanwhile."""
    sent = await fill(shared_cluster, "failing", 400, keys=10)
    handled: list[Message] = []
    tries: list[tuple[int, int]] = []

    async def handle(message: Message) -> None:
        if message.key == b"k3" and message.value == sent[b"k3"][0]:
            tries.append((message.attempt, len(handled)))
            if message.attempt < 4:
                raise RuntimeError("not yet")
        handled.append(message)

    async with Consumer(
        shared_cluster.meta, subject="failing", group="g", handler=handle, settings=QUICK
    ):
        await eventually(lambda: len(handled) >= 400)
    assert by_key(handled) == sent
    assert [attempt for attempt, _ in tries] == [1, 2, 3, 4]
    assert tries[3][1] >= 360, "the other nine keys did not wait"


async def test_partitions_are_divided_and_handed_over(shared_cluster: Cluster):
    """A second consumer takes over half, between two messages of a key; when it leaves, all return
    at once.
    """
    sent = await fill(shared_cluster, "joined", 20, keys=20)
    log: list[tuple[str, Message]] = []

    def handler(name: str):
        async def handle(message: Message) -> None:
            await asyncio.sleep(0.002)
            log.append((name, message))

        return handle

    async with Consumer(
        shared_cluster.meta, subject="joined", group="g", handler=handler("a"), settings=QUICK
    ) as first:
        await eventually(lambda: len(first.assignment) == 4)
        async with (
            Producer(shared_cluster.meta) as producer,
            Consumer(
                shared_cluster.meta,
                subject="joined",
                group="g",
                handler=handler("b"),
                settings=QUICK,
            ) as second,
        ):
            for number in range(20, 2_000):
                key, value = b"k%d" % (number % 20), b"%d" % number
                sent[key].append(value)
                producer.send("joined", value, key=key)
                await asyncio.sleep(0.0005)
            await eventually(lambda: len(first.assignment) == 2 == len(second.assignment))
            left = time.monotonic()
        await eventually(lambda: len(first.assignment) == 4)
        assert time.monotonic() - left < TTL_MS / 1000, "a graceful leave does not wait for the ttl"
        await eventually(lambda: len(log) >= 2_000)
    assert by_key([message for _, message in log]) == sent, "a clean hand-over redelivers nothing"
    assert {name for name, _ in log} == {"a", "b"}


@pytest.mark.parametrize("name", ["../x", "a\0b", "x" * 300, ""])
def test_illegal_names_are_refused_at_once(name: str):
    """Names are checked before anything is opened."""
    with raises(Reason.NAME_INVALID):
        Consumer("127.0.0.1:1", subject=name, group="g")
    with raises(Reason.NAME_INVALID):
        Consumer("127.0.0.1:1", subject="s", group=name)


def test_impossible_settings_are_all_listed():
    """The error lists every problem."""
    with pytest.raises(ConfigError, match=r"ttl_ms.*concurrency"):
        Consumer(
            "127.0.0.1:1",
            subject="s",
            group="g",
            settings=ConsumerSettings(ttl_ms=10, concurrency=0),
        )


async def test_unknown_subject_is_refused_at_open(shared_cluster: Cluster):
    """Opening does not wait for a subject that does not exist."""
    with pytest.raises(SubjectUnknownError, match="keylane subject create"):
        async with Consumer(shared_cluster.meta, subject="no-such-subject", group="g"):
            pass


async def test_unreachable_metaserver_is_reported_at_open():
    """The error of a refused connection says what to do."""
    with pytest.raises(NotSentError, match="Check that it is running"):
        async with Consumer("127.0.0.1:1", subject="s", group="g"):
            pass


# ── real processes ────────────────────────────────────────────────────────────────────────────────
def consumer_process(
    cluster: Cluster, subject: str, path: Path, *, sleep_s: float = 0.0
) -> AbstractContextManager[ServerProcess]:
    arguments = (cluster.meta, subject, "g", str(TTL_MS), str(path), str(sleep_s))
    return running_script(Path(__file__).with_name("zombie.py"), *arguments)


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in written_lines(path)]


@pytest.mark.crash
async def test_killed_consumer_is_replaced_within_its_ttl(cluster: Cluster, tmp_path: Path):
    """After SIGKILL the other consumer handles the rest, in order, within ttl + 1 s."""
    sent = await fill(cluster, "killed", 200, keys=10)
    survivor: list[Message] = []
    path = tmp_path / "events"
    with consumer_process(cluster, "killed", path, sleep_s=0.02) as victim:
        await eventually(lambda: len(events(path)) > 20)
        victim.kill()
        killed = time.monotonic()
        async with Consumer(
            cluster.meta, subject="killed", group="g", handler=survivor.append, settings=QUICK
        ) as consumer:
            await eventually(lambda: len(consumer.assignment) == 4)
            took = time.monotonic() - killed
            finished = ended_in(path)
            await eventually(
                lambda: len(finished | {(m.partition_id, m.offset) for m in survivor}) >= 200
            )
    assert took < TTL_MS / 1000 + 1
    for key, values in by_key(survivor).items():
        assert values == sent[key][-len(values) :], (
            "it continues where the acks ended, without a gap"
        )


@pytest.mark.crash
@pytest.mark.parametrize("ttls", [1.5, 4])
async def test_stopped_consumer_moves_no_cursor_when_it_wakes(
    cluster: Cluster, tmp_path: Path, ttls: float
):
    """SIGSTOP inside handlers: a new owner continues; awake again, the old one starts no handler
    and acks nothing.
    """
    sent = await fill(cluster, "stopped", 200, keys=10)
    survivor: list[Message] = []
    path = tmp_path / "events"
    with consumer_process(cluster, "stopped", path, sleep_s=0.05) as zombie:
        await eventually(lambda: len(events(path)) > 20)
        pause(zombie.pid)
        async with Consumer(
            cluster.meta, subject="stopped", group="g", handler=survivor.append, settings=QUICK
        ) as consumer:
            await asyncio.sleep(ttls * TTL_MS / 1000)
            await eventually(lambda: len(consumer.assignment) == 4)
            resume(zombie.pid)
            before = len(events(path))
            # The old process joins again, and gets partitions back.
            await eventually(
                lambda: len(ended_in(path) | {(m.partition_id, m.offset) for m in survivor}) >= 200
            )
            await asyncio.sleep(0.5)
    assert survivor
    late = [
        event
        for event in events(path)
        if event["event"] == "start" and event["boot_ms"] >= event["deadline_ms"]
    ]
    assert late == [], "no handler starts after its deadline"
    old = {(event["partition"], event["token"]) for event in events(path)[:before]}
    new = {message.partition_id: message.fencing_token for message in survivor}
    assert all(new[partition] > token for partition, token in old if partition in new)
    for key, values in by_key(survivor).items():
        begin = sent[key].index(
            values[0]
        )  # the old process may have the last ones, once it is back
        assert values == sent[key][begin : begin + len(values)], (
            "what the survivor did has no gap and no repeat"
        )


@pytest.mark.crash
async def test_consumer_continues_after_a_broker_was_killed(cluster: Cluster):
    """After the broker is back, consuming continues with the same token, in order, without a
    loss.
    """
    sent = await fill(cluster, "bumpy", 2_000, keys=20)
    handled: list[Message] = []

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.005)
        handled.append(message)

    async with Consumer(cluster.meta, subject="bumpy", group="g", handler=handle, settings=QUICK):
        await eventually(lambda: len(handled) > 300)
        cluster.brokers[0].kill()
        await asyncio.sleep(0.3)
        cluster.brokers[0].restart()
        await eventually(lambda: len(handled) >= 2_000)
        await asyncio.sleep(0.2)
    assert by_key(handled) == sent


@pytest.mark.crash
async def test_handlers_stop_in_time_without_metaserver_and_brokers(cluster: Cluster):
    """While neither a heartbeat nor a request for a promise is answered, no handler starts after
    the deadline; consuming continues once they are.
    """
    await fill(cluster, "cut", 3_000, keys=20)
    starts: list[float] = []

    async def handle(_message: Message) -> None:
        starts.append(time.monotonic())
        await asyncio.sleep(0.02)

    async with Consumer(
        cluster.meta, subject="cut", group="g", handler=handle, settings=QUICK
    ) as consumer:
        await eventually(lambda: len(starts) > 50)
        killed = time.monotonic()
        for program in (cluster.meta_program, *cluster.brokers):
            program.kill()
        await asyncio.sleep(TTL_MS / 1000 * 1.5)
        assert max(starts) - killed < TTL_MS / 1000
        count = len(starts)
        for program in (cluster.meta_program, *cluster.brokers):
            program.restart()
        await eventually(lambda: len(starts) > count + 50)
        assert all(assigned.fencing_token > 1 for assigned in consumer.assignment)
