"""Deletions, settings and first messages at two metaservers on one PostgreSQL, under messages that
flow meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from keylane import Admin, Consumer, Message, Producer
from keylane.consumer import ConsumerSettings
from keylane.errors import (
    GroupDeletedError,
    KeylaneError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
)
from keylane.protocol.routing import OrderStrategy
from support.cluster import Cluster, delete_group, delete_subject, eventually
from support.descriptions import without_rates
from support.load import Load
from support.postgres import Postgres
from support.raising import raises

META = """
broker_heartbeat_ms = 200
broker_ttl_ms = 3000
operation_lease_ms = 1000
poll_ms = 100
auto_create = "made.*"
auto_create_partitions = 3
"""
GONE = (SubjectDeletedError, SubjectUnknownError, GroupDeletedError)
FLOWING = 300
"""Messages that are handled before and after each change."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Cluster]:
    """Two metaservers and two brokers."""
    settings = f"{META}database_url = {json.dumps(postgres.url())}\n"
    folder = tmp_path_factory.mktemp("pair")
    with Cluster(folder, 2, meta_settings=settings, metas=2) as cluster:
        yield cluster


@pytest.fixture
async def admins(pair: Cluster) -> AsyncIterator[tuple[Admin, Admin]]:
    """One for each metaserver."""
    first, second = pair.addresses
    async with Admin(first) as at_first, Admin(second) as at_second:
        yield at_first, at_second


async def consume(pair: Cluster, subject: str, group: str, seen: list[Message]) -> None:
    """Handle messages until the consumer is ended; it asks the first metaserver first."""
    consumer = Consumer(
        pair.addresses,
        subject=subject,
        group=group,
        handler=seen.append,
        settings=ConsumerSettings(ttl_ms=3_000),
    )
    async with consumer:
        await consumer.wait()


async def end_of(load: Load) -> None:
    """Messages still flow; each key's are handled in order, each once."""
    await load.progress(FLOWING)
    await load.finish()
    load.check()


async def test_subject_is_deleted_when_the_metaserver_that_began_it_dies(pair: Cluster):
    """The other one ends the deletion; what is sent to another subject meanwhile is handled in
    order.
    """
    await pair.create("doomed", partitions=4)
    await pair.create("steady-0", partitions=4)
    values: list[Message] = []
    async with Load(pair.addresses, "steady-0") as load, Producer(pair.addresses) as producer:
        await producer.send("doomed", b"before", key=b"k")
        consuming = asyncio.create_task(consume(pair, "doomed", "g", values))
        await eventually(lambda: len(values) == 1)
        await load.progress(FLOWING)
        async with Admin(pair.addresses[0]) as admin:
            old = await admin.describe_subject("doomed")
            await admin.delete_subject("doomed", force=True)
        pair.metas[0].kill()
        sending = asyncio.create_task(send_until_refused(producer, "doomed"))
        async with Admin(pair.addresses[1]) as admin, asyncio.timeout(60):
            while "doomed" in [each.subject for each in await admin.list_subjects()]:
                await asyncio.sleep(0.05)
        for task in (sending, consuming):
            with pytest.raises(GONE):
                await task
        pair.metas[0].restart()
        route = await pair.create("doomed", partitions=4)
        numbers = {partition.partition_id for partition in old.partitions}
        assert not numbers & {partition.partition_id for partition in route.partitions}
        assert (await producer.send("doomed", b"new", key=b"k")).offset == 0
        await end_of(load)
    async with Admin(pair.addresses) as admin:
        assert (await admin.verify()).ok


async def send_until_refused(producer: Producer, subject: str) -> None:
    while True:
        await producer.send(subject, b"late", key=b"k")


async def test_group_is_deleted_at_both_metaservers_at_once_while_others_consume(
    pair: Cluster, admins: tuple[Admin, Admin]
):
    """Its live consumer is refused, and ended by force; a later group of the name begins at the
    first message.
    """
    await pair.create("steady-1", partitions=4)
    seen: list[Message] = []
    async with Load(pair.addresses, "steady-1") as load:
        consuming = asyncio.create_task(consume(pair, "steady-1", "extra", seen))
        await eventually(lambda: len(seen) > FLOWING)
        for admin in admins:
            with raises(Reason.GROUP_BUSY):
                await admin.delete_group("steady-1", "extra")
        deletions = [delete_group(each, "steady-1", "extra", force=True) for each in pair.addresses]
        ended = await asyncio.gather(*deletions, return_exceptions=True)
        assert None in ended
        assert all(each is None or isinstance(each, KeylaneError) for each in ended), ended
        with pytest.raises(GroupDeletedError):
            await consuming
        seen.clear()
        again = asyncio.create_task(consume(pair, "steady-1", "extra", seen))
        await eventually(lambda: len(seen) > FLOWING)
        assert min(message.offset for message in seen) == 0
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        await end_of(load)


async def test_settings_are_set_at_both_metaservers_at_once_while_messages_flow(
    pair: Cluster, admins: tuple[Admin, Admin]
):
    """One change is made; the other call finds it running, or done. Both show it, and no key loses
    its order.
    """
    await pair.create("steady-2", partitions=4)
    async with Load(pair.addresses, "steady-2") as load:
        await load.progress(FLOWING)
        changes = await asyncio.gather(
            *(admin.set_subject("steady-2", order_strategy="best_tried") for admin in admins),
            return_exceptions=True,
        )
        done = [change for change in changes if not isinstance(change, BaseException)]
        refused = [change for change in changes if isinstance(change, BaseException)]
        assert done
        assert all(error.reason is Reason.OPERATION_RUNNING for error in refused), refused
        for change in done:
            if change.operation.operation_id:
                await admins[0].wait(change.operation)
        for admin in admins:
            described = await admin.describe_subject("steady-2")
            assert described.order_strategy is OrderStrategy.BEST_TRIED
            assert len(described.partitions) == 8, "sealed and continued once"
        await end_of(load)


async def test_first_messages_at_both_metaservers_create_one_subject_while_others_flow(
    pair: Cluster, admins: tuple[Admin, Admin]
):
    """Many producers at once, twice; the ids of a deleted one are not used again."""
    await pair.create("steady-3", partitions=4)
    ids: set[int] = set()
    async with Load(pair.addresses, "steady-3") as load:
        for name in ("made.once", "made.again"):

            async def send(number: int, name: str = name) -> None:
                async with Producer(pair.addresses[number % 2]) as producer:
                    await producer.send(name, b"v", key=b"%d" % number)

            await asyncio.gather(*map(send, range(8)))
            views = [await admin.describe_subject(name) for admin in admins]
            assert without_rates(views[0]) == without_rates(views[1])
            made = {partition.partition_id for partition in views[0].partitions}
            assert len(made) == 3
            assert not made & ids
            ids |= made
            await pair.check_history(name, {b"%d" % number: [b"v"] for number in range(8)})
            await delete_subject(pair.addresses, name)
        await end_of(load)
    assert (await admins[1].verify()).ok
