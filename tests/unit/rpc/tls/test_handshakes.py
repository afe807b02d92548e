"""TLS at one end only, and certificates that are not accepted: real servers, one typed error
each.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import errno
import socket
import struct
from functools import partial

import aiohttp
import pytest

from keylane.protocol import endpoints
from keylane.protocol.control import Done
from keylane.protocol.errors import Fate, NotSentError, Reason, UnreachableError
from keylane.protocol.http.tls_settings import TlsSettings
from keylane.rpc.http_network import HttpNetwork, client_network
from keylane.rpc.server import ControlRoute, Server
from keylane.rpc.tls.contexts import ServerTls, client_context
from keylane.rpc.tls.handshakes import probe_tls
from keylane.rpc.tls.settings import ServingSettings
from support.access.certificates import NOW, CertificateShelf
from support.raising import raises


@pytest.fixture
def shelf(tmp_path) -> CertificateShelf:
    return CertificateShelf(tmp_path)


@contextlib.asynccontextmanager
async def serving(settings: ServingSettings | None, *, at_ms: int | None = None, port: int = 0):
    """A real server; `at_ms` is the time at which it looked at its certificate."""
    calls = []

    async def answer(_body, _params) -> Done:
        calls.append(1)
        return Done()

    tls = None
    if settings is not None:
        tls = ServerTls(settings) if at_ms is None else ServerTls(settings, lambda: at_ms)
    server = Server([ControlRoute(endpoints.LIVE, answer)], serving=settings, tls=tls)
    await server.start("127.0.0.1", port)
    try:
        yield server, calls
    finally:
        await server.stop()


async def call(address: str, tls: TlsSettings | None) -> Done:
    network = HttpNetwork(tls)
    try:
        live = endpoints.LIVE
        return await network.control(live.method, address, live.path, Done, timeout_ms=5_000)
    finally:
        await network.close()


async def open_channel(address: str, tls: TlsSettings | None) -> None:
    network = HttpNetwork(tls)
    try:
        await network.open_channel(address, timeout_ms=5_000)
    finally:
        await network.close()


async def refused(address: str, tls: TlsSettings | None, reason: Reason) -> None:
    """Control calls and channels fail with this error, which has advice."""
    for connect in (call, open_channel):
        with raises(reason) as caught:
            await connect(address, tls)
        assert type(caught.value) is NotSentError
        assert caught.value.fate is Fate.NOT_DONE
        assert caught.value.hint
        assert caught.value.address == address


async def test_call_arrives_over_tls_when_the_authority_is_trusted(shelf) -> None:
    async with serving(shelf.serving()) as (server, _calls):
        assert await call(server.address, shelf.client) == Done()
        assert await call(f"localhost:{server.port}", shelf.client) == Done()


async def test_certificate_is_refused_when_it_has_other_names(shelf) -> None:
    async with serving(shelf.serving("broker.example", "10.1.2.3")) as (server, calls):
        await refused(server.address, shelf.client, Reason.CERTIFICATE_NAME)
        await refused(f"localhost:{server.port}", shelf.client, Reason.CERTIFICATE_NAME)
        assert calls == []


async def test_certificate_is_refused_when_it_has_ended(shelf) -> None:
    start = NOW - dt.timedelta(days=20)
    settings = shelf.serving(start=start, days=10)
    during_ms = int((start + dt.timedelta(days=5)).timestamp() * 1000)
    async with serving(settings, at_ms=during_ms) as (server, calls):
        await refused(server.address, shelf.client, Reason.CERTIFICATE_ENDED)
        assert calls == []


async def test_certificate_is_refused_when_it_is_not_valid_yet(shelf) -> None:
    start = NOW + dt.timedelta(days=2)
    later_ms = int((start + dt.timedelta(days=1)).timestamp() * 1000)
    async with serving(shelf.serving(start=start), at_ms=later_ms) as (server, calls):
        await refused(server.address, shelf.client, Reason.CERTIFICATE_EARLY)
        assert calls == []


async def test_certificate_is_refused_when_its_authority_is_unknown(shelf, tmp_path) -> None:
    other = CertificateShelf(tmp_path, "another")
    async with serving(shelf.serving()) as (server, calls):
        await refused(server.address, other.client, Reason.CERTIFICATE_UNKNOWN)
        assert calls == []


async def test_plain_client_is_told_when_the_server_wants_tls(shelf) -> None:
    async with serving(shelf.serving()) as (server, calls):
        await refused(server.address, None, Reason.TLS_NEEDED)
        assert calls == []


async def test_tls_client_is_told_when_the_server_serves_none(shelf) -> None:
    async with serving(None) as (server, calls):
        await refused(server.address, shelf.client, Reason.TLS_MISSING)
        assert calls == []


async def test_client_is_told_when_the_server_wants_a_certificate(shelf, tmp_path) -> None:
    other = CertificateShelf(tmp_path, "another")
    settings = ServingSettings(**shelf.files(), tls_client_ca=shelf.ca)
    own = shelf.files("client", "someone")
    foreign = other.files("foreign", "someone")
    async with serving(settings) as (server, calls):
        await refused(server.address, shelf.client, Reason.CLIENT_CERTIFICATE)
        with raises(Reason.CLIENT_CERTIFICATE, match="this client has none"):
            await call(server.address, shelf.client)
        pair = str(foreign["tls_cert"]), str(foreign["tls_key"])
        stranger = TlsSettings(ca=str(shelf.ca), cert=pair[0], key=pair[1])
        await refused(server.address, stranger, Reason.CLIENT_CERTIFICATE)
        assert calls == []
        known = TlsSettings(ca=str(shelf.ca), cert=str(own["tls_cert"]), key=str(own["tls_key"]))
        assert await call(server.address, known) == Done()


async def test_client_is_told_when_its_own_certificate_ended_when_it_is_refused(shelf) -> None:
    """It names the file and the time."""
    start = NOW - dt.timedelta(days=20)
    cert, key = shelf.put("client", shelf.authority.issue(["client"], start=start, days=10))
    ended = TlsSettings(ca=str(shelf.ca), cert=str(cert), key=str(key))
    settings = ServingSettings(**shelf.files(), tls_client_ca=shelf.ca)
    async with serving(settings) as (server, calls):
        for connect in (call, open_channel):
            with raises(Reason.CLIENT_CERTIFICATE) as caught:
                await connect(server.address, ended)
            since = f"expired on {start + dt.timedelta(days=10):%Y-%m-%d %H:%M} UTC"
            assert since in caught.value.message
            assert str(cert) in caught.value.message
        assert calls == []


async def test_open_client_is_told_that_its_certificate_has_ended_when_the_server_is_back(
    shelf,
) -> None:
    """The address had answered before, so the fate of a call that changes something is unknown."""
    live = endpoints.LIVE
    lived = dt.datetime.now(dt.UTC) - NOW + dt.timedelta(seconds=2)
    pair = shelf.authority.issue(["client"], start=NOW, days=lived / dt.timedelta(days=1))
    cert, key = shelf.put("client", pair)
    settings = ServingSettings(**shelf.files(), tls_client_ca=shelf.ca)
    network = client_network(TlsSettings(ca=str(shelf.ca), cert=str(cert), key=str(key)))
    try:
        async with serving(settings) as (server, _calls):
            port = server.port
            ask = partial(network.control, address=server.address, path=live.path, answer=Done)
            assert await ask(live.method, timeout_ms=5_000) == Done()
        until = NOW + lived + dt.timedelta(seconds=1.1)  # certificates count whole seconds
        await asyncio.sleep((until - dt.datetime.now(dt.UTC)).total_seconds())
        async with serving(settings, port=port) as (server, calls):
            with raises(Reason.CLIENT_CERTIFICATE, match="expired on"):
                await ask("GET", timeout_ms=5_000)
            with pytest.raises(UnreachableError, match="expired on"):
                await ask("POST", timeout_ms=5_000)
            with raises(Reason.CLIENT_CERTIFICATE, match="expired on"):
                await network.open_channel(server.address, timeout_ms=5_000)
            assert calls == []
    finally:
        await network.close()


async def test_open_client_is_told_that_its_certificate_is_refused_when_it_is_cut_again(
    shelf, tmp_path
) -> None:
    """The first time may be the stop of the server."""
    live = endpoints.LIVE
    cert, key = shelf.put("client", shelf.authority.issue(["client"]))
    settings = ServingSettings(**shelf.files(), tls_client_ca=shelf.ca)
    network = client_network(TlsSettings(ca=str(shelf.ca), cert=str(cert), key=str(key)))
    ask = partial(network.control, live.method, path=live.path, answer=Done, timeout_ms=5_000)
    try:
        async with serving(settings) as (server, _calls):
            port = server.port
            assert await ask(server.address) == Done()
        other = CertificateShelf(tmp_path, "another")
        narrow = ServingSettings(**shelf.files(), tls_client_ca=other.ca)
        async with serving(narrow, port=port) as (server, _calls):
            caught = []
            for _ in range(2):
                with pytest.raises(UnreachableError) as refused:
                    await ask(server.address)
                caught.append(refused.value.reason)
            assert caught[-1] is Reason.CLIENT_CERTIFICATE
    finally:
        await network.close()


@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.EPIPE])
async def test_refused_certificate_is_known_by_a_reset_that_overtakes_the_alert(
    shelf, number: int
) -> None:
    def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linger = struct.pack("ii", 1, 0)
        plain = writer.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    context = ServerTls(shelf.serving()).context
    server = await asyncio.start_server(reset, "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    error = aiohttp.ClientOSError(number, "cut")
    try:
        problem = await probe_tls(address, error, client_context(shelf.client))
        assert problem.reason is Reason.CLIENT_CERTIFICATE
    finally:
        server.close()
        await server.wait_closed()


async def test_new_handshakes_use_the_new_certificate_when_it_is_reloaded(shelf, tmp_path) -> None:
    """The authority changes; an unusable file changes nothing."""
    settings = shelf.serving()
    other = CertificateShelf(tmp_path, "another")
    async with serving(settings) as (server, _calls):
        await call(server.address, shelf.client)
        other.files()  # over the same files
        server._tls.reload(settings)
        assert await call(server.address, other.client) == Done()
        await refused(server.address, shelf.client, Reason.CERTIFICATE_UNKNOWN)


async def test_authority_is_trusted_no_longer_when_it_is_taken_out_and_the_files_are_reloaded(
    shelf, tmp_path
) -> None:
    """Neither with a new handshake nor with an earlier session."""
    cert, key = shelf.put("client", shelf.authority.issue(("client.example",)))
    known = TlsSettings(ca=str(shelf.ca), cert=str(cert), key=str(key))
    clients = shelf.folder / "clients.pem"
    clients.write_bytes(shelf.ca.read_bytes())
    settings = ServingSettings(**shelf.files(), tls_client_ca=clients)
    async with serving(settings) as (server, _calls):
        assert await call(server.address, known) == Done()
        clients.write_bytes(CertificateShelf(tmp_path, "another").ca.read_bytes())
        server._tls.reload(settings)
        await refused(server.address, known, Reason.CLIENT_CERTIFICATE)


async def test_client_uses_its_replaced_certificate_when_it_connects_again(shelf, caplog) -> None:
    """The client stays open; half of a pair, or missing files, leave the old ones in use."""
    live = endpoints.LIVE
    accepted = CertificateShelf(shelf.folder, "accepted")
    cert, key = shelf.put("client", shelf.authority.issue(["client"]))
    tls = TlsSettings(ca=str(shelf.ca), cert=str(cert), key=str(key))
    settings = ServingSettings(**shelf.files(), tls_client_ca=accepted.ca)
    network = client_network(tls)
    try:
        async with serving(settings) as (server, calls):

            async def ask() -> Done:
                return await network.control(
                    live.method, server.address, live.path, Done, timeout_ms=5_000
                )

            with raises(Reason.CLIENT_CERTIFICATE):
                await ask()
            renewed = accepted.authority.issue(["client"])
            cert.write_bytes(renewed.certificate)
            for _ in range(2):
                with raises(Reason.CLIENT_CERTIFICATE):
                    await ask()
            assert caplog.text.count("TLS keeps using the previous files") == 1
            key.write_bytes(renewed.key)
            assert await ask() == Done()
            key.unlink()
            assert await ask() == Done()
            assert len(calls) == 2
    finally:
        await network.close()
