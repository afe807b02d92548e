"""Who is over a quota waits, hears of it, and slows no other principal; nothing of it is an
error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest

from keylane import Admin, Consumer, Producer
from keylane.protocol import endpoints
from keylane.protocol.access.quota import BYTES_PER_S_MIN
from keylane.protocol.control import Join
from keylane.protocol.errors import (
    ConnectionQuotaError,
    InvalidRequestError,
    KeylaneError,
    OverloadedError,
    QuotaExceededError,
    Reason,
)
from keylane.rpc.client import MetaClient
from keylane.rpc.http_network import HttpNetwork
from support.access.guarded import GuardedCluster, capabilities, figures_of
from support.raising import raises

SUBJECT = "limited"
VALUE = bytes(10_000)
COUNT = 120
"""1.2 MB: the first quarter is free, the rest takes nearly four seconds."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedCluster]:
    with GuardedCluster(tmp_path_factory.mktemp("quotas")) as cluster:
        asyncio.run(cluster.made(SUBJECT, partitions=2))
        yield cluster


async def limited(guarded: GuardedCluster, name: str, **limits: int) -> str:
    token = await guarded.principal(name, "produce", "consume")
    async with guarded.admin() as admin:
        await admin.set_quota(name, **limits)
    return token


async def test_producer_over_its_quota_waits_and_others_do_not(
    guarded: GuardedCluster, caplog: pytest.LogCaptureFixture
):
    slow = await limited(guarded, "slow", bytes_per_s=BYTES_PER_S_MIN)
    quick = await guarded.principal("quick", "produce")
    caplog.set_level(logging.WARNING, "keylane.rpc")
    waits: list[float] = []

    async def send_beside(over: asyncio.Event) -> None:
        async with Producer(guarded.meta, token=quick) as producer:
            while not over.is_set():
                began = time.monotonic()
                await producer.send(SUBJECT, b"x", key=b"quick")
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.05)

    over = asyncio.Event()
    beside = asyncio.create_task(send_beside(over))
    async with Producer(guarded.meta, token=slow) as producer:
        began = time.monotonic()
        for number in range(COUNT):
            producer.send(SUBJECT, VALUE, key=b"%d" % (number % 7))
            await producer.drain()
            if number % 10 == 9:
                await producer.flush()
        await producer.flush()
        seconds = time.monotonic() - began
        stats = producer.stats
    over.set()
    await beside
    assert seconds > (COUNT * len(VALUE) - 2 * BYTES_PER_S_MIN) / BYTES_PER_S_MIN
    assert (stats.acked, stats.failed, stats.retries) == (COUNT, 0, 0)
    assert stats.throttled_ms > 1_000
    assert any("bytes of principal 'slow' is used up" in line for line in caplog.messages)
    assert len(waits) > 10
    assert sorted(waits)[len(waits) * 3 // 4] < 1.0, waits
    figures = await figures_of(guarded.brokers[0].address)
    assert 'keylane_throttled_seconds_total{principal="slow"}' in figures


async def test_consumer_over_its_quota_gets_all_in_time(guarded: GuardedCluster):
    await guarded.made("read-slowly", partitions=2)
    sender = await guarded.principal("sender", "produce")
    async with Producer(guarded.meta, token=sender) as producer:
        for number in range(COUNT):
            producer.send("read-slowly", VALUE, key=b"%d" % number)
        await producer.flush()
    token = await limited(guarded, "reader", bytes_per_s=BYTES_PER_S_MIN)
    got = 0
    began = time.monotonic()
    consumer = Consumer(
        guarded.meta, subject="read-slowly", group="g", start="earliest", token=token
    )
    async with asyncio.timeout(60), consumer:
        async for message in consumer:
            got += 1
            await message.ack()
            if got == COUNT:
                break
    assert got == COUNT
    assert time.monotonic() - began > 1.0
    assert consumer.throttled_ms > 0


async def test_subject_over_its_limit_takes_messages_slowly(guarded: GuardedCluster):
    await guarded.made("narrow.one")
    async with guarded.admin() as admin:
        await admin.set_quota("narrow.*", kind="subject", bytes_per_s=BYTES_PER_S_MIN)
        assert [row.name for row in (await admin.list_quotas()).quotas if row.kind == "subject"]
    token = await guarded.principal("free", "produce")
    await asyncio.sleep(2.5)  # the broker hears of it with its next heartbeats
    async with Producer(guarded.meta, token=token) as producer:
        began = time.monotonic()
        for number in range(COUNT):
            producer.send("narrow.one", VALUE, key=b"%d" % number)
            if number % 10 == 9:
                await producer.flush()
        await producer.flush()
        assert time.monotonic() - began > 1.5
        assert producer.stats.throttled_ms > 0
    async with guarded.admin() as admin:
        await admin.unset_quota("narrow.*", kind="subject")


async def test_connections_over_the_quota_are_refused_with_a_time(guarded: GuardedCluster):
    token = await limited(guarded, "two", connections=2)
    broker = guarded.brokers[0].address
    networks = [HttpNetwork(token=token) for _ in range(3)]
    try:
        for network in networks:
            network.add_metaservers([guarded.meta])
        first = await networks[0].open_channel(broker, timeout_ms=5_000)
        await networks[1].open_channel(broker, timeout_ms=5_000)
        with raises(ConnectionQuotaError) as refused:
            await networks[2].open_channel(broker, timeout_ms=5_000)
        assert refused.value.limit == 2
        assert refused.value.retry_after_ms > 0
        await first.close()
        async with asyncio.timeout(10):
            while True:
                try:
                    await networks[2].open_channel(broker, timeout_ms=5_000)
                    break
                except ConnectionQuotaError:
                    await asyncio.sleep(0.05)
    finally:
        for network in networks:
            await network.close()
    assert 'error="ConnectionQuotaError"' in await figures_of(broker)


async def test_requests_over_the_quota_wait_and_a_flood_is_refused_with_a_time(
    guarded: GuardedCluster,
):
    token = await limited(guarded, "asker", requests_per_s=5)
    url = f"http://{guarded.meta}/v1/subjects/{SUBJECT}/route"
    headers = {"Authorization": f"Bearer {token}"}

    async def ask(session: aiohttp.ClientSession) -> tuple[int, str | None, str | None, int]:
        async with session.get(url, headers=headers) as answer:
            body = await answer.json()
            waited = answer.headers.get("Keylane-Throttled-Ms")
            return (
                answer.status,
                waited,
                answer.headers.get("Retry-After"),
                body.get("code", 0),
            )

    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(ask(session) for _ in range(40)))
    done = [answer for answer in answers if answer[0] == 200]
    refused = [answer for answer in answers if answer[0] == 429]
    assert len(done) + len(refused) == 40
    assert 5 <= len(done) <= 25
    assert any(waited is not None and int(waited) > 100 for _, waited, _, _ in done)
    assert refused
    assert all(int(again or 0) >= 1 for _, _, again, _ in refused)
    assert {code for _, _, _, code in refused} == {QuotaExceededError.code}


async def test_quota_changes_what_a_capability_says_and_mistakes_change_nothing(
    guarded: GuardedCluster,
):
    token = await limited(guarded, "changing", requests_per_s=1_000)
    before = (await capabilities(guarded.meta, token))["bearer"]
    async with guarded.admin() as admin:
        await admin.set_quota("changing", requests_per_s=2_000)
        assert (await capabilities(guarded.meta, token))["bearer"] != before
        rows = (await admin.list_quotas()).quotas
        assert [row.requests_per_s for row in rows if row.name == "changing"] == [2_000]
        for wrong in (
            {"bytes_per_s": 1},
            {},
            {"connections": -1},
            {"requests_per_s": 1 << 50},
            {"requests_per_s": "7"},
        ):
            with pytest.raises(InvalidRequestError):
                await admin.set_quota("changing", **wrong)
        for limits in (
            {"connections": 3},
            {"scheduled_bytes": -1},
            {"scheduled_bytes": 1 << 50},
            {"subjects": True},
            {},
        ):
            with pytest.raises(InvalidRequestError):
                await admin.set_quota("a.*", kind="subject", **limits)
        no_name: Any = 5
        with pytest.raises(InvalidRequestError, match="name"):
            await admin.set_quota(no_name, kind="subject", subjects=3)
        with pytest.raises(InvalidRequestError, match="limits a pattern"):
            await admin.set_quota("a", kind="subject", subjects=3)
        with pytest.raises(InvalidRequestError, match="limits of subjects"):
            await admin.set_quota("changing", subjects=3)
        assert (await admin.list_quotas()).quotas == rows
        await admin.unset_quota("changing")
        assert "changing" not in {row.name for row in (await admin.list_quotas()).quotas}


async def test_tenant_at_its_limit_of_subjects_leaves_room_for_others(guarded: GuardedCluster):
    """Which subjects count is said by their names; a subject that is there is found all the
    same.
    """
    token = await guarded.principal("tenant", "administer", subject="tenant.*")
    other = await guarded.principal("neighbor", "administer", subject="Tenant.*")
    async with guarded.admin() as admin:
        await admin.set_quota("tenant.*", kind="subject", subjects=2, bytes_per_s=1_000_000)
        await admin.set_quota("tenant.eu.*", kind="subject", subjects=1)
        rows = [row for row in (await admin.list_quotas()).quotas if row.name == "tenant.*"]
        assert [(row.bytes_per_s, row.subjects, row.scheduled_bytes) for row in rows] == [
            (1_000_000, 2, 0)
        ]
    async with Admin(guarded.meta, token=token) as tenant:
        await tenant.create_subject("tenant.eu.a", partitions=1)
        with pytest.raises(OverloadedError, match=r"'tenant\.eu\.\*' has 1 subject,"):
            await tenant.create_subject("tenant.eu.b", partitions=1)
        await tenant.create_subject("tenant.b", partitions=1)
        with pytest.raises(OverloadedError, match=r"'tenant\.\*' has 2 subjects,") as refused:
            await tenant.create_subject("tenant.c", partitions=1)
        assert "keylane access quota set 'tenant.*'" in refused.value.hint
        assert (refused.value.limit, refused.value.subjects) == (2, 2)
        await tenant.create_subject("tenant.b", partitions=1)
        with pytest.raises(OverloadedError):
            await tenant.hide_subject("tenant.b", hidden="tenant.hidden")
    async with Admin(guarded.meta, token=other) as neighbor:
        await neighbor.create_subject("Tenant.c", partitions=1)
    async with guarded.admin() as admin:
        for name in ("tenant.*", "tenant.eu.*"):
            await admin.unset_quota(name, kind="subject")
        assert not [row for row in (await admin.list_quotas()).quotas if "tenant" in row.name]
    async with Admin(guarded.meta, token=token) as tenant:
        await tenant.create_subject("tenant.c", partitions=1)


async def test_tenant_at_its_limit_of_scheduled_bytes_leaves_room_for_others(
    guarded: GuardedCluster,
):
    """However many subjects it has; until now each of them had a share of its own."""
    for name in ("late.a", "late.b", "prompt"):
        await guarded.made(name)
    token = await guarded.principal("late", "produce", subject="late.*")
    other = await guarded.principal("prompt", "produce", subject="prompt")
    async with guarded.admin() as admin:
        await admin.set_quota("late.*", kind="subject", scheduled_bytes=100_000)
    later = datetime.now(UTC) + timedelta(days=1)

    async def refused_at(producer: Producer, subject: str) -> tuple[int, BaseException | None]:
        for kept in range(20):
            try:
                await producer.send(subject, VALUE, deliver_at=later, timeout_ms=2_000)
            except KeylaneError as error:
                return kept, error if error.reason is Reason.SCHEDULE_FULL else error.__cause__
        return 20, None

    await asyncio.sleep(2.5)  # the broker hears of it with its next heartbeats
    async with (
        Producer(guarded.meta, token=token) as late,
        Producer(guarded.meta, token=other) as prompt,
    ):
        first, _ = await refused_at(late, "late.a")
        second, error = await refused_at(late, "late.b")
        assert (first, second) == (9, 0)
        assert error.reason is Reason.SCHEDULE_FULL
        assert (error.pattern, error.limit) == ("late.*", 100_000)
        assert "--scheduled-bytes" in error.hint
        assert await refused_at(prompt, "prompt") == (20, None)


async def test_strict_producers_far_over_their_quota_keep_all_messages_in_order(
    guarded: GuardedCluster,
):
    """The debt of a principal with many connections is longer than a broker holds a connection: it
    refuses batches.
    """
    await guarded.made("crowded", partitions=1)
    token = await limited(guarded, "crowd", bytes_per_s=BYTES_PER_S_MIN)
    count, senders = 2, 10

    async def send(number: int) -> None:
        async with Producer(guarded.meta, token=token) as producer:
            for sent in range(count):
                producer.send("crowded", b"%d" % sent + bytes(300_000), key=b"k%d" % number)
            await producer.flush()
            assert producer.stats.failed == 0

    async with asyncio.timeout(120):
        await asyncio.gather(*map(send, range(senders)))


async def test_principal_has_no_more_consumers_than_its_quota_in_all_groups(
    guarded: GuardedCluster,
):
    """One that is closed gives its place to the next; other principals have places of their own."""
    token = await limited(guarded, "crowd", sessions=2)
    other = await guarded.principal("other-crowd", "consume")
    async with guarded.admin() as admin:
        rows = {row.name: row.sessions for row in (await admin.list_quotas()).quotas}
        assert rows["crowd"] == 2
        for wrong in ({"sessions": -1}, {"sessions": 2, "kind": "subject"}):
            with pytest.raises(InvalidRequestError):
                await admin.set_quota("crowd", **wrong)

    def consumer(number: int, token: str) -> Consumer:
        return Consumer(guarded.meta, subject=SUBJECT, group=f"crowd{number}", token=token)

    first, second = consumer(1, token), consumer(2, token)
    await asyncio.gather(first.__aenter__(), second.__aenter__())
    network = HttpNetwork(token=token)
    meta = MetaClient(network, [guarded.meta])
    async with consumer(3, other):
        ask = Join(subject=SUBJECT, group="crowd3", session="c" * 32)
        with raises(Reason.SESSION_QUOTA) as refused:
            await meta.call(endpoints.JOIN, ask)
        assert (refused.value.principal, refused.value.limit) == ("crowd", 2)
        with raises(Reason.SESSION_QUOTA):
            await consumer(3, token).__aenter__()
        await first.close()
        third = await consumer(3, token).__aenter__()
        with raises(Reason.SESSION_QUOTA):
            await meta.call(endpoints.JOIN, ask)
    await network.close()
    for each in (second, third):
        await each.close()
