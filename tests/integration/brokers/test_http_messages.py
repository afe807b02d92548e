"""Messages by plain HTTP at the brokers of a real cluster: posted, read, repeated, in order,
refused.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import aiohttp
import msgspec
import pytest
import yarl

from keylane import Producer
from keylane.protocol.control import Route
from keylane.protocol.errors import Reason, codes
from keylane.protocol.operations import OperationKind, Reshape
from keylane.protocol.routing import PartitionState, logical_partition
from support.cluster import Cluster

NUMBERS = {name: code for code, name in codes().items()}


SUBJECTS = itertools.count(1)
"""Each test has a subject of its own."""

pytestmark = pytest.mark.cluster(brokers=2)


class Http:
    """Calls as `curl` makes them, to the first broker unless said otherwise."""

    def __init__(self, session: aiohttp.ClientSession, cluster: Cluster) -> None:
        self._session = session
        self.cluster = cluster
        self.subject = f"s{next(SUBJECTS)}"

    def url(self, path: str, broker: int = 0) -> str:
        return f"http://{self.cluster.brokers[broker].address}/v1/{path}"

    async def post(
        self, body: Any, query: str = "", *, subject: str = "", broker: int = 0, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """A text or bytes are the value; anything else is sent as JSON."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if not isinstance(body, bytes | str):
            body = json.dumps(body)
            named.setdefault("Content-Type", "application/json")
        path = self.url(f"subjects/{subject or self.subject}/messages{query}", broker)
        url = yarl.URL(path, encoded=True)
        data = BytesIO(body.encode() if isinstance(body, str) else body)
        async with self._session.post(url, data=data, headers=named) as response:
            return response.status, await response.json()

    async def get(
        self, query: str, *, subject: str = "", broker: int = 0
    ) -> tuple[int, dict[str, Any]]:
        url = self.url(f"subjects/{subject or self.subject}/messages{query}", broker)
        async with self._session.get(url) as response:
            return response.status, await response.json()

    async def values(self, route: Route) -> dict[str, list[str]]:
        """Every stored value by key, read page by page; partitions by id."""
        stored: dict[str, list[str]] = {}
        for partition_id in sorted(partition.partition_id for partition in route.partitions):
            offset = 0
            while True:
                query = f"?partition={partition_id}&offset={offset}&count=7"
                status, page = await self.get(query, subject=route.subject)
                assert status == 200, page
                for message in page["messages"]:
                    stored.setdefault(message["key"], []).append(message["value"])
                if page["next_offset"] == page["end_offset"]:
                    break
                offset = page["next_offset"]
        return stored


@asynccontextmanager
async def calling(cluster: Cluster) -> AsyncIterator[Http]:
    connector = aiohttp.TCPConnector(force_close=True)  # brokers are killed and restarted
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Http(session, cluster)


@pytest.fixture
async def http(file_cluster: Cluster) -> AsyncIterator[Http]:
    async with calling(file_cluster) as http:
        yield http


@pytest.fixture
async def killable(cluster: Cluster) -> AsyncIterator[Http]:
    """Calls to a cluster of the test's own, whose brokers it may kill."""
    async with calling(cluster) as http:
        yield http


def key_at(route: Route, broker_group: str) -> str:
    """A key whose open partition is at this broker group."""
    ranges = [
        range(partition.range_start, partition.range_end)
        for partition in route.open_partitions()
        if partition.broker_group == broker_group
    ]
    return next(
        key
        for key in map(str, range(10_000))
        if any(logical_partition(key.encode()) in logical for logical in ranges)
    )


async def test_posted_messages_are_stored_at_whichever_broker_has_their_partition(
    file_cluster, http
):
    """One broker takes messages of both; each is read back where its receipt says it is."""
    route = await file_cluster.create(http.subject, partitions=4)
    for group in ("g1", "g2"):
        key = key_at(route, group)
        status, answer = await http.post(f"value at {group}", f"?key={key}")
        assert status == 200, answer
        (receipt,) = answer["receipts"]
        assert (receipt["durable"], receipt["duplicate"]) == ("fsync", False)
        assert (receipt["queue"], receipt["logic_offset"]) == (None, None)
        where = f"?partition={receipt['partition_id']}&offset={receipt['offset']}"
        for broker in (0, 1):
            status, page = await http.get(where, broker=broker)
            assert status == 200, page
            assert [(each["key"], each["value"]) for each in page["messages"]] == [
                (key, f"value at {group}")
            ]


async def test_many_messages_in_one_request_have_receipts_in_its_order(file_cluster, http):
    """As an array, and as a line each; of both brokers, with properties, bytes, and no key."""
    route = await file_cluster.create(http.subject, partitions=4)
    messages = [{"key": f"k{n % 20}", "value": f"{n}"} for n in range(200)]
    status, answer = await http.post(messages)
    assert status == 200
    for message, receipt in zip(messages, answer["receipts"], strict=True):
        where = f"?partition={receipt['partition_id']}&offset={receipt['offset']}&count=1"
        _, page = await http.get(where)
        assert page["messages"][0]["key"] == message["key"]
        assert page["messages"][0]["value"] == message["value"]
    lines = [
        {"key_base64": b64encode(b"\xff").decode(), "value_base64": b64encode(b"\xfe").decode()},
        {"value": {"paid": True}, "properties": {"type": "json"}},
    ]
    body = "\n".join(map(json.dumps, lines)) + "\n"
    status, answer = await http.post(body, Content_Type="application/x-ndjson; charset=utf-8")
    assert status == 200, answer
    first, second = answer["receipts"]
    _, page = await http.get(f"?partition={first['partition_id']}&offset={first['offset']}")
    assert (page["messages"][0]["key_base64"], page["messages"][0]["value_base64"]) == (
        "/w==",
        "/g==",
    )
    _, page = await http.get(f"?partition={second['partition_id']}&offset={second['offset']}")
    last = page["messages"][-1]
    assert (last["key"], last["value"], last["properties"]) == (
        None,
        '{"paid":true}',
        {"type": "json"},
    )
    sent: dict[str, list[str]] = {}
    for message in messages:
        sent.setdefault(message["key"], []).append(message["value"])
    stored = {key: values for key, values in (await http_texts(http, route)).items() if key}
    assert stored == sent


async def http_texts(http: Http, route: Route) -> dict[str, list[str]]:
    """As `Http.values`, without messages that are no text."""
    stored: dict[str, list[str]] = {}
    for partition in route.partitions:
        _, page = await http.get(f"?partition={partition.partition_id}&count=1000")
        for message in page["messages"]:
            if "key" in message and "value" in message:
                stored.setdefault(message["key"], []).append(message["value"])
    return stored


async def test_repeat_with_the_idempotency_key_is_stored_once(cluster, killable):
    """The same receipts, as duplicates, from any broker, and after both brokers were killed and
    restarted.
    """
    route = await cluster.create(killable.subject, partitions=4)
    messages = [{"key": f"k{n}", "value": f"{n}"} for n in range(20)] + [{"value": "keyless"}]
    status, first = await killable.post(messages, Idempotency_Key="order 4711")
    assert status == 200
    assert not any(receipt["duplicate"] for receipt in first["receipts"])
    expected = [{**receipt, "duplicate": True} for receipt in first["receipts"]]
    for broker in (0, 1):
        status, again = await killable.post(messages, broker=broker, Idempotency_Key="order 4711")
        assert (status, again["receipts"]) == (200, expected)
    for program in cluster.brokers:
        program.kill()
        program.restart()
    status, again = await killable.post(messages, Idempotency_Key="order 4711")
    assert (status, again["receipts"]) == (200, expected)
    status, other = await killable.post(messages, Idempotency_Key="order 4712")
    assert status == 200
    assert not any(receipt["duplicate"] for receipt in other["receipts"])
    stored = await killable.values(route)
    assert all(len(values) == 2 for values in stored.values())


async def test_other_messages_under_an_idempotency_key_are_refused(cluster, killable):
    """Another value, properties, or more messages: nothing is stored, also after a restart."""
    await cluster.create(killable.subject, partitions=1)
    status, answer = await killable.post("one", "?key=k", Idempotency_Key="id")
    assert status == 200
    (receipt,) = answer["receipts"]
    cluster.brokers[0].kill()
    cluster.brokers[0].restart()
    others = [
        [{"key": "k", "value": "two"}],
        [{"key": "j", "value": "one"}],
        [{"key": "k", "value": "one", "properties": {"a": "b"}}],
        [{"key": "k", "value": "one"}, {"key": "k", "value": "one"}],
    ]
    for messages in others:
        status, answer = await killable.post(messages, Idempotency_Key="id")
        assert (status, answer["code"]) == (422, Reason.IDEMPOTENCY_KEY_REUSED.code)
        assert answer["fate"] == "not_done"
    _, page = await killable.get(f"?partition={receipt['partition_id']}")
    assert [message["value"] for message in page["messages"]] == ["one"]


async def test_repeats_at_once_are_stored_once(file_cluster, http):
    """The same request from many connections, at both brokers: one is the first, the others are
    duplicates of it.
    """
    route = await file_cluster.create(http.subject, partitions=2)
    answers = await asyncio.gather(
        *(http.post("x", "?key=k", broker=n % 2, Idempotency_Key="id") for n in range(20))
    )
    assert [status for status, _ in answers] == [200] * 20
    receipts = [answer["receipts"][0] for _, answer in answers]
    assert len({receipt["offset"] for receipt in receipts}) == 1
    assert [receipt["duplicate"] for receipt in receipts].count(False) == 1
    assert await http.values(route) == {"k": ["x"]}


async def test_order_per_key_is_kept_while_partitions_are_split(file_cluster, http):
    """Each key's requests, one after the other at alternating brokers, through a resize; by HTTP
    and by a producer.
    """
    await file_cluster.create(http.subject, partitions=2)
    sent: dict[str, list[str]] = {f"k{n}": [] for n in range(10)}
    done = asyncio.Event()

    async def send(key: str) -> None:
        count = 0
        while not done.is_set() or count < 20:
            count += 1
            sent[key].append(str(count))
            status, answer = await http.post(
                str(count), f"?key={key}", broker=count % 2, Idempotency_Key=f"{key}/{count}"
            )
            assert status == 200, answer
            assert not answer["receipts"][0]["duplicate"]

    tasks = [asyncio.create_task(send(key)) for key in sent]
    await asyncio.sleep(0.3)
    await file_cluster.reshape(
        Reshape(kind=OperationKind.RESIZE, subject=http.subject, partitions=6)
    )
    done.set()
    await asyncio.gather(*tasks)
    async with Producer(file_cluster.meta) as producer:
        for key, values in sent.items():
            values.append("by a producer")
            await producer.send(http.subject, b"by a producer", key=key.encode())
    assert await http.values(await cluster_route(http)) == sent


async def cluster_route(http: Http) -> Route:
    """The route with sealed partitions, parents before children."""
    url = f"http://{http.cluster.meta}/v1/subjects/{http.subject}/route"
    async with http._session.get(url) as response:
        return msgspec.json.decode(await response.read(), type=Route)


async def test_repeat_after_a_split_is_answered_by_the_sealed_partition(file_cluster, http):
    await file_cluster.create(http.subject, partitions=1)
    messages = [{"key": f"k{n}", "value": str(n)} for n in range(30)]
    _, first = await http.post(messages, Idempotency_Key="id")
    await file_cluster.reshape(
        Reshape(kind=OperationKind.RESIZE, subject=http.subject, partitions=4)
    )
    route = await cluster_route(http)
    assert PartitionState.SEALED in {partition.state for partition in route.partitions}
    for broker in (0, 1):
        status, again = await http.post(messages, broker=broker, Idempotency_Key="id")
        assert status == 200, again
        assert again["receipts"] == [
            {**receipt, "duplicate": True} for receipt in first["receipts"]
        ]
        status, refused = await http.post(messages[:3], broker=broker, Idempotency_Key="id")
        assert (status, refused["code"]) == (422, Reason.IDEMPOTENCY_KEY_REUSED.code)


async def test_request_is_stored_in_part_when_a_broker_is_dead(cluster, killable):
    """The answer has the receipts of what is stored; the repeat stores the rest, once the broker is
    back.
    """
    route = await cluster.create(killable.subject, partitions=2)
    here, there = key_at(route, "g1"), key_at(route, "g2")
    messages = [{"key": there, "value": "there"}, {"key": here, "value": "here"}]
    await killable.post({"value": "warm up the route"})
    cluster.brokers[1].kill()
    status, answer = await killable.post(messages, Idempotency_Key="id")
    assert status in {503, 504}
    assert answer["code"] == Reason.PARTLY_STORED.code
    assert (answer["details"]["stored"], answer["details"]["messages"]) == (1, 2)
    assert answer["receipts"][0] is None
    assert answer["receipts"][1]["duplicate"] is False
    status, alone = await killable.post("x", f"?key={there}")
    assert (status, alone["code"]) == (503, NUMBERS["NotSentError"])
    cluster.brokers[1].restart()
    status, again = await killable.post(messages, Idempotency_Key="id")
    assert status == 200, again
    assert again["receipts"][1] == {**answer["receipts"][1], "duplicate": True}
    assert (await killable.values(route))[there] == ["there"]


async def test_messages_without_a_key_are_stored_while_a_broker_is_dead(cluster, killable):
    await cluster.create(killable.subject, partitions=2)
    cluster.brokers[1].kill()
    for n in range(10):
        status, answer = await killable.post(str(n))
        assert status == 200, answer
    cluster.brokers[1].restart()


async def test_posted_key_is_text_or_bytes(file_cluster, http):
    """In the query, in base64, or in a header."""
    route = await file_cluster.create(http.subject, partitions=1)
    (partition,) = route.partitions
    assert (await http.post("a", "?key=Z%C3%BCrich%26"))[0] == 200
    assert (await http.post("b", "?key_base64=" + "%2Fw%3D%3D"))[0] == 200
    assert (await http.post("c", Message_Key="Zürich&"))[0] == 200
    _, page = await http.get(f"?partition={partition.partition_id}")
    keys = [message.get("key", message.get("key_base64")) for message in page["messages"]]
    assert keys == ["Zürich&", "/w==", "Zürich&"]


BAD: list[tuple[Any, str, dict[str, str], int, str]] = [
    ([], "", {}, 400, "InvalidRequestError"),
    ([{"key": "k"}], "", {}, 400, "InvalidRequestError"),
    ([{"value": "v", "value_base64": "dg=="}], "", {}, 400, "InvalidRequestError"),
    ([{"value": "v", "kye": "k"}], "", {}, 400, "InvalidRequestError"),
    ([{"value_base64": "!"}], "", {}, 400, "InvalidRequestError"),
    ([{"value": "v", "properties": {"a": 1}}], "", {}, 400, "InvalidRequestError"),
    ([{"value": "good"}, 7], "", {}, 400, "InvalidRequestError"),
    ([{"value": "v"}], "?key=k", {}, 400, "InvalidRequestError"),
    ("{", "", {"Content-Type": "application/json"}, 400, "InvalidRequestError"),
    ("[" * 100_000, "", {"Content-Type": "application/json"}, 400, "InvalidRequestError"),
    (b"\xff", "", {"Content-Type": "application/json"}, 400, "InvalidRequestError"),
    ("\n\n", "", {"Content-Type": "application/x-ndjson"}, 400, "InvalidRequestError"),
    ('{"value": 1}\n{', "", {"Content-Type": "application/x-ndjson"}, 400, "InvalidRequestError"),
    ("v", "?kye=k", {}, 400, "InvalidRequestError"),
    ("v", "?key=k", {"Message-Key": "k"}, 400, "InvalidRequestError"),
    ("v", "?key=%ff", {}, 400, "InvalidRequestError"),
    ("v", "?key=a&key=b", {}, 400, "InvalidRequestError"),
    ("v", "?Idempotency-Key=a", {}, 400, "InvalidRequestError"),
    ("v", "?Idempotency-Key=a", {"Idempotency-Key": "a"}, 400, "InvalidRequestError"),
    ("v", "?key_base64=%21", {}, 400, "InvalidRequestError"),
    ("v", "?key=" + "k" * 1_025, {}, 413, "MessageTooLargeError"),
    ("v", "", {"Idempotency-Key": "k" * 201}, 400, "InvalidRequestError"),
    ("v", "", {"Idempotency-Key": ""}, 400, "InvalidRequestError"),
    ("v", "", {"Idempotency-Key": "ü"}, 400, "InvalidRequestError"),
    ("v", "", {"Content-Type": "multipart/form-data; boundary=x"}, 400, "InvalidRequestError"),
    ("v", "", {"Origin": "http://evil.example"}, 403, "InvalidRequestError"),
    ("v", "", {"Sec-Fetch-Site": "cross-site"}, 403, "InvalidRequestError"),
    ("v", "", {"Host": "evil.example"}, 421, "InvalidRequestError"),
    ("v" * (1 << 20), "?key=k", {}, 413, "MessageTooLargeError"),
    ("v" * ((1 << 20) + 1), "", {}, 413, "MessageTooLargeError"),
    ([{"value": 1}] * 5_001, "", {}, 413, "MessageTooLargeError"),
]


async def test_bad_requests_are_refused_with_a_typed_error_and_store_nothing(file_cluster, http):
    route = await file_cluster.create(http.subject, partitions=1)
    (partition,) = route.partitions
    for body, query, headers, status, name in BAD:
        got, answer = await http.post(body, query, **headers)
        assert (got, answer["name"]) == (status, name), (str(body)[:80], query[:80], headers)
        assert answer["fate"] == "not_done"
    for subject, status, name in (
        ("unknown", 404, "SubjectUnknownError"),
        ("b%C3%A4d", 400, "InvalidRequestError"),
    ):
        got, answer = await http.post("v", subject=subject)
        assert (got, answer["name"]) == (status, name)
    _, page = await http.get(f"?partition={partition.partition_id}")
    assert page["messages"] == []


async def test_largest_message_and_the_most_messages_are_stored(file_cluster, http):
    route = await file_cluster.create(http.subject, partitions=1)
    (partition,) = route.partitions
    assert (await http.post("v" * (1 << 20)))[0] == 200
    assert (await http.post([{"value": 1}] * 5_000))[0] == 200
    long = [{"value": "v" * 190}] * 5_000
    assert (1 << 20) - 50_000 < len(json.dumps(long, separators=(",", ":"))) < 1 << 20
    assert (
        await http.post(json.dumps(long, separators=(",", ":")), Content_Type="application/json")
    )[0] == 200
    _, page = await http.get(f"?partition={partition.partition_id}&count=1000")
    assert len(page["messages"]) == 1
    assert len(page["messages"][0]["value"]) == 1 << 20
    assert page["end_offset"] == 10_001
    _, page = await http.get(f"?partition={partition.partition_id}&offset=1&count=1000")
    assert (len(page["messages"]), page["next_offset"]) == (1_000, 1_001)


@pytest.mark.parametrize(
    ("query", "status", "name"),
    [
        ("?partition=999", 404, "PartitionUnknownError"),
        ("?partition=x", 400, "InvalidRequestError"),
        ("?partition=1&queue=0", 400, "InvalidRequestError"),
        ("?queue=0", 409, "ConflictError"),
        ("?partition={}&offset=5", 400, "OffsetOutOfRangeError"),
        ("?partition={}&offset=99999999999999999999", 400, "InvalidRequestError"),
        ("?partition={}&count=0", 400, "InvalidRequestError"),
        ("?partition={}&count=1001", 400, "InvalidRequestError"),
        ("", 400, "InvalidRequestError"),
        ("?partition={}&ofset=1", 400, "InvalidRequestError"),
    ],
)
async def test_bad_reads_are_refused_with_a_typed_error(file_cluster, http, query, status, name):
    route = await file_cluster.create(http.subject, partitions=1)
    got, answer = await http.get(query.format(route.partitions[0].partition_id))
    assert (got, answer["name"]) == (status, name)


async def test_queue_is_read_by_logic_offset_over_a_move(file_cluster, http):
    """A logic offset stays when the queue moves to the other broker; receipts have queue and logic
    offset.
    """
    route = await file_cluster.create(http.subject, partitions=1, static=True)
    (partition,) = route.partitions
    for n in range(5):
        _, answer = await http.post(str(n))
        assert answer["receipts"][0]["logic_offset"] == n
    target = "g2" if partition.broker_group == "g1" else "g1"
    await file_cluster.reshape(
        Reshape(
            kind=OperationKind.MOVE, partition_ids=(partition.partition_id,), broker_group=target
        )
    )
    for n in range(5, 10):
        status, answer = await http.post(str(n))
        assert status == 200, answer
        assert (answer["receipts"][0]["logic_offset"], answer["receipts"][0]["queue"]) == (n, 0)
    read: list[str] = []
    offset = 0
    while len(read) < 10:
        status, page = await http.get(f"?queue=0&offset={offset}&count=3")
        assert status == 200, page
        read += [message["value"] for message in page["messages"]]
        assert [each["logic_offset"] for each in page["messages"]] == list(
            range(offset, page["next_offset"])
        )
        offset = page["next_offset"]
    assert read == [str(n) for n in range(10)]
    status, error = await http.get("?queue=0&offset=11")
    assert (status, error["name"]) == (400, "OffsetOutOfRangeError")
    assert (error["details"]["first_offset"], error["details"]["next_offset"]) == (5, 10)
    status, error = await http.get("?queue=1")
    assert (status, error["name"]) == (404, "NotFoundError")


async def test_openapi_document_of_a_broker_has_the_messages(file_cluster, http):
    """Every reference resolves; headers, queries and the kinds of bodies are named."""
    async with http._session.get(http.url("openapi.json")) as response:
        text = await response.text()
    document = json.loads(text)
    calls = document["paths"]["/v1/subjects/{subject}/messages"]
    assert {each["name"] for each in calls["post"]["parameters"]} == {
        *("subject", "key", "key_base64", "Message-Key", "Idempotency-Key"),
    }
    assert set(calls["post"]["requestBody"]["content"]) == {
        *("application/json", "application/x-ndjson", "application/octet-stream"),
    }
    assert {each["name"] for each in calls["get"]["parameters"]} == {
        *("subject", "partition", "queue", "offset", "count"),
    }
    for part in text.split('"$ref":"')[1:]:
        assert part.split('"')[0].rsplit("/", 1)[1] in document["components"]["schemas"]


async def test_curl_posts_and_reads(file_cluster, http, tmp_path):
    """The program itself: a value, a file, lines, an idempotency key, and --fail for a refusal."""
    curl = shutil.which("curl")
    assert curl, "apt-get install curl"
    route = await file_cluster.create(http.subject, partitions=2)

    async def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        process = await asyncio.create_subprocess_exec(
            *(curl, "-sS", *arguments), stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, json.loads(printed or b"{}")

    url = http.url(f"subjects/{http.subject}/messages")
    large = tmp_path / "large"
    large.write_bytes(b"\0" + b"v" * 900_000)
    lines = tmp_path / "lines"
    lines.write_text('{"key": "k", "value": "2"}\n{"key": "k", "value": "3"}\n')
    assert (await run(url + "?key=k", "-d", "1"))[0] == 0
    kind = "Content-Type: application/x-ndjson"
    for duplicate in (False, True):
        _, answer = await run(
            *(url, "-H", kind, "-H", "Idempotency-Key: a", "--data-binary", f"@{lines}")
        )
        assert [receipt["duplicate"] for receipt in answer["receipts"]] == [duplicate] * 2
    assert (await run(url, "--data-binary", f"@{large}"))[0] == 0
    status, _ = await run(url + "?kye=k", "-d", "4", "--fail")
    assert status == 22
    texts = await http.values(route)
    assert texts["k"] == ["1", "2", "3"]


async def test_requests_that_are_repeated_through_kills_are_stored_once(cluster, killable):
    """Each key's requests in order, each repeated until it is answered, while brokers are killed
    and restarted.
    """
    await cluster.create(killable.subject, partitions=4)
    sent: dict[str, list[str]] = {f"k{n}": [] for n in range(8)}
    killing = asyncio.Event()
    repeats = 0

    async def post_until_stored(key: str, value: str) -> None:
        nonlocal repeats
        for attempt in range(1_000):
            try:
                status, answer = await killable.post(
                    value, f"?key={key}", broker=attempt % 2, Idempotency_Key=f"{key}/{value}"
                )
            except (aiohttp.ClientError, OSError):
                status, answer = 0, {}
            if status == 200:
                return
            assert status in {0, 500, 503, 504}, answer
            repeats += 1
            await asyncio.sleep(0.02)
        raise AssertionError(f"{key}/{value} was never stored")

    async def send(key: str) -> None:
        while not killing.is_set():
            sent[key].append(str(len(sent[key])))
            await post_until_stored(key, sent[key][-1])

    tasks = [asyncio.create_task(send(key)) for key in sent]
    for number in range(6):
        await asyncio.sleep(0.3)
        program = cluster.brokers[number % 2]
        program.kill()
        await asyncio.to_thread(program.restart)
    killing.set()
    await asyncio.gather(*tasks)
    assert repeats
    assert await killable.values(await cluster_route(killable)) == sent
