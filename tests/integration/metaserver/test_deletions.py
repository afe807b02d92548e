"""Subjects and groups deleted in a real cluster: fenced, driven through kills, never mixed with
later ones of their names.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.errors import (
    GroupDeletedError,
    GroupUnknownError,
    KeylaneError,
    Reason,
    SessionUnknownError,
    SubjectDeletedError,
    SubjectUnknownError,
    UnreachableError,
)
from keylane.protocol import endpoints
from keylane.protocol.control import Heartbeat, Join
from support.cluster import Cluster, eventually, meta_of
from support.raising import raises
from support.server_process import run_keylane

SEGMENT = 16_384
META = "broker_heartbeat_ms = 200\nbroker_ttl_ms = 1500\n"
BROKER = f"segment_bytes = {SEGMENT}\n"
pytestmark = pytest.mark.cluster(meta_settings=META, broker_settings=BROKER)
SETTINGS = ConsumerSettings(ttl_ms=2_000)
COUNT = 40


@pytest.fixture
async def admin(cluster: Cluster) -> AsyncIterator[Admin]:
    async with Admin(cluster.meta) as admin:
        yield admin


async def send(cluster: Cluster, subject: str, start: int = 0, count: int = COUNT) -> list[bytes]:
    values = [b"%d" % number for number in range(start, start + count)]
    async with Producer(cluster.meta) as producer:
        for value in values:
            producer.send(subject, value, key=value)
    return values


async def handled(cluster: Cluster, subject: str, wanted: list[bytes], group: str = "g") -> None:
    """A consumer of the group gets exactly these, in whatever order."""
    seen: list[Message] = []
    async with Consumer(
        cluster.meta, subject=subject, group=group, handler=seen.append, settings=SETTINGS
    ):
        await eventually(lambda: len(seen) >= len(wanted), what=f"all of {subject}")
        await asyncio.sleep(0.2)
    assert sorted(message.value for message in seen) == sorted(wanted)


async def gone(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Ask until nothing is left; a metaserver may be down meanwhile."""
    async with asyncio.timeout(60):
        while True:
            try:
                view = await ask()
                if not view.left:
                    return view
            except UnreachableError:
                pass
            await asyncio.sleep(0.05)


async def refused(
    ask: Callable[[], Awaitable[Any]], kind: type[KeylaneError] | tuple[type[KeylaneError], ...]
) -> KeylaneError:
    with raises(kind) as caught:
        await ask()
    return caught.value


async def consuming(cluster: Cluster, work: Callable[[], Awaitable[None]]) -> None:
    """Do some work beside a consumer of the subject `s`, which no busy machine ends, and wait until
    it ends.
    """
    patient = ConsumerSettings(ttl_ms=30_000)
    consumer = Consumer(
        cluster.meta, subject="s", group="g", handler=lambda _message: None, settings=patient
    )
    async with asyncio.timeout(60), consumer:
        await work()
        await consumer.wait()


async def sent(producer: Producer) -> None:
    await producer.send("s", b"late", key=b"k")


# ── groups ────────────────────────────────────────────────────────────────────────────────────────
async def test_group_of_a_deleted_name_begins_at_the_first_message_that_is_stored(
    cluster: Cluster, admin: Admin
):
    await cluster.create("s")
    values = await send(cluster, "s")
    await handled(cluster, "s", values)
    view = await admin.delete_group("s", "g")
    await gone(lambda: admin.delete_group("s", "g", group_id=view.group_id))
    assert await admin.list_groups("s") == []
    await refused(lambda: admin.delete_group("s", "g"), GroupUnknownError)
    await handled(cluster, "s", values)
    assert (await admin.verify()).ok


async def test_group_with_live_consumers_is_deleted_by_force_alone_and_ends_them(
    cluster: Cluster, admin: Admin
):
    await cluster.create("s")

    async def delete() -> None:
        error = await refused(lambda: admin.delete_group("s", "g"), Reason.GROUP_BUSY)
        assert "--force" in error.message
        view = await admin.delete_group("s", "g", force=True)
        await gone(lambda: admin.delete_group("s", "g", group_id=view.group_id))

    await refused(lambda: consuming(cluster, delete), GroupDeletedError)
    assert await admin.list_groups("s") == []


async def test_session_ends_when_a_late_join_has_begun_it_again_in_a_later_group(
    cluster: Cluster, admin: Admin
):
    """Its consumer is one of the deleted group; what the session was granted in the later one is
    free at once.
    """
    await cluster.create("s")
    join = Join(subject="s", group="g", session="a" * 32, client="c", ttl_ms=60_000)
    async with meta_of(cluster) as meta:
        first = await meta.call(endpoints.JOIN, join)
        view = await admin.delete_group("s", "g", force=True)
        await gone(lambda: admin.delete_group("s", "g", group_id=view.group_id))
        later = await meta.call(endpoints.JOIN, join)
        assert later.grants is not None
        assert later.grants.group_id == later.group_id != first.group_id
        told = Heartbeat(
            session=join.session, known_version=later.grants.version, group_id=first.group_id
        )
        await refused(lambda: meta.call(endpoints.HEARTBEAT, told), SessionUnknownError)
        assert not (await meta.call(endpoints.GROUP, subject="s", group="g")).sessions


async def test_group_is_forgotten_by_a_dead_broker_when_it_is_back_though_the_metaserver_died(
    cluster: Cluster, admin: Admin
):
    """Until then no consumer of the name can join; afterwards the group is another one."""
    await cluster.create("s")
    values = await send(cluster, "s")
    await handled(cluster, "s", values)
    cluster.brokers[1].kill()
    view = await admin.delete_group("s", "g")
    assert view.left == 2
    consumer = Consumer(
        cluster.meta, subject="s", group="g", handler=lambda _message: None, settings=SETTINGS
    )
    with pytest.raises(GroupDeletedError, match="being deleted"):
        async with consumer:
            pass
    cluster.meta_program.kill()
    cluster.meta_program.restart()
    cluster.brokers[1].restart()
    await gone(lambda: admin.delete_group("s", "g", group_id=view.group_id))
    await handled(cluster, "s", values)
    assert (await admin.verify()).ok


# ── subjects ──────────────────────────────────────────────────────────────────────────────────────
async def test_subject_of_a_deleted_name_has_none_of_its_messages_and_other_ids(
    cluster: Cluster, admin: Admin
):
    before = await cluster.create("s")
    await cluster.create("other")
    others = await send(cluster, "other")
    values = await send(cluster, "s")
    await handled(cluster, "s", values)
    view = await admin.delete_subject("s")
    await gone(lambda: admin.delete_subject("s", subject_id=view.subject_id))
    await refused(lambda: admin.describe_subject("s"), SubjectUnknownError)
    await refused(lambda: admin.delete_subject("s"), SubjectUnknownError)
    assert [summary.subject for summary in await admin.list_subjects()] == ["other"]
    after = await cluster.create("s")
    old = {partition.partition_id for partition in before.partitions}
    assert min(partition.partition_id for partition in after.partitions) > max(old)
    new = await send(cluster, "s", 1_000)
    await handled(cluster, "s", new)
    await handled(cluster, "other", others)
    assert (await admin.verify()).ok


async def test_last_subject_is_deleted_and_the_database_does_not_count_as_lost(
    cluster: Cluster, admin: Admin
):
    await cluster.create("s")
    view = await admin.delete_subject("s")
    await gone(lambda: admin.delete_subject("s", subject_id=view.subject_id))
    assert await admin.list_subjects() == []
    await asyncio.sleep(0.5)  # the brokers have reported themselves again
    await cluster.create("s")
    assert (await admin.verify()).ok


async def test_messages_of_a_deleted_subject_fail_with_a_typed_error_while_others_are_stored(
    cluster: Cluster, admin: Admin
):
    """A producer and a consumer that were at work do not go on with the next subject of the
    name.
    """
    await cluster.create("s")
    await cluster.create("other")
    ends = (SubjectDeletedError, SubjectUnknownError)
    async with asyncio.timeout(60), Producer(cluster.meta) as producer:
        await producer.send("s", b"before", key=b"k")

        async def delete() -> None:
            await refused(lambda: admin.delete_subject("s"), Reason.GROUP_BUSY)
            view = await admin.delete_subject("s", force=True)
            await gone(lambda: admin.delete_subject("s", subject_id=view.subject_id))
            error = await refused(lambda: sent(producer), ends)
            assert error.hint

        await refused(lambda: consuming(cluster, delete), SubjectDeletedError)
        await producer.send("other", b"unharmed", key=b"k")
        await cluster.create("s")
        assert (await producer.send("s", b"new", key=b"k")).offset == 0


async def _deleted_apart(meta: str, again: bool) -> None:
    """With a client of its own, because another event loop calls."""
    async with Admin(meta) as admin:
        view = await admin.delete_subject("s", force=True)
        await gone(lambda: admin.delete_subject("s", subject_id=view.subject_id))
        if again:
            await admin.create_subject("s", partitions=2)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "created_again"])
async def test_consumer_is_told_of_the_deletion_when_its_subject_goes_while_it_does_not_ask(
    cluster: Cluster, again: bool
):
    """Whether the name is free by then, or that of a later subject: the error is the same."""
    await cluster.create("s")

    def stand_still(_message: Message) -> None:
        """The consumer's event loop stands while another thread has the subject deleted."""
        asked = threading.Thread(target=asyncio.run, args=(_deleted_apart(cluster.meta, again),))
        asked.start()
        asked.join()

    await send(cluster, "s", count=1)
    with pytest.raises(SubjectDeletedError, match="was deleted"):
        async with asyncio.timeout(60):
            await Consumer(
                cluster.meta, subject="s", group="g", handler=stand_still, settings=SETTINGS
            ).run()


async def test_producer_that_slept_does_not_send_to_the_next_subject_of_the_name(
    cluster: Cluster, admin: Admin
):
    """Its messages wait for a broker while the subject is deleted and created again."""
    await cluster.create("s", partitions=1)
    async with asyncio.timeout(60), Producer(cluster.meta) as producer:
        await producer.send("s", b"before", key=b"k")
        (broker,) = [
            program
            for program in cluster.brokers
            if program.address == (await admin.describe_subject("s")).partitions[0].address
        ]
        broker.kill()
        waiting = producer.send("s", b"of the old one", key=b"k")
        view = await admin.delete_subject("s")
        assert view.left == 1
        broker.restart()
        await gone(lambda: admin.delete_subject("s", subject_id=view.subject_id))
        route = await cluster.create("s", partitions=1)
        with pytest.raises(SubjectDeletedError):
            await waiting
        assert await cluster.log(route) == {route.partitions[0].partition_id: []}


async def test_deletion_ends_when_the_metaserver_and_a_broker_are_killed_between_its_steps(
    cluster: Cluster, admin: Admin
):
    """The dead broker drops its partitions when it is back; until then the name is taken."""
    await cluster.create("s")
    await cluster.create("other")
    others = await send(cluster, "other")
    await send(cluster, "s")
    cluster.brokers[1].kill()
    view = await admin.delete_subject("s")
    assert view.left in {2, 4}
    error = await refused(lambda: admin.create_subject("s"), SubjectDeletedError)
    assert "is being deleted" in error.message
    assert [each.problem for each in await admin.list_subjects()] == ["", "it is being deleted"]
    assert not (await admin.verify()).ok
    cluster.meta_program.kill()
    cluster.brokers[0].kill()
    cluster.meta_program.restart()
    for broker in cluster.brokers:
        broker.restart()
    await gone(lambda: admin.delete_subject("s", subject_id=view.subject_id))
    await cluster.create("s")
    await handled(cluster, "other", others)
    assert (await admin.verify()).ok
    for broker in cluster.brokers:
        broker.kill()
        broker.restart()
    await handled(cluster, "s", [])


async def test_commands_delete_and_show_how_far_it_is(cluster: Cluster, admin: Admin):
    await cluster.create("s")
    await handled(cluster, "s", await send(cluster, "s"))

    async def keylane(*words: str) -> str:
        done = await asyncio.to_thread(run_keylane, *words, "--meta", cluster.meta)
        return done.stdout + done.stderr

    assert await keylane("group", "delete", "s", "g", "--yes") == "group g of s: deleted\n"
    assert "GroupUnknownError" in await keylane("group", "delete", "s", "g")
    await admin.create_group("s", "h")
    refused = await keylane("subject", "delete", "s")
    assert re.search(r"Delete subject s with \d\d+ messages and 1 consumer group\?", refused)
    assert "pass --yes to confirm" in refused
    cluster.brokers[1].kill()
    begun = json.loads(await keylane("subject", "delete", "s", "--no-wait", "--yes", "-o", "json"))
    assert begun["left"] > 0
    cluster.brokers[1].restart()
    told = await keylane("subject", "delete", "s")
    # The broker may have dropped its partitions before the command asks.
    assert told.endswith("subject s: deleted\n") or "SubjectUnknownError" in told
    assert await admin.list_subjects() == []


async def test_rebuilt_database_has_no_deleted_subject_and_drops_what_is_left_of_one(
    cluster: Cluster, admin: Admin, tmp_path: Path
):
    """One subject is gone, of the other a broker that was down still has partitions."""
    await cluster.create("gone")
    await cluster.create("kept")
    values = await send(cluster, "kept")
    highest = max(each.partition_id for each in (await cluster.create("half")).partitions)
    view = await admin.delete_subject("gone")
    await gone(lambda: admin.delete_subject("gone", subject_id=view.subject_id))
    cluster.brokers[1].kill()
    assert (await admin.delete_subject("half")).left == 2
    cluster.brokers[1].restart()
    cluster.meta_program.kill()
    shutil.rmtree(tmp_path / "meta-0")
    brokers = [word for broker in cluster.brokers for word in ("--broker", broker.address)]
    done = await asyncio.to_thread(
        run_keylane, "meta", "rebuild", "--data", str(tmp_path / "meta-0"), *brokers
    )
    assert done.returncode == 0, done.stderr
    cluster.meta_program.restart()
    async with asyncio.timeout(60):
        while [each.subject for each in await admin.list_subjects()] != ["kept"]:
            await asyncio.sleep(0.1)
    await handled(cluster, "kept", values)
    later = await cluster.create("half")
    assert min(each.partition_id for each in later.partitions) > highest
    assert (await admin.verify()).ok


async def test_disk_is_freed_when_a_subject_is_deleted(
    cluster: Cluster, admin: Admin, tmp_path: Path
):
    await cluster.create("s")
    async with Producer(cluster.meta) as producer:
        for number in range(300):
            await producer.send("s", b"%01000d" % number, key=b"%d" % number)

    def segments() -> int:
        return sum(1 for _ in tmp_path.glob("broker-*/log/*.log"))

    full = segments()
    assert full > 10
    await admin.delete_subject("s")
    await eventually(lambda: segments() <= 4, what="segments that go", seconds=30)
