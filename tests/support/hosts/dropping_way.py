"""A proxy that drops connections without a word: it takes their bytes, and gives nothing on, in
both directions.

It runs in a thread with an event loop of its own, so that clients that block can be behind it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self

OUTSIDE = "127.0.0.2"
"""Where proxies listen, on the port of their server at 127.0.0.1: `advertised_host` of brokers
behind them.
"""


class _Link:
    """One connection."""

    def __init__(self) -> None:
        self.dropped = False
        self.last_s = asyncio.get_running_loop().time()


class DroppingWay:
    """
    Listens at OUTSIDE and passes on to the same port of 127.0.0.1, until its block ends.

    Args:
        idle_s: a connection without traffic for so long is dropped.
    """

    def __init__(self, port: int, *, idle_s: float = float("inf")) -> None:
        self.port = port
        self.address = f"{OUTSIDE}:{port}"
        self.accepted = self.idle = 0
        """Connections that were made, and those that were dropped because nothing came."""
        self._idle_s = idle_s
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def drop(self) -> None:
        """Drop the connections of now; later ones pass."""
        done = threading.Event()

        def drop() -> None:
            for link in self._links:
                link.dropped = True
            done.set()

        self._loop.call_soon_threadsafe(drop)
        assert done.wait(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, OUTSIDE, self.port)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        link = _Link()
        self._links.add(link)
        try:
            there = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                ways = (self._pump(link, reader, there[1]), self._pump(link, there[0], writer))
                await asyncio.gather(*ways)
            finally:
                there[1].transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._links.discard(link)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(1 << 16):
            now_s = self._loop.time()
            if not link.dropped and now_s - link.last_s > self._idle_s:
                link.dropped = True
                self.idle += 1
            link.last_s = now_s
            if not link.dropped:
                writer.write(data)
                await writer.drain()
        if link.dropped:  # the other end hears of no end either
            await asyncio.Event().wait()
        writer.close()
