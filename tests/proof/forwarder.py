"""A way between two programs over loopback that can be cut in one direction or in both.

What is under way when it is cut waits in the sockets, as on a network that loses packets; healing
lets it go on, or breaks the connections.
"""

from __future__ import annotations

import asyncio


class _Direction:
    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self.open.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # either end broke; the other hears of it
        finally:
            writer.close()


class Forwarder:
    """Listens on loopback and passes everything on to `target`."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self._up, self._down = _Direction(), _Direction()
        self._links: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> Forwarder:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links[task] = writer
        try:
            await self._link(reader, writer)
        except asyncio.CancelledError:
            pass  # broken on purpose
        finally:
            writer.transport.abort()
            del self._links[task]

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._up.open.wait()
        host, port = self.target.split(":")
        try:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return  # no program listens: the caller's connection is reset
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._up.pump(reader, there_writer))
                both.create_task(self._down.pump(there_reader, writer))
        finally:
            there_writer.transport.abort()

    def cut(self, *, up: bool = True, down: bool = True) -> None:
        """Hold back everything: towards the target, from it, or both."""
        if up:
            self._up.open.clear()
        if down:
            self._down.open.clear()

    def heal(self, *, reset: bool = False) -> None:
        """Let everything through; with `reset` the connections that were cut break first."""
        if reset:
            for task in list(self._links):
                task.cancel()
        self._up.open.set()
        self._down.open.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.heal(reset=True)
        await asyncio.gather(*self._links, return_exceptions=True)
        await self._server.wait_closed()
