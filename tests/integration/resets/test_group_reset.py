"""A group's progress set by an operator, on real processes: back, ahead, and interrupted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from typing import Any

import pytest

from keylane import Admin, Consumer, Message, Producer, QueueReader
from keylane.consumer import ConsumerSettings
from keylane.protocol import endpoints
from keylane.protocol.errors import (
    BusyError,
    FencedError,
    GroupUnknownError,
    InvalidRequestError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    Reason,
    SubjectUnknownError,
    UnreachableError,
)
from keylane.protocol.frames import Ack
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.progress import GroupReset, ResetGroup, ResetTo, SetCursor
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import ALERT, Cluster, Program, eventually, meta_of
from support.raising import raises
from support.server_process import run_keylane

SETTINGS = ConsumerSettings(ttl_ms=1_500)
VALUES = [b"%d" % number for number in range(40)]


pytestmark = pytest.mark.cluster(meta_settings=ALERT)


async def fill(cluster: Cluster, subject: str) -> list[int]:
    """A queue of four segments, ten messages each, there and back between two groups; when each was
    complete.
    """
    route = await cluster.create(subject, partitions=1, static=True)
    at = route.partitions[0]
    times = []
    for number in range(4):
        if number:
            to = "g2" if at.broker_group == "g1" else "g1"
            ask = Reshape(
                kind=OperationKind.MOVE, partition_ids=(at.partition_id,), broker_group=to
            )
            (done,) = await cluster.reshape(ask)
            (at,) = done.children
        async with Producer(cluster.meta) as producer:
            for value in VALUES[10 * number : 10 * number + 10]:
                await producer.send(subject, value, key=b"k")
        await asyncio.sleep(0.03)
        times.append(time.time_ns() // 1_000_000)
        await asyncio.sleep(0.03)
    return times


async def handle(cluster: Cluster, subject: str, count: int) -> list[bytes]:
    """Return what a consumer of the group handles until it has `count` messages, and a moment
    longer.
    """
    seen: list[Message] = []
    async with Consumer(
        cluster.meta, subject=subject, group="g", handler=seen.append, settings=SETTINGS
    ):
        await eventually(lambda: len(seen) >= count, what=f"{count} messages")
        await asyncio.sleep(0.1)
    assert [message.logic_offset for message in seen] == [int(message.value) for message in seen]
    return [message.value for message in seen]


async def reset(cluster: Cluster, subject: str, to: ResetTo, **more: Any) -> GroupReset:
    async with meta_of(cluster) as meta:
        return await meta.call(
            endpoints.RESET_GROUP, ResetGroup(to=to, **more), subject=subject, group="g"
        )


async def test_reset_goes_to_any_segment_and_to_the_end(shared_cluster: Cluster):
    """Earliest, a logic offset in the first, a middle and the last segment, a time, latest: exactly
    that comes, in order.
    """
    times = await fill(shared_cluster, "back")
    assert await handle(shared_cluster, "back", 40) == VALUES
    async with QueueReader(shared_cluster.meta, subject="back") as reader:
        for to, more, begin in (
            (ResetTo.EARLIEST, {}, 0),
            (ResetTo.OFFSET, {"queue": 0, "offset": 7}, 7),
            (ResetTo.OFFSET, {"queue": 0, "offset": 10}, 10),
            (ResetTo.OFFSET, {"queue": 0, "offset": 29}, 29),
            (ResetTo.TIME, {"at_ms": times[1]}, 20),
            (ResetTo.OFFSET, {"queue": 0, "offset": 35}, 35),
        ):
            done = await reset(shared_cluster, "back", to, **more)
            assert (
                min(cursor.logic_cursor for cursor in done.cursors if cursor.cursor < 10) == begin
            )
            progress = await reader.progress(0, "g")
            assert (progress.cursor, progress.lag) == (begin, 40 - begin)
            assert await handle(shared_cluster, "back", 40 - begin) == VALUES[begin:]
        await reset(shared_cluster, "back", ResetTo.EARLIEST)
        await reset(shared_cluster, "back", ResetTo.LATEST)
        assert (await reader.progress(0, "g")).lag == 0
        async with Producer(shared_cluster.meta) as producer:
            await producer.send("back", b"40", key=b"k")
        assert await handle(shared_cluster, "back", 1) == [b"40"]


async def test_reset_of_a_resized_subject_brings_each_key_in_order(shared_cluster: Cluster):
    """After a resize: earliest brings every message, in the order of each key; one partition alone;
    latest brings nothing.
    """
    route = await shared_cluster.create("plain", partitions=1)
    sent: dict[bytes, list[bytes]] = {}

    async def send(first: int) -> None:
        async with Producer(shared_cluster.meta) as producer:
            for number in range(first, first + 30):
                key = b"key-%d" % (number % 5)
                sent.setdefault(key, []).append(b"%d" % number)
                await producer.send("plain", b"%d" % number, key=key)

    async def all_of(count: int) -> list[Message]:
        seen: list[Message] = []
        async with Consumer(
            shared_cluster.meta, subject="plain", group="g", handler=seen.append, settings=SETTINGS
        ):
            await eventually(lambda: len(seen) >= count)
        return seen

    await send(0)
    await shared_cluster.reshape(Reshape(kind=OperationKind.RESIZE, subject="plain", partitions=3))
    await send(30)
    for _ in range(2):
        by_key: dict[bytes, list[bytes]] = {}
        for message in await all_of(60):
            by_key.setdefault(message.key, []).append(message.value)
        assert by_key == sent
        await reset(shared_cluster, "plain", ResetTo.EARLIEST)
    await reset(shared_cluster, "plain", ResetTo.LATEST)
    first = int(route.partitions[0].partition_id)
    done = await reset(shared_cluster, "plain", ResetTo.OFFSET, partition_id=first, offset=28)
    assert [(cursor.partition_id, cursor.cursor) for cursor in done.cursors] == [(first, 28)]
    assert [message.value for message in await all_of(2)] == [b"28", b"29"]


async def test_shift_and_dry_run_say_what_they_set(shared_cluster: Cluster):
    """A dry run changes nothing, beside live consumers too; a shift counts from the cursor of the
    queue.
    """
    await fill(shared_cluster, "shifted")
    assert await handle(shared_cluster, "shifted", 40) == VALUES

    def command(*words: str) -> Any:
        where = ("--meta", shared_cluster.meta, "--output", "json")
        done = run_keylane("group", "reset", "shifted", "g", *words, *where)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    async with (
        QueueReader(shared_cluster.meta, subject="shifted") as reader,
        Admin(shared_cluster.meta) as admin,
    ):
        async with Consumer(shared_cluster.meta, subject="shifted", group="g"):
            plan = command("--shift", "-15", "--dry-run")
            with raises(Reason.GROUP_BUSY):
                await admin.reset_group("shifted", "g", "shift", shift=-15)
        assert plan["dry_run"]
        assert {cursor["token"] for cursor in plan["cursors"]} == {0}
        assert max(c["logic_cursor"] - c["cursor"] + c["before"] for c in plan["cursors"]) == 40
        assert (await reader.progress(0, "g")).lag == 0
        for words, begin in (
            (("--shift", "-15"), 25),
            (("--shift", "-1000"), 0),
            (("--to", "-1h"), 0),
            (("--shift", "12"), 12),
        ):
            plan = command(*words, "--dry-run")
            done = command(*words)
            assert [c["cursor"] for c in plan["cursors"]] == [c["cursor"] for c in done["cursors"]]
            assert not done["dry_run"]
            assert (await reader.progress(0, "g")).cursor == begin
        table = run_keylane(
            "group",
            "reset",
            "shifted",
            "g",
            "--shift",
            "-2",
            "--dry-run",
            "--meta",
            shared_cluster.meta,
        )
        assert "would be set by -2" in table.stdout
        for words in ((), ("--to", "latest", "--shift", "3"), ("--shift", "0")):
            refused = run_keylane(
                "group", "reset", "shifted", "g", *words, "--meta", shared_cluster.meta
            )
            assert (refused.returncode, refused.stdout) == (1, "")
        with pytest.raises(PartitionUnknownError):
            await admin.reset_group("shifted", "g", "cursors", cursors={10**6: 0})
        assert (await reader.progress(0, "g")).cursor == 12


async def test_reset_of_a_shared_group_brings_later_messages_once(shared_cluster: Cluster):
    """Every message behind the new cursor comes to its consumers again, each once."""
    await fill(shared_cluster, "everybodys")
    settings = ConsumerSettings(ttl_ms=1_500, consume_strategy="shared")
    for begin in (0, 15, 38):
        seen: list[Message] = []
        async with Consumer(
            shared_cluster.meta,
            subject="everybodys",
            group="g",
            handler=seen.append,
            settings=settings,
        ):
            await eventually(lambda seen=seen, left=40 - begin: len(seen) >= left)
        assert sorted(message.logic_offset for message in seen) == list(range(begin, 40))
        following = {0: 15, 15: 38, 38: 40}[begin]
        await reset(shared_cluster, "everybodys", ResetTo.OFFSET, queue=0, offset=following)
    async with QueueReader(shared_cluster.meta, subject="everybodys") as reader:
        assert (await reader.progress(0, "g")).lag == 0


async def test_reset_is_refused_while_a_consumer_lives(shared_cluster: Cluster):
    """Nothing changes; a consumer that was stopped in a handler is fenced after the reset."""
    await fill(shared_cluster, "busy")
    async with (
        meta_of(shared_cluster) as meta,
        QueueReader(shared_cluster.meta, subject="busy") as reader,
    ):
        async with Consumer(
            shared_cluster.meta, subject="busy", group="g", settings=SETTINGS
        ) as consumer:
            held = await consumer.getmany(max_records=5)
            await held[0].ack()
            with raises(Reason.GROUP_BUSY):
                await meta.call(
                    endpoints.RESET_GROUP, ResetGroup(to=ResetTo.LATEST), subject="busy", group="g"
                )
            session, token = (
                held[0].delivery.shell.state.tenure.lease.session,
                held[0].fencing_token,
            )
            partition_id = held[0].partition_id
        assert (await reader.progress(0, "g")).cursor == 1
        await meta.call(
            endpoints.RESET_GROUP,
            ResetGroup(to=ResetTo.OFFSET, offset=3, queue=0),
            subject="busy",
            group="g",
        )
        place = next(
            segment.partition
            for segment in (await reader.queues())[0].segments
            if segment.partition.partition_id == partition_id
        )
        network = HttpNetwork()
        broker = BrokerClient(network, place.address)
        try:
            with pytest.raises(FencedError):
                await broker.call(Ack(partition_id, "g", session, token, ((0, 9),)))
            with pytest.raises(FencedError):
                await broker.control(
                    endpoints.SET_CURSOR, SetCursor(group="g", token=1, cursor=0), id=partition_id
                )
        finally:
            await broker.close()
            await network.close()
        assert (await reader.progress(0, "g")).cursor == 3


async def test_bad_reset_is_refused(shared_cluster: Cluster):
    """Each problem has an error of its own, and nothing changes."""
    await shared_cluster.create("wrong", partitions=2, static=True)
    await shared_cluster.create("other", partitions=2)
    for subject in ("wrong", "other"):
        async with Consumer(shared_cluster.meta, subject=subject, group="g"):
            pass
    async with meta_of(shared_cluster) as meta:
        for subject, group, ask, error in (
            ("nothing", "g", {"to": ResetTo.LATEST}, SubjectUnknownError),
            ("wrong", "h", {"to": ResetTo.LATEST}, GroupUnknownError),
            ("wrong", "g", {"to": ResetTo.OFFSET, "offset": 0}, InvalidRequestError),
            ("wrong", "g", {"to": ResetTo.OFFSET, "offset": 1, "queue": 0}, OffsetOutOfRangeError),
            ("wrong", "g", {"to": ResetTo.LATEST, "queue": 2}, Reason.QUEUE_UNKNOWN),
            ("wrong", "g", {"to": ResetTo.LATEST, "partition_id": 1}, InvalidRequestError),
            ("other", "g", {"to": ResetTo.LATEST, "queue": 0}, Reason.SUBJECT_NOT_STATIC),
            ("other", "g", {"to": ResetTo.LATEST, "partition_id": 10**6}, PartitionUnknownError),
            (
                "other",
                "g",
                {"to": ResetTo.OFFSET, "offset": 2**63, "partition_id": 1},
                InvalidRequestError,
            ),
        ):
            with raises(error):
                await meta.call(
                    endpoints.RESET_GROUP, ResetGroup(**ask), subject=subject, group=group
                )
        view = await meta.call(endpoints.GROUP, subject="wrong", group="g")
        await meta.call(
            endpoints.RESET_GROUP, ResetGroup(to=ResetTo.LATEST), subject="wrong", group="g"
        )
        assert max(
            owner.token
            for owner in (await meta.call(endpoints.GROUP, subject="wrong", group="g")).owners
        ) > max(owner.token for owner in view.owners)


@pytest.mark.crash
@pytest.mark.parametrize("step", ["reset-begun", "reset-generation", "reset-told"])
async def test_reset_is_finished_by_a_retry_when_its_metaserver_is_killed(
    cluster: Cluster, step: str
):
    """The caller gets UNKNOWN; the same call to the next metaserver finishes it; a restart of all
    keeps it.
    """
    await fill(cluster, "cut")
    assert await handle(cluster, "cut", 40) == VALUES
    program = cluster.meta_program
    program.restart_to_die_after(step)
    with pytest.raises(UnreachableError) as unknown:
        await brokers_known(cluster, ResetGroup(to=ResetTo.OFFSET, queue=0, offset=15))
    assert unknown.value.fate == "unknown"
    await program.died()
    program.restart()
    done = await brokers_known(cluster, ResetGroup(to=ResetTo.OFFSET, queue=0, offset=15))
    assert [cursor.cursor for cursor in done.cursors] == [10, 5, 0, 0]
    for process in (*cluster.brokers, program):
        process.kill()
        process.restart()
    assert await handle(cluster, "cut", 25) == VALUES[15:]


async def brokers_known(cluster: Cluster, ask: ResetGroup) -> GroupReset:
    """The reset, as soon as the restarted metaserver has heard of the brokers, and no other holds
    the group.
    """
    async with meta_of(cluster) as meta:
        until = time.monotonic() + 60
        while True:
            try:
                return await meta.call(endpoints.RESET_GROUP, ask, subject="cut", group="g")
            except (NotSentError, BusyError):
                assert time.monotonic() < until
                await asyncio.sleep(0.05)


@pytest.mark.crash
async def test_reset_is_refused_or_unfinished_when_a_broker_does_not_answer(cluster: Cluster):
    """Silent before it begins: nothing is changed. Silent in the middle: UNKNOWN, and the same
    call finishes it.
    """
    await fill(cluster, "cut")
    assert await handle(cluster, "cut", 40) == VALUES
    ask = ResetGroup(to=ResetTo.OFFSET, queue=0, offset=5)
    broker = cluster.brokers[0]
    async with meta_of(cluster) as meta, QueueReader(cluster.meta, subject="cut") as reader:
        broker.kill()
        with pytest.raises(NotSentError, match="nothing was changed"):
            await meta.call(endpoints.RESET_GROUP, ask, subject="cut", group="g")
        restart_to_die_at_its_next_sync(broker)
        assert await lag(reader) == 0
        with raises(Reason.RESET_UNFINISHED) as unfinished:
            await brokers_known(cluster, ask)
        assert unfinished.value.fate == "unknown"
        broker.process.wait(60)
        broker.process.stdout.close()
        broker.environment = {}
        broker.restart()
    done = await brokers_known(cluster, ask)
    assert [cursor.cursor for cursor in done.cursors] == [5, 0, 0, 0]
    assert await handle(cluster, "cut", 35) == VALUES[5:]


async def lag(reader: QueueReader) -> int:
    """Of the group, as soon as the brokers are known."""
    while True:
        try:
            return (await reader.progress(0, "g")).lag
        except NotSentError:
            await asyncio.sleep(0.05)


def restart_to_die_at_its_next_sync(broker: Program) -> None:
    """Some syncs belong to the start itself: try until one later is the first that it does not
    survive.
    """
    for count in range(1, 20):
        broker.environment = {"KEYLANE_FAIL_AT": f"sync:{count}"}
        try:
            broker.restart()
        except AssertionError:
            broker.process.stdout.close()
        else:
            return
    raise AssertionError("it never started")


async def keylane(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_keylane, "group", *words, "--meta", cluster.meta)


async def test_reset_command_sets_what_describe_shows(shared_cluster: Cluster):
    """`keylane group reset` sets it, and `describe` shows cursor and lag of each queue in logic
    offsets.
    """
    await fill(shared_cluster, "cmds")
    assert await handle(shared_cluster, "cmds", 40) == VALUES
    done = await keylane(
        shared_cluster, "reset", "cmds", "g", "--to", "15", "--queue", "0", "--output", "json"
    )
    assert done.returncode == 0, done.stderr
    assert [cursor["cursor"] for cursor in json.loads(done.stdout)["cursors"]] == [10, 5, 0, 0]
    shown = await keylane(shared_cluster, "describe", "cmds", "g", "--output", "json")
    (queue,) = json.loads(shown.stdout)["queues"]
    assert queue == {"queue": 0, "cursor": 15, "min_offset": 0, "max_offset": 40, "lag": 25}
    table = await keylane(shared_cluster, "describe", "cmds", "g")
    assert "logic offset" in table.stdout
    for to, begin in (("earliest", 0), ("latest", 40), ("1970-01-01T00:00:01", 0)):
        done = await keylane(shared_cluster, "reset", "cmds", "g", "--to", to)
        assert done.returncode == 0, done.stderr
        async with QueueReader(shared_cluster.meta, subject="cmds") as reader:
            assert (await reader.progress(0, "g")).cursor == begin
        assert "logic offset" in done.stdout
    for words, text in (
        (("--to", "3"), "an offset needs a queue"),
        (("--to", "soon"), "is not a position: give earliest, latest, an offset"),
        (("--to", "99", "--queue", "0"), "OffsetOutOfRangeError"),
    ):
        refused = await keylane(shared_cluster, "reset", "cmds", "g", *words)
        assert refused.returncode == 1
        assert text in refused.stderr


async def test_reset_command_shows_no_queues_when_the_subject_has_none(shared_cluster: Cluster):
    """Queue numbers and logic offsets mean nothing there."""
    await shared_cluster.create("flat", partitions=1)
    async with Producer(shared_cluster.meta) as producer:
        await producer.send("flat", b"1")
    async with Consumer(shared_cluster.meta, subject="flat", group="g") as consumer:
        await (await anext(consumer)).ack()
    done = await keylane(shared_cluster, "reset", "flat", "g", "--to", "earliest")
    assert done.returncode == 0, done.stderr
    _title, header, *_ = filter(str.strip, done.stdout.splitlines())
    assert header.split() == ["partition", "offset", "token"]
