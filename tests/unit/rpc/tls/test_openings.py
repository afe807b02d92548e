"""Half-open TLS connections are bounded in number, and others are served meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

from keylane.protocol.control import Done
from keylane.protocol.errors import KeylaneError
from keylane.protocol.http.endpoint import Endpoint, Rights
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.intake import HttpLimits
from keylane.rpc.server import ControlRoute, Server
from keylane.rpc.tls.contexts import ServerTls
from support.access.certificates import CertificateShelf

MOST = 20


async def test_server_closes_the_oldest_half_open_connections_and_serves_others(tmp_path: Path):
    async def done(_body: object, _params: object) -> Done:
        return Done()

    shelf, refused = CertificateShelf(tmp_path), list[KeylaneError]()
    serving = shelf.serving()
    route = ControlRoute(Endpoint("GET", "/v1/x", None, Done, Rights.OPEN, ""), done)
    server = Server(
        [route], limits=HttpLimits(connections_max=MOST), on_refusal=refused.append,
        serving=serving, tls=ServerTls(serving),
    )  # fmt: skip
    await server.start("127.0.0.1", 0)
    network, writers = HttpNetwork(shelf.client), []
    try:
        for number in range(200):
            _reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"\x16\x03\x01"[: number % 4])
            writers.append(writer)
        answer = await network.control("GET", server.address, "/v1/x", Done, timeout_ms=5_000)
        assert answer == Done()
        assert len(refused) >= 200 - MOST
        assert {type(error).__name__ for error in refused} == {"OverloadedError"}
    finally:
        for writer in writers:
            writer.transport.abort()
        await network.close()
        await server.stop()
