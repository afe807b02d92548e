"""A message that ends the process of its consumer is found, and set aside; everything else goes
on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.parking.test_parked_keys import (
    Handler,
    ParkedBrokers,
    brokers_of,
    consumer_of,
    send,
)
from keylane import Admin, Producer
from keylane.admin import FailingMessage
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.text import key_digest
from support.cluster import Cluster, eventually
from support.server_process import ForkedProcess, run_keylane
from support.written_lines import written_lines

CRASHER = Path(__file__).with_name("crasher.py")


@contextmanager
def crasher(cluster: Cluster, subject: str, path: Path, *how: str) -> Iterator[ForkedProcess]:
    arguments = [cluster.meta, subject, str(path), *how]
    with errors_of(path).open("w") as errors:
        process = ForkedProcess(str(CRASHER), arguments, os.environ, {2: errors.fileno()})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def errors_of(path: Path) -> Path:
    """What the last process that wrote to `path` said on standard error."""
    return path.with_name(f"{path.name}-errors")


def handed(path: Path, key: str) -> list[tuple[int, int]]:
    """The values and attempts of a key's messages, as handlers got them."""
    lines = [line.split() for line in written_lines(path)] if path.exists() else []
    return [(int(value), int(attempt)) for name, value, attempt in lines if name == key]


@pytest.mark.parametrize("manner", ["one", "batch", "iterated"])
async def test_message_that_ends_its_process_is_parked(
    shared_cluster: Cluster, tmp_path: Path, manner: str
):
    """Three processes end: two unawares, one with the message alone; the fourth handles everything
    else.
    """
    subject, path = f"crash-{manner}", tmp_path / "handed"
    await shared_cluster.create(subject, partitions=1)
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        for number in range(4):
            await send(producer, subject, b"a", number)
            await send(producer, subject, b"b", number)
        await send(producer, subject, b"bad", 0, 1)
        await send(producer, subject, b"a", 4)
        for _ in range(3):
            with crasher(shared_cluster, subject, path, manner) as process:
                await eventually(lambda process=process: process.poll() is not None)
                assert process.poll() == 9, errors_of(path).read_text()
        with crasher(shared_cluster, subject, path, manner):
            while await brokers.count() < 2:
                await asyncio.sleep(0.02)
            await eventually(lambda: (4, 1) in handed(path, "a"))
            await send(producer, subject, b"a", 5)
            await eventually(lambda: (5, 1) in handed(path, "a"))
            ((_, page),) = (await brokers.parked()).items()
        (view,) = page.keys
        assert view.key_hex == b"bad".hex()
        assert view.failure is not None
        assert (view.failure.kind, view.failure.attempts) == ("crashed", 2)
        assert "2 times" in view.failure.text
        listed = await asyncio.to_thread(
            run_keylane, "parked", "list", subject, "g", "--meta", shared_cluster.meta
        )
        assert (
            "crashed: the process of its consumer ended while it was handled, 2 times"
            in " ".join(listed.stdout.split())
        )
    assert handed(path, "bad") == [(0, 1)] * 3
    assert [value for value, _ in handed(path, "b")][-1] == 3


async def test_message_in_flight_at_all_ends_is_not_parked_for_another_one(
    shared_cluster: Cluster, tmp_path: Path
):
    """One of each partition was with a handler when the first two processes ended; all but one are
    handled by the fourth.
    """
    subject, path = "crash-beside", tmp_path / "handed"
    await shared_cluster.create(subject, partitions=4)
    keys = [b"slow%d" % number for number in range(12)]
    async with (
        asyncio.timeout(90),
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        for key in (*keys, b"bad"):
            await send(producer, subject, key, 0)
        for _ in range(3):
            with crasher(shared_cluster, subject, path, "slow") as process:
                await eventually(lambda process=process: process.poll() is not None)
                assert process.poll() == 9, errors_of(path).read_text()
        before = len(handed(path, "bad"))
        with crasher(shared_cluster, subject, path, "slow"):
            while not await brokers.count():
                await asyncio.sleep(0.02)
            await send(producer, subject, b"last", 0)
            await eventually(lambda: handed(path, "last"))
            pages = (await brokers.parked()).values()
            assert [view.key_hex for page in pages for view in page.keys] == [b"bad".hex()]
    assert len(handed(path, "bad")) == before == 3


async def test_messages_run_at_once_when_one_process_ended_without_handing_over(
    shared_cluster: Cluster, tmp_path: Path
):
    """Handlers of the next one run beside each other: nothing waits for a message of before."""
    subject, path = "crash-once", tmp_path / "handed"
    await shared_cluster.create(subject, partitions=1)
    async with asyncio.timeout(60), Producer(shared_cluster.meta) as producer:
        for number in range(4):
            await send(producer, subject, b"stands%d" % number, number)
        for _ in range(2):
            with crasher(shared_cluster, subject, path, "one") as process:
                before = len(written_lines(path)) if path.exists() else 0
                await eventually(lambda before=before: len(written_lines(path)) == before + 4)
                process.kill()


async def failures_of(brokers: ParkedBrokers) -> dict[str, str]:
    """The kind of the last failure of each parked key of the only partition."""
    ((_, page),) = (await brokers.parked()).items()
    return {view.key_hex: view.failure.kind for view in page.keys if view.failure is not None}


async def test_redriven_message_that_ends_its_process_is_parked_again(
    shared_cluster: Cluster, tmp_path: Path
):
    """By the second process: it parks the key before it begins; the third one handles everything
    else.
    """
    subject, path, handler = "crash-redriven", tmp_path / "handed", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad", b"worse"}
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, b"bad", 0, 1)
        await send(producer, subject, b"worse", 0)
        async with consumer_of(shared_cluster, subject, handler):
            while await brokers.count() < 3:
                await asyncio.sleep(0.02)
        await brokers.redrive(b"bad")
        for _ in range(2):
            with crasher(shared_cluster, subject, path, "one") as process:
                await eventually(lambda process=process: process.poll() is not None)
        await brokers.redrive(b"worse")
        with crasher(shared_cluster, subject, path, "one"):
            await eventually(lambda: handed(path, "worse"))
            await send(producer, subject, b"a", 0)
            await eventually(lambda: handed(path, "a"))
            while await failures_of(brokers) != {b"bad".hex(): "crashed"}:
                await asyncio.sleep(0.02)
            assert await brokers.count() == 2
    assert handed(path, "bad") == [(0, 1), (0, 1)]


async def test_redriven_message_that_ends_its_process_is_parked_again_where_nothing_else_was_sent(
    shared_cluster: Cluster, tmp_path: Path
):
    """The partition has taken it over and is empty, so nothing was ever pulled from it."""
    subject, path, handler = "crash-redriven-empty", tmp_path / "handed", Handler()
    await shared_cluster.create(subject, partitions=1)
    handler.poison = {b"bad"}
    async with (
        asyncio.timeout(
            180
        ),  # of three starts of Python, each with a second of processor time, and their ttls
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, b"bad", 0)
        async with consumer_of(shared_cluster, subject, handler):
            while await brokers.count() < 1:
                await asyncio.sleep(0.02)
            (parent,) = await brokers.partitions()
            resize = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=2)
            await shared_cluster.reshape(resize)
            await brokers.adopted(parent, 1)
        await brokers.redrive(b"bad")
        for _ in range(2):
            with crasher(shared_cluster, subject, path, "one") as process:
                await eventually(lambda process=process: process.poll() is not None)
        with crasher(shared_cluster, subject, path, "one") as process:
            await send(producer, subject, b"a", 0)
            await eventually(lambda: handed(path, "a"))
            while await failures_of(brokers) != {b"bad".hex(): "crashed"}:
                await asyncio.sleep(0.02)
            assert process.poll() is None
    assert handed(path, "bad") == [(0, 1), (0, 1)]


async def test_dead_letter_that_ended_its_process_is_handled_when_it_is_retried(
    shared_cluster: Cluster, tmp_path: Path
):
    """Also by an owner that followed such an end; only what was chosen before that end is a dead
    letter as before.
    """
    subject, path, handler = "crash-retried", tmp_path / "handed", Handler()
    await shared_cluster.create(subject, partitions=1)
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
    ):

        async def dead_letters() -> int:
            return sum([view.messages async for view in admin.parked(subject, "g", dead=True)])

        await send(producer, subject, b"bad", 0)
        for ended in range(4):
            with crasher(shared_cluster, subject, path, "dead") as process:
                if ended == 3:
                    while not await dead_letters():
                        await asyncio.sleep(0.02)
                    await admin.redrive(subject, "g", key=b"bad", dead=True)
                await eventually(lambda process=process: process.poll() is not None)
                assert process.poll() == 9, errors_of(path).read_text()
        assert not await dead_letters(), "it is chosen"
        async with consumer_of(shared_cluster, subject, handler, on_failure="dead"):
            while not await dead_letters():
                await asyncio.sleep(0.02)
            assert not handler.tried
            await admin.redrive(subject, "g", key=b"bad", dead=True)
            await eventually(lambda: handler.handled[b"bad"] == [0])
            while await dead_letters():
                await asyncio.sleep(0.02)


async def test_message_of_a_shared_group_that_ends_its_process_is_buried(
    shared_cluster: Cluster, tmp_path: Path
):
    """Two processes end with it among others, one with it alone; two such messages are told apart
    from all others.
    """
    subject, path = "crash-shared", tmp_path / "handed"
    await shared_cluster.create(subject, partitions=1)
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        brokers_of(shared_cluster, subject) as brokers,
    ):
        await send(producer, subject, b"bad", 0, 1)
        for number in range(4):
            await send(producer, subject, b"a", number)
        for ended in range(4):
            with crasher(shared_cluster, subject, path, "shared") as process:
                await eventually(lambda process=process: process.poll() is not None)
                assert process.poll() == 9, errors_of(path).read_text()
            if ended == 1:
                before = len(handed(path, "bad"))
        with crasher(shared_cluster, subject, path, "shared"):
            while await brokers.count() < 2:
                await asyncio.sleep(0.02)
            await send(producer, subject, b"a", 4)
            await eventually(lambda: (4, 1) in handed(path, "a"))
            await eventually(lambda: {value for value, _ in handed(path, "a")} == set(range(5)))
            ((_, page),) = (await brokers.parked()).items()
        (view,) = page.keys
        assert view.failure is not None
        assert (view.failure.kind, view.failure.attempts) == ("crashed", 3)
        assert "3 times" in view.failure.text
    assert handed(path, "bad")[before:] == [(0, 3), (1, 3)], "each alone, once"


async def test_row_of_arrow_data_that_ends_its_process_is_named(
    shared_cluster: Cluster, tmp_path: Path
):
    """The batch comes again in ever smaller parts; `group describe` names the row once it was
    alone.
    """
    subject, path = "crash-arrow", tmp_path / "handed"
    await shared_cluster.create(subject, partitions=1)
    async with (
        asyncio.timeout(60),
        Producer(shared_cluster.meta) as producer,
        Admin(shared_cluster.meta) as admin,
    ):
        for number in range(30):
            await send(producer, subject, b"a", number)
        await send(producer, subject, b"bad", 30)
        await send(producer, subject, b"a", 31)

        async def failing() -> FailingMessage | None:
            (part,) = (await admin.describe_group(subject, "g")).partitions
            return part.failing

        ended = 0
        named = None
        while named is None:
            ended += 1
            with crasher(shared_cluster, subject, path, "arrow") as process:
                await eventually(lambda process=process: process.poll() is not None)
                assert process.poll() == 9, errors_of(path).read_text()
            named = await failing()
        assert (named.offset, named.key_digest) == (30, key_digest(b"bad"))
        assert named.kind == "crashed"
        assert ended <= 6
        described = await asyncio.to_thread(
            run_keylane, "group", "describe", subject, "g", "--meta", shared_cluster.meta
        )
        assert "g fails at offset 30" in described.stdout
    values = [value for value, _ in handed(path, "a")]
    assert 31 not in values, "nothing overtakes it"
    assert values.count(29) <= 4
