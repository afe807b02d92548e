"""Callers that mean harm, against a real cluster over TLS: each is refused and told, and others are
served meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from keylane import Producer, Reader
from keylane.cli.connection import wait_for_brokers
from keylane.protocol.errors import (
    FrameError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    OverloadedError,
    Reason,
    UnauthenticatedError,
)
from keylane.protocol.frames import Authenticate, Challenge, Refused
from keylane.protocol.limits import CONTROL_BYTES_MAX, FRAME_BYTES_MAX
from keylane.rpc.access.client_credentials import ClientCredentials
from keylane.rpc.access.guard import AUTHENTICATE_S, REFUSALS_PER_KIND
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.intake import HttpLimits
from keylane.rpc.plane.data_plane import AUTH_FRAME_BYTES_MAX
from keylane.rpc.tls.contexts import client_context
from support.access.guarded import GuardedCluster, capabilities
from support.access.secured_cluster import SecuredCluster
from support.access.slow_callers import SlowCallers
from support.raw_frames import connect, sized

SUBJECT = "orders"
HALF_OPEN = 1_000
OVER = 100
HALF_OPEN_BYTES_MAX = 100 << 10
"""Of memory for each connection in its handshake."""
LEVELS = 500_000
"""Of brackets in brackets; a tenth of what a body may have."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    cluster = SecuredCluster(
        tmp_path_factory.mktemp("secured"), f"http_connections_max = {HALF_OPEN}\n"
    )

    async def fill() -> None:
        async with cluster.admin() as admin:
            await wait_for_brokers(admin, 1)
            await admin.create_subject(SUBJECT, partitions=1)

    asyncio.run(fill())
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module", autouse=True)
def slow_callers(secured: SecuredCluster) -> SlowCallers:
    """They are under way during all tests here."""
    return SlowCallers(secured)


async def answer_of(
    secured: SecuredCluster, address: str, path: str, token: str = "", **given: Any
) -> tuple[int, dict[str, Any]]:
    """The status and the body with which a server answers."""
    headers = given.pop("headers", {})
    if token:
        headers = headers | {"Authorization": f"Bearer {token}"}
    url = URL(f"https://{address}{path}", encoded=True)
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            given.pop("method", "GET"),
            url,
            headers=headers,
            ssl=client_context(secured.tls),
            **given,
        ) as answer,
    ):
        return answer.status, await answer.json()


async def code_of(
    secured: SecuredCluster, address: str, path: str, *args: str, **given: Any
) -> int:
    """The code of the error with which a server answers."""
    status, body = await answer_of(secured, address, path, *args, **given)
    assert status >= 400, body
    return int(body["code"])


async def refusals(
    secured: SecuredCluster, address: str, error: type[KeylaneError] | Reason
) -> int:
    """How many requests a server has refused with this error."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"https://{address}/metrics", ssl=client_context(secured.tls)) as answer,
    ):
        text = await answer.text()
    match = re.search(rf'keylane_refusals_total{{[^}}]*"{error.code}"[^}}]*}} (\d+)', text)
    return 0 if match is None else int(match[1])


async def until_noted(secured: SecuredCluster, code: int, did: str) -> None:
    """Wait until the audit log has a refusal with this code."""
    async with secured.admin() as admin, asyncio.timeout(10):
        while True:
            rows = (await admin.list_audit(limit=500, outcome="refused")).rows
            if any(row.event.code == code and row.event.did == did for row in rows):
                return
            await asyncio.sleep(0.1)


async def check_served(secured: SecuredCluster) -> None:
    """An ordinary client writes a message and reads it."""
    value = b"%d" % time.monotonic_ns()
    access: dict[str, Any] = {"tls": secured.tls, "token": secured.admin_token}
    async with asyncio.timeout(5):
        async with Producer(secured.meta, **access) as producer:
            await producer.send(SUBJECT, value, key=b"k")
        async with Reader(secured.meta, SUBJECT, **access) as reader:
            assert value in [message.value async for message in reader]


async def test_tokens_and_capabilities_of_another_cluster_are_refused(
    secured: SecuredCluster, tmp_path: Path
):
    with GuardedCluster(tmp_path, brokers=0) as other:
        given = await capabilities(other.meta, other.admin_token)
    before = await refusals(secured, secured.broker, UnauthenticatedError)
    for token in (other.admin_token, given["bearer"]):
        for address, path in ((secured.meta, "/v1/subjects"), (secured.broker, "/v1/partitions")):
            assert await code_of(secured, address, path, token) == UnauthenticatedError.code
    assert await refusals(secured, secured.broker, UnauthenticatedError) == before + 2
    await until_noted(secured, UnauthenticatedError.code, "GET /v1/subjects")
    await until_noted(secured, UnauthenticatedError.code, "GET /v1/partitions")
    await check_served(secured)


async def test_token_is_refused_when_it_has_ended(secured: SecuredCluster):
    async with secured.admin() as admin:
        ends = datetime.now(UTC) + timedelta(seconds=1)
        token = (await admin.create_token("guest", ends=ends)).token
        await admin.grant("guest", "read")
    assert (await answer_of(secured, secured.meta, "/v1/subjects", token))[0] == 200
    await asyncio.sleep(1.1)
    assert await code_of(secured, secured.meta, "/v1/subjects", token) == UnauthenticatedError.code


async def test_capability_is_refused_when_it_is_replayed(secured: SecuredCluster):
    """On another connection, and at a broker that another one hands it to: what was signed names
    the first.
    """
    async with secured.admin() as admin:
        token = (await admin.create_token("victim")).token
        await admin.grant("victim", "produce")
    network = HttpNetwork(secured.tls, token=token)
    network.add_metaservers([secured.meta])
    channels = [await network._connect(secured.broker, 5_000) for _ in range(3)]
    try:
        assert isinstance(network._credentials, ClientCredentials)
        shown = await network._credentials.data_capability()
        assert shown is not None
        first, second, third = channels
        challenge, _ = await first.call(Challenge(), timeout_ms=5_000)
        proof = shown.key.sign_challenge(challenge.nonce, secured.broker)
        sent = Authenticate(shown.text, proof, secured.broker)
        assert await first.call(sent, timeout_ms=5_000)
        await second.call(Challenge(), timeout_ms=5_000)
        with pytest.raises(UnauthenticatedError):
            await second.call(sent, timeout_ms=5_000)
        handed_on, _ = await third.call(Challenge(), timeout_ms=5_000)
        for_another = shown.key.sign_challenge(handed_on.nonce, "broker-of-a-thief:7100")
        for address in ("broker-of-a-thief:7100", secured.broker):
            with pytest.raises(UnauthenticatedError):
                await third.call(Authenticate(shown.text, for_another, address), timeout_ms=5_000)
        await until_noted(secured, UnauthenticatedError.code, "Authenticate")
    finally:
        for channel in channels:
            await channel.close()
        await network.close()


async def test_connection_of_the_data_plane_ends_within_five_seconds_after_revocation(
    secured: SecuredCluster,
):
    async with secured.admin() as admin:
        made = await admin.create_token("leaver")
        await admin.grant("leaver", "produce")
        network = HttpNetwork(secured.tls, token=made.token)
        network.add_metaservers([secured.meta])
        channel = await network._connect(secured.broker, 5_000)
        try:
            assert isinstance(network._credentials, ClientCredentials)
            shown = await network._credentials.data_capability()
            assert shown is not None
            challenge, _ = await channel.call(Challenge(), timeout_ms=5_000)
            proof = shown.key.sign_challenge(challenge.nonce, secured.broker)
            sent = Authenticate(shown.text, proof, secured.broker)
            await channel.call(sent, timeout_ms=5_000)
            await asyncio.sleep(0.3)
            assert not channel._socket.closing
            await admin.revoke_token(made.view.token_id)
            async with asyncio.timeout(5):
                while not channel._socket.closing:
                    await asyncio.sleep(0.05)
        finally:
            await channel.close()
            await network.close()


@pytest.mark.parametrize(
    "name", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "_method"]
)
async def test_headers_do_not_change_the_method(secured: SecuredCluster, name: str):
    body = {"subject": "made-by-a-get", "partitions": 1}
    for method in ("POST", "DELETE"):
        status, answer = await answer_of(
            secured,
            secured.meta,
            "/v1/subjects",
            secured.admin_token,
            headers={name: method},
            json=body,
        )
        assert status == 200
        assert [row["subject"] for row in answer["subjects"]] == [SUBJECT]


@pytest.mark.parametrize(
    "path",
    [
        "/v1%2Fsubjects",
        "/health/live%2F..%2F..%2Fv1%2Fsubjects",
        "/health/live/..%2F..%2Fv1/subjects",
        "/v1/subjects%2F",
        "/%2e%2e/v1/subjects%00",
    ],
)
async def test_encoded_slashes_lead_to_no_call(secured: SecuredCluster, path: str):
    """Not to a call that needs no token, nor with a token to another one."""
    for token in ("", secured.admin_token):
        assert await code_of(secured, secured.meta, path, token) == InvalidRequestError.code
    await until_noted(secured, InvalidRequestError.code, "GET another path")


@pytest.mark.parametrize("name", ["orders%2F..%2Fothers", "..%2F..%2Faccess%2Ftokens"])
async def test_encoded_slashes_stay_in_their_part_of_the_path(secured: SecuredCluster, name: str):
    path = f"/v1/subjects/{name}"
    assert await code_of(secured, secured.meta, path) == UnauthenticatedError.code
    assert (
        await code_of(secured, secured.meta, path, secured.admin_token) == Reason.NAME_INVALID.code
    )


async def test_deep_and_large_bodies_are_refused_and_counted(secured: SecuredCluster):
    ask: dict[str, Any] = {"method": "POST"}
    token = secured.admin_token
    bodies = [
        (b"[" * LEVELS, InvalidRequestError),
        (b'{"subject":' * (LEVELS // 10), InvalidRequestError),
        (b'{"subject":"x","more":' + b"[" * LEVELS + b"]" * LEVELS + b"}", InvalidRequestError),
        (b" " * (CONTROL_BYTES_MAX + 1), MessageTooLargeError),
        (gzip.compress(b" " * (CONTROL_BYTES_MAX + 1)), MessageTooLargeError),
    ]
    for data, error in bodies:
        ask["headers"] = {"Content-Encoding": "gzip"} if data[:2] == b"\x1f\x8b" else {}
        before = await refusals(secured, secured.meta, error)
        assert (
            await code_of(secured, secured.meta, "/v1/subjects", token, data=BytesIO(data), **ask)
            == error.code
        )
        assert await refusals(secured, secured.meta, error) == before + 1
    await until_noted(secured, MessageTooLargeError.code, "POST /v1/subjects")
    await check_served(secured)


async def test_bytes_that_are_no_tls_and_no_http_are_refused_and_counted(secured: SecuredCluster):
    host, _, port = secured.broker.rpartition(":")
    for tls, error, did in (
        (None, Reason.HANDSHAKE, "TLS handshake"),
        (client_context(secured.tls), InvalidRequestError, "no HTTP"),
    ):
        before = await refusals(secured, secured.broker, error)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
        writer.write(b"GARBAGE\r\n\r\n" * 9)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            async with asyncio.timeout(10):
                await reader.read()
        writer.transport.abort()
        assert await refusals(secured, secured.broker, error) == before + 1
        await until_noted(secured, error.code, did)
    await check_served(secured)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", sized(b"\x00"), b"\xff" * 9, sized(bytes(FRAME_BYTES_MAX))],
    ids=["text", "short", "bits", "long"],
)
async def test_bad_frames_end_their_connection_and_are_counted(
    secured: SecuredCluster, data: bytes
):
    before = await refusals(secured, secured.broker, FrameError)
    client = await connect(secured.broker, ssl=client_context(secured.tls))
    client.transport.write(data)
    while await client.receive(10) is not None:
        pass
    assert await refusals(secured, secured.broker, FrameError) == before + 1
    await until_noted(secured, FrameError.code, "connection")
    await check_served(secured)


async def test_frame_of_a_caller_that_is_not_known_is_refused_when_it_is_large(
    secured: SecuredCluster,
):
    """It would take memory of the broker's before it is known who calls."""
    client = await connect(secured.broker, ssl=client_context(secured.tls))
    client.transport.write(sized(bytes(AUTH_FRAME_BYTES_MAX)))
    _, answer, _ = await client.answer(10)
    assert isinstance(answer, Refused)
    assert f"over the limit of {AUTH_FRAME_BYTES_MAX}" in answer.message
    assert await client.receive(10) is None
    await check_served(secured)


async def test_connection_that_says_not_who_calls_is_ended_and_counted(secured: SecuredCluster):
    before = await refusals(secured, secured.broker, UnauthenticatedError)
    network = HttpNetwork(secured.tls)
    channel = await network._connect(secured.broker, 5_000)
    try:
        async with asyncio.timeout(AUTHENTICATE_S + 5):
            while not channel.closed:
                await asyncio.sleep(0.1)
    finally:
        await channel.close()
        await network.close()
    assert await refusals(secured, secured.broker, UnauthenticatedError) == before + 1
    await until_noted(secured, UnauthenticatedError.code, "connection")


def resident_bytes(pid: int) -> int:
    """The memory of a process."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) << 10


async def test_half_open_tls_connections_take_little_memory_and_the_oldest_are_refused(
    secured: SecuredCluster,
):
    await check_served(secured)
    host, _, port = secured.meta.rpartition(":")
    before, pid = await refusals(secured, secured.meta, OverloadedError), secured.metaserver.pid
    memory, writers = resident_bytes(pid), []
    try:
        for number in range(HALF_OPEN + OVER):
            _reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"\x16\x03\x01\x02\x00"[: number % 6])
            writers.append(writer)
        await check_served(secured)
        grown = resident_bytes(pid) - memory
        assert grown < HALF_OPEN * HALF_OPEN_BYTES_MAX
        refused = await refusals(secured, secured.meta, OverloadedError) - before
        assert refused >= OVER
        await until_noted(secured, OverloadedError.code, "TLS handshake")
    finally:
        for writer in writers:
            writer.transport.abort()


async def test_slow_callers_are_ended_and_others_are_served_meanwhile(
    secured: SecuredCluster, slow_callers: SlowCallers
):
    limits = HttpLimits()
    ordinary = [asyncio.wrap_future(caller) for caller in slow_callers.all]
    while not all(caller.done() for caller in ordinary):
        await check_served(secured)
        await asyncio.sleep(0.5)
    (head_s, _), (body_s, answer), (reader_s, _), (handshake_s, _) = [
        caller.result() for caller in ordinary
    ]
    assert limits.head_s - 1 < head_s < limits.head_s + 5
    assert limits.body_s - 1 < body_s < limits.body_s + 5
    assert limits.answer_s - 1 < reader_s < limits.answer_s + 5
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert limits.head_s - 1 < handshake_s < limits.head_s + 5
    assert await refusals(secured, secured.meta, Reason.REQUEST_TOO_SLOW) == 2
    assert await refusals(secured, secured.broker, Reason.REQUEST_TOO_SLOW) == 1
    assert await refusals(secured, secured.meta, Reason.ANSWER_NOT_TAKEN) == 1
    for did in ("POST /v1/subjects", "head of a request", "TLS handshake"):
        await until_noted(secured, Reason.REQUEST_TOO_SLOW.code, did)
    await until_noted(secured, Reason.ANSWER_NOT_TAKEN.code, "GET /v1/openapi.json")


async def test_flood_of_refused_handshakes_is_counted_and_fills_no_log(secured: SecuredCluster):
    """The last one here: it uses up the lines about handshakes that fail."""
    host, _, port = secured.broker.rpartition(":")
    flood = 4 * REFUSALS_PER_KIND.burst
    before = await refusals(secured, secured.broker, Reason.HANDSHAKE)

    async def knock() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GARBAGE\r\n\r\n" * 9)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                await reader.read()
        writer.transport.abort()

    began = time.monotonic()
    for _ in range(flood // 20):
        await asyncio.gather(*(knock() for _ in range(20)))
    lines_max = REFUSALS_PER_KIND.burst + (time.monotonic() - began) * REFUSALS_PER_KIND.per_s + 2
    assert await refusals(secured, secured.broker, Reason.HANDSHAKE) == before + flood
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"https://{secured.broker}/metrics", ssl=client_context(secured.tls)) as answer,
    ):
        left_out = re.search(r"keylane_audit_left_out_total (\d+)", await answer.text())
    assert left_out is not None
    assert int(left_out[1]) >= flood - lines_max
    await check_served(secured)
