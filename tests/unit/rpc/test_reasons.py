"""The reason of a failed connection is reported in plain words, whichever library raised it."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import traceback

import aiohttp
import pytest

from keylane.protocol.control import Health
from keylane.protocol.errors import Fate, NotSentError, OutcomeUnknownError
from keylane.rpc import http_network
from keylane.rpc.reasons import reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('::1', 1)"), "refused"),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111]"), "refused"),
        (OSError(errno.EADDRINUSE, "error while attempting to bind"), "in use"),
        (TimeoutError(), "timed out"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
        (ValueError(), "ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_reason_is_told_in_words_without_an_errno(error, words):
    """Known errors are described in a few words, others in their own."""
    assert words in reason(error)
    assert "Errno" not in reason(error)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_reason_says_refused_when_no_server_listens(network, host):
    """The error says that no program listens, and no more of what the library says."""
    with socket.socket() as taken:
        taken.bind(
            ("127.0.0.1", 0)
        )  # bound and not listening, so that no other program can listen there
        address = f"{host}:{taken.getsockname()[1]}"
        with pytest.raises(NotSentError) as caught:
            await network.control("GET", address, "/v1/health", Health, timeout_ms=5_000)
        assert caught.value.message == f"cannot reach {address}: connection refused"
        with pytest.raises(NotSentError) as caught:
            await network.open_channel(address, timeout_ms=5_000)
        told = f"cannot reach the broker at {address}: connection refused"
        assert caught.value.message == told


async def test_hint_names_keylane_dev_when_nothing_listens_at_its_address(network, monkeypatch):
    """A server of another cluster, which somebody named, is to be started again."""
    with socket.socket() as usual, socket.socket() as named:
        addresses = []
        for taken in (usual, named):
            taken.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(http_network, "META_DEFAULT", addresses[0])
        hints = []
        for address in addresses:
            with pytest.raises(NotSentError) as caught:
                await network.control("GET", address, "/v1/health", Health, timeout_ms=5_000)
            hints.append(caught.value.hint)
    assert hints == [f"{NotSentError.hint} keylane dev starts a cluster.", NotSentError.hint]
    assert "keylane dev" not in NotSentError.hint


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


async def test_traceback_has_one_line_of_the_cause_when_no_server_listens(network):
    """The system's error is there, without the calls inside of the libraries that passed it on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        calls = (
            lambda: network.control("GET", address, "/v1/health", Health, timeout_ms=5_000),
            lambda: network.open_channel(address, timeout_ms=5_000),
            lambda: network.get_text(address, "/metrics", timeout_ms=5_000),
        )
        for call in calls:
            with pytest.raises(NotSentError) as caught:
                await call()
            text = shown(caught.value)
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)
            assert text.startswith("ConnectionRefusedError: ")
            assert "site-packages" not in text


async def test_traceback_has_one_line_of_the_cause_when_a_server_ends_the_connection(network):
    """What aiohttp says of it stays."""

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        with pytest.raises(OutcomeUnknownError) as caught:
            await network.control("GET", address, "/v1/health", Health, timeout_ms=5_000)
    text = shown(caught.value)
    assert re.match(r"(aiohttp\S+|ConnectionResetError): ", text)
    assert "site-packages" not in text


@pytest.mark.parametrize(
    ("method", "path", "fate"),
    [
        ("GET", "/v1/subjects", Fate.NOT_DONE),
        ("POST", "/v1/partitions/bounds", Fate.NOT_DONE),
        ("POST", "/v1/subjects", Fate.UNKNOWN),
        ("DELETE", "/v1/subjects/s", Fate.UNKNOWN),
    ],
)
async def test_call_that_times_out_is_not_done_only_if_it_reads(network, method, path, fate):
    """The hint says so too."""
    came = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client leaves
        writer.close()
        came.set()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        with pytest.raises(OutcomeUnknownError, match="timed out") as caught:
            await network.control(method, address, path, Health, timeout_ms=200)
        await asyncio.wait_for(came.wait(), 60)
    assert caught.value.fate is fate
    assert ("may have taken effect" in caught.value.hint) == (fate is Fate.UNKNOWN)
