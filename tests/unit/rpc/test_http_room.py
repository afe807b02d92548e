"""Plain HTTP answers with messages have their own memory budget; headers reach a handler by their
names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from keylane.protocol.control import Done
from keylane.protocol.http.endpoint import Endpoint, Rights
from keylane.rpc import server as server_module
from keylane.rpc.answer_budget import reserve_bytes
from keylane.rpc.intake import HttpLimits
from keylane.rpc.server import ControlRoute, Params, Reply, Server

ANSWER_BYTES = 8 << 20
"""More than the sockets of both ends take without a reader."""


@asynccontextmanager
async def serving(*routes: ControlRoute) -> AsyncIterator[Server]:
    server = Server(routes, limits=HttpLimits(answer_s=5.0))
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def reading(server: Server, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """A client that has sent a request, and reads when the test does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 10)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    try:
        yield reader
    finally:
        writer.transport.abort()


async def test_answer_waits_while_clients_that_do_not_read_have_the_room(monkeypatch):
    """It is prepared once the first client has received its own answer, or has left."""
    monkeypatch.setattr(server_module, "HTTP_BYTES_MAX", ANSWER_BYTES + 1)
    made = 0

    async def long(_body: object, _params: Params) -> str:
        nonlocal made
        await reserve_bytes(ANSWER_BYTES)
        await reserve_bytes(ANSWER_BYTES)  # an answer that has room keeps it
        made += 1
        return "x" * ANSWER_BYTES

    endpoint = Endpoint("GET", "/v1/long", None, str, Rights.READ, "")
    async with serving(ControlRoute(endpoint, long)) as server:
        async with reading(server, "/v1/long"):
            while not made:
                await asyncio.sleep(0.01)
            async with reading(server, "/v1/long") as second:
                await asyncio.sleep(0.2)
                assert made == 1
                first_line = asyncio.create_task(second.readline())
                await asyncio.sleep(0.05)
                assert not first_line.done()
                first_line.cancel()
        async with reading(server, "/v1/long") as third, asyncio.timeout(20):
            assert await third.readline() == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("query", "headers", "status"),
    [
        ("?a=1", [("Name", "n")], 207),
        ("", [], 207),
        ("?a=1&a=2", [], 400),
        ("", [("Name", "n"), ("Name", "m")], 400),
        ("?Name=n", [], 400),
    ],
)
async def test_handler_gets_headers_and_queries_that_are_given_once(query, headers, status):
    asked: list[dict[str, str]] = []

    async def named(body: bytes, params: Params) -> Reply:
        asked.append({**params, "body": body.decode()})
        return Reply(Done(), 207)

    endpoint = Endpoint(
        "POST", "/v1/named", bytes, Done, Rights.PRODUCE, "", query=("a",), headers=("Name",)
    )
    async with serving(ControlRoute(endpoint, named)) as server, aiohttp.ClientSession() as session:
        url = f"http://{server.address}/v1/named{query}"
        async with session.post(url, data=b"{", headers=headers) as response:
            assert response.status == status
    if status == 207:
        assert asked == [{"body": "{", **({"a": "1", "Name": "n"} if query else {})}]
