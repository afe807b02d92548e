"""Client and server exchange their versions: in a connection's first frame, and in a header of
every call.
"""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from keylane.protocol import endpoints
from keylane.protocol.control import Done, Health
from keylane.protocol.errors import (
    Fate,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    Reason,
)
from keylane.protocol.frames import Append, Hello, Refused, encode_frame
from keylane.protocol.membership.versions import VERSION, VERSION_HEADER
from keylane.rpc import http_network
from keylane.rpc import server as rpc_server
from keylane.rpc.access import credentials as greeting
from keylane.rpc.plane import data_plane
from keylane.rpc.server import ControlRoute
from support.raising import raises
from support.raw_frames import connect

APART = [
    ("0.4.0", "0.5.0", None),
    ("0.5.0", "0.5.9", None),
    ("0.6.0", "0.5.0", None),
    ("0.4.0", "0.6.0", Reason.CLIENT_TOO_OLD),
    ("0.6.0", "0.4.0", Reason.SERVER_TOO_OLD),
]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch):
    def give(client: str, server: str) -> None:
        monkeypatch.setattr(http_network, "VERSION", client)
        monkeypatch.setattr(greeting, "VERSION", client)
        monkeypatch.setattr(data_plane, "VERSION", server)
        monkeypatch.setattr(rpc_server, "VERSION", server)

    return give


async def health(_body: object, _params: object) -> Health:
    return Health(program="broker", ready=True)


async def asked_health(network, server) -> Health:
    return await network.control("GET", server.address, "/v1/health", Health, timeout_ms=5_000)


@pytest.mark.parametrize(("client", "server", "error"), APART)
async def test_connection_opens_when_versions_are_one_minor_apart(
    network, serve, desk, versions, client, server, error
) -> None:
    versions(client, server)
    there = await serve()
    if error is None:
        channel = await network.open_channel(there.address, timeout_ms=5_000)
        assert (await channel.call(Append(1), b"pay", timeout_ms=5_000))[1] == b"pay"
        await channel.close()
        return
    with raises(error, match="upgrade the ") as caught:
        await network.open_channel(there.address, timeout_ms=5_000)
    assert caught.value.hint
    assert (caught.value.client, caught.value.server) == (client, server)
    assert desk.arrived == []


@pytest.mark.parametrize(("client", "server", "error"), APART)
async def test_call_is_answered_when_versions_are_one_minor_apart(
    network, serve, versions, client, server, error
) -> None:
    versions(client, server)
    there = await serve(ControlRoute(endpoints.HEALTH, health))
    if error is None:
        assert (await asked_health(network, there)).ready
        return
    with raises(error, match="upgrade the "):
        await asked_health(network, there)


async def test_call_that_an_older_server_does_not_have_says_its_version(
    network, serve, versions
) -> None:
    """As that of a metaserver which knows of no copies."""
    versions("0.6.0", "0.5.0")
    there = await serve(ControlRoute(endpoints.HEALTH, health))
    text = "404 Not Found; .*: it is keylane 0.5.0, and this client is 0.6.0"
    with raises(InvalidRequestError, match=text) as caught:
        await network.control(
            "POST", there.address, "/v1/brokers/g1/copies", Done, body=None, timeout_ms=5_000
        )
    assert caught.value.fate is Fate.NOT_DONE


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ("0.1.0", Reason.SERVER_TOO_OLD),
        ("0.9.0", Reason.CLIENT_TOO_OLD),
        ("x", InvalidRequestError),
    ],
)
@pytest.mark.parametrize(
    ("method", "fate"), [("GET", Fate.NOT_DONE), ("POST", Fate.UNKNOWN), ("DELETE", Fate.UNKNOWN)]
)
async def test_call_that_a_server_of_another_version_has_carried_out_may_be_done(
    network,
    monkeypatch: pytest.MonkeyPatch,
    told: str,
    error: type[KeylaneError],
    method: str,
    fate: Fate,
) -> None:
    """The server checks no version, like one from before versions, and sends its own with the
    answer.
    """
    monkeypatch.setattr(http_network, "VERSION", "0.5.0")
    done: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        done.append(request.method)
        return web.json_response({}, headers={VERSION_HEADER: told})

    app = web.Application()
    app.router.add_route("*", "/v1/done", answer)
    async with TestServer(app) as there:
        with raises(error) as caught:
            await network.control(
                method, f"127.0.0.1:{there.port}", "/v1/done", Done, timeout_ms=5_000
            )
    assert caught.value.fate is fate
    assert done == [method]


async def test_client_without_a_version_is_refused_when_it_sends_its_first_frame(
    server, desk
) -> None:
    """Like clients from before versions; the client gets advice, and its connection is closed."""
    client = await connect(server.address)
    await client.send(encode_frame(5, Append(1), b"pay"))
    for expected in (5, 0):
        number, answer, _ = await client.answer()
        assert isinstance(answer, Refused)
        assert (number, answer.code) == (expected, Reason.CLIENT_TOO_OLD.code)
    assert await client.receive() is None
    assert desk.arrived == []


async def test_hello_without_a_readable_version_is_refused(server) -> None:
    client = await connect(server.address)
    await client.send(encode_frame(5, Hello("x" * 1_000)))
    _, answer, _ = await client.answer()
    assert isinstance(answer, Refused)
    assert answer.code == InvalidRequestError.code
    client.abort()


async def test_server_that_ends_in_the_greeting_can_be_tried_again(network, serve, wire) -> None:
    wire._port = 1  # nothing listens there
    with pytest.raises(NotSentError):
        await network.open_channel(wire.address, timeout_ms=5_000)


async def test_plain_http_needs_no_version_and_is_told_the_servers(serve) -> None:
    """Like curl."""
    there = await serve(ControlRoute(endpoints.HEALTH, health))
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{there.address}/v1/health") as response:
            assert response.status == 200
            assert response.headers[VERSION_HEADER] == VERSION
        headers = {VERSION_HEADER: "none"}
        async with session.get(f"http://{there.address}/v1/health", headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["code"] == InvalidRequestError.code


async def test_proxy_is_not_taken_for_its_broker_when_it_answers_in_its_place(
    network, serve
) -> None:
    """A proxy's 502 ended the connections of all clients while the broker behind it paused."""
    there = await serve()  # it has no call for its health, and says so
    assert await network._is_answering(there.address)

    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=502, text="Bad Gateway")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as proxy:
        assert not await network._is_answering(f"127.0.0.1:{proxy.port}")
