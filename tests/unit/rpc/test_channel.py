"""The data plane over a real socket: order, pipelining, deadlines, ends of connections."""

from __future__ import annotations

import asyncio
import time

import pytest

from keylane.protocol.errors import (
    Fate,
    FencedError,
    InternalError,
    MessageTooLargeError,
    NotSentError,
    OutcomeUnknownError,
    OverloadedError,
    UnreachableError,
)
from keylane.protocol.frames import (
    Append,
    Batches,
    CancelScheduled,
    ListParked,
    Pull,
    PullShared,
    Read,
    Release,
    Request,
    encode_frame,
)
from keylane.protocol.limits import FRAME_BYTES_MAX, IN_FLIGHT_PER_CONNECTION_MAX
from keylane.rpc.client import BrokerClient
from keylane.rpc.network import Call
from keylane.rpc.server import Server


@pytest.fixture
async def channel(network, server):
    channel = await network.open_channel(server.address, timeout_ms=2_000)
    yield channel
    await channel.close()


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def test_payload_goes_there_and_back(channel):
    """Header and payload of a call and of its answer arrive whole, empty and large ones too."""
    for payload in (b"", b"x", bytes(range(256)) * 4_000):
        answer, rest = await channel.call(Append(1), payload, timeout_ms=5_000)
        assert answer.durable == "fsync"
        assert rest == payload


async def test_calls_arrive_in_the_order_they_were_made(channel, desk):
    """Hundreds of calls made at once reach the handler in the order in which they were made."""
    calls = [
        channel.call(Append(number), bytes(number * 37), timeout_ms=5_000)
        for number in range(1_000, 1_400)
    ]
    answers = await asyncio.gather(*calls)
    assert [request.partition_id for request in desk.arrived] == list(range(1_000, 1_400))
    assert [answer.base_offset for answer, _ in answers] == list(range(400))


async def test_held_call_does_not_hold_up_those_after_it(channel, desk):
    """Answers come in any order: a call the server holds back lets later ones pass."""
    held = asyncio.create_task(channel.call(Read(1, 7, 0), timeout_ms=5_000))
    await until(lambda: desk.arrived)
    answer, _ = await channel.call(Append(1), timeout_ms=5_000)
    assert answer.base_offset == 1
    assert not held.done()
    desk.let_go.set()
    answer, _ = await held
    assert isinstance(answer, Batches)
    assert answer.next_offset == 7


async def test_answers_find_their_own_calls(channel, desk):
    """A hundred calls held together and let go at once each get their own answer."""
    calls = [asyncio.create_task(channel.call(Read(1, n, n), timeout_ms=5_000)) for n in range(100)]
    await until(lambda: len(desk.arrived) == 100)
    desk.let_go.set()
    answers = await asyncio.gather(*calls)
    assert [(a.next_offset, len(rest)) for a, rest in answers] == [(n, n) for n in range(100)]


async def test_more_calls_than_fit_in_flight_wait_their_turn(channel, desk):
    """The server accepts a limited number of calls of a connection, and reads on when one ends."""
    count = IN_FLIGHT_PER_CONNECTION_MAX + 50
    calls = [
        asyncio.create_task(channel.call(Read(1, n, 0), timeout_ms=20_000)) for n in range(count)
    ]
    await until(lambda: len(desk.arrived) == IN_FLIGHT_PER_CONNECTION_MAX)
    await asyncio.sleep(0.05)
    assert len(desk.arrived) == IN_FLIGHT_PER_CONNECTION_MAX
    desk.let_go.set()
    answers = await asyncio.gather(*calls)
    assert [answer.next_offset for answer, _ in answers] == list(range(count))


async def test_refusal_is_the_same_error_here(channel):
    """The error a handler raises is raised by the call, with code, details and fate."""
    with pytest.raises(FencedError) as caught:
        await channel.call(Append(13), timeout_ms=5_000)
    assert caught.value.details == {"partition_id": 13, "message": "not the text", "token": 5}
    assert caught.value.fate is Fate.NOT_DONE


async def test_fault_of_the_server_is_told_without_its_secrets(channel, caplog):
    """A handler that breaks is an InternalError of unknown fate; its text stays in the server's
    log.
    """
    with pytest.raises(InternalError) as caught:
        await channel.call(Append(14), timeout_ms=5_000)
    assert caught.value.fate is Fate.UNKNOWN
    assert len(caught.value.request_id or "") == 16
    assert "secret" not in str(caught.value)
    assert "a secret of the server" in caplog.text
    answer, _ = await channel.call(Append(1), timeout_ms=5_000)
    assert answer.durable == "fsync"


@pytest.mark.parametrize(
    ("kind", "fate"), [(Read, Fate.NOT_DONE), (Append, Fate.UNKNOWN), (Pull, Fate.UNKNOWN)]
)
async def test_request_without_an_answer_is_not_done_only_if_it_reads(kind, fate):
    """A pull renews the lock of its partition."""
    call = Call(asyncio.get_running_loop().create_future(), None, kind, 1_000)
    call.fail_unanswered("the connection ended")
    with pytest.raises(OutcomeUnknownError) as caught:
        await call.future
    assert caught.value.fate is fate


async def test_no_answer_in_time_leaves_the_outcome_unknown(channel, desk):
    """A deadline that passes raises OutcomeUnknownError; the late answer does no harm."""
    before = time.monotonic()
    with pytest.raises(OutcomeUnknownError, match="within 60 ms"):
        await channel.call(Read(1, 7, 0), timeout_ms=60)
    assert 0.05 <= time.monotonic() - before < 2
    desk.let_go.set()
    answer, _ = await channel.call(Read(1, 8, 0), timeout_ms=5_000)
    assert answer.next_offset == 8
    assert not channel.closed


async def test_call_with_less_time_ends_before_older_ones_with_more(channel, desk):
    """One timer serves all calls: it is set for the earliest deadline, and then for the next."""
    long = channel.begin(Read(1, 1, 0), timeout_ms=300)
    short = channel.begin(Read(1, 2, 0), timeout_ms=60)
    endless = channel.begin(Read(1, 3, 0), timeout_ms=60_000)
    with pytest.raises(OutcomeUnknownError, match="within 60 ms"):
        await short
    assert not long.done()
    with pytest.raises(OutcomeUnknownError, match="within 300 ms"):
        await long
    desk.let_go.set()
    answer, _ = await endless
    assert answer.next_offset == 3


async def test_call_of_a_closed_channel_fails_in_its_future(channel):
    """`begin` raises nothing, so a caller handles errors in one place."""
    await channel.close()
    call = channel.begin(Append(1), timeout_ms=5_000)
    assert isinstance(call.exception(), NotSentError)


async def test_cancelled_call_leaves_the_channel_whole(channel, desk):
    """A caller that gives up takes nothing with it."""
    held = asyncio.create_task(channel.call(Read(1, 7, 0), timeout_ms=5_000))
    await until(lambda: desk.arrived)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    desk.let_go.set()
    await channel.call(Append(1), timeout_ms=5_000)


async def test_frame_over_the_limit_is_refused_before_it_is_sent(channel, desk):
    """A call too large for the other side is refused here; the connection and its other calls go
    on.
    """
    with pytest.raises(MessageTooLargeError) as caught:
        await channel.call(Append(1), bytes(FRAME_BYTES_MAX), timeout_ms=5_000)
    assert caught.value.fate is Fate.NOT_DONE
    assert not desk.arrived
    await channel.call(Append(1), timeout_ms=5_000)


async def test_answer_over_the_limit_is_refused_by_the_server(channel, desk):
    """A handler's answer too large for a frame becomes a typed refusal; the connection stays
    open.
    """
    desk.let_go.set()
    with pytest.raises(MessageTooLargeError):
        await channel.call(Read(1, 7, FRAME_BYTES_MAX), timeout_ms=5_000)
    await channel.call(Append(1), timeout_ms=5_000)


async def test_server_that_stops_leaves_outcomes_unknown(channel, server, desk):
    """Pending calls fail with OutcomeUnknownError when the server stops; later ones are not
    sent.
    """
    held = asyncio.create_task(channel.call(Read(1, 7, 0), timeout_ms=5_000))
    await until(lambda: desk.arrived)
    await server.stop()
    with pytest.raises(OutcomeUnknownError):
        await held
    assert channel.closed
    with pytest.raises(NotSentError) as caught:
        await channel.call(Append(1), timeout_ms=5_000)
    assert caught.value.fate is Fate.NOT_DONE


async def test_cut_wire_ends_its_calls_at_once(network, wire, desk):
    """A connection that breaks without a goodbye does not leave them until their deadline."""
    channel = await network.open_channel(wire.address, timeout_ms=2_000)
    calls = [asyncio.create_task(channel.call(Read(1, n, 0), timeout_ms=60_000)) for n in range(3)]
    await until(lambda: len(desk.arrived) == 3)
    wire.cut()
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(ended, OutcomeUnknownError)
        assert ended.fate is Fate.NOT_DONE  # they only read
    assert channel.closed
    await channel.close()


async def test_closing_ends_the_calls_under_way(network, server, desk):
    """A channel closed on this side says so to its callers; closing again does nothing."""
    channel = await network.open_channel(server.address, timeout_ms=2_000)
    held = asyncio.create_task(channel.call(Read(1, 7, 0), timeout_ms=5_000))
    await until(lambda: desk.arrived)
    await channel.close()
    with pytest.raises(OutcomeUnknownError, match="closed on this side"):
        await held
    with pytest.raises(NotSentError, match="closed on this side"):
        await channel.call(Append(1), timeout_ms=5_000)
    await channel.close()


async def test_channel_closed_before_its_first_step_lets_the_connection_go(network, server):
    """A channel opened and closed at once leaves no connection behind."""
    channel = await network.open_channel(server.address, timeout_ms=2_000)
    channel._reader.cancel()
    await channel.close()
    assert channel._socket.closing


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.1:99999", "no port", "", "a..b:7000", "[::1"]
)
async def test_channel_is_not_opened_when_its_address_has_no_server(network, address):
    """No listener, and an address that is none: NotSentError that names the address."""
    with pytest.raises(NotSentError, match="cannot reach the broker at"):
        await network.open_channel(address, timeout_ms=2_000)


async def test_listener_that_is_no_broker_is_told_as_not_sent(network):
    """A listener that is not a broker, or that never answers, counts as an unreachable broker."""

    async def rude(_reader, writer):
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    async def silent(reader, writer):
        await reader.read()
        writer.close()

    for behaviour in (rude, silent):
        other = await asyncio.start_server(behaviour, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(NotSentError):
            await network.open_channel(f"127.0.0.1:{port}", timeout_ms=100)
        other.close()


async def test_broker_client_comes_back_by_itself(network, wire, desk):
    """After its connection broke, the next call of a BrokerClient opens another."""
    client = BrokerClient(network, wire.address)
    assert (await client.call(Append(1)))[0].base_offset == 0
    first = await client.channel()
    wire.cut()
    await until(lambda: first.closed)
    assert (await client.call(Append(1)))[0].base_offset == 1
    assert await client.channel() is not first
    await client.close()


async def test_broker_client_keeps_the_order_of_its_calls_while_it_opens(network, wire, desk):
    """Calls made while the channel opens arrive in the order they were made, none overtaken by
    later ones.
    """
    client = BrokerClient(network, wire.address)
    tasks = []
    for number in range(200):
        tasks.append(asyncio.create_task(client.call(Append(1_000 + number))))
        if number % 20 == 0:
            await asyncio.sleep(0)
    while not desk.arrived:
        number += 1
        tasks.append(asyncio.create_task(client.call(Append(1_000 + number))))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    arrived = [request.partition_id for request in desk.arrived]
    assert arrived == list(range(1_000, 1_000 + len(tasks)))
    await client.close()


async def test_calls_of_a_broker_client_that_cannot_open_were_not_sent(network):
    """All callers that waited for one channel get the error, and a later call tries again."""
    client = BrokerClient(network, "127.0.0.1:1")
    results = await asyncio.gather(
        *(client.call(Release(1, "g", "s", 1)) for _ in range(5)), return_exceptions=True
    )
    assert [type(result) for result in results] == [NotSentError] * 5
    await client.close()


async def test_overloaded_handler_is_just_a_refusal(network):
    """An error that says "later" reaches the caller as that, and the connection stays open."""

    async def busy(_request, _payload):
        raise OverloadedError(in_flight=3)

    server = Server([], data_handler=busy)
    await server.start("127.0.0.1", 0)
    channel = await network.open_channel(server.address, timeout_ms=2_000)
    for _ in range(2):
        with pytest.raises(OverloadedError):
            await channel.call(Append(1), timeout_ms=5_000)
    await channel.close()
    await server.stop()


@pytest.mark.parametrize(
    ("request_", "owed"),
    [
        (Append(1), True),
        (Read(1, 0, 0), True),
        (Read(1, 0, 0, wait_ms=1), False),
        (Pull(1, "g", "s", 1, 0, 0, 30_000), False),
        (PullShared(1, "g", "s", 1, 1, 0, 30_000, 1_000), False),
    ],
)
async def test_answer_is_owed_unless_its_call_waits_for_messages(
    network, request_: Request, owed: bool
):
    """A silent connection without an outstanding answer is pinged less often."""

    async def never(_request, _payload):
        await asyncio.Event().wait()

    server = Server([], data_handler=never)
    await server.start("127.0.0.1", 0)
    channel = await network.open_channel(server.address, timeout_ms=2_000)
    assert not channel._watchdog._is_reply_outstanding()
    channel.begin(request_, timeout_ms=5_000)
    assert channel._watchdog._is_reply_outstanding() is owed
    await channel.close()
    await server.stop()


async def test_part_of_a_pull_counts_as_an_answer(channel, desk):
    """A consumer's connection carries hardly any other call, and counted as one without answers."""
    parts: list[object] = []
    channel.begin(
        Read(1, 0, 0), timeout_ms=5_000, on_part=lambda answer, _payload: parts.append(answer)
    )
    (number,) = channel._pending
    assert not channel._watchdog._has_received()
    assert channel._on_frame(bytearray(encode_frame(number, Batches(0, 1, 1, False, more=True))))
    assert len(parts) == 1
    assert channel._watchdog._has_received()


@pytest.mark.parametrize("request_", [CancelScheduled(bytes(16)), ListParked(1, "g", "s", 0, 0)])
async def test_idempotent_call_is_made_once_more_when_a_kept_connection_turns_out_dead(
    network, wire, desk, request_
):
    """As after a restart of the broker's machine: a client's first call failed each time."""
    broker = BrokerClient(network, wire.address)
    await broker.call(Append(1))
    wire.forget()
    await broker.call(request_)
    assert desk.arrived[-1] == request_
    wire.forget()
    with pytest.raises(
        OutcomeUnknownError
    ):  # a message that may be stored is the caller's to repeat
        await broker.call(Append(2))
    await broker.close()


async def test_idempotent_call_fails_when_a_new_connection_ends_too(network, wire, desk):
    broker = BrokerClient(network, wire.address)
    await broker.call(Append(1))
    wire.forget()
    await wire.stop()
    with pytest.raises(UnreachableError):
        await broker.call(CancelScheduled(bytes(16)))
    await broker.close()
