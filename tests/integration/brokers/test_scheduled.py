"""Messages for a later delivery at the brokers of a real cluster: at their times, once each, over
kills; canceled.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

import aiohttp
import pytest
from msgspec.structs import replace

from keylane import Admin, Producer, ScheduledReceipt, SubjectUnknownError
from keylane.admin import CancelOutcome
from keylane.errors import Reason
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.frames import Read
from keylane.protocol.message import unpack_properties
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import Route
from keylane.rpc.client import BrokerClient
from keylane.rpc.http_network import HttpNetwork
from support.cluster import Cluster
from support.raising import raises
from support.server_process import run_keylane

LATE_MS = 1_000
"""A bound for a loaded machine; on a quiet one the 99th percentile is within 100 ms."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A test that kills a broker starts it again; each test has a subject of its own."""
    with Cluster(tmp_path_factory.mktemp("cluster"), brokers=2) as cluster:
        yield cluster


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Stored(NamedTuple):
    """A message in a log."""

    value: bytes
    properties: dict[str, str]
    appended_at_ms: int


async def stored(route: Route) -> list[Stored]:
    """Every stored message of a subject; none has a key."""
    network = HttpNetwork()
    try:
        messages: list[Stored] = []
        for partition in route.partitions:
            broker = BrokerClient(network, partition.address)
            offset = 0
            while True:
                answer, payload = await broker.call(Read(partition.partition_id, offset, 1 << 20))
                offset = answer.upto
                if not payload:
                    break
                for start, header in batch_starts(payload):
                    cut = columns(payload, header, start)
                    assert cut.key_edges[0] == cut.key_edges[-1]
                    for (low, high), (begin, end) in zip(
                        pairwise(cut.value_edges), pairwise(cut.property_edges), strict=True
                    ):
                        properties = dict(unpack_properties(cut.blob[begin:end]))
                        messages.append(
                            Stored(cut.blob[low:high], properties, header.appended_at_ms)
                        )
            await broker.close()
        return messages
    finally:
        await network.close()


async def stored_when(route: Route, count: int, *, seconds: float = 20) -> list[Stored]:
    """The stored messages of a subject, once there are as many."""
    until = time.monotonic() + seconds
    while True:
        messages = await stored(route)
        if len(messages) >= count:
            return messages
        assert time.monotonic() < until, f"{len(messages)} of {count} messages are stored"
        await asyncio.sleep(0.05)


async def test_scheduled_message_is_stored_at_its_time(cluster):
    """Not before; with its value and properties, as it was sent."""
    route = await cluster.create("at-its-time")
    async with Producer(cluster.meta) as producer:
        due = datetime.now(UTC) + timedelta(seconds=1)
        receipt = await producer.send(
            route.subject, b"later", properties={"kind": "reminder"}, deliver_at=due
        )
    assert isinstance(receipt, ScheduledReceipt)
    assert receipt.subject == route.subject
    assert receipt.durable == "fsync"
    assert 0 <= receipt.deliver_at_ms - due.timestamp() * 1000 <= 1
    (message,) = await stored_when(route, 1)
    assert (message.value, message.properties) == (b"later", {"kind": "reminder"})
    assert 0 <= message.appended_at_ms - receipt.deliver_at_ms < LATE_MS


async def test_thousand_scheduled_messages_are_stored_once_each_and_in_time(cluster):
    """Their times are spread over three seconds, with many of one millisecond; `flush` waits for
    all receipts.
    """
    route = await cluster.create("a-thousand")
    async with Producer(cluster.meta) as producer:
        first = now_ms() + 2_000
        futures = [
            producer.send(route.subject, b"%d" % due, deliver_at=due)
            for due in (first + number // 4 * 4 * 3 for number in range(1_000))
        ]
        await producer.flush()
        assert all(future.done() for future in futures)
        sent = Counter(b"%d" % future.result().deliver_at_ms for future in futures)
        kept_ms = now_ms()
    messages = await stored_when(route, 1_000)
    assert Counter(message.value for message in messages) == sent
    assert all(message.appended_at_ms >= int(message.value) for message in messages)
    late = sorted(message.appended_at_ms - max(int(message.value), kept_ms) for message in messages)
    assert late[989] < LATE_MS, f"99th percentile {late[989]} ms, latest {late[-1]} ms"


async def test_scheduled_messages_outlive_a_kill_before_their_time(cluster):
    """What became due meanwhile is stored at the start, once."""
    route = await cluster.create("killed-before")
    async with Producer(cluster.meta) as producer:
        due = now_ms() + 1_500
        values = [b"%d" % number for number in range(50)]
        await asyncio.gather(
            *(producer.send(route.subject, value, deliver_at=due) for value in values)
        )
    for program in cluster.brokers:
        program.kill()
    await asyncio.sleep((due - now_ms()) / 1000 + 0.2)
    for program in cluster.brokers:
        program.restart()
    messages = await stored_when(route, len(values))
    assert sorted(message.value for message in messages) == sorted(values)


async def test_scheduled_messages_outlive_kills_while_they_are_stored(cluster):
    """Brokers are killed again and again while messages become due: each is stored once."""
    route = await cluster.create("killed-meanwhile")
    async with Producer(cluster.meta) as producer:
        first = now_ms() + 1_000
        values = [b"%d" % number for number in range(600)]
        await asyncio.gather(
            *(
                producer.send(route.subject, value, deliver_at=first + 5 * number)
                for number, value in enumerate(values)
            )
        )
    await asyncio.sleep((first - now_ms()) / 1000)
    for _ in range(3):
        for program in cluster.brokers:
            await asyncio.sleep(0.3)
            program.kill()
            program.restart()
    messages = await stored_when(route, len(values), seconds=60)
    assert Counter(message.value for message in messages) == Counter(values)


async def test_canceled_message_is_never_stored(cluster):
    """Also after a restart; a repeated cancel has the same outcome, and a delivered message is
    told.
    """
    route = await cluster.create("canceled")
    async with Producer(cluster.meta) as producer:
        due = now_ms() + 1_000
        receipts = [
            await producer.send(route.subject, value, deliver_at=due)
            for value in (b"stays", b"goes")
        ]
        for _ in range(2):
            assert await producer.cancel(receipts[1]) is CancelOutcome.CANCELED
        for program in cluster.brokers:
            program.kill()
            program.restart()
        (message,) = await stored_when(route, 1)
        await asyncio.sleep(0.3)
        assert [each.value for each in await stored(route)] == [message.value] == [b"stays"]
        assert await producer.cancel(receipts[1]) is CancelOutcome.CANCELED
        assert await producer.cancel(receipts[0]) is CancelOutcome.DELIVERED
        with raises(Reason.SCHEDULED_UNKNOWN):
            await producer.cancel(replace(receipts[0], scheduled_id="00" * 16))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (datetime(2000, 1, 1, tzinfo=UTC), "has passed"),
        (datetime(2100, 1, 1), "no time zone"),
        (datetime(2100, 1, 1, tzinfo=UTC), "over 366 days ahead"),
        (1_900_000_000, "seconds"),
        (10**400, "over 366 days ahead"),
        ("tomorrow", "not str"),
        (1.5, "not float"),
        (True, "not bool"),
    ],
)
async def test_impossible_time_is_refused(cluster, given, text):
    """At once, with advice; other messages of the producer are sent."""
    route = await cluster.create("refused")
    async with Producer(cluster.meta) as producer:
        with raises(Reason.DELIVER_AT, match=text) as refused:
            producer.send(route.subject, b"v", deliver_at=given)
        assert "time zone" in str(refused.value)
        await producer.send(route.subject, b"v")


async def test_scheduled_message_with_a_key_is_refused(cluster):
    """With the reason: a later delivery breaks the order of the key."""
    async with Producer(cluster.meta) as producer:
        with raises(Reason.DELIVER_AT_KEY, match="in the order they were sent"):
            producer.send("refused", b"v", key=b"k", deliver_at=now_ms() + 60_000)


async def test_scheduled_message_for_an_unknown_subject_is_refused(cluster):
    async with Producer(cluster.meta) as producer:
        with pytest.raises(SubjectUnknownError):
            await producer.send("nowhere", b"v", deliver_at=now_ms() + 60_000)


async def test_messages_are_scheduled_and_canceled_by_http(cluster):
    """One value, and several objects with one time; a repeat is kept once; a key is refused
    wherever it is given.
    """
    route = await cluster.create("by-http")
    base = f"http://{cluster.brokers[0].address}/v1"
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    async with aiohttp.ClientSession() as session:

        async def post(path: str, data: object = None, **headers: str) -> tuple[int, dict]:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.post(f"{base}/{path}", data=data, headers=named) as response:
                return response.status, await response.json()

        there = f"subjects/{route.subject}/scheduled"
        at = due.isoformat().replace("+00:00", "Z")
        status, kept = await post(f"{there}?deliver_at={at}", b"goes")
        assert status == 200, kept
        (receipt,) = kept["receipts"]
        assert (receipt["broker_group"], receipt["durable"]) == ("g1", "fsync")
        objects = b'[{"value": "a", "properties": {"n": "1"}}, {"value": "b"}]'
        at = f"{int(due.timestamp() * 1000)}"
        for _ in range(2):
            status, kept = await post(
                f"{there}?deliver_at={at}",
                objects,
                Content_Type="application/json",
                Idempotency_Key="reminders of May",
            )
            assert (status, len(kept["receipts"])) == (200, 2)
        cancel = f"scheduled/{receipt['scheduled_id']}/cancel"
        assert await post(cancel) == (200, {"outcome": "canceled"})
        messages = await stored_when(route, 2)
        assert sorted(message.value for message in messages) == [b"a", b"b"]
        delivered = f"scheduled/{kept['receipts'][0]['scheduled_id']}/cancel"
        assert await post(delivered) == (200, {"outcome": "delivered"})
        status, error = await post(f"{there}?deliver_at=2000-01-01T00:00:00Z", b"v")
        assert (status, error["name"]) == (400, "InvalidRequestError")
        later = int((due + timedelta(days=1)).timestamp() * 1000)
        for query, key in (("&key=k", {}), ("&key_base64=aw==", {}), ("", {"Message_Key": "k"})):
            status, error = await post(f"{there}?deliver_at={later}{query}", b"v", **key)
            assert (status, error["name"]) == (400, "InvalidRequestError")
        status, error = await post(f"scheduled/{'00' * 16}/cancel")
        assert (status, error["name"]) == (404, "NotFoundError")
        async with session.get(f"{base}/health") as response:
            view = (await response.json())["details"]["scheduled"]
        assert (view["count"], view["problem"], view["late"]) == (0, "", {})


async def test_command_line_sends_messages_for_a_later_delivery(cluster):
    """One message, and the lines of the input; a line with a key is refused."""
    route = await cluster.create("by-command")

    async def produce(*arguments: str, text: str = "") -> tuple[int, str]:
        command = ("produce", route.subject, *arguments, "--meta", cluster.meta)
        done = await asyncio.to_thread(run_keylane, *command, text=text)
        return done.returncode, done.stdout + done.stderr

    status, shown = await produce("alone", "--delay", "0.5")
    assert status == 0, shown
    assert "1 message is kept by g" in shown
    status, shown = await produce("--delay", "0.5", text="x\ny\n")
    assert "2 messages are kept by g" in shown
    status, shown = await produce("v", "--key", "k", "--delay", "9")
    assert status != 0
    assert "DELIVER_AT_KEY" in shown
    messages = await stored_when(route, 3)
    assert sorted(message.value for message in messages) == [b"alone", b"x", b"y"]


def test_verify_reads_the_scheduled_messages_of_a_folder(tmp_path):
    """Their number, and damage of their records in the log; it changes no byte."""
    with Cluster(tmp_path, brokers=1) as cluster:

        async def schedule() -> None:
            route = await cluster.create("verified")
            async with Producer(cluster.meta) as producer:
                for number in range(3):
                    due = now_ms() + 600_000
                    await producer.send(route.subject, b"%d" % number, deliver_at=due)

        asyncio.run(schedule())
    folder = tmp_path / "broker-1"

    def verify() -> tuple[int, dict]:
        done = run_keylane("broker", "verify", str(folder), "-o", "json")
        return done.returncode, json.loads(done.stdout)

    status, verified = verify()
    assert (status, verified["scheduled"], verified["problems"]) == (0, 3, [])
    (log,) = (folder / "log").glob("*.log")
    data = bytearray(log.read_bytes())
    data[data.rindex(b"verified")] ^= 1  # the last message
    log.chmod(0o644)
    log.write_bytes(data)
    status, verified = verify()
    assert status == 1
    assert verified["scheduled"] == 2
    assert any("what became of scheduled messages" in text for text in verified["problems"])
    assert log.read_bytes() == data


async def test_evacuated_broker_delivers_its_scheduled_messages_elsewhere(tmp_path):
    """Its partitions are at another broker when the time comes."""
    with Cluster(tmp_path, brokers=2) as cluster:
        route = await cluster.create("moved")
        async with Producer(cluster.meta) as producer, Admin(cluster.meta) as admin:
            due = now_ms() + 3_000
            values = [b"%d" % number for number in range(20)]
            receipts = await asyncio.gather(
                *(producer.send(route.subject, value, deliver_at=due) for value in values)
            )
            assert {receipt.broker_group for receipt in receipts} == {"g1", "g2"}
            await cluster.reshape(Reshape(kind=OperationKind.EVACUATE, broker_group="g1"))
            assert now_ms() < due
            history = await admin.history(route.subject)
            moved = [
                past.partition for past in history.partitions if past.partition.address is not None
            ]
            route = replace(route, partitions=tuple(moved))
            messages = await stored_when(route, len(values))
            assert Counter(message.value for message in messages) == Counter(values)


async def test_due_messages_wait_for_no_broker_that_has_only_sealed_partitions(tmp_path):
    """It was evacuated and is away; with messages, so its partitions are not gone yet."""
    with Cluster(tmp_path, brokers=2) as cluster:
        route = await cluster.create("left", partitions=1)
        groups = ["g1", "g2"]
        left = groups.index(route.partitions[0].broker_group)
        async with Producer(cluster.meta) as producer, Admin(cluster.meta) as admin:
            await producer.send(route.subject, b"plain")
            ask = Reshape(kind=OperationKind.EVACUATE, broker_group=groups[left])
            await cluster.reshape(ask)
            cluster.brokers[left].kill()
            receipt = await producer.send(route.subject, b"later", deliver_at=now_ms() + 500)
            assert receipt.broker_group == groups[1 - left]
            async with asyncio.timeout(20):
                while (await admin.list_scheduled(subject=route.subject)).count:
                    await asyncio.sleep(0.05)
