"""Serving: hostile input ends no more than its own connection, and only loopback is served."""

from __future__ import annotations

import asyncio
import re
import socket
import struct

import msgspec
import pytest

from keylane.protocol.control import ErrorBody
from keylane.protocol.endpoints import DATA_PATH
from keylane.protocol.errors import AddressError, FrameError, InvalidRequestError, Reason
from keylane.protocol.frames import (
    Append,
    Hello,
    Read,
    Refused,
    Welcome,
    encode_frame,
)
from keylane.protocol.limits import FRAME_BYTES_MAX
from keylane.protocol.membership.versions import VERSION
from keylane.rpc.listening import check_free, check_loopback
from keylane.rpc.server import Server
from support.raising import raises
from support.raw_frames import connect, sized, upgrade_request

WEBSOCKET = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"


def hostile(header: object, length: int | None = None) -> bytes:
    packed = msgspec.msgpack.encode(header)
    return sized(struct.pack("<I", len(packed) if length is None else length) + packed)


async def still_serves(network, server, neighbour) -> None:
    """The connection that was open before, and a new one, both get answers."""
    await neighbour.call(Append(1), timeout_ms=5_000)
    fresh = await network.open_channel(server.address, timeout_ms=2_000)
    await fresh.call(Append(1), timeout_ms=5_000)
    await fresh.close()


@pytest.mark.parametrize(
    "frame",
    [
        sized(b"\x00"),
        sized(b"\x00" * 4),
        b"\x82\x85\x12\x34\x56\x78hello",
        hostile([1, 5, 7], length=2**32 - 1),
        hostile([1, 5, 7], length=99),
        hostile([1, 5, 7], length=0),
        hostile([99, 5, 7]),
        hostile([65, 5, 7, "fsync", False]),
        hostile([1, 5]),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=[
        "a byte",
        "zeros",
        "WebSocket",
        "lying",
        "too long",
        "no header",
        "tag",
        "answer",
        "cut",
        "http",
    ],
)
async def test_bad_frame_is_refused_and_ends_its_connection_only(
    network, server, desk, caplog, frame
):
    """The sender of a bad frame gets a typed refusal and a closed connection; everybody else is
    served on.
    """
    neighbour = await network.open_channel(server.address, timeout_ms=2_000)
    bad = await connect(server.address)
    await bad.send(frame)
    number, answer, _ = await bad.answer()
    assert isinstance(answer, Refused)
    assert (number, answer.code) == (0, FrameError.code)
    assert await bad.receive() is None
    assert not desk.arrived
    assert not caplog.records
    await still_serves(network, server, neighbour)
    await neighbour.close()


async def test_frame_over_the_limit_ends_its_connection_only(network, server, desk):
    """The sender gets the limit in its error, and other clients are served."""
    neighbour = await network.open_channel(server.address, timeout_ms=2_000)
    bad = await connect(server.address)
    bad.transport.write(sized(bytes(FRAME_BYTES_MAX)))
    _, answer, _ = await bad.answer()
    assert isinstance(answer, Refused)
    assert f"over the limit of {FRAME_BYTES_MAX}" in answer.message
    assert await bad.receive() is None
    assert not desk.arrived
    await still_serves(network, server, neighbour)
    await neighbour.close()


async def test_word_of_a_server_that_hangs_up_reaches_the_caller(network, server, desk):
    """Pending calls of a refused frame's client get the reason."""
    channel = await network.open_channel(server.address, timeout_ms=2_000)
    held = asyncio.create_task(channel.call(Read(1, 0, 0), timeout_ms=5_000))
    while not desk.arrived:
        await asyncio.sleep(0.001)
    await channel._socket.send((hostile([99, 5, 7]),))
    with pytest.raises(Exception, match="unreadable request"):
        await held
    await channel.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00" * 100,
        b"POST /v1/partitions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 99999999999\r\n\r\n",
        b"GET " + DATA_PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"",
    ],
    ids=["zeros", "lying length", "no upgrade", "long path", "silence"],
)
async def test_bytes_that_are_no_http_leave_the_server_serving(network, server, raw):
    """Garbage on the port, or a connection dropped at once, disturbs no other client."""
    neighbour = await network.open_channel(server.address, timeout_ms=2_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(raw)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    del reader
    await still_serves(network, server, neighbour)
    await neighbour.close()


async def test_client_that_leaves_before_its_answer_disturbs_no_other(
    network, server, wire, desk, caplog
):
    """The work of a client that vanished is dropped without a word."""
    neighbour = await network.open_channel(server.address, timeout_ms=2_000)
    leaving = await network.open_channel(wire.address, timeout_ms=2_000)
    held = asyncio.create_task(leaving.call(Read(1, 0, 0), timeout_ms=5_000))
    while not desk.arrived:
        await asyncio.sleep(0.001)
    wire.cut()
    await asyncio.gather(held, return_exceptions=True)
    desk.let_go.set()
    await still_serves(network, server, neighbour)
    assert not caplog.records
    await leaving.close()
    await neighbour.close()


async def test_frame_is_the_same_in_one_piece_and_in_many(server):
    client = await connect(server.address)
    for frame in (encode_frame(4, Hello(VERSION)), encode_frame(5, Append(1), b"pay")):
        for byte in frame:
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
    assert (await client.answer())[:2] == (4, Welcome(VERSION))
    number, _, payload = await client.answer()
    assert (number, payload) == (5, b"pay")
    client.abort()


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ("", "and has none"),
        ("Connection: Upgrade\r\n", "and has none"),
        ("Upgrade: keylane/1\r\n", "not 'keylane/1'"),
        ("Connection: Upgrade\r\nUpgrade: keylane/2\r\n", "not 'keylane/2'"),
        (
            f"Connection: Upgrade\r\nUpgrade: websocket\r\n{WEBSOCKET}",
            "not 'websocket'",
        ),
    ],
    ids=["none", "no name", "no connection", "version", "WebSocket"],
)
async def test_request_for_another_protocol_is_refused_with_a_typed_error(server, headers, shown):
    """A plain GET, and a client of WebSockets, as one from before these frames."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(upgrade_request("localhost", headers))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    size = int(re.search(rb"Content-Length: (\d+)", head)[1])
    body = msgspec.json.decode(await reader.readexactly(size), type=ErrorBody)
    assert type(body.error()) is InvalidRequestError
    assert shown in body.message
    assert "proxy" in body.hint
    assert not server.connections
    writer.transport.abort()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_pass(host):
    """Every loopback address may be served."""
    check_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.1", "192.168.1.1", "8.8.8.8", "example.com", "", "127.0.0.1.x"],
)
async def test_other_addresses_are_not_bound(host):
    """Without TLS nothing but loopback is served, and the error says so."""
    server = Server([])
    with raises(Reason.INSECURE_HOST, match="is not a loopback address") as caught:
        await server.start(host, 0)
    assert "there is no TLS" in str(caught.value)
    assert "insecure_network" in str(caught.value)
    assert "another port" not in str(caught.value)
    await server.stop()


async def test_port_in_use_is_told(server):
    """A port in use is an AddressError that names it."""
    second = Server([])
    with pytest.raises(
        AddressError, match=f"cannot listen on 127.0.0.1:{server.port}: the port is in use"
    ) as caught:
        await second.start("127.0.0.1", server.port)
    assert caught.value.details == {"port": server.port}


@pytest.mark.parametrize("port", [-1, 65_536, 10**9])
async def test_impossible_port_is_told(port):
    """An invalid port number is an AddressError."""
    with pytest.raises(AddressError, match=f"ports are 0 to 65535, not {port}"):
        await Server([]).start("127.0.0.1", port)


async def test_address_is_checked_before_a_server_listens(server):
    """An address that the server could not use is refused before the server is created."""
    check_free("127.0.0.1", 0)
    with pytest.raises(AddressError, match="the port is in use"):
        check_free("127.0.0.1", server.port)
    with raises(Reason.INSECURE_HOST):
        check_free("0.0.0.0", 0)
    with pytest.raises(AddressError, match="ports are 0 to 65535"):
        check_free("127.0.0.1", 70_000)
    port = server.port
    await server.stop()
    check_free("127.0.0.1", port)


async def test_port_is_free_again_at_once(serve, network):
    """A server that stopped leaves its port to the next one, though connections were open."""
    first = await serve()
    channel = await network.open_channel(first.address, timeout_ms=2_000)
    await first.stop()
    second = await serve(port=first.port)
    assert second.address == first.address
    await channel.close()


async def test_address_of_an_ipv6_server_can_be_dialled(network, desk):
    """An IPv6 address is written with brackets, as clients need it."""
    if not socket.has_ipv6:
        return
    server = Server([], data_handler=desk)
    try:
        await server.start("::1", 0)
    except AddressError:  # a machine without ::1
        return
    channel = await network.open_channel(server.address, timeout_ms=2_000)
    await channel.call(Append(1), timeout_ms=5_000)
    await channel.close()
    await server.stop()
