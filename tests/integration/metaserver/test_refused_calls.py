"""Refused calls, of metaservers that are asked again and again: each answers with a typed error,
changes nothing, and serves.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from msgspec.structs import replace

from keylane.protocol import endpoints
from keylane.protocol.control import AcceptFolder, BrokerHeartbeat, CreateSubject, Join
from keylane.protocol.errors import InvalidRequestError, MessageTooLargeError, Reason
from keylane.protocol.groups import SuspendGroup
from keylane.protocol.limits import CONTROL_BYTES_MAX
from keylane.protocol.membership.versions import VERSION
from support.brokers.hosting_broker import MetaAndBroker, running_house
from support.postgres import Postgres
from support.raising import raises

ILLEGAL_NAMES = ["../x", "a\0b", "a" * 300, "", ".", "-x", "a/b", "ü", "a b", "%"]
A = "a" * 16

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sqlite", "postgresql"])
async def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: Postgres
) -> AsyncIterator[MetaAndBroker]:
    """All tests ask it, so each shows too that it serves after what it has refused before."""
    database = {} if request.param == "sqlite" else {"database_url": postgres.url()}
    async with running_house(tmp_path_factory.mktemp("meta"), **database) as running:
        yield running


@pytest.mark.parametrize("name", ILLEGAL_NAMES)
async def test_illegal_name_is_refused_by_every_call(house: MetaAndBroker, name: str) -> None:
    """Nothing is stored."""
    await house.meta.create_subject(CreateSubject(subject="s"))
    before = await house.meta.call(endpoints.SUBJECTS)
    with raises(Reason.NAME_INVALID):
        await house.meta.create_subject(CreateSubject(subject=name))
    with raises(Reason.NAME_INVALID):
        await house.meta.call(endpoints.JOIN, Join(subject=name, group="g", session=A))
    with raises(Reason.NAME_INVALID):
        await house.meta.call(endpoints.JOIN, Join(subject="s", group=name, session=A))
    with raises(Reason.NAME_INVALID):
        await house.meta.broker_heartbeat(
            BrokerHeartbeat(
                version=VERSION, broker_group=name, broker_id="x", address="127.0.0.1:1"
            )
        )
    if name not in {"", "."}:  # those make other paths
        with raises(Reason.NAME_INVALID):
            await house.meta.route(name)
    assert (await house.meta.call(endpoints.GROUPS, subject="s")).groups == []
    assert await house.meta.call(endpoints.SUBJECTS) == before


async def test_text_with_a_nul_is_refused_by_every_call(house: MetaAndBroker) -> None:
    """PostgreSQL has no such text, and SQLite took it."""
    await house.meta.create_subject(CreateSubject(subject="nul"))
    report = BrokerHeartbeat(broker_group="new", broker_id="x", address="127.0.0.1:1")
    for call in (
        lambda: house.meta.call(
            endpoints.JOIN, Join(subject="nul", group="g", session=A, client="a\0b")
        ),
        lambda: house.meta.broker_heartbeat(replace(report, broker_id="a\0b")),
        lambda: house.meta.broker_heartbeat(replace(report, problem="\0")),
        lambda: house.meta.broker_heartbeat(replace(report, opening="\0")),
        lambda: house.meta.call(
            endpoints.SUSPEND_GROUP,
            SuspendGroup(client="\0", suspended=True),
            subject="nul",
            group="g",
        ),
        lambda: house.meta.call(endpoints.ACCEPT_FOLDER, AcceptFolder(address="\0"), group="new"),
    ):
        with pytest.raises(InvalidRequestError, match=r"U\+0000"):
            await call()
    assert (await house.meta.call(endpoints.GROUPS, subject="nul")).groups == []


@pytest.mark.parametrize(
    ("method", "path", "data", "status"),
    [
        ("POST", "/v1/subjects", b"{", 400),
        ("POST", "/v1/subjects", b"", 400),
        ("POST", "/v1/subjects", b"\xff\xfe", 400),
        ("POST", "/v1/subjects", b'{"subject": 5}', 400),
        ("POST", "/v1/subjects", b'{"subject": "x", "partitions": 0}', 400),
        ("POST", "/v1/subjects", b'{"subject": "x", "partitions": 1025}', 400),
        ("POST", "/v1/subjects", b'{"subject": "x", "order_strategy": "loose"}', 400),
        ("POST", "/v1/subjects", b" " * (CONTROL_BYTES_MAX + 1), 413),
        ("POST", "/v1/consumers/join", b'{"subject":"s","group":"g","session":"zz"}', 400),
        ("POST", "/v1/consumers/heartbeat", b'{"session":"aaaaaaaaaaaaaaaa","wait_ms":-1}', 400),
        ("GET", "/v1/subjects/s/route?known_version=x", None, 400),
        ("GET", "/v1/subjects/s/route?known_version=-2", None, 400),
        ("GET", "/v1/subjects/s/route?wait_ms=30001", None, 400),
        ("GET", "/v1/subjects/s/route?wait_ms=" + "9" * 5000, None, 400),
        ("GET", "/v1/subjects/s/route?order_strategy=loose", None, 400),
        ("GET", "/v1/nothing", None, 404),
        ("DELETE", "/v1/subjects", None, 405),
    ],
)
async def test_bad_request_is_refused(
    house: MetaAndBroker, method: str, path: str, data: bytes | None, status: int
) -> None:
    """Bad input gets a typed error body, changes nothing, and the server keeps serving."""
    before = await house.meta.call(endpoints.SUBJECTS)
    url = f"http://{house.address}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=None if data is None else io.BytesIO(data)) as response,
    ):
        assert response.status == status
        body = await response.json()
    kind = MessageTooLargeError if status == 413 else InvalidRequestError
    assert body["code"] == kind.code
    assert body["message"]
    assert await house.meta.call(endpoints.SUBJECTS) == before


@pytest.mark.parametrize("address", ["", "x", "127.0.0.1", "127.0.0.1:0", "a b:1", "h:99999"])
async def test_broker_heartbeat_is_refused_when_its_address_is_no_host_and_port(
    house: MetaAndBroker, address: str
) -> None:
    """A broker that reports anything but host:port is refused."""
    with pytest.raises(InvalidRequestError):
        await house.meta.broker_heartbeat(
            BrokerHeartbeat(version=VERSION, broker_group="right", broker_id="x", address=address)
        )


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:7101",
        "[::]:7101",
        "0.0.0.0:7101",
        "evil.example:7101",
        "127.0.0.1.evil.example:1",
        "metadata:80",
    ],
)
async def test_broker_heartbeat_is_refused_when_its_address_is_not_loopback(
    house: MetaAndBroker, address: str
) -> None:
    """No client is sent to another host: the known address stays, for a new name and for a known
    broker's name.
    """
    known = (await house.meta.health()).details["brokers"]
    for group, broker_id in (("right", "x"), ("left", house.broker.broker_id)):
        report = BrokerHeartbeat(
            version=VERSION, broker_group=group, broker_id=broker_id, address=address
        )
        with raises(Reason.BROKER_ADDRESS):
            await house.meta.broker_heartbeat(report)
    after = (await house.meta.health()).details["brokers"]
    assert [(broker["broker_group"], broker["address"]) for broker in after] == [
        (broker["broker_group"], broker["address"]) for broker in known
    ]


@pytest.mark.parametrize("wanted", [b"0", b"9", b"-1", b'"2"', b"null"])
async def test_number_of_copies_is_refused_when_no_group_may_have_it(
    house: MetaAndBroker, wanted: bytes
) -> None:
    """Clients check it as well: this is what another program may send."""
    url = f"http://{house.address}/v1/brokers/left/copies"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, data=b'{"wanted": %b}' % wanted) as response:
            assert response.status == 400
            assert (await response.json())["code"] == InvalidRequestError.code
        async with session.get(url) as response:
            assert (await response.json())["wanted"] == 1
