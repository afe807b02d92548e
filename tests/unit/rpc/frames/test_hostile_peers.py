"""Peers that keylane's programs never are: the memory that they can use at the other end is
limited.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest
import uvloop
from aiohttp import web

from keylane.protocol.errors import FrameError
from keylane.protocol.frames import SIGN_OF_LIFE
from keylane.rpc.frames import frame_socket
from keylane.rpc.frames.frame_socket import (
    FRAME_OVERHEAD_BYTES,
    QUEUED_BYTES_MAX,
    RECEIVE_BUFFER_BYTES,
    FrameSocket,
)
from keylane.rpc.frames.incoming import RATE_WINDOW_S, IncomingBudget
from keylane.rpc.frames.upgrade import accept_socket, open_socket
from support.raw_frames import sized

BYTES_MAX = 1 << 20
TINY = sized(b"x")


@contextlib.asynccontextmanager
async def both_ends(**settings):
    """A client's socket and the server's, made with `settings`; neither end receives by itself."""
    settings = {"bytes_max": BYTES_MAX, "budget": IncomingBudget()} | settings
    ours: asyncio.Future[FrameSocket] = asyncio.get_running_loop().create_future()

    async def serve(request: web.Request) -> web.StreamResponse:
        response, socket = await accept_socket(request, **settings)
        lost = asyncio.Event()
        socket.add_lost_callback(lost.set)
        ours.set_result(socket)
        await lost.wait()
        return response

    app = web.Application()
    app.router.add_get("/", serve)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            theirs = await open_socket(session, url, bytes_max=BYTES_MAX)
            yield theirs, await ours
            theirs.transport.abort()
    finally:
        await runner.cleanup()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def run(request):
    def run_body(body):
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(body())

    return run_body


async def sent(theirs: FrameSocket, data: bytes, size: int) -> None:
    """Send `data` again and again, `size` bytes of it, or as many as the other end reads in a
    second.
    """
    many = data * max(1, RECEIVE_BUFFER_BYTES // len(data))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            for _ in range(size // len(many)):
                theirs.transport.write(many)
                await asyncio.sleep(0)
                while theirs.transport.get_write_buffer_size():
                    await asyncio.sleep(0.001)


@pytest.mark.parametrize("reads", [False, True])
def test_peer_that_asks_for_signs_of_life_without_end_gets_few(run, reads: bool):
    """A peer that does not read gets no replies to pings, apart from those that wait."""

    async def body():
        async with both_ends() as (theirs, ours):
            if not reads:
                theirs.transport.pause_reading()
            await sent(theirs, SIGN_OF_LIFE, 32 << 20)
            assert ours.transport.get_write_buffer_size() < 2 * RECEIVE_BUFFER_BYTES + (64 << 10)
            assert ours.written_bytes < 1 << 20
            theirs.transport.resume_reading()
            served = sized(b"served on")
            await ours.send((served,))
            assert await theirs.receive() == served

    run(body)


def test_peer_that_asks_for_thousands_of_signs_of_life_between_two_checks_is_refused(run):
    async def body():
        async with both_ends() as (theirs, ours):
            theirs.transport.write(SIGN_OF_LIFE * (frame_socket.PINGS_MAX + 1))
            with pytest.raises(FrameError, match="pings between two checks"):
                await ours.receive()

    run(body)


def test_frame_is_not_late_while_the_server_reads_nothing(run):
    async def body():
        async with both_ends() as (theirs, ours):
            half = sized(bytes(QUEUED_BYTES_MAX // 2))
            frame = sized(bytes(1_000))
            theirs.transport.write(half * 2 + frame[:500])
            await asyncio.sleep(0.5)
            assert not ours.reading
            assert ours.unfinished_s() < 0.3
            assert [await ours.receive() for _ in range(2)] == [half, half]
            while not ours._frame_bytes:
                await asyncio.sleep(0.01)
            assert ours.unfinished_s() < 0.3
            await asyncio.sleep(0.2)
            assert ours.unfinished_s() > 0.1
            theirs.transport.write(frame[500:])
            assert await ours.receive() == frame
            assert not ours.unfinished_s()

    run(body)


def test_frames_without_an_end_hold_a_bounded_amount_together(run):
    """The stuck sender is dropped in favor of later ones, and its memory is released."""

    async def body():
        budget = IncomingBudget(1 << 20)
        async with both_ends(budget=budget) as (theirs, ours):
            frame = sized(bytes(BYTES_MAX - 4))
            theirs.transport.write(frame[:100])
            while not budget.used_bytes:
                await asyncio.sleep(0.01)
            assert budget.used_bytes == 100  # whatever memory it has
            theirs.transport.write(frame[100:-100])
            while ours._arrived_bytes < BYTES_MAX - 100:
                await asyncio.sleep(0.01)
            assert budget.used_bytes == BYTES_MAX - 100
            given_up: list[int] = []
            for step in (1, 2, 3):
                later = asyncio.get_running_loop().time() + step * (RATE_WINDOW_S + 1)
                budget.record_progress(
                    "a later one", 100_000 * step, later, lambda: given_up.append(1)
                )
            with pytest.raises(FrameError, match="did not arrive in time"):
                await ours.receive()
            assert (budget.used_bytes, given_up, len(ours._frame)) == (300_000, [], 0)

    run(body)


def test_frame_is_not_given_up_for_others_when_the_server_reads_nothing(run):
    """As while a quota pauses the connection."""

    async def body():
        budget = IncomingBudget(256 << 10)
        async with both_ends(budget=budget) as (theirs, ours):
            half = sized(bytes(QUEUED_BYTES_MAX // 2))
            await theirs.send((half,))
            while not ours._frames:
                await asyncio.sleep(0.01)
            frame = sized(bytes(1_000))
            theirs.transport.write(frame[:500])
            while budget.used_bytes != 500:
                await asyncio.sleep(0.01)
            ours._deliver(bytearray(half))
            for step in (1, 2, 3):
                later = asyncio.get_running_loop().time() + step * (RATE_WINDOW_S + 1)
                budget.record_progress("another", 300_000 * step, later, lambda: None)
            assert not ours.closing
            assert [await ours.receive() for _ in range(2)] == [half, half]
            theirs.transport.write(frame[500:])
            assert await ours.receive() == frame
            assert budget.used_bytes == 900_000

    run(body)


def test_peer_that_sends_many_small_frames_leaves_turns_to_others(run):
    """Each iteration of the event loop takes a limited number of frames, and none is lost."""

    async def body():
        async with both_ends() as (theirs, ours):
            taken = 0
            most = 0

            def take(_frame: bytearray) -> bool:
                nonlocal taken
                taken += 1
                return True

            ours.on_frame = take
            receiving = asyncio.create_task(ours.receive())
            await asyncio.sleep(0.05)
            sent_frames = 100_000
            theirs.transport.write(TINY * sent_frames)
            while taken < sent_frames:
                before = taken
                await asyncio.sleep(0)
                most = max(most, taken - before)
            assert most <= frame_socket.ITERATION_FRAMES_MAX + RECEIVE_BUFFER_BYTES // len(TINY)
            await theirs.send((sized(b"served"),))
            while taken == sent_frames:
                await asyncio.sleep(0.01)
            receiving.cancel()

    run(body)


def test_tiny_frames_wait_in_a_bounded_number(run):
    async def body():
        async with both_ends() as (theirs, ours):
            await sent(theirs, TINY, 4 << 20)
            most = QUEUED_BYTES_MAX // FRAME_OVERHEAD_BYTES + RECEIVE_BUFFER_BYTES // len(TINY) + 1
            assert 0 < len(ours._frames) <= most
            for _ in range(most):
                assert await ours.receive() == TINY

    run(body)
