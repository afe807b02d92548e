"""The way between two programs that tests cut: what it holds, what it gives on, what it breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from proof.forwarder import Forwarder


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """The address of a server that says everything again."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(100):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[Forwarder, asyncio.StreamReader, asyncio.StreamWriter]]:
    async with echoing() as address:
        way = await Forwarder(address).start()
        host, port = way.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield way, reader, writer
        finally:
            writer.close()
            await way.close()


@pytest.mark.parametrize("cut", [{"up": True, "down": False}, {"up": False, "down": True}])
async def test_cut_forwarder_holds_the_bytes_that_are_sent(cut: dict[str, bool]):
    """Nothing comes through while one direction is cut; after the healing everything does, in
    order.
    """
    async with linked() as (way, reader, writer):
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        way.cut(**cut)
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)
        way.heal()
        writer.write(b"three")
        assert await asyncio.wait_for(reader.readexactly(8), 60) == b"twothree"


async def test_reset_breaks_the_connections_that_were_cut():
    """The other side hears of it, and a new connection passes."""
    async with linked() as (way, reader, writer):
        writer.write(b"one")
        await reader.readexactly(3)
        way.cut()
        way.heal(reset=True)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(1), 60) == b""
        host, port = way.address.split(":")
        again, writer_again = await asyncio.open_connection(host, int(port))
        writer_again.write(b"two")
        assert await asyncio.wait_for(again.readexactly(3), 60) == b"two"
        writer_again.close()


async def test_connection_breaks_when_no_server_listens():
    """Where no program listens, the caller's connection ends at once."""
    async with echoing() as address:
        pass
    way = await Forwarder(address).start()
    host, port = way.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(1), 60) == b""
    writer.close()
    await way.close()
