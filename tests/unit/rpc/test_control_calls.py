"""JSON calls over a real socket: errors with their status, limits, addresses in turn."""

from __future__ import annotations

import asyncio
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import aiohttp
import msgspec
import pytest

from keylane import Consumer, Producer, QueueReader
from keylane.protocol import endpoints
from keylane.protocol.access.capability import NO_CAPABILITY
from keylane.protocol.control import (
    CreateSubject,
    Done,
    ErrorBody,
    Health,
    Heartbeat,
    Leave,
    SubjectList,
)
from keylane.protocol.errors import (
    BrokerReadOnlyError,
    ConflictError,
    DataFolderError,
    DiskFullError,
    Fate,
    FencedError,
    FlushFailedError,
    ForeignServerError,
    InternalError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    NotSentError,
    OutcomeUnknownError,
    Reason,
    SessionUnknownError,
    StorageError,
    SubjectUnknownError,
    UnauthenticatedError,
)
from keylane.protocol.http.bodies import encode_json
from keylane.protocol.limits import CONTROL_BYTES_MAX
from keylane.rpc.client import BrokerClient, MetaClient
from keylane.rpc.environment import Environment
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.metaservers import check_program
from keylane.rpc.server import ControlRoute, Server, front_route, status_of


class SmallMetaserver:
    """Control handlers of a small metaserver."""

    def __init__(self, name: str = "metaserver", reason: str = "") -> None:
        self.name = name
        self.reason = reason
        self.asked: list[tuple[object, dict[str, str]]] = []
        self.error: Exception | None = None
        self.wait: asyncio.Event | None = None

    async def answer(self, body: object, params) -> object:
        self.asked.append((body, dict(params)))
        if self.wait is not None:
            await self.wait.wait()
        if self.error is not None:
            raise self.error
        if isinstance(body, Leave):
            return Done()
        if isinstance(body, CreateSubject):
            raise ConflictError(Reason.SUBJECT_EXISTS, subject=body.subject)
        if "subject" in params:
            raise SubjectUnknownError(subject=params["subject"])
        return Health(program=self.name, ready=True, reason=self.reason)

    def routes(self) -> list[ControlRoute]:
        return [
            ControlRoute(endpoints.HEALTH, self.answer),
            ControlRoute(endpoints.SUBJECT, self.answer),
            ControlRoute(endpoints.ROUTE, self.answer),
            ControlRoute(endpoints.CREATE_SUBJECT, self.answer),
            ControlRoute(endpoints.LEAVE, self.answer),
            ControlRoute(endpoints.HEARTBEAT, self.answer),
        ]


@pytest.fixture
def meta() -> SmallMetaserver:
    return SmallMetaserver()


@pytest.fixture
async def server(serve, meta):
    return await serve(*meta.routes())


@pytest.fixture
def client(network: HttpNetwork, server) -> MetaClient:
    return MetaClient(network, [server.address], timeout_ms=2_000)


async def test_call_gets_its_answer(client, meta):
    """A body arrives as it was sent, and the answer as it was given."""
    assert await client.health() == Health(program="metaserver", ready=True)
    assert await client.call(endpoints.LEAVE, Leave(session="s")) == Done()
    assert meta.asked == [(None, {}), (Leave(session="s"), {})]


async def test_names_in_paths_arrive_whole(client, meta):
    """A name with slashes, blanks or signs stays one part of the path; the server's error comes
    back typed.
    """
    for name in ("../../etc", "a b/c", "%2e%2e", "ключ", "x" * 300, "a?b#c"):
        with pytest.raises(SubjectUnknownError) as caught:
            await client.call(endpoints.SUBJECT, subject=name)
        assert caught.value.details == {"subject": name}
        assert meta.asked[-1][1] == {"subject": name}


async def test_text_with_a_lone_surrogate_is_refused_before_it_is_sent(network, server, meta):
    """Bytes of a command line that are no UTF-8; a UnicodeEncodeError named no call."""
    broken = "\udcff"
    with pytest.raises(InvalidRequestError, match="leave: not valid text"):
        await MetaClient(network, [server.address], timeout_ms=2_000).call(
            endpoints.LEAVE, Leave(session=broken)
        )
    with pytest.raises(InvalidRequestError, match="/x: not valid text"):
        await network.control(
            "GET", server.address, "/x", Done, query={"name": broken}, timeout_ms=2_000
        )
    assert meta.asked == []


async def test_queries_of_a_route_arrive(client, meta):
    """Version and wait of a route are in its query."""
    with pytest.raises(SubjectUnknownError):
        await client.route("s", known_version=3, wait_ms=10)
    assert meta.asked[-1][1] == {"known_version": "3", "wait_ms": "10", "subject": "s"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SubjectUnknownError(subject="s"), 404),
        (ConflictError(Reason.SUBJECT_EXISTS), 409),
        (FencedError(token=5, message="m"), 409),
        (SessionUnknownError(), 410),
        (InvalidRequestError("no"), 400),
        (BrokerReadOnlyError(), 503),
        (DiskFullError(path="/x"), 503),
        (StorageError("the database is locked"), 503),
        (DataFolderError("cannot open the database"), 503),
        (FlushFailedError(), 500),
        (NotSentError("the broker"), 503),
        (InternalError(), 500),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_error_has_its_status_and_comes_back_typed(client, meta, server, error, status):
    """Each error is answered with its HTTP status, and is the same error for the caller."""
    meta.error = error
    assert status_of(error) == status
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.address}/v1/health") as got,
    ):
        assert got.status == status
        body = msgspec.json.decode(await got.read(), type=ErrorBody)
        assert (body.code, body.name) == (error.code, type(error).__name__)
    with pytest.raises(type(error)) as caught:
        await client.health()
    assert (caught.value.details, caught.value.fate) == (error.details, error.fate)


async def test_fault_of_a_handler_is_an_internal_error(client, meta, caplog):
    """A handler that breaks answers 500 with a typed body, and its text stays in the server's
    log.
    """
    meta.error = ZeroDivisionError("a secret of the server")
    with pytest.raises(InternalError) as caught:
        await client.health()
    assert len(caught.value.request_id or "") == 16
    assert "secret" not in str(caught.value)
    assert "a secret of the server" in caplog.text
    meta.error = None
    assert (await client.health()).ready


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/subjects", b"", 400),
        ("POST", "/v1/subjects", b"{", 400),
        ("POST", "/v1/subjects", b"[]", 400),
        ("POST", "/v1/subjects", b'{"subject":"s","partitions":2000}', 400),
        ("POST", "/v1/subjects", b'{"subject":"\xff"}', 400),
        (
            "POST",
            "/v1/subjects",
            b'{"subject":"s","x":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
            400,
        ),
        ("POST", "/v1/subjects", bytes(CONTROL_BYTES_MAX + 1), 413),
        ("GET", "/v1/nothing", None, 404),
        ("DELETE", "/v1/health", None, 405),
        ("GET", "/v1/subjects/%00", None, 400),
    ],
    ids=["none", "cut", "list", "limit", "utf8", "nested", "oversize", "path", "method", "NUL"],
)
async def test_bad_input_is_a_typed_answer(
    client, server, meta, caplog, method, path, body, status
):
    """Bad JSON, a body too large, an unknown path: an ErrorBody with its status, and the server
    serves on.
    """
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method, f"http://{server.address}{path}", data=body and BytesIO(body)
        ) as got,
    ):
        assert got.status == status
        error = msgspec.json.decode(await got.read(), type=ErrorBody).error()
        if status == 413:
            assert type(error) is MessageTooLargeError
            assert error.details == {"limit_bytes": CONTROL_BYTES_MAX}
        else:
            assert type(error) in {InvalidRequestError, SubjectUnknownError}
    assert not caplog.records
    assert (await client.health()).ready


@pytest.mark.parametrize("by_reset", [True, False], ids=["reset", "closed"])
async def test_client_that_goes_away_in_its_body_is_no_traceback(
    client: MetaClient, server: Server, caplog: pytest.LogCaptureFixture, by_reset: bool
) -> None:
    host, _, port = server.address.rpartition(":")
    for _ in range(5):
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/subjects HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: 99\r\n\r\n{{"
        )
        writer.write(head.encode())
        await writer.drain()
        await asyncio.sleep(0.02)
        if by_reset:
            given = writer.get_extra_info("socket")
            given.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()
    await asyncio.sleep(0.1)
    assert (await client.health()).ready
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_body_over_the_limit_is_a_typed_error_for_the_caller(client, meta):
    """A call whose body is too large is refused before it is sent."""
    with pytest.raises(MessageTooLargeError):
        await client.call(endpoints.LEAVE, Leave(session="x" * (CONTROL_BYTES_MAX + 1)))
    assert not meta.asked


async def test_no_answer_in_time_leaves_the_outcome_unknown(network, server, meta):
    """A deadline that passes raises OutcomeUnknownError."""
    meta.wait = asyncio.Event()
    with pytest.raises(OutcomeUnknownError, match=r"GET /v1/health: \w"):
        await MetaClient(network, [server.address], timeout_ms=60).health()
    meta.wait.set()


async def test_long_call_ends_at_its_time_and_not_at_a_whole_second(network, server, meta):
    """Leases are renewed in time that is counted in milliseconds."""
    meta.wait = asyncio.Event()
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1 - loop.time() % 1)
    began = loop.time()
    with pytest.raises(OutcomeUnknownError):
        await MetaClient(network, [server.address], timeout_ms=5_050).health()
    assert loop.time() - began < 5.7
    meta.wait.set()


async def test_server_that_dies_leaves_the_outcome_unknown(network, wire, meta):
    """A connection that breaks in mid-call raises OutcomeUnknownError."""
    meta.wait = asyncio.Event()
    call = asyncio.create_task(
        MetaClient(network, [wire.address]).call(endpoints.LEAVE, Leave(session="s"))
    )
    async with asyncio.timeout(5):
        while not meta.asked:
            await asyncio.sleep(0.001)
    wire.cut()
    with pytest.raises(OutcomeUnknownError):
        await call
    meta.wait.set()


async def test_call_waits_longer_when_the_server_may(network, server, meta):
    """The deadline of a long poll is its wait and the time of a call together."""
    meta.wait = asyncio.Event()
    asyncio.get_running_loop().call_later(0.15, meta.wait.set)
    with pytest.raises(SubjectUnknownError):
        await MetaClient(network, [server.address], timeout_ms=100).route("s", wait_ms=5_000)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.1:99999", "no port", "", "a..b:7000", "[::1"]
)
async def test_call_is_not_sent_when_its_address_has_no_server(network, address):
    """No listener, and an address that is none: NotSentError, so the caller may repeat freely."""
    with pytest.raises(NotSentError) as caught:
        await MetaClient(network, [address], timeout_ms=2_000).health()
    assert caught.value.fate is Fate.NOT_DONE


@pytest.fixture
async def foreign_address():
    """The address of a web server that is none of ours."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()


async def test_metaserver_call_raises_foreign_server_error_when_another_program_answers(
    network, foreign_address
):
    with pytest.raises(ForeignServerError, match="not as a keylane server") as caught:
        await MetaClient(network, [foreign_address]).call(endpoints.SUBJECTS)
    assert caught.value.address == foreign_address
    assert caught.value.fate is Fate.UNKNOWN
    assert "which program listens there" in str(caught.value)


@pytest.mark.parametrize("silent_first", [True, False])
async def test_metaserver_call_raises_the_error_that_may_pass_when_another_address_is_foreign(
    network, foreign_address, silent_first
):
    """A metaserver that restarts will answer; the order of the addresses does not decide whether a
    client tries again.
    """
    addresses = ["127.0.0.1:1", foreign_address]
    with pytest.raises(NotSentError):
        await MetaClient(network, addresses if silent_first else addresses[::-1]).call(
            endpoints.SUBJECTS
        )


async def test_clients_raise_foreign_server_error_when_another_program_answers(foreign_address):
    """At the opening or at the first call: no client retries forever."""
    with pytest.raises(ForeignServerError):
        async with Producer(foreign_address):
            pass
    async with QueueReader(foreign_address, subject="s") as reader:
        with pytest.raises(ForeignServerError):
            await reader.queues()
    consumer = Consumer(foreign_address, subject="s", group="g")
    with pytest.raises(ForeignServerError):
        async with asyncio.timeout(30), consumer:
            await anext(aiter(consumer))


async def test_next_metaserver_is_asked_when_another_program_answers(
    network, server, foreign_address
):
    client = MetaClient(network, [foreign_address, server.address])
    assert (await client.health()).ready
    assert client._addresses[0] == server.address


@pytest.mark.parametrize(("program", "other"), [("metaserver", "broker"), ("broker", "metaserver")])
async def test_health_of_another_program_is_told(network, serve, program, other):
    """An address of a broker is none of a metaserver, though both have a health, and the other way
    round.
    """
    server = await serve(*SmallMetaserver(other).routes())
    client = MetaClient(network, [server.address])
    with pytest.raises(InvalidRequestError) as caught:
        await (
            client if program == "metaserver" else BrokerClient(network, server.address)
        ).health()
    assert (
        caught.value.message == f"{server.address} is the address of a {other}, not of a {program}"
    )


async def test_call_of_a_metaserver_names_the_broker_that_answers(network, serve):
    """As its health does: a consumer, a producer and an admin were given a broker's address."""
    server = await serve(*SmallMetaserver("broker").routes())
    environment = Environment(network=network)
    consumer = Consumer(server.address, subject="s", group="g", _environment=environment)
    text = f"{server.address} is the address of a broker, not of a metaserver"
    with pytest.raises(InvalidRequestError, match=text):
        await consumer.__aenter__()
    with pytest.raises(InvalidRequestError, match=text):
        await MetaClient(network, [server.address]).call(endpoints.SUBJECTS)
    with pytest.raises(InvalidRequestError, match=text):
        await Producer(server.address, _environment=environment).__aenter__()


@pytest.mark.parametrize(
    ("program", "other", "hint"),
    [
        ("metaserver", "broker", "Give the address of its metaserver: 127.0.0.1:7000, b:7000"),
        ("broker", "metaserver", "`keylane broker list` shows the addresses of brokers."),
    ],
)
def test_address_of_another_program_is_answered_with_the_right_one(program, other, hint):
    details = {"metaservers": ["127.0.0.1:7000", "b:7000"]} if other == "broker" else {}
    health = Health(program=other, ready=True, details=details)
    with pytest.raises(InvalidRequestError) as caught:
        check_program(program, "127.0.0.1:7001", health)
    assert caught.value.hint == hint


async def test_front_page_says_what_the_server_is_and_lists_its_calls(serve):
    """A person with a browser was told that this is another program than was meant."""
    server = await serve(front_route(endpoints.BROKER, "broker", "Take the metaserver."))
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            f"http://{server.address}/", headers={"Sec-Fetch-Site": "none", "Accept": "text/html"}
        ) as response,
    ):
        page = await response.text()
        assert (response.status, response.content_type) == (200, "text/plain")
    assert page.startswith("This is a broker of keylane ")
    assert "Take the metaserver." in page
    calls = page.partition("Calls:\n")[2].splitlines()
    assert {call.split()[1] for call in calls} >= {"/v1/health", "/metrics", "/v1/openapi.json"}
    assert all(endpoint.path in page for endpoint in endpoints.BROKER if endpoint.is_get)


async def test_call_names_the_broker_that_refuses_a_token(network, serve):
    """A broker with access control expects capabilities: its refusal reported a wrong token
    first.
    """
    broker = SmallMetaserver("broker")

    async def refuse(body: object, params) -> object:
        raise UnauthenticatedError(problem=NO_CAPABILITY)

    server = await serve(
        ControlRoute(endpoints.HEALTH, broker.answer), ControlRoute(endpoints.SUBJECT, refuse)
    )
    with pytest.raises(InvalidRequestError, match="is the address of a broker, not of a meta"):
        await MetaClient(network, [server.address]).call(endpoints.SUBJECT, subject="s")


async def test_call_raises_foreign_server_error_when_the_answer_is_not_http(network):
    """As of a server of SSH; its greeting was shown in the words of the HTTP library."""

    async def greet(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await writer.drain()
        await reader.read(100)
        writer.close()

    listener = await asyncio.start_server(greet, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    with pytest.raises(ForeignServerError, match="answered GET /v1/subjects not in HTTP"):
        await MetaClient(network, [address]).call(endpoints.SUBJECTS)
    listener.close()


async def test_next_metaserver_is_asked_when_a_broker_answers(network, serve, server):
    """A broker's address among the metaservers' is tried last afterwards."""
    broker = await serve(*SmallMetaserver("broker").routes()[:1])
    client = MetaClient(network, [broker.address, server.address])
    await client.call(endpoints.LEAVE, Leave(session="s"))
    assert (await client.health()).ready


async def test_heartbeat_asks_another_metaserver_next_when_a_broker_answers(network, serve, server):
    """One address is tried, and the caller gets the broker's error."""
    broker = await serve(*SmallMetaserver("broker").routes()[:1])
    client = MetaClient(network, [broker.address, server.address])
    with pytest.raises(InvalidRequestError, match="is the address of a broker"):
        await client.call(endpoints.HEARTBEAT, Heartbeat(session="s"))
    assert (await client.health()).ready


async def test_look_at_a_program_takes_what_is_left_of_the_calls_time(network, serve):
    """A heartbeat of 300 ms does not wait 5 s for the health of a server that does not know the
    call.
    """
    other = SmallMetaserver("broker")
    other.wait = asyncio.Event()
    server = await serve(*other.routes()[:1])
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(InvalidRequestError, match="404 Not Found"):
        await MetaClient(network, [server.address]).call(
            endpoints.HEARTBEAT, Heartbeat(session="s"), timeout_ms=300
        )
    assert loop.time() - began_s < 2
    other.wait.set()


async def test_call_that_the_server_does_not_have_is_told(network, server):
    """As that of a metaserver, made to a broker's address."""
    with pytest.raises(
        InvalidRequestError, match="404 Not Found; this server may be another program"
    ):
        await MetaClient(network, [server.address]).call(endpoints.VERIFY)


async def test_call_raises_foreign_server_error_when_the_answer_has_another_shape(network, server):
    """JSON of another form is not decoded in part."""
    with pytest.raises(ForeignServerError):
        await network.control("GET", server.address, "/v1/health", SubjectList, timeout_ms=2_000)


async def test_next_address_is_asked_when_one_is_not_there(network, server, meta):
    """Addresses are tried in turn, and the one that answered is tried first afterwards."""
    client = MetaClient(network, ["127.0.0.1:1", "127.0.0.1:2", server.address])
    assert (await client.health()).ready
    assert client._addresses[0] == server.address
    assert (await client.health()).ready
    assert len(meta.asked) == 2


async def test_calls_at_the_same_time_each_try_every_address(network, server):
    """Concurrent calls that reorder the addresses all find the one that answers."""
    client = MetaClient(network, ["127.0.0.1:1", server.address, "127.0.0.1:2"])
    answers = await asyncio.gather(*(client.health() for _ in range(20)))
    assert all(answer.ready for answer in answers)


async def test_call_is_not_sent_when_no_address_answers(network):
    """When no metaserver answers, the call was not sent, and every address stays in the list."""
    client = MetaClient(network, ["127.0.0.1:1", "127.0.0.1:2"])
    with pytest.raises(NotSentError):
        await client.health()
    assert sorted(client._addresses) == ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.fixture
async def pair(serve, server) -> tuple[list[str], SmallMetaserver]:
    """Addresses of the metaserver and of another, and that other."""
    other = SmallMetaserver(reason="the other")
    second = await serve(*other.routes())
    return [server.address, second.address], other


async def test_unknown_outcome_is_not_tried_elsewhere(network, pair, meta):
    """A call that may have been executed is not repeated: the caller decides, and finds a
    metaserver that answers.
    """
    addresses, other = pair
    meta.wait = asyncio.Event()
    client = MetaClient(network, addresses, timeout_ms=60)
    with pytest.raises(OutcomeUnknownError):
        await client.call(endpoints.HEARTBEAT, Heartbeat(session="s"))
    assert not other.asked
    assert client._addresses[0] == addresses[1]
    meta.wait.set()


async def test_repeatable_call_is_answered_by_another_metaserver_when_one_hangs(
    network, pair, meta
):
    """A metaserver that accepts calls but never answers is tried last."""
    addresses, other = pair
    meta.wait = asyncio.Event()
    client = MetaClient(network, addresses, timeout_ms=60)
    assert (await client.health()).reason == "the other"
    assert await client.call(endpoints.LEAVE, Leave(session="s")) == Done()
    assert len(other.asked) == 2
    assert len(meta.asked) == 2  # a question twice, the second time on a new connection
    meta.wait.set()


async def test_metaserver_without_its_database_is_asked_last(network, pair, meta):
    """Another metaserver can answer the call."""
    addresses, other = pair
    meta.error = StorageError("cannot reach the database", operation="connect")
    client = MetaClient(network, addresses)
    assert (await client.health()).reason == "the other"
    assert client._addresses[0] == addresses[1]
    other.error = meta.error
    with pytest.raises(StorageError):
        await client.health()


async def test_machine_that_takes_no_connection_was_sent_nothing(network, monkeypatch):
    """A call to a machine that is switched off never left: a full queue of connections answers as
    little.
    """
    monkeypatch.setattr("keylane.rpc.http_network.CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        address = deaf.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for waiter in waiting:
            waiter.setblocking(False)
            waiter.connect_ex(address)
        with pytest.raises(NotSentError, match="timed out"):
            await MetaClient(network, [f"127.0.0.1:{address[1]}"]).call(
                endpoints.LEAVE, Leave(session="s")
            )
        for waiter in waiting:
            waiter.close()


async def test_broker_answers_control_calls_on_the_same_port(network, serve):
    """Data plane and control calls share one address."""
    server = await serve(*SmallMetaserver("broker").routes())
    client = BrokerClient(network, server.address)
    assert (await client.health()).program == "broker"
    with pytest.raises(InvalidRequestError, match="404"):
        await client.control(endpoints.PARTITION, id=7)
    await client.close()


async def test_heartbeat_is_json_of_its_type():
    """What is sent is what the drawing in protocol/control.py says."""
    assert encode_json(Heartbeat(session="s", drained=(1,))) == (
        b'{"session":"s","known_version":-1,"drained":[1],"parked":[],"holding":null,"wait_ms":0,"suspended":null,"group_id":0,"unreached":null}'
    )


async def test_call_is_not_sent_when_no_thread_looks_up_the_name(free_port):
    """A program may shut down the thread pool of its event loop, in which names of hosts are looked
    up.
    """
    with ThreadPoolExecutor(1) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
    network = HttpNetwork()
    try:
        meta = MetaClient(network, (f"localhost:{free_port}",))
        with pytest.raises(NotSentError, match="no thread can resolve the name localhost"):
            await meta.health()
        with pytest.raises(NotSentError, match="no thread can resolve the name localhost"):
            await network.open_channel(f"localhost:{free_port}", timeout_ms=1_000)
    finally:
        await network.close()


SILENT = NotSentError("broker group g1 is silent")
CREATE = CreateSubject(subject="orders", partitions=1)


@pytest.mark.parametrize(
    ("endpoint", "body", "refusal", "fate"),
    [
        (endpoints.CREATE_SUBJECT, CREATE, None, Fate.UNKNOWN),
        (endpoints.CREATE_SUBJECT, CREATE, SILENT, Fate.UNKNOWN),
        (endpoints.ROUTE, None, None, Fate.NOT_DONE),  # it changes nothing
    ],
)
async def test_refusal_after_a_metaserver_without_an_answer_leaves_open_what_was_done(
    network, serve, endpoint, body, refusal, fate
):
    hanging, refusing = SmallMetaserver(), SmallMetaserver()
    hanging.wait, refusing.error = asyncio.Event(), refusal
    servers = [await serve(*each.routes()) for each in (hanging, refusing)]
    client = MetaClient(network, [each.address for each in servers], timeout_ms=300)
    with pytest.raises(KeylaneError) as caught:
        await client.call(endpoint, body, **({} if body else {"subject": "orders"}))
    hanging.wait.set()
    assert hanging.asked
    assert refusing.asked
    assert caught.value.fate is fate
