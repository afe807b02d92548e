"""Plain HTTP: bodies that cannot be decoded, slow callers, and too many callers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from keylane.protocol.control import Done, ErrorBody, Leave
from keylane.protocol.errors import (
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    OverloadedError,
    Reason,
)
from keylane.protocol.frames import Append
from keylane.protocol.http.endpoint import Endpoint, Rights
from keylane.protocol.limits import CONTROL_BYTES_MAX
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.intake import HttpLimits
from keylane.rpc.server import ControlRoute, Server

BODY = msgspec.json.encode({"subject": "s", "group": "g", "session": "x"})
LONG_ANSWER_BYTES = 16 << 20
HALF_OF_LONG_S = 1.0
opened: list[asyncio.StreamWriter] = []
"""Of the running test; closed with its server."""


refused: list[KeylaneError] = []
"""What the server has counted."""


@asynccontextmanager
async def serving(desk, **limits: float) -> AsyncIterator[tuple[Server, list[object]]]:
    """A server with these limits, and the requests that its handler got."""
    asked: list[object] = []

    async def leave(body: object, _params: object) -> Done:
        asked.append(body)
        return Done()

    async def long(_body: object, _params: object) -> list[str]:
        return ["x" * LONG_ANSWER_BYTES]

    async def wait(_body: object, _params: object) -> Done:
        await asyncio.sleep(0.3)
        return Done()

    async def wait_long(_body: object, _params: object) -> Done:
        asked.append("begun")
        try:
            await asyncio.sleep(HALF_OF_LONG_S)
            asked.append("half")
            await asyncio.sleep(HALF_OF_LONG_S)
        finally:
            asked.append("ended")
        return Done()

    routes = [
        ControlRoute(Endpoint("GET", "/v1/poll", None, Done, Rights.READ, ""), wait_long),
        ControlRoute(Endpoint("POST", "/v1/change", None, Done, Rights.CONSUME, ""), wait_long),
        ControlRoute(Endpoint("POST", "/v1/leave", Leave, Done, Rights.CONSUME, ""), leave),
        ControlRoute(Endpoint("GET", "/v1/long", None, list, Rights.READ, ""), long),
        ControlRoute(Endpoint("GET", "/v1/wait", None, Done, Rights.READ, ""), wait),
    ]
    refused.clear()
    server = Server(
        routes, data_handler=desk, limits=HttpLimits(**limits), on_refusal=refused.append
    )
    await server.start("127.0.0.1", 0)
    try:
        yield server, asked
    finally:
        await server.stop()
        for writer in opened:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        opened.clear()


def head(*headers: str, length: int | None = None, path: str = "/v1/leave") -> bytes:
    """The head of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def get(path: str) -> bytes:
    """A GET, whole."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def connect(
    server: Server, *pieces: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send the pieces, each by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    opened.append(writer)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
    return reader, writer


async def send(server: Server, *pieces: bytes) -> asyncio.StreamReader:
    """As `connect`, for who only reads from then on."""
    return (await connect(server, *pieces))[0]


async def answer(reader: asyncio.StreamReader) -> tuple[int, KeylaneError | None]:
    """Status and typed error of the next answer."""
    async with asyncio.timeout(10):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(
            int(line.split(":")[1]) for line in lines if line.startswith("content-length")
        )
        body = await reader.readexactly(length)
    status = int(lines[0].split()[1])
    return status, None if status == 200 else msgspec.json.decode(body, type=ErrorBody).error()


async def closed_after(reader: asyncio.StreamReader) -> float:
    """Seconds until the server closes the connection."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    return loop.time() - began


PACKED = gzip.compress(BODY)
BROKEN = {
    "no gzip": (("Content-Encoding: gzip",), BODY),
    "gzip and more": (("Content-Encoding: gzip",), PACKED + b"x"),
    "gzip cut": (("Content-Encoding: gzip",), PACKED[:-9]),
    "gzip checksum": (("Content-Encoding: gzip",), PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:]),
    "no deflate": (("Content-Encoding: deflate",), b"\xff" * 40),
    "broken JSON": ((), BODY[:-1]),
    "no UTF-8": ((), b'{"subject": "\xff\xfe"}'),
    "nothing": ((), b""),
    "nested": ((), b"[" * 100_000),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_body_that_cannot_be_decoded_is_refused_with_400(desk, caplog, case):
    """The error is typed, no handler is called, and the log keeps silent, whether body and head
    come together or not.
    """
    headers, body = BROKEN[case]
    async with serving(desk) as (server, asked):
        for pieces in (
            (head(*headers, length=len(body)), body),
            (head(*headers, length=len(body)) + body,),
        ):
            status, error = await answer(await send(server, *pieces))
            assert (status, type(error)) == (400, InvalidRequestError)
        assert not asked
        assert not caplog.records


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "x"])
async def test_body_of_an_unknown_encoding_is_refused_with_415(desk, encoding):
    """It is not treated as plain JSON, even if it is valid JSON."""
    async with serving(desk) as (server, asked):
        reader = await send(server, head(f"Content-Encoding: {encoding}", length=len(BODY)) + BODY)
        status, error = await answer(reader)
        assert (status, type(error)) == (415, InvalidRequestError)
        assert not asked


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "identity"])
async def test_body_of_a_known_encoding_is_decoded(desk, encoding):
    """What was packed as the header says arrives."""
    packed = {"gzip": PACKED, "deflate": zlib.compress(BODY), "identity": BODY}[encoding.lower()]
    async with serving(desk) as (server, asked):
        reader = await send(
            server, head(f"Content-Encoding: {encoding}", length=len(packed)) + packed
        )
        assert await answer(reader) == (200, None)
        assert asked == [msgspec.json.decode(BODY, type=Leave)]


@pytest.mark.parametrize("packed", [True, False])
async def test_body_over_the_limit_is_refused_with_413(desk, packed):
    """Bytes count as they are after decoding: what unfolds to a gigabyte is not unfolded."""
    if packed:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        body = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
        headers = ("Content-Encoding: gzip",)
        assert len(body) < CONTROL_BYTES_MAX
    else:
        body, headers = bytes(CONTROL_BYTES_MAX + 1), ()
    async with serving(desk) as (server, asked):
        reader = await send(server, head(*headers, length=len(body)), body)
        status, error = await answer(reader)
        assert (status, type(error)) == (413, MessageTooLargeError)
        assert not asked


CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("chunks", [b"zz\r\nabc\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"-1\r\n\r\n"])
async def test_broken_chunk_is_refused_with_400(desk, caplog, apart, chunks):
    """A chunked body that is truncated within a size or a chunk is the caller's error."""
    async with serving(desk) as (server, asked):
        pieces = (head(CHUNKED), chunks) if apart else (head(CHUNKED) + chunks,)
        reader = await send(server, *pieces)
        status, error = await answer(reader)
        assert (status, type(error)) == (400, InvalidRequestError)
        assert not asked
        assert not caplog.records


async def test_bytes_that_are_no_http_are_refused_with_400(desk, caplog):
    """The error is typed, and a stranger's garbage writes nothing to the log."""
    async with serving(desk) as (server, _):
        status, error = await answer(await send(server, b"\0" * 100 + b"\r\n\r\n"))
        assert (status, type(error)) == (400, InvalidRequestError)
        assert [type(error) for error in refused] == [InvalidRequestError]
        assert not caplog.records


async def test_connection_without_a_whole_head_is_closed_in_time(desk):
    """Silence, a part of a head, and a head of which a line comes now and then: each ends after
    `head_s`.
    """
    async with serving(desk, head_s=0.6) as (server, _):
        silent = await send(server)
        partial = await send(server, b"POST /v1/leave HTTP/1.1\r\nHost: loc")
        dripping, drops = await connect(server, b"POST /v1/leave HTTP/1.1\r\n")

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                for number in range(100):
                    drops.write(f"X-{number}: 1\r\n".encode())
                    await asyncio.sleep(0.05)

        task = asyncio.create_task(drip())
        took = await asyncio.gather(*map(closed_after, (silent, partial, dripping)))
        task.cancel()
        assert max(took) < 3
        # The silent one is an idle connection, and was refused nothing.
        assert [error.reason for error in refused] == [Reason.REQUEST_TOO_SLOW] * 2


async def test_idle_connection_takes_another_request_within_its_time(desk):
    """A connection serves several requests, and is closed when it has been idle for `head_s`."""
    async with serving(desk, head_s=1.0) as (server, asked):
        reader, writer = await connect(server)
        for _ in range(3):
            writer.write(head(length=len(BODY)) + BODY)
            assert await answer(reader) == (200, None)
            await asyncio.sleep(0.5)
        assert len(asked) == 3
        assert await closed_after(reader) < 4
        assert not refused


async def test_body_that_comes_too_slowly_is_refused_with_408(desk):
    """A declared length whose bytes never come, or come one by one, holds a handler no longer than
    `body_s`.
    """
    async with serving(desk, body_s=0.4) as (server, asked):
        reader = await send(server, head(length=10_000) + b'{"sub')
        status, error = await answer(reader)
        assert (status, error.reason) == (408, Reason.REQUEST_TOO_SLOW)
        assert await closed_after(reader) < 5
        assert not asked


async def test_answer_that_the_client_does_not_read_is_given_up_in_time(desk):
    """A caller that reads nothing of a long answer loses its connection after `answer_s`."""
    async with serving(desk, answer_s=0.4) as (server, _):
        reader = await send(server, b"GET /v1/long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(1.5)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(LONG_ANSWER_BYTES)
        assert [error.reason for error in refused] == [Reason.ANSWER_NOT_TAKEN]


async def test_caller_that_leaves_before_its_answer_is_no_error(desk, caplog):
    """Consumers break off long polls all the time; a server's log says nothing of it."""
    async with serving(desk) as (server, _):
        _, writer = await connect(server, b"GET /v1/wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
        writer.transport.abort()
        await asyncio.sleep(0.6)
    assert not caplog.records


@pytest.mark.parametrize("reset", [False, True])
async def test_long_poll_ends_when_its_client_leaves(desk, caplog, reset):
    """Clients that connect and leave would accumulate calls in progress and their memory without
    limit.
    """
    async with serving(desk) as (server, asked):
        polls = [await connect(server, get("/v1/poll")) for _ in range(10)]
        assert asked == ["begun"] * 10
        for _, writer in polls:
            writer.transport.abort() if reset else writer.close()
        await asyncio.sleep(HALF_OF_LONG_S / 2)
        assert asked == ["begun"] * 10 + ["ended"] * 10
    assert not caplog.records
    assert not refused


async def test_long_poll_whose_client_left_at_once_ends_when_it_begins(desk, caplog):
    async with serving(desk) as (server, asked):
        for _ in range(10):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(get("/v1/poll"))
            writer.close()
        await asyncio.sleep(HALF_OF_LONG_S / 2)
        assert asked.count("begun") == asked.count("ended")
    assert not caplog.records


async def test_change_goes_on_when_its_client_leaves(desk):
    async with serving(desk) as (server, asked):
        _, writer = await connect(server, head(length=0, path="/v1/change"))
        assert asked == ["begun"]
        writer.close()
        await asyncio.sleep(2.3 * HALF_OF_LONG_S)
        assert asked == ["begun", "half", "ended"]


async def test_connection_beyond_the_limit_is_refused_with_503(desk):
    """Refused callers get the error at once; an open data-plane connection continues and needs no
    slot; a released slot is free.
    """
    async with serving(desk, connections_max=8) as (server, _):
        network = HttpNetwork()
        channel = await network.open_channel(server.address, timeout_ms=2_000)
        held = [await connect(server) for _ in range(8)]
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(5):
            status, error = await answer(await send(server))
            assert (status, type(error)) == (503, OverloadedError)
        with pytest.raises(OverloadedError):
            await network.control("POST", server.address, "/v1/leave", Done, timeout_ms=2_000)
        assert loop.time() - began < 2
        assert [type(error) for error in refused] == [OverloadedError] * 6
        await channel.call(Append(1), timeout_ms=2_000)
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(5):
            while True:
                status, _ = await answer(await send(server, head(length=len(BODY)) + BODY))
                if status == 200:
                    break
        await channel.close()
        await network.close()
