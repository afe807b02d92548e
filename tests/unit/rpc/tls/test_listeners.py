"""Listening sockets survive failures, at every address of their host."""

from __future__ import annotations

import asyncio
import os
import resource
import socket

import pytest
import uvloop

from keylane.rpc.tls.listeners import listen

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


@LOOPS
def test_listeners_go_on_when_files_are_free_again(new_loop, caplog: pytest.LogCaptureFixture):
    async def run() -> None:
        accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
        listeners = await listen("127.0.0.1", 0, backlog=10, on_accepted=accepted.put_nowait)
        port = listeners.sockets[0].getsockname()[1]
        client, other = connected(port), socket.socket()
        other.settimeout(5)
        (await accepted.get()).close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            other.connect(("127.0.0.1", port))
            await asyncio.sleep(0.05)
            assert accepted.empty()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with asyncio.timeout(5):
            (await accepted.get()).close()
        assert "Too many open files" in caplog.text
        listeners.close()
        assert listeners.sockets == []
        with pytest.raises(ConnectionRefusedError):
            connected(port)
        client.close()
        other.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@LOOPS
def test_listeners_bind_each_address_of_their_host(new_loop):
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(OSError, match="in use"):
                await listen("127.0.0.1", port, backlog=10, on_accepted=socket.socket.close)
        listeners = await listen("localhost", port, backlog=10, on_accepted=socket.socket.close)
        names = {row[4] for row in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM)}
        bound = {listener.getsockname() for listener in listeners.sockets}
        assert bound
        assert bound <= names
        listeners.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
