"""Clients resume sessions only with the server that began them, and only while its certificate is
valid.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from keylane.protocol.errors import Reason
from keylane.protocol.http.tls_settings import TlsSettings
from keylane.rpc.tls import resumption
from keylane.rpc.tls.contexts import SHARED_MAX, ClientContexts, ServerTls, client_context
from keylane.rpc.tls.resumption import NAMES_MAX, READ_BYTES, ResumingContext
from keylane.rpc.tls.settings import ServingSettings
from support.access.certificates import CertificateShelf
from support.raising import raises

HOST = "127.0.0.1"
BLOCK = bytes(range(256)) * 4096


@pytest.fixture
def shelf(tmp_path: Path) -> CertificateShelf:
    return CertificateShelf(tmp_path)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=request.param)


@asynccontextmanager
async def serving(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that sends back what it gets; gives its port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def is_resumed(context: ssl.SSLContext, port: int, block: bytes = b"a") -> bool:
    """Whether a connection that carries these bytes there and back has resumed a session."""
    reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
    writer.write(block)
    assert await reader.readexactly(len(block)) == block
    resumed: bool = writer.get_extra_info("ssl_object").session_reused
    writer.close()
    await writer.wait_closed()
    return resumed


def test_second_connection_resumes_the_session_of_the_first(
    shelf: CertificateShelf, runner: asyncio.Runner
) -> None:
    async def run() -> None:
        context = client_context(shelf.client)
        async with serving(ServerTls(shelf.serving()).context) as port:
            assert not await is_resumed(context, port)
            for _ in range(3):
                assert await is_resumed(context, port, BLOCK)

    with runner:
        runner.run(run())


def test_session_is_resumed_after_a_connection_that_was_cut(
    shelf: CertificateShelf, runner: asyncio.Runner
) -> None:
    async def run() -> None:
        context = client_context(shelf.client)
        async with serving(ServerTls(shelf.serving()).context) as port:
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
            writer.write(b"a")
            await reader.readexactly(1)
            writer.transport.abort()
            assert await is_resumed(context, port)

    with runner:
        runner.run(run())


async def test_whole_handshake_is_made_where_the_server_has_restarted(
    shelf: CertificateShelf,
) -> None:
    context = client_context(shelf.client)
    for _ in range(2):
        async with serving(ServerTls(shelf.serving()).context) as port:
            assert not await is_resumed(context, port)
            assert await is_resumed(context, port)


async def test_certificate_of_a_client_is_known_in_a_resumed_session(
    shelf: CertificateShelf,
) -> None:
    cert, key = shelf.put("client", shelf.authority.issue(("client.example",)))
    tls = TlsSettings(ca=str(shelf.ca), cert=str(cert), key=str(key))
    settings = ServingSettings(**shelf.files(), tls_client_ca=shelf.ca)
    seen: list[object] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate = writer.get_extra_info("ssl_object").getpeercert()
        seen.append(certificate["subjectAltName"])
        writer.write(await reader.read(1))
        writer.close()

    server = await asyncio.start_server(note, HOST, 0, ssl=ServerTls(settings).context)
    context = client_context(tls)
    port = server.sockets[0].getsockname()[1]
    assert [await is_resumed(context, port) for _ in range(2)] == [False, True]
    assert seen == [(("DNS", "client.example"),)] * 2
    server.close()


async def test_session_is_not_offered_after_its_time(
    shelf: CertificateShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = client_context(shelf.client)
    async with serving(ServerTls(shelf.serving()).context) as port:
        monkeypatch.setattr(resumption, "RESUMED_S", 0)
        assert not await is_resumed(context, port)
        assert not await is_resumed(context, port)


async def test_session_is_not_offered_after_its_certificate_has_ended(
    shelf: CertificateShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = client_context(shelf.client)
    async with serving(ServerTls(shelf.serving(days=1)).context) as port:
        monkeypatch.setattr(resumption, "RESUMED_S", 1 << 30)
        await is_resumed(context, port)
        assert await is_resumed(context, port)
        later_s = resumption._now_s() + 2 * 86_400
        monkeypatch.setattr(resumption, "_now_s", lambda: later_s)
        wrapped = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=HOST)
        assert wrapped.session is None


async def test_times_of_a_session_are_those_of_the_first_handshake(
    shelf: CertificateShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a client that connects each minute would never verify the certificate again."""
    context = client_context(shelf.client)
    async with serving(ServerTls(shelf.serving()).context) as port:
        await is_resumed(context, port)
        until_s = context._sessions[HOST].until_s
        assert await is_resumed(context, port)
        assert context._sessions[HOST].until_s == until_s


async def test_client_looks_at_a_session_once_for_a_whole_handshake(
    shelf: CertificateShelf,
) -> None:
    """Each access leaks a copy, with Python versions that are in use (gh-116810)."""
    context = client_context(shelf.client)
    looks: list[object] = []

    class Looked(context.sslobject_class):  # type: ignore[name-defined, misc]
        @property
        def session(self) -> object:
            looks.append(self)
            return super().session

    context.sslobject_class = Looked
    async with serving(ServerTls(shelf.serving()).context) as port:
        assert not await is_resumed(context, port, BLOCK)
        assert len(looks) == 1
        for _ in range(3):
            assert await is_resumed(context, port, BLOCK)
    assert len(looks) == 1


async def test_sessions_have_a_limit(shelf: CertificateShelf) -> None:
    context = client_context(shelf.client)
    async with serving(ServerTls(shelf.serving()).context) as port:
        await is_resumed(context, port)
        kept = context._sessions[HOST]
        for number in range(NAMES_MAX * 2):
            context._sessions[f"host-{number}"] = kept
        assert not await is_resumed(client_context(shelf.client), port)
        del context._sessions[HOST]
        assert not await is_resumed(context, port)
        assert await is_resumed(context, port)
    assert len(context._sessions) == NAMES_MAX


async def test_reads_have_small_buffers(shelf: CertificateShelf) -> None:
    context = ServerTls(shelf.serving()).context
    asked: list[int] = []

    class Noted(context.sslobject_class):  # type: ignore[name-defined, misc]
        def read(self, size: int = 1024, buffer: object = None) -> object:
            data = super().read(size, buffer)
            asked.append(len(data))
            return data

    context.sslobject_class = Noted
    async with serving(context) as port:
        await is_resumed(client_context(shelf.client), port, BLOCK)
    assert 0 < max(asked) <= READ_BYTES


def test_clients_with_the_same_files_share_sessions_and_others_do_not(
    shelf: CertificateShelf, tmp_path: Path
) -> None:
    first = ClientContexts(shelf.client)
    context = first.of("a.example:1")
    assert isinstance(context, ResumingContext)
    assert first.of("a.example:2") is not context
    assert ClientContexts(shelf.client).of("a.example:1") is context
    cert, key = shelf.put("client", shelf.authority.issue(("client.example",)))
    own = TlsSettings(ca=str(shelf.ca), cert=str(cert), key=str(key))
    assert ClientContexts(own).of("a.example:1") is not context
    folder = tmp_path / "other"
    folder.mkdir()
    shelf.ca.write_bytes(CertificateShelf(folder, "another").ca.read_bytes())
    assert first.of("a.example:1") is context
    first.renew(shelf.client)
    assert first.of("a.example:1") is not context


def test_client_has_contexts_of_the_addresses_that_it_used_last(shelf: CertificateShelf) -> None:
    """Brokers return at other addresses: a client that ran for months kept a context of 17 KiB or
    more for each.
    """
    contexts = ClientContexts(shelf.client)
    first = contexts.of("a.example:1")
    for number in range(2 * SHARED_MAX):
        contexts.of(f"b.example:{number}")
        assert contexts.of("a.example:1") is first
    assert len(contexts._contexts) == SHARED_MAX


@pytest.mark.parametrize("change", ["other", "empty", "gone"])
async def test_client_goes_on_with_its_files_when_they_change_before_it_is_told(
    shelf: CertificateShelf, tmp_path: Path, change: str
) -> None:
    """To servers that it has not called yet, too; clients after it use the new files."""
    contexts = ClientContexts(shelf.client)
    authority = shelf.ca.read_bytes()
    folder = tmp_path / "other"
    folder.mkdir()
    if change == "gone":
        shelf.ca.unlink()
    else:
        other = CertificateShelf(folder, "another").ca.read_bytes()
        shelf.ca.write_bytes(other if change == "other" else b"")
    async with serving(ServerTls(shelf.serving()).context) as port:
        context = contexts.of(f"{HOST}:{port}")
        assert not await is_resumed(context, port)
        if change == "other":
            with pytest.raises(ssl.SSLCertVerificationError):
                await is_resumed(ClientContexts(shelf.client).of(f"{HOST}:{port}"), port)
        else:
            with raises(Reason.CERTIFICATE_FILE):
                ClientContexts(shelf.client)
        shelf.ca.write_bytes(authority)
        assert await is_resumed(contexts.of(f"{HOST}:{port}"), port)
