"""A group's progress set under its live consumers: they hand over, and go on at the new offsets, in
order.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.errors import FencedError, OffsetOutOfRangeError, Reason
from keylane.protocol import endpoints
from keylane.protocol.frames import Ack
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster, eventually
from support.consumer_options import consumer_options
from support.raising import raises
from support.server_process import run_keylane

SETTINGS = ConsumerSettings(ttl_ms=3_000, handover_ms=300)


class Member:
    """A consumer that notes what it handles, and what it is told of its partitions."""

    def __init__(self, cluster: Cluster, subject: str, name: str, **given: object) -> None:
        self.handled: list[Message] = []
        self.told: list[str] = []
        self.consumer: Consumer = Consumer(
            cluster.meta,
            **consumer_options(
                subject=subject,
                group="g",
                handler=self.handle,
                settings=replace(
                    SETTINGS,
                    name=name,
                    on_assigned=lambda _ids: self.told.append("assigned"),
                    on_revoked=lambda _ids: self.told.append("revoked"),
                    on_lost=lambda _ids: self.told.append("lost"),
                ),
                **given,
            ),
        )

    async def handle(self, message: Message) -> None:
        self.handled.append(message)


async def fill(cluster: Cluster, subject: str, count: int, *, partitions: int = 2) -> None:
    await cluster.create(subject, partitions=partitions)
    await send(cluster, subject, range(count))


async def send(cluster: Cluster, subject: str, numbers: range) -> None:
    async with Producer(cluster.meta) as producer:
        for number in numbers:
            await producer.send(subject, b"%d" % number, key=b"k%d" % (number % 5))


def by_key(*members: Member, since: tuple[int, ...] = (0, 0)) -> dict[bytes, list[int]]:
    keys: dict[bytes, list[int]] = defaultdict(list)
    for member, first in zip(members, since, strict=False):
        for message in member.handled[first:]:
            keys[message.key].append(int(message.value))
    return keys


@pytest.mark.parametrize("strategy", ["exclusive", "shared"])
async def test_members_go_on_at_the_new_cursors_without_being_restarted(
    shared_cluster: Cluster, strategy: str
):
    """Back to the first message, and to the end; each partition is handed over as usual, and in
    order.
    """
    subject = f"live-{strategy}"
    await fill(shared_cluster, subject, 40)
    first, second = (
        Member(shared_cluster, subject, name, consume_strategy=strategy) for name in ("a", "b")
    )
    async with (
        asyncio.timeout(60),
        first.consumer,
        second.consumer,
        Admin(shared_cluster.meta) as admin,
    ):
        await eventually(lambda: len(first.handled) + len(second.handled) == 40)
        await eventually(lambda: "assigned" in second.told)
        with raises(Reason.GROUP_BUSY):
            await admin.reset_group(subject, "g", "earliest")
        since = len(first.handled), len(second.handled)
        done = await admin.reset_group(subject, "g", "earliest", live=True)
        assert {view.cursor for view in done.cursors} == {0}
        await eventually(lambda: len(first.handled) + len(second.handled) == 80)
        again = by_key(first, second, since=since)
        assert {key: sorted(numbers) for key, numbers in again.items()} == {
            b"k%d" % key: list(range(key, 40, 5)) for key in range(5)
        }
        if strategy == "exclusive":
            assert all(numbers == sorted(numbers) for numbers in again.values())
            for member in (first, second):
                assert member.told[-2:] == ["revoked", "assigned"]
                assert "lost" not in member.told
        await first.consumer.suspend()
        await second.consumer.suspend()
        await send(shared_cluster, subject, range(40, 60))
        await admin.reset_group(subject, "g", "latest", live=True)
        await first.consumer.resume()
        await second.consumer.resume()
        await send(shared_cluster, subject, range(60, 65))
        await eventually(lambda: len(first.handled) + len(second.handled) == 85)
        values = {int(message.value) for message in (*first.handled, *second.handled)}
        assert not values & set(range(40, 60))


async def test_handler_that_runs_ends_before_the_cursors_are_set_and_its_ack_moves_nothing(
    shared_cluster: Cluster,
):
    """The reset waits for it; an ack under a token of before is refused by the broker."""
    subject = "live-handler"
    await fill(shared_cluster, subject, 10, partitions=1)
    gate, running = asyncio.Event(), asyncio.Event()
    seen: list[tuple[int, int]] = []

    async def handle(message: Message) -> None:
        seen.append((int(message.value), message.fencing_token))
        if len(seen) == 3:
            running.set()
            await gate.wait()

    async with (
        asyncio.timeout(60),
        Consumer(
            shared_cluster.meta,
            subject=subject,
            group="g",
            handler=handle,
            settings=ConsumerSettings(handover_ms=20_000, concurrency=1),
        ) as consumer,
        Admin(shared_cluster.meta) as admin,
    ):
        await running.wait()
        (before,) = consumer.assignment
        reset = asyncio.create_task(
            admin.reset_group(
                subject, "g", "offset", offset=1, partition_id=before.partition_id, live=True
            )
        )
        await asyncio.sleep(0.3)
        assert not reset.done()
        with raises(Reason.GROUP_BUSY):
            await admin.reset_group(subject, "g", "latest", live=True)
        gate.set()
        await reset
        await eventually(lambda: len(seen) == 3 + 9)
        assert [number for number, _ in seen] == [0, 1, 2, *range(1, 10)]
        network = HttpNetwork()
        try:
            history = await MetaClient(network, [shared_cluster.meta]).call(
                endpoints.HISTORY, subject=subject
            )
            broker = BrokerClient(network, str(history.partitions[0].partition.address))
            session = consumer._assignments.clients[0].state.tenure.lease.session  # type: ignore[union-attr]
            stale = Ack(before.partition_id, "g", session, before.fencing_token, ((0, 10),))
            with pytest.raises(FencedError):
                await broker.call(stale)
            await broker.close()
        finally:
            await network.close()


async def test_reset_beyond_the_end_is_refused_and_changes_nothing(shared_cluster: Cluster):
    """Nothing is handed over for it."""
    await fill(shared_cluster, "live-beyond", 10, partitions=1)
    member = Member(shared_cluster, "live-beyond", "a")
    async with asyncio.timeout(60), member.consumer, Admin(shared_cluster.meta) as admin:
        await eventually(lambda: len(member.handled) == 10)
        (owned,) = member.consumer.assignment
        named = f"offset 11 of partition {owned.partition_id} is not in \\[0, 10\\]"
        with pytest.raises(OffsetOutOfRangeError, match=f"^{named}") as refused:
            await admin.reset_group(
                *("live-beyond", "g", "offset"),
                offset=11,
                partition_id=owned.partition_id,
                live=True,
            )
        assert "earliest, latest or a time" in refused.value.hint
        await send(shared_cluster, "live-beyond", range(10, 12))
        await eventually(lambda: len(member.handled) == 12)
        assert member.told == ["assigned"]


async def test_command_resets_a_live_group(shared_cluster: Cluster):
    await fill(shared_cluster, "live-command", 10)
    member = Member(shared_cluster, "live-command", "a")
    async with asyncio.timeout(60), member.consumer:
        await eventually(lambda: len(member.handled) == 10)
        words = ("group", "reset", "live-command", "g", "--shift", "-1", "--live")
        done = await asyncio.to_thread(
            run_keylane, *words, "--meta", shared_cluster.meta, "--output", "json"
        )
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["cursors"]) == 2
        await eventually(lambda: len(member.handled) == 12)


@pytest.mark.parametrize("step", ["reset-begun", "reset-generation", "reset-told"])
async def test_reset_is_finished_when_its_metaserver_dies(tmp_path: Path, step: str):
    """The members are granted nothing until the next metaserver has set every cursor; then they go
    on.
    """
    with Cluster(tmp_path, brokers=1) as cluster:
        await fill(cluster, "s", 20)
        member = Member(cluster, "s", "a")
        async with asyncio.timeout(60):
            cluster.meta_program.kill()
            cluster.meta_program.restart_to_die_after(step)
            async with member.consumer, Admin(cluster.meta) as admin:
                await eventually(lambda: len(member.handled) == 20)
                reset = asyncio.create_task(admin.reset_group("s", "g", "earliest", live=True))
                await cluster.meta_program.died()
                cluster.meta_program.restart()
                await asyncio.wait([reset])
                assert reset.exception() is not None
                await eventually(lambda: len(member.handled) >= 40)
                again = by_key(member, since=(20,))
                assert {key: numbers[:4] for key, numbers in again.items()} == {
                    b"k%d" % key: list(range(key, 20, 5)) for key in range(5)
                }


async def test_canceled_reset_leaves_the_group_where_it_was(shared_cluster: Cluster):
    """While a handler is waited for; the caller that waits for the reset is told, and once cursors
    are set it is too late.
    """
    subject = "live-canceled"
    await fill(shared_cluster, subject, 10, partitions=1)
    gate, running = asyncio.Event(), asyncio.Event()
    handled: list[int] = []

    async def handle(message: Message) -> None:
        if len(handled) == 5:
            running.set()
            await gate.wait()
        handled.append(int(message.value))

    slow = ConsumerSettings(ttl_ms=10_000, handover_ms=8_000, concurrency=1)
    consumer: Consumer = Consumer(
        shared_cluster.meta, subject=subject, group="g", handler=handle, settings=slow
    )
    async with asyncio.timeout(60), consumer, Admin(shared_cluster.meta) as admin:
        await running.wait()
        with raises(Reason.RESET_FORWARD):
            await admin.cancel_reset(subject, "g")
        reset = asyncio.create_task(admin.reset_group(subject, "g", "earliest", live=True))
        while (pending := (await admin.describe_group(subject, "g")).reset) is None:
            await asyncio.sleep(0.02)
        assert (pending.to, pending.begun) == ("earliest", False)
        assert len(pending.waits_for) == 1
        shown = await asyncio.to_thread(
            run_keylane, "group", "describe", subject, "g", "--meta", shared_cluster.meta
        )
        assert f"it waits for {pending.waits_for[0]}" in " ".join(shown.stdout.split())
        words = ("group", "reset", subject, "g", "--cancel", "--meta", shared_cluster.meta)
        while (done := await asyncio.to_thread(run_keylane, *words)).returncode:
            assert "has no reset" in done.stderr
        assert "nothing was changed" in done.stdout
        with raises(Reason.RESET_CANCELED):
            await reset
        assert (await admin.describe_group(subject, "g")).reset is None
        gate.set()
        await eventually(lambda: len(handled) == 10)
        assert len(set(handled)) == 10, "no message came twice"
        await admin.reset_group(subject, "g", "earliest", live=True)
        with raises(Reason.RESET_FORWARD, match="is done"):
            await admin.cancel_reset(subject, "g")
        await eventually(lambda: len(handled) == 20)
    refused = run_keylane(*words, "--live")
    assert refused.returncode == 1
    assert "cannot be combined" in refused.stderr
