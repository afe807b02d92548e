"""Half-open TLS connections are bounded in number, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Self

import pytest
import uvloop

from keylane.protocol.control import Done
from keylane.protocol.errors import KeylaneError
from keylane.protocol.http.endpoint import Endpoint, Rights
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.intake import HttpLimits
from keylane.rpc.server import ControlRoute, Server
from keylane.rpc.tls.contexts import ServerTls
from support.access.certificates import CertificateShelf

MOST = 20


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class HalfOpened:
    """A server, and connections to it that end no handshake."""

    def __init__(self, folder: Path) -> None:
        async def done(_body: object, _params: object) -> Done:
            return Done()

        self.shelf, self.refused = CertificateShelf(folder), list[KeylaneError]()
        serving = self.shelf.serving()
        route = ControlRoute(Endpoint("GET", "/v1/x", None, Done, Rights.OPEN, ""), done)
        self.server = Server(
            [route], limits=HttpLimits(connections_max=MOST), on_refusal=self.refused.append,
            serving=serving, tls=ServerTls(serving),
        )  # fmt: skip
        self.writers: list[asyncio.StreamWriter] = []
        self.readers: list[asyncio.StreamReader] = []

    async def open(self, count: int) -> None:
        for number in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            writer.write(b"\x16\x03\x01"[: number % 4])
            self.readers.append(reader)
            self.writers.append(writer)

    async def ask(self) -> Done:
        network = HttpNetwork(self.shelf.client)
        try:
            address = self.server.address
            return await network.control("GET", address, "/v1/x", Done, timeout_ms=5_000)
        finally:
            await network.close()

    async def __aenter__(self) -> Self:
        await self.server.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_error: object) -> None:
        for writer in self.writers:
            writer.transport.abort()
        await self.server.stop()


async def ended(reader: asyncio.StreamReader) -> bool:
    """True as soon as the server has closed a connection."""
    try:
        async with asyncio.timeout(5):
            return await reader.read() == b""
    except ConnectionError:
        return True


@LOOPS
def test_server_closes_the_oldest_half_open_connections_and_serves_others(new_loop, tmp_path: Path):
    async def run() -> None:
        async with HalfOpened(tmp_path) as opened:
            await opened.open(200)
            assert await opened.ask() == Done()
            assert len(opened.refused) >= 200 - MOST
            assert {type(error).__name__ for error in opened.refused} == {"OverloadedError"}
            assert all(await asyncio.gather(*map(ended, opened.readers[: 200 - MOST])))
            assert not opened.readers[-1].at_eof()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@LOOPS
def test_server_closes_half_open_connections_and_its_socket_when_it_stops(new_loop, tmp_path: Path):
    async def run() -> None:
        async with HalfOpened(tmp_path) as opened:
            await opened.open(MOST // 2)
            await opened.server.stop()
            assert all(await asyncio.gather(*map(ended, opened.readers)))
            with socket.create_server(("127.0.0.1", opened.server.port)):
                pass

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
