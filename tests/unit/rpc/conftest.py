"""A server on a real loopback socket, a client, and a TCP relay between them that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from keylane.protocol.errors import FencedError
from keylane.protocol.frames import Answer, Append, Appended, Batches, Read, Released, Request
from keylane.rpc.frames import frame_socket
from keylane.rpc.http_network import HttpNetwork
from keylane.rpc.server import ControlRoute, Server
from support import ports

FENCED = 13
"""Appends to this partition are refused."""
FAULTY = 14
"""Appends to this partition meet a fault of the server."""


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """Each test leaves the handlers that it met: uvloop leaves its own behind a program's end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def quick_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose frames a test writes does not end its connection when the server has said
    why.
    """
    monkeypatch.setattr(frame_socket, "CLOSE_S", 0.2)


class EchoingHandler:
    """Echoes appends, and holds reads back until the test releases them."""

    def __init__(self) -> None:
        self.arrived: list[Request] = []
        self.let_go = asyncio.Event()

    async def __call__(self, request: Request, payload: memoryview) -> tuple[Answer, bytes]:
        self.arrived.append(request)
        if isinstance(request, Append):
            if request.partition_id == FENCED:
                raise FencedError(partition_id=FENCED, message="not the text", token=5)
            if request.partition_id == FAULTY:
                raise ZeroDivisionError("a secret of the server")
            answer = Appended(len(self.arrived) - 1, "fsync", False)
            return answer, bytes(payload)
        if isinstance(request, Read):
            await self.let_go.wait()
            return Batches(0, request.offset, 0, False), bytes(request.bytes_max)
        return Released(), b""


class Wire:
    """A TCP relay to `port`: `cut` resets its connections, `forget` resets them when they are used
    next.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._forgotten: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if sink in self._forgotten:
                    self.cut()
                    return
                sink.write(data)
            sink.close()

    def forget(self) -> None:
        """Answer data on the current connections with a reset, like a machine that was
        restarted.
        """
        self._forgotten.update(self._writers)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def stop(self) -> None:
        self.cut()
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


Serve = Callable[..., Awaitable[Server]]


@pytest.fixture
def desk() -> EchoingHandler:
    return EchoingHandler()


@pytest.fixture
async def serve(desk: EchoingHandler) -> AsyncIterator[Serve]:
    """Starts servers on loopback; all are stopped at the end."""
    servers: list[Server] = []

    async def start(*routes: ControlRoute, port: int = 0) -> Server:
        server = Server(routes, data_handler=desk)
        await server.start("127.0.0.1", port)
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def server(serve: Serve) -> Server:
    return await serve()


@pytest.fixture
async def network() -> AsyncIterator[HttpNetwork]:
    network = HttpNetwork()
    yield network
    await network.close()


@pytest.fixture
async def wire(server: Server) -> AsyncIterator[Wire]:
    wire = Wire(server.port)
    await wire.start()
    yield wire
    await wire.stop()


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listens."""
    return ports.free_port()
