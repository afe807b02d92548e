"""Programs that harm their own consumer: they block the event loop past the lease, fork, and end
the program inside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import pytest

from keylane import (
    Admin,
    Consumer,
    ConsumerSettings,
    InvalidRequestError,
    LeaseLostError,
    Message,
    Producer,
)
from keylane.consumer.dispatch import workers
from support.cluster import Cluster, eventually


async def fill(cluster: Cluster, subject: str, count: int) -> None:
    await cluster.create(subject, partitions=1)
    async with Producer(cluster.meta) as producer:
        await producer.send_all(subject, [(b"k", b"%d" % number) for number in range(count)])


async def test_body_that_blocks_past_the_lease_loses_what_is_in_hand(shared_cluster: Cluster):
    """The acks are refused, `on_lost` is told, and the messages come again in their order."""
    await fill(shared_cluster, "blocking-body", 6)
    lost: list[int] = []
    consumer = Consumer(
        shared_cluster.meta,
        subject="blocking-body",
        group="g",
        settings=ConsumerSettings(ttl_ms=1_000, handover_ms=100, on_lost=lost.extend),
    )
    async with asyncio.timeout(60), consumer:
        taken = await consumer.getmany(max_records=2, timeout_ms=30_000)
        time.sleep(1.5)
        with pytest.raises(LeaseLostError):
            await consumer.ack(taken)
        again: list[Message] = []
        while len(again) < 6:
            messages = await consumer.getmany(timeout_ms=1_000)
            await consumer.ack(messages)
            again += messages
    assert [message.value for message in again] == [b"%d" % number for number in range(6)]
    assert lost == [taken[0].partition_id]
    assert again[0].fencing_token > taken[0].fencing_token


@pytest.mark.parametrize("by_column", [False, True])
async def test_loop_that_catches_a_lost_lease_goes_on_and_gets_the_messages_again(
    shared_cluster: Cluster, by_column: bool
):
    """`async for` and `batches()`: the ack is refused in the body, and nothing is lost or out of
    order.
    """
    subject = f"lost-in-a-loop-{by_column}"
    await fill(shared_cluster, subject, 6)
    consumer = Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        settings=ConsumerSettings(ttl_ms=1_000, handover_ms=100),
    )
    acked: list[int] = []
    refused = 0
    async with asyncio.timeout(60), consumer:
        async for taken in consumer.batches() if by_column else consumer:
            if not refused:
                time.sleep(1.5)
            try:
                await taken.ack()
            except LeaseLostError:
                refused += 1
                continue
            acked += range(taken.start_offset, taken.next_offset) if by_column else [taken.offset]
            if len(acked) == 6:
                break
    assert refused == 1
    assert acked == list(range(6))


async def test_handler_that_forks_is_the_parents_alone(shared_cluster: Cluster):
    """The child can neither ack nor consume; the parent handles every message once."""
    await fill(shared_cluster, "forking-handler", 4)
    handled: list[bytes] = []
    statuses: list[int] = []

    async def handle(message: Message) -> None:
        child = os.fork()
        if child == 0:
            try:
                message.ack().send(None)
            except InvalidRequestError:  # as in the parent: the handler's return acks it
                os._exit(7)
            finally:
                os._exit(1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        handled.append(message.value)

    consumer = Consumer(shared_cluster.meta, subject="forking-handler", group="g", handler=handle)
    async with consumer:
        await eventually(lambda: len(handled) == 4)
    assert handled == [b"%d" % number for number in range(4)]
    assert statuses == [7] * 4


@pytest.mark.parametrize("how", ["returns", "awaits", "raises"])
async def test_child_ends_when_a_forking_handler_comes_back_in_it(
    shared_cluster: Cluster, tmp_path: Path, how: str
):
    """It names its error, and neither acks nor reads; the parent handles every message once."""
    subject, said = f"forking-{how}", tmp_path / "said"
    await fill(shared_cluster, subject, 6)
    handled: list[bytes] = []
    statuses: list[int] = []

    async def handle(message: Message) -> None:
        child = os.fork()
        if child == 0:
            logging.getLogger("keylane").addHandler(logging.FileHandler(said))
            if how == "awaits":
                await asyncio.sleep(0.2)
            if how == "raises":
                raise ValueError("in the child")
            return
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        handled.append(message.value)

    consumer = Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        handler=handle,
        settings=ConsumerSettings(concurrency=4),
    )
    async with asyncio.timeout(60), consumer:
        await eventually(lambda: len(handled) == 6)
        async with Admin(shared_cluster.meta) as admin:
            while await admin.lag(subject, "g"):
                await asyncio.sleep(0.05)
    assert handled == [b"%d" % number for number in range(6)]
    assert statuses == [os.EX_SOFTWARE] * 6
    assert said.read_text().count("UsageError 1258") == 6


async def test_child_of_a_handler_handles_no_later_message_when_the_handler_returns(
    shared_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Messages that are handled one after another without a turn of the event loop are the parent's
    as well.
    """
    monkeypatch.setattr(
        workers, "TURN_S", 10.0
    )  # a fork of this large process takes longer than a run
    await fill(shared_cluster, "forking-in-a-run", 400)
    handled = os.open(tmp_path / "handled", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    parent = os.getpid()
    children: list[int] = []

    async def handle(message: Message) -> None:
        os.write(handled, b"%d\n" % os.getpid())
        if int(message.value) % 100 == 37 and os.getpid() == parent and (child := os.fork()):
            children.append(child)

    consumer = Consumer(shared_cluster.meta, subject="forking-in-a-run", group="g", handler=handle)
    async with asyncio.timeout(60), consumer:
        await eventually(lambda: len(children) == 4)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        async with Admin(shared_cluster.meta) as admin:
            while await admin.lag("forking-in-a-run", "g"):
                await asyncio.sleep(0.05)
    os.close(handled)
    assert statuses == [os.EX_SOFTWARE] * 4
    assert (tmp_path / "handled").read_text().split() == [str(parent)] * 400


@pytest.mark.parametrize("threads", [0, 2])
async def test_batch_handler_that_ends_the_program_acks_nothing(
    shared_cluster: Cluster, threads: int
):
    """The consumer hands over, `wait` raises what the handler raised, and the batch comes again."""
    subject = f"ending-batch-{threads}"
    await fill(shared_cluster, subject, 4)

    def handle(_messages: list[Message]) -> None:
        raise SystemExit(3)

    consumer = Consumer(
        shared_cluster.meta,
        subject=subject,
        group="g",
        batch_handler=handle,
        settings=ConsumerSettings(threads=threads),
    )
    async with asyncio.timeout(60), consumer:
        with pytest.raises(SystemExit):
            await consumer.wait()
    async with Consumer(shared_cluster.meta, subject=subject, group="g") as consumer:
        assert (await anext(consumer)).value == b"0"
