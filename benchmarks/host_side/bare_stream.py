"""What a stream costs with nothing of keylane in it: uvloop and OpenSSL, both ends in one process
on one core.

No program in Python that uses the event loop's TLS is cheaper, so `bare_tls_us_per_mb` is what TLS
costs at least.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import uvloop

from keylane.protocol.http.tls_settings import TlsSettings
from keylane.rpc.tls.contexts import ServerTls, client_context
from keylane.rpc.tls.settings import ServingSettings

FRAME_BYTES = 128 << 10
FRAMES = 1_000


class _Sink(asyncio.Protocol):
    """Counts the received bytes."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self._remaining = FRAMES * FRAME_BYTES
        self._done = done

    def data_received(self, data: bytes) -> None:
        """Count."""
        self._remaining -= len(data)
        if self._remaining <= 0:
            self._done.set_result(None)


class _Source(asyncio.Protocol):
    """Tracks whether the transport accepts writes."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.may_write.set()

    def pause_writing(self) -> None:
        """Pause writing."""
        self.may_write.clear()

    def resume_writing(self) -> None:
        """Resume writing."""
        self.may_write.set()


async def _stream(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> float:
    """Return the processor time of both ends for the frames, in seconds."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    listener = await loop.create_server(lambda: _Sink(done), "127.0.0.1", 0, ssl=server)
    port = listener.sockets[0].getsockname()[1]
    transport, source = await loop.create_connection(_Source, "127.0.0.1", port, ssl=client)
    frame = bytes(FRAME_BYTES)
    began = time.process_time()
    for _ in range(FRAMES):
        transport.write(frame)
        await source.may_write.wait()
    await done
    cpu_s = time.process_time() - began
    transport.close()
    listener.close()
    return cpu_s


def bare_us_per_mb(folder: Path) -> dict[str, float]:
    """
    Processor time of a bare stream without and with TLS, µs for each MB.

    Args:
        folder: of a host, with its certificate; the authority's is beside it.
    """
    settings = ServingSettings(tls_cert=folder / "server.pem", tls_key=folder / "server.key")
    tls = ServerTls(settings).context, client_context(TlsSettings(ca=str(folder.parent / "ca.pem")))
    size_mb = FRAMES * FRAME_BYTES / 1e6
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        plain_s = min(runner.run(_stream(None, None)) for _ in range(3))
        tls_s = min(runner.run(_stream(*tls)) for _ in range(3))
    return {
        "bare_us_per_mb": plain_s / size_mb * 1e6,
        "bare_tls_us_per_mb": tls_s / size_mb * 1e6,
    }
