"""TLS connections in their handshake are limited in number, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Self

import pytest
import uvloop

from keylane.protocol.control import Done
from keylane.protocol.errors import KeylaneError, Reason
from keylane.protocol.http.endpoint import Endpoint, Rights
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.intake import HttpLimits
from keylane.rpc.server import ControlRoute, Server
from keylane.rpc.tls.contexts import ServerTls, client_context
from keylane.rpc.tls.listeners import listen
from keylane.rpc.tls.server_handshakes import TlsHandshakes
from keylane.rpc.tls.settings import ServingSettings
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
            [route],
            limits=HttpLimits(connections_max=MOST),
            on_refusal=self.refused.append,
            serving=serving,
            tls=ServerTls(serving),
        )
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
    except (ConnectionError, ssl.SSLError):  # its alert
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
def test_refused_handshake_is_told_with_the_host_that_began_it(new_loop, tmp_path: Path) -> None:
    """The connection has ended by then: the client shows no certificate."""

    async def run() -> None:
        shelf, told = CertificateShelf(tmp_path), list[tuple[str, str]]()
        wanting = ServingSettings(**shelf.files(), tls_client_ca=shelf.ca)
        context = ServerTls(wanting).context
        openings = TlsHandshakes(
            lambda: context,
            asyncio.Protocol,
            limit=MOST,
            handshake_s=5,
            on_refused=lambda error, host: told.append((error.reason, host)),
        )
        listeners = await listen("127.0.0.1", 0, backlog=MOST, on_accepted=openings.enter)
        try:
            port = listeners.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=client_context(shelf.client)
            )
            assert await ended(reader)
            writer.transport.abort()
            async with asyncio.timeout(5):
                while not told:
                    await asyncio.sleep(0.01)
        finally:
            listeners.close()
            await openings.close()
        assert told == [(Reason.HANDSHAKE, "127.0.0.1")]

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
