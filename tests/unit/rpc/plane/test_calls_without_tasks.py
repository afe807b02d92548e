"""Requests that are answered without a task, over real sockets: at once, later, by a task after
all, or never.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from keylane.protocol.errors import (
    FencedError,
    InternalError,
    MessageTooLargeError,
    OutcomeUnknownError,
)
from keylane.protocol.frames import Ack, Acked, Append, Appended, Batches, Pull, Read, frame_parts
from keylane.protocol.limits import FRAME_BYTES_MAX, IN_FLIGHT_PER_CONNECTION_MAX
from keylane.rpc.answer_budget import CONNECTION_BYTES_MAX, READS_AT_ONCE, AnswerBudget
from keylane.rpc.frames.frame_socket import FrameSocket
from keylane.rpc.frames.incoming import IncomingBudget
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.plane import data_plane
from keylane.rpc.plane.connection import PlaneConnection
from keylane.rpc.plane.data_plane import DataPlane
from keylane.rpc.server import Server

WHO = ("g", "a" * 16, 1)
PULL = Pull(1, *WHO, 0, 1 << 20, 1_000)


class PromptDesk:
    """Begins calls as the test says, and handles those that it does not begin."""

    def __init__(self) -> None:
        self.calls = []
        self.begins = True
        self.on_call = None
        self.handled = []
        self.refused = []

    def begin(self, request, payload, call):
        if not self.begins:
            return False
        self.calls.append((request, bytes(payload), call))
        if self.on_call is not None:
            self.on_call(request, call)
        return True

    async def handle(self, request, payload):
        self.handled.append(request)
        return Batches(0, 0, 0, False), b"from a task"


@pytest.fixture
def desk() -> PromptDesk:
    return PromptDesk()


@pytest.fixture
def room() -> AnswerBudget:
    return AnswerBudget()


@pytest.fixture
async def server(desk, room):
    server = Server(
        [],
        data_handler=desk.handle,
        data_begin=desk.begin,
        answer_budget=room,
        on_refusal=desk.refused.append,
    )
    await server.start("127.0.0.1", 0)
    yield server
    await server.stop()


@pytest.fixture
async def channel(network: HttpNetwork, server):
    channel = await network.open_channel(server.address, timeout_ms=5_000)
    yield channel
    await channel.close()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def begun(desk: PromptDesk, count: int = 1):
    """Return the last call, once `count` have begun."""
    await until(lambda: len(desk.calls) == count)
    return desk.calls[-1][2]


async def test_call_is_answered_where_it_arrives(channel, desk):
    """No task is created for it."""
    desk.on_call = lambda _request, call: call.answer(Appended(7, "fsync", False))
    before = len(asyncio.all_tasks())
    future = channel.begin(Append(1), b"batch", timeout_ms=1_000)
    answer, _ = await future
    assert answer.base_offset == 7
    assert desk.calls[0][:2] == (Append(1), b"batch")
    assert not desk.handled
    assert len(asyncio.all_tasks()) == before


async def test_callback_of_the_caller_is_called_in_the_turn_of_the_bytes(channel, desk):
    """A caller that has no task either settles what it waits for without one."""
    desk.on_call = lambda _request, call: call.answer(Acked(3))
    seen = []
    future = channel.begin(
        Ack(1, *WHO, ()), timeout_ms=1_000, on_answer=lambda done: seen.append(done.result()[0])
    )
    future.add_done_callback(lambda _done: seen.append("a turn later"))
    await future
    assert seen == [Acked(3), "a turn later"]


async def test_calls_are_answered_in_any_order(channel, desk):
    """Each answer goes to its own call."""
    futures = [channel.begin(Ack(n, *WHO, ()), timeout_ms=5_000) for n in range(3)]
    await begun(desk, 3)
    for request, _payload, call in reversed(desk.calls):
        call.answer(Acked(request.partition_id))
    assert [(await future)[0].cursor for future in futures] == [0, 1, 2]


async def test_frames_keep_their_order_behind_one_that_needs_a_task(channel, desk):
    """A request that needs a task is begun in order; later ones wait until the reader has seen
    it.
    """
    desk.begins = False
    futures = [channel.begin(PULL, timeout_ms=5_000) for _ in range(5)]
    answers = [(await future)[1] for future in futures]
    assert answers == [b"from a task"] * 5
    assert len(desk.handled) == 5
    await channel.call(Read(1, 0, 1 << 20), timeout_ms=1_000)
    assert len(desk.handled) == 6


async def test_refusal_is_told_and_counted(channel, desk):
    """Of `begin`, and of a call that has begun."""

    def refuse(_request, _call):
        raise FencedError(token=1, current_token=2)

    desk.on_call = refuse
    with pytest.raises(FencedError):
        await channel.call(PULL, timeout_ms=1_000)
    desk.on_call = lambda _request, call: call.refuse(FencedError(token=1, current_token=3))
    with pytest.raises(FencedError) as refused:
        await channel.call(PULL, timeout_ms=1_000)
    assert refused.value.current_token == 3
    assert [type(error) for error in desk.refused] == [FencedError, FencedError]


async def test_bug_is_logged_and_told_as_an_internal_error(channel, desk, caplog):
    """The connection remains usable."""

    def break_down(_request, _call):
        raise ZeroDivisionError

    desk.on_call = break_down
    with pytest.raises(InternalError):
        await channel.call(Append(1), b"x", timeout_ms=1_000)
    assert "Append failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    desk.on_call = lambda _request, call: call.answer(Acked(0))
    await channel.call(Ack(1, *WHO, ()), timeout_ms=1_000)


async def test_answer_that_is_too_large_for_a_frame_is_refused(channel, desk, room):
    """Its reservation is released."""

    def answer(_request, call):
        assert call.reserve_bytes(1 << 20)
        call.answer(Batches(0, 0, 0, False), bytes(FRAME_BYTES_MAX))

    desk.on_call = answer
    with pytest.raises(MessageTooLargeError):
        await channel.call(PULL, timeout_ms=2_000)
    assert room.reserved_bytes == 0


async def test_room_is_taken_until_the_client_has_the_answer(channel, desk, room):
    """Like an answer that a task prepares."""
    granted = []

    def answer(_request, call):
        granted.append(call.reserve_bytes(1 << 20))
        if len(granted) <= READS_AT_ONCE:
            return
        call.hand_to_task(PULL)

    desk.on_call = answer
    futures = [channel.begin(PULL, timeout_ms=5_000) for _ in range(READS_AT_ONCE + 1)]
    await begun(desk, READS_AT_ONCE + 1)
    assert granted == [True] * READS_AT_ONCE + [False]
    assert room.reserved_bytes == READS_AT_ONCE << 20
    for _request, _payload, call in desk.calls[:READS_AT_ONCE]:
        call.answer(Batches(0, 0, 0, False), b"data")
    assert [(await future)[1] for future in futures] == [b"data"] * READS_AT_ONCE + [b"from a task"]
    await until(lambda: room.reserved_bytes == 0)


async def test_client_that_reads_nothing_holds_the_room_of_its_answers(channel, desk, room):
    """Until it reads; then all answers arrive completely."""
    size = CONNECTION_BYTES_MAX // 8
    granted = []

    def answer(_request, call):
        granted.append(call.reserve_bytes(size))
        if granted[-1]:
            call.answer(Batches(0, 0, 0, False), bytes(size))
        else:
            call.hand_to_task(PULL)

    desk.on_call = answer
    channel._socket._transport.pause_reading()
    futures = [channel.begin(PULL, timeout_ms=30_000) for _ in range(20)]
    await until(lambda: len(desk.calls) + len(desk.handled) == 20)
    assert room.reserved_bytes > 0
    assert len(desk.calls) < 20
    channel._socket._transport.resume_reading()
    answers = [(await future)[1] for future in futures]
    assert {len(answer) for answer in answers} == {size, len(b"from a task")}
    await until(lambda: room.reserved_bytes == 0)


async def test_call_handed_on_is_answered_in_a_task(channel, desk):
    """With the request that was handed on."""
    desk.on_call = lambda _request, call: call.hand_to_task(Pull(2, *WHO, 5, 1 << 20, 0))
    _, data = await channel.call(PULL, timeout_ms=1_000)
    assert data == b"from a task"
    assert desk.handled == [Pull(2, *WHO, 5, 1 << 20, 0)]


async def test_waits_end_with_the_connection(channel, desk):
    """The pull of a client that has left takes no messages from others."""
    future = channel.begin(PULL, timeout_ms=30_000)
    call = await begun(desk)
    wait = asyncio.get_running_loop().create_future()
    call.cancel_on_disconnect(wait)
    await channel.close()
    await until(wait.done)
    assert wait.cancelled()
    call.answer(Batches(0, 0, 0, False), b"too late")
    with pytest.raises(OutcomeUnknownError):
        await future


async def test_calls_over_the_limit_of_a_connection_wait_for_others(channel, desk):
    """The reader gets them, and stops until a call has ended."""
    count = IN_FLIGHT_PER_CONNECTION_MAX
    futures = [channel.begin(Ack(1, *WHO, ()), timeout_ms=30_000) for _ in range(count + 1)]
    await begun(desk, count)
    await asyncio.sleep(0.02)
    assert len(desk.calls) == count
    assert not desk.handled
    desk.calls[0][2].answer(Acked(1))
    await futures[0]
    await futures[-1]
    assert len(desk.handled) == 1
    for _request, _payload, call in desk.calls[1:]:
        call.answer(Acked(1))
    await asyncio.gather(*futures)


async def test_pulls_over_their_limit_are_refused_also_without_tasks(channel, desk, monkeypatch):
    """Another pull is accepted when one ends."""
    monkeypatch.setattr(data_plane, "PULLS_PER_CONNECTION_MAX", 2)
    futures = [channel.begin(PULL, timeout_ms=30_000) for _ in range(2)]
    await begun(desk, 2)
    with pytest.raises(Exception, match="at most"):
        await channel.call(PULL, timeout_ms=1_000)
    desk.calls[0][2].answer(Batches(0, 0, 0, False))
    await futures[0]
    third = channel.begin(PULL, timeout_ms=30_000)
    await begun(desk, 3)
    for _request, _payload, call in desk.calls[1:]:
        call.answer(Batches(0, 0, 0, False))
    await asyncio.gather(futures[1], third)


# ── a connection without a network ────────────────────────────────────────────────────────────────
class StillTransport(asyncio.Transport):
    """Takes bytes, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: asyncio.BaseProtocol = asyncio.Protocol()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def write(self, data) -> None: ...

    def writelines(self, list_of_data) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


class Line:
    """A connection of a plane, whose bytes a test brings."""

    def __init__(self, desk: PromptDesk, room: AnswerBudget) -> None:
        self.socket = FrameSocket(
            StillTransport(), bytes_max=FRAME_BYTES_MAX, budget=IncomingBudget()
        )
        self.plane = DataPlane(desk.handle, begin=desk.begin, answer_budget=room)
        self.connection = PlaneConnection(self.socket, room, None)
        self.connection.has_said_hello = True
        self.socket.on_frame = partial(self.plane._answer_without_task, self.connection)
        self.reading = asyncio.create_task(self.plane._answer_all(self.connection))

    def bring(self, *frames) -> None:
        for frame in frames:
            data = b"".join(map(bytes, frame))
            self.socket.get_buffer(-1)[: len(data)] = data
            self.socket.buffer_updated(len(data))


@pytest.fixture
async def line(desk, room):
    line = Line(desk, room)
    await asyncio.sleep(0)
    yield line
    line.reading.cancel()
    line.socket.connection_lost(None)


async def test_answers_that_a_client_does_not_read_keep_their_slots(line, desk):
    """No more calls are made than a connection may have."""
    desk.on_call = lambda _request, call: call.answer(Acked(1))
    line.socket.pause_writing()
    for number in range(2 * IN_FLIGHT_PER_CONNECTION_MAX):
        line.bring(frame_parts(number + 1, Ack(1, *WHO, ())))
        await asyncio.sleep(0)
    assert len(line.connection._tasks) <= IN_FLIGHT_PER_CONNECTION_MAX


async def test_answer_of_a_call_that_waited_keeps_its_slot_until_the_client_reads(line, desk):
    """It had begun before the client stopped to read."""
    line.bring(frame_parts(1, Ack(1, *WHO, ())))
    line.socket.pause_writing()
    desk.calls[0][2].answer(Acked(1))
    assert line.connection.other_count == 1
    line.socket.resume_writing()
    await until(lambda: line.connection.other_count == 0)


async def test_room_is_freed_if_the_connection_ends_before_the_answer_is_sent(line, desk, room):
    """In the turn in which it was made."""
    line.bring(frame_parts(1, PULL))
    line.socket.pause_writing()
    call = desk.calls[0][2]
    assert call.reserve_bytes(1 << 20)
    call.answer(Batches(0, 5, 5, False), bytes(100_000))
    line.connection.end()
    await until(lambda: room.reserved_bytes == 0)


async def test_frame_does_not_overtake_one_whose_task_has_not_begun(line, desk):
    """Its bytes come in the turn in which the reader hands the first one on."""
    order = []

    def begin(_request, payload, call):
        if bytes(payload) == b"large":
            return False
        order.append(bytes(payload))
        call.answer(Appended(0, "fsync", False))
        return True

    async def handle(_request, payload):
        order.append(bytes(payload))
        return Appended(0, "fsync", False), b""

    line.plane._begin, line.plane._handler = begin, handle
    line.bring(frame_parts(1, Append(1), b"large"))
    asyncio.get_running_loop().call_soon(line.bring, frame_parts(2, Append(1), b"small"))
    await until(lambda: len(order) == 2)
    assert order == [b"large", b"small"]


async def test_parts_arrive_before_the_answer_in_their_order(channel, desk, room):
    """Each part is delivered as it arrives; the call ends with its answer."""
    parts, ended = [], []
    future = channel.begin(
        replace(PULL, answers_max=3),
        timeout_ms=5_000,
        on_answer=lambda done: ended.append(done.result()[0]),
        on_part=lambda answer, payload: parts.append((answer.upto, bytes(payload))),
    )
    call = await begun(desk)
    for upto in (1, 2):
        assert call.accepts_parts
        assert call.reserve_bytes(1_000)
        call.send_part(Batches(0, upto, upto, False, more=True), b"part %d" % upto)
    await until(lambda: len(parts) == 2)
    assert (parts, ended) == ([(1, b"part 1"), (2, b"part 2")], [])
    assert not future.done()
    call.answer(Batches(0, 3, 3, False), b"")
    answer, _ = await future
    assert (answer.upto, ended) == (3, [answer])
    assert room.reserved_bytes == 0


async def test_parts_of_a_cancelled_call_are_left(channel, desk):
    """Its caller gets nothing more; other calls continue."""
    parts = []
    future = channel.begin(
        replace(PULL, answers_max=3),
        timeout_ms=5_000,
        on_part=lambda answer, _payload: parts.append(answer),
    )
    call = await begun(desk)
    future.cancel()
    call.send_part(Batches(0, 1, 1, False, more=True), b"")
    call.answer(Batches(0, 1, 1, False), b"")
    desk.on_call = lambda _request, call: call.answer(Appended(7, "fsync", False))
    await channel.call(Append(1), b"batch", timeout_ms=5_000)
    assert parts == []


async def test_call_without_its_last_answer_in_time_fails_after_its_parts(channel, desk):
    """The timeout applies to all of its answers together."""
    parts = []
    future = channel.begin(
        replace(PULL, answers_max=3),
        timeout_ms=200,
        on_part=lambda answer, _payload: parts.append(answer.upto),
    )
    call = await begun(desk)
    call.send_part(Batches(0, 1, 1, False, more=True), b"")
    with pytest.raises(OutcomeUnknownError):
        await future
    assert parts == [1]
