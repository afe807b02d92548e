"""Readers of subjects on real processes: by time, offset and key, through resizes and moves,
without a group.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keylane import (
    Admin,
    ClosedError,
    InvalidRequestError,
    JsonCodec,
    Message,
    Producer,
    QueueReader,
    Reader,
    SubjectUnknownError,
)
from keylane.errors import (
    ConfigError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
)
from keylane.protocol.operations import OperationKind, Reshape
from support.cluster import Cluster
from support.raising import raises
from support.server_process import run_keylane

KEYS = [b"key-%d" % number for number in range(6)]


async def send(cluster: Cluster, subject: str, numbers: range) -> None:
    """For each number a message of every key."""
    async with Producer(cluster.meta) as producer:
        for number in numbers:
            for key in KEYS:
                producer.send(subject, b"%d" % number, key=key)
        await producer.flush()


async def read(cluster: Cluster, subject: str, **options: Any) -> list[Message]:
    async with Reader(cluster.meta, subject, **options) as reader:
        return [message async for message in reader]


def by_key(messages: list[Message]) -> dict[bytes, list[int]]:
    values: dict[bytes, list[int]] = {}
    for message in messages:
        values.setdefault(message.key, []).append(int(message.value))
    return values


async def move_all(cluster: Cluster, subject: str) -> None:
    """Move each open partition to the other broker group."""
    async with Admin(cluster.meta) as admin:
        history = (await admin.history(subject)).partitions
    for partition in (past.partition for past in history if past.partition.state == "open"):
        ids, to = (partition.partition_id,), "g2" if partition.broker_group == "g1" else "g1"
        await cluster.reshape(Reshape(kind=OperationKind.MOVE, partition_ids=ids, broker_group=to))


async def groups_of(cluster: Cluster, subject: str) -> list[Any]:
    async with Admin(cluster.meta) as admin:
        return list(await admin.list_groups(subject))


@pytest.mark.parametrize("static", [False, True])
async def test_reader_keeps_the_order_of_keys_through_resizes_and_moves(
    shared_cluster: Cluster, static: bool
):
    """While it follows, and afterwards; no group is made."""
    subject = f"read-through-{static}"
    await shared_cluster.create(subject, partitions=2, static=static)
    await send(shared_cluster, subject, range(20))
    followed: list[Message] = []
    total = 60 * len(KEYS)

    async def follow() -> None:
        async with Reader(shared_cluster.meta, subject, follow=True) as reader:
            async for message in reader:
                followed.append(message)
                if len(followed) == total:
                    return

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        if static:
            ask = Reshape(kind=OperationKind.GROW, subject=subject, partitions=4)
        else:
            ask = Reshape(kind=OperationKind.RESIZE, subject=subject, partitions=3)
        await shared_cluster.reshape(ask)
        await send(shared_cluster, subject, range(20, 40))
        await move_all(shared_cluster, subject)
        await send(shared_cluster, subject, range(40, 60))
    expected = {key: list(range(60)) for key in KEYS}
    assert by_key(followed) == expected
    assert by_key(await read(shared_cluster, subject)) == expected
    assert by_key(await read(shared_cluster, subject, key=KEYS[2])) == {KEYS[2]: list(range(60))}
    async with Reader(shared_cluster.meta, subject, key=KEYS[2]) as reader:
        everything = [message async for message in reader]
        assert {message.key for message in everything} == {KEYS[2]}
        assert set(reader.positions) < {message.partition_id for message in followed}
    assert await groups_of(shared_cluster, subject) == []


async def test_reader_keeps_the_order_of_keys_when_a_partition_between_is_empty(
    shared_cluster: Cluster,
):
    """The first partition takes several chunks, while the last one has a single message."""
    subject = "read-past-empty"
    await shared_cluster.create(subject, partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        for number in range(5):
            producer.send(subject, b"%d" % number + b" " * 500_000, key=b"a")
        await producer.flush()
        await move_all(shared_cluster, subject)
        await move_all(shared_cluster, subject)
        await producer.send(subject, b"5", key=b"a")
    assert by_key(await read(shared_cluster, subject)) == {b"a": list(range(6))}


async def test_reader_begins_and_stops_at_times_and_offsets(shared_cluster: Cluster):
    await shared_cluster.create("read-bounds", partitions=2)
    await send(shared_cluster, "read-bounds", range(5))
    await asyncio.sleep(0.05)
    between = datetime.now(UTC)
    await asyncio.sleep(0.05)
    await send(shared_cluster, "read-bounds", range(5, 10))
    whole = await read(shared_cluster, "read-bounds")
    assert by_key(whole) == {key: list(range(10)) for key in KEYS}
    late = await read(shared_cluster, "read-bounds", start=between)
    assert by_key(late) == {key: list(range(5, 10)) for key in KEYS}
    early = await read(shared_cluster, "read-bounds", stop=between)
    assert by_key(early) == {key: list(range(5)) for key in KEYS}
    assert len(await read(shared_cluster, "read-bounds", start="-1h", stop="latest")) == len(whole)
    assert await read(shared_cluster, "read-bounds", start="latest") == []
    assert await read(shared_cluster, "read-bounds", stop="-1h") == []
    partition = whole[0].partition_id
    part = await read(shared_cluster, "read-bounds", partition=partition, start=3, stop=7)
    assert [(message.partition_id, message.offset) for message in part] == [
        (partition, offset) for offset in range(3, 7)
    ]
    even = await read(
        shared_cluster, "read-bounds", where=lambda message: int(message.value) % 2 == 0
    )
    assert by_key(even) == {key: [0, 2, 4, 6, 8] for key in KEYS}


async def test_reader_asks_every_partition_for_a_key_that_may_have_left(shared_cluster: Cluster):
    """A keyed message of a best_tried subject may be stored in another partition than its own."""
    for strategy, asked in (("best_tried", 3), ("strict", 1)):
        subject = f"read-{strategy}"
        await shared_cluster.create(subject, partitions=3, strategy=strategy)
        async with Producer(shared_cluster.meta) as producer:
            await producer.send(subject, b"0", key=KEYS[0])
        async with Reader(shared_cluster.meta, subject, key=KEYS[0]) as reader:
            assert by_key([message async for message in reader]) == {KEYS[0]: [0]}
            assert len(reader.positions) == asked


async def test_reader_goes_on_at_the_positions_of_an_earlier_one(shared_cluster: Cluster):
    await shared_cluster.create("read-positions", partitions=3)
    await send(shared_cluster, "read-positions", range(30))
    messages: list[Message] = []
    async with Reader(shared_cluster.meta, "read-positions", codec=JsonCodec(int)) as first:
        async for message in first:
            messages.append(message)
            if len(messages) == 77:
                break
        assert message.decode() == int(message.value)
        with pytest.raises(ClosedError, match="was only read"):
            await message.ack()
        assert message.group == ""
    messages += await read(
        shared_cluster, "read-positions", start=json.loads(json.dumps(first.positions))
    )
    assert len(messages) == 30 * len(KEYS)
    assert by_key(messages) == {key: list(range(30)) for key in KEYS}


async def test_reader_refuses_what_cannot_be_read(shared_cluster: Cluster):
    await shared_cluster.create("read-refused", partitions=1)
    route = await shared_cluster.create("read-refused-another", partitions=1)
    await send(shared_cluster, "read-refused", range(1))
    (message, *_) = await read(shared_cluster, "read-refused")
    here, elsewhere = message.partition_id, int(route.partitions[0].partition_id)
    for options, kind in (
        ({"partition": here, "start": 7}, OffsetOutOfRangeError),
        ({"partition": here, "stop": 7}, OffsetOutOfRangeError),
        ({"start": {here: 7}}, OffsetOutOfRangeError),
        ({"partition": elsewhere}, PartitionUnknownError),
        ({"start": {elsewhere: 0}}, PartitionUnknownError),
        ({"start": datetime.now(UTC) + timedelta(hours=1)}, InvalidRequestError),
        ({"stop": timedelta(hours=1)}, InvalidRequestError),
        ({"start": 3}, InvalidRequestError),
        ({"key": ""}, ConfigError),
        ({"key": b""}, ConfigError),
        ({"partition": 0}, ConfigError),
        ({"where": "text"}, ConfigError),
    ):
        with pytest.raises(kind) as refused:
            await read(shared_cluster, "read-refused", **options)
        assert refused.value.hint
    with pytest.raises(SubjectUnknownError):
        await read(shared_cluster, "read-refused-unknown")
    with pytest.raises(ClosedError):
        await anext(Reader(shared_cluster.meta, "read-refused"))
    assert await groups_of(shared_cluster, "read-refused") == []


async def test_reader_goes_on_behind_a_message_whose_filter_failed(shared_cluster: Cluster):
    await shared_cluster.create("read-filter", partitions=1)
    await send(shared_cluster, "read-filter", range(3))

    def where(message: Message) -> bool:
        if message.offset == 4:
            raise ValueError("odd message")
        return message.offset > 3

    async with Reader(shared_cluster.meta, "read-filter", where=where) as reader:
        with raises(Reason.READER_WHERE, match="odd message") as failed:
            await anext(reader)
        assert (failed.value.offset, type(failed.value.__cause__)) == (4, ValueError)
        assert (await anext(reader)).offset == 5

    async def later(message: Message) -> bool:
        return False

    with pytest.raises(ConfigError):
        # that is tested
        Reader(shared_cluster.meta, "read-filter", where=later)  # type: ignore[arg-type]

    class Hidden:
        """Whose call is a coroutine, which shows when it is made."""

        def __call__(self, message: Message) -> Any:
            return later(message)

    with raises(Reason.READER_WHERE, match="async"):
        await read(shared_cluster, "read-filter", where=Hidden())


@pytest.mark.cluster(brokers=1)
async def test_reader_goes_on_when_the_broker_comes_back(cluster: Cluster):
    await cluster.create("s", partitions=1)
    await send(cluster, "s", range(2))
    async with asyncio.timeout(60), Reader(cluster.meta, "s", follow=True) as reader:
        messages = [await anext(reader) for _ in range(2 * len(KEYS))]
        cluster.brokers[0].kill()
        waiting = asyncio.create_task(anext(reader))
        await asyncio.sleep(0.5)
        cluster.brokers[0].restart()
        await send(cluster, "s", range(2, 3))
        messages.append(await waiting)
        messages += [await anext(reader) for _ in range(len(KEYS) - 1)]
    assert by_key(messages) == {key: [0, 1, 2] for key in KEYS}


async def test_each_reader_gets_every_message_from_now_on(shared_cluster: Cluster):
    """Through a resize, in the order of each key, and without a group: a broadcast."""
    await shared_cluster.create("read-all", partitions=1)
    await send(shared_cluster, "read-all", range(2))
    known = {"subject": "read-all", "start": "latest", "follow": True}
    async with (
        asyncio.timeout(60),
        Reader(shared_cluster.meta, **known) as first,
        Reader(shared_cluster.meta, **known) as second,
    ):
        await send(shared_cluster, "read-all", range(2, 4))
        ask = Reshape(kind=OperationKind.RESIZE, subject="read-all", partitions=2)
        await shared_cluster.reshape(ask)
        await send(shared_cluster, "read-all", range(4, 6))
        for reader in (first, second):
            messages = [await anext(reader) for _ in range(4 * len(KEYS))]
            assert by_key(messages) == {key: [2, 3, 4, 5] for key in KEYS}
    assert await groups_of(shared_cluster, "read-all") == []


async def test_reader_gives_messages_with_one_of_the_tags(shared_cluster: Cluster):
    """In code and on the command line; the others count as read."""
    await shared_cluster.create("read-tags", partitions=2)
    async with Producer(shared_cluster.meta) as producer:
        for number in range(9):
            tags = ["paid", "new", ""][number % 3]
            await producer.send("read-tags", b"%d" % number, key=b"k", tags=[tags] if tags else ())
    async with Reader(shared_cluster.meta, "read-tags", tags=["paid", "void"]) as reader:
        assert [int(message.value) async for message in reader] == [0, 3, 6]
        assert sum(reader.positions.values()) == 9
    words = ("--tag", "new", "--tag", "paid", "--meta", shared_cluster.meta)
    done = run_keylane("read", "read-tags", "--output", "{value}", *words)
    assert done.stdout.split() == ["0", "1", "3", "4", "6", "7"]
    words = ("--group", "g", "--idle", "1", "--output", "{value}", "--tag", "new", *words[4:])
    done = run_keylane("consume", "read-tags", *words)
    assert done.stdout.split() == ["1", "4", "7"]


async def test_read_command_prints_messages_and_makes_no_group(shared_cluster: Cluster):
    await shared_cluster.create("read-command", partitions=2)
    await send(shared_cluster, "read-command", range(4))
    key = KEYS[1].decode()

    def run(*words: str) -> list[str]:
        done = run_keylane("read", "read-command", "--meta", shared_cluster.meta, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert len(run("--from", "-1h")) == 4 * len(KEYS)
    assert [line.split()[-1] for line in run("--key", key)] == ["0", "1", "2", "3"]
    facts = [json.loads(line) for line in run("--key", key, "--output", "json", "--count", "2")]
    assert [fact["value"] for fact in facts] == ["0", "1"]
    partition = str(facts[0]["partition_id"])
    lines = run("--partition", partition, "--from", "1", "--to", "3", "--output", "{offset}")
    assert lines == ["1", "2"]
    assert run("--from", "latest") == []
    followed = run("--follow", "--count", "3", "--output", "{key}")
    assert len(followed) == 3
    for words in (
        ("--from", "9999", "--partition", partition),
        ("--from", "2999-01-01"),
        ("--from", "7"),
    ):
        done = run_keylane("read", "read-command", "--meta", shared_cluster.meta, *words)
        assert (done.returncode, done.stdout) == (1, "")
    assert await groups_of(shared_cluster, "read-command") == []


@pytest.mark.cluster(brokers=2)
async def test_read_command_prints_what_others_have_while_a_broker_is_away(cluster: Cluster):
    """What is missing is named, and the exit status says it; a key that is elsewhere is whole."""
    subject = "read-away"
    await cluster.create(subject, partitions=2)
    await send(cluster, subject, range(2))
    homes = {each.key: each.partition_id for each in await read(cluster, subject)}
    async with Admin(cluster.meta) as admin:
        gone, *_ = (await admin.describe_subject(subject)).partitions
    (killed,) = (each for each in cluster.brokers if each.address == gone.address)
    await asyncio.to_thread(killed.kill)

    async def run(*words: str) -> tuple[int, list[str], str]:
        words = ("read", subject, *words, "--meta", cluster.meta, "--output", "{key} {value}")
        done = await asyncio.to_thread(run_keylane, *words)
        return done.returncode, sorted(done.stdout.splitlines()), done.stderr

    there = [key for key in KEYS if homes[key] != gone.partition_id]
    away = next(key for key in KEYS if homes[key] == gone.partition_id)
    status, lines, errors = await run()
    assert lines == sorted(f"{key.decode()} {number}" for key in there for number in range(2))
    assert f"partition {gone.partition_id} is not read: " in errors
    assert status == 1
    key = there[0]
    assert await run("--key-hex", key.hex()) == (0, [f"{key.decode()} 0", f"{key.decode()} 1"], "")
    status, lines, errors = await run("--key-hex", away.hex())
    assert (status, lines) == (1, [])
    assert f"partition {gone.partition_id} is not read: " in errors
    status, lines, errors = await run("--partition", str(gone.partition_id))
    assert (status, lines) == (1, [])
    assert "is not read" not in errors
    status, lines, errors = await run("--key", "a", "--key-hex", "00")
    assert (status, lines, "give one of --key, --key-hex" in errors) == (1, [], True)


async def test_iteration_ends_with_a_typed_error_when_another_task_closes_the_reader(
    shared_cluster: Cluster,
):
    """Reads that wait end with their connections; the iteration asked on, and got aiohttp's
    RuntimeError.
    """
    await shared_cluster.create("closed-in-flight", partitions=300)
    for _ in range(3):
        reader = Reader(shared_cluster.meta, "closed-in-flight", start="latest", follow=True)
        async with reader:
            following = asyncio.create_task(anext(reader))
            await asyncio.sleep(0.5)
            await reader.close()
            with pytest.raises(ClosedError):
                await following


@pytest.mark.parametrize("kind", ["reader", "queue reader"])
async def test_reader_closes_its_connections_when_its_scope_is_cancelled(
    shared_cluster: Cluster, kind: str
):
    """A cancel scope, as anyio has it, cancels its task at each turn until the task ends, also
    while it closes.
    """
    subject = f"scope-{kind.replace(' ', '-')}"
    await shared_cluster.create(subject, partitions=1, static=True)
    await send(shared_cluster, subject, range(1))
    before, reading = set(asyncio.all_tasks()), asyncio.Event()

    async def read_on() -> None:
        if kind == "reader":
            async with Reader(shared_cluster.meta, subject, follow=True) as reader:
                async for _message in reader:
                    reading.set()
        else:
            async with QueueReader(shared_cluster.meta, subject=subject) as queue_reader:
                await queue_reader.read(0, 0)
                reading.set()
                await asyncio.Event().wait()

    scope = asyncio.create_task(read_on())
    await asyncio.wait_for(reading.wait(), 60)
    while not scope.done():
        scope.cancel()
        await asyncio.sleep(0)
    assert set(asyncio.all_tasks()) == before
