"""A web page of another site, open in a browser on this machine, cannot call a server."""

from __future__ import annotations

import aiohttp
import msgspec
import pytest

from keylane.protocol import endpoints
from keylane.protocol.control import Done, ErrorBody
from keylane.protocol.endpoints import DATA_PATH
from keylane.protocol.errors import Reason
from keylane.protocol.frames import Append, encode_frame
from keylane.rpc.origin import check_host, check_origins, is_host_pattern
from keylane.rpc.server import ControlRoute
from support.raising import raises
from support.raw_frames import UpgradeRefusedError, connect

FOREIGN = [
    "http://example.com",
    "http://example.com:7000",
    "https://127.0.0.1:7000",
    "http://127.0.0.1:7001",
    "http://127.0.0.1",
    "http://127.0.0.1.example.com:7000",
    "http://example.com@example.net:7000",
    "http://10.0.0.1:7000",
    "http://127.0.0.1:70000",
    "http://[::1",
    "file://",
    "null",
    "",
]


@pytest.mark.parametrize("origin", FOREIGN)
def test_origin_that_is_foreign_or_malformed_is_refused(origin: str):
    """Another host, port or scheme, a page without an origin, and invalid addresses are refused
    with a typed error.
    """
    with raises(Reason.ORIGIN) as caught:
        check_origins([origin], ["127.0.0.1"], 7000)
    assert caught.value.origin == origin
    with raises(Reason.ORIGIN):
        check_origins(["http://127.0.0.1:7000", origin], ["127.0.0.1"], 7000)


def test_long_origin_is_told_shortened():
    """Text from a stranger cannot fill the log."""
    with raises(Reason.ORIGIN) as caught:
        check_origins(["http://" + "a" * 5_000], ["127.0.0.1"], 7000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "origins",
    [
        [],
        ["http://127.0.0.1:7000"],
        ["http://localhost:7000"],
        ["http://[::1]:7000"],
        ["http://127.8.8.8:7000"],
    ],
)
def test_own_pages_and_programs(origins: list[str]):
    """No origin at all, and the server's own address under any of its names, are let through."""
    check_origins(origins, ["127.8.8.8"], 7000)


def test_page_of_a_tls_server_is_its_own_by_scheme_and_name():
    """With TLS a page comes by https; its default port is 443."""
    names = ["10.0.0.1", "a.example"]
    check_origins(["https://a.example:7000", "https://10.0.0.1:7000"], names, 7000, scheme="https")
    check_origins(["https://a.example"], names, 443, scheme="https")
    for origin in ("http://a.example:7000", "https://b.example:7000", "https://a.example"):
        with raises(Reason.ORIGIN):
            check_origins([origin], names, 7000, scheme="https")


async def test_no_foreign_page_opens_the_data_plane(server):
    """The handshake is answered with 403 and a typed error; without an origin, or with its own,
    there are answers.
    """
    with pytest.raises(UpgradeRefusedError) as caught:
        await connect(server.address, headers="Origin: http://example.com\r\n")
    assert caught.value.status == 403
    assert not server.connections
    for headers in ("", f"Origin: http://{server.address}\r\n"):
        client = await connect(server.address, headers=headers)
        await client.greet()
        await client.send(encode_frame(5, Append(1), b"pay"))
        number, _, payload = await client.answer()
        assert (number, payload) == (5, b"pay")
        client.abort()


async def test_no_foreign_page_makes_a_control_call(serve):
    """Neither what a page may send without asking nor the question before it comes to a handler."""
    asked: list[object] = []

    async def leave(body: object, _params: object) -> Done:
        asked.append(body)
        return Done()

    server = await serve(ControlRoute(endpoints.LEAVE, leave))
    place = f"http://{server.address}/v1/consumers/leave"
    body = msgspec.json.encode({"subject": "s", "group": "g", "session": "x"})
    foreign = {"Origin": "http://example.com", "content-type": "text/plain"}
    async with aiohttp.ClientSession() as session:
        for method in ("POST", "OPTIONS", "GET"):
            async with session.request(method, place, data=body, headers=foreign) as response:
                assert response.status == 403
                assert "Access-Control-Allow-Origin" not in response.headers
                error = msgspec.json.decode(await response.read(), type=ErrorBody).error()
                assert error.reason is Reason.ORIGIN
        assert not asked
        async with session.post(place, data=body) as response:
            assert response.status == 200
    assert len(asked) == 1


FOREIGN_HOSTS = [
    [],
    [""],
    ["evil.example"],
    ["evil.example:7000"],
    ["127.0.0.1.evil.example:7000"],
    ["localhost.evil.example"],
    ["10.0.0.1:7000"],
    ["0.0.0.0:7000"],
    ["[::]:7000"],
    ["[::1"],
    ["localhost@evil.example"],
    ["localhost:70000000"],
    ["localhost", "localhost"],
]


@pytest.mark.parametrize("hosts", FOREIGN_HOSTS)
def test_check_host_refuses_a_name_that_is_not_ours(hosts: list[str]):
    """Another name or address, several, or none: a page that had a name lead here is refused."""
    with raises(Reason.FOREIGN_HOST):
        check_host(hosts, ["127.0.0.1"])


@pytest.mark.parametrize(
    "named",
    [
        "localhost",
        "localhost:7000",
        "LOCALHOST:1",
        "127.0.0.1",
        "127.0.0.1:9",
        "[::1]:7000",
        "127.8.8.8:1",
        "here:7000",
    ],
)
def test_check_host_takes_loopback_and_the_name_listened_on(named: str):
    """With a port or without; a forwarded port is another than ours."""
    check_host([named], ["here"])


async def test_request_for_a_foreign_host_is_refused_everywhere(server):
    """Each method and path, those that do not exist and the data plane too, answers 421 with a
    typed error.
    """
    async with aiohttp.ClientSession() as session:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            for path in ("/v1/health", "/nothing", "/", DATA_PATH):
                async with session.request(
                    method, f"http://{server.address}{path}", headers={"Host": "evil.example"}
                ) as response:
                    assert response.status == 421
                    if method != "HEAD":
                        body = msgspec.json.decode(await response.read(), type=ErrorBody)
                        assert body.error().reason is Reason.FOREIGN_HOST
    with pytest.raises(UpgradeRefusedError) as caught:
        await connect(server.address, headers="Host: evil.example\r\n")
    assert caught.value.status == 421
    assert not server.connections


@pytest.mark.parametrize(
    ("site", "passes"),
    [
        ("cross-site", False),
        ("same-site", False),
        ("x", False),
        ("", False),
        ("same-origin", True),
        ("none", True),
    ],
)
async def test_request_of_a_foreign_page_is_refused_everywhere(server, site: str, passes: bool):
    """A plain GET has no Origin; its Sec-Fetch-Site says whose page asks."""
    headers = {"Sec-Fetch-Site": site}
    async with aiohttp.ClientSession() as session:
        for method in ("GET", "POST", "HEAD"):
            async with session.request(
                method, f"http://{server.address}/nothing", headers=headers
            ) as response:
                assert response.status == (404 if passes else 403)
    header = f"Sec-Fetch-Site: {site}\r\n"
    if passes:
        (await connect(server.address, headers=header)).abort()
    else:
        with pytest.raises(UpgradeRefusedError) as caught:
            await connect(server.address, headers=header)
        assert caught.value.status == 403


@pytest.mark.parametrize(
    ("host", "patterns"),
    [
        ("10.77.0.11:7100", ["10.77.0.0/16"]),
        ("10.77.0.11:7100", ["10.77.0.11"]),
        ("[fd00::7]:7100", ["fd00::/8"]),
        ("Pod-3.brokers:7100", ["pod-3.BROKERS"]),
        ("pod-3.brokers:7100", ["10.0.0.0/8", "*"]),
    ],
)
def test_scraper_is_answered_when_a_pattern_means_the_host(host: str, patterns: list[str]) -> None:
    check_host([host], {"broker-1"}, patterns)
    with raises(Reason.FOREIGN_HOST):
        check_host([host], {"broker-1"})


@pytest.mark.parametrize(
    ("host", "patterns"),
    [("10.78.0.11", ["10.77.0.0/16"]), ("evil.example", ["0.0.0.0/0", "::/0"]), ("", ["*"])],
)
def test_scraper_is_told_of_the_setting_when_no_pattern_means_the_host(
    host: str, patterns: list[str]
) -> None:
    with raises(Reason.FOREIGN_HOST) as caught:
        check_host([host], {"broker-1"}, patterns)
    assert "metrics_hosts" in caught.value.hint


@pytest.mark.parametrize("text", ["", "10.0.0.5/8", "a b", "http://x", "1.2.3.4/99"])
def test_host_pattern_is_refused_when_it_can_mean_no_host(text: str) -> None:
    assert not is_host_pattern(text)
