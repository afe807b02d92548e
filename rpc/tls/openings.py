"""Connections between their acceptance and the end of their TLS handshake: bounded in number and time.

    accepted ─▶ room? ─no─▶ the oldest one without a handshake is closed
                  │
                  ▼
    handshake, in `handshake_s` ─▶ the protocol behind it, which never hears of the others

A connection whose handshake is not done costs a socket and some kilobytes; so their number has a limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import cast

log = logging.getLogger("keylane.rpc")

EARLY_BYTES_MAX = 1 << 20
"""What a client may send in a turn of the event loop."""


class TlsOpenings:
    """
    The connections of one server that are in their handshake.

    Args:
        most: above it the oldest is closed.
        on_refused: called for each that is closed so.
    """

    def __init__(self, most: int, handshake_s: float, on_refused: Callable[[], None]) -> None:
        self.handshake_s = handshake_s
        self._most = most
        self._on_refused = on_refused
        self._under_way: dict[TlsOpening, None] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def enter(self, opening: TlsOpening) -> None:
        """Count a new one, and make room for it."""
        while len(self._under_way) >= self._most:
            self._on_refused()
            oldest = next(iter(self._under_way))
            self.leave(oldest)
            oldest.abort()
        self._under_way[opening] = None

    def leave(self, opening: TlsOpening) -> None:
        """Count one less; again changes nothing."""
        self._under_way.pop(opening, None)

    def close(self) -> None:
        """Close all."""
        for opening in list(self._under_way):
            self.leave(opening)
            opening.abort()


class TlsOpening(asyncio.Protocol):
    """
    One connection until its handshake is done.

    Args:
        make: makes the protocol that takes over.
    """

    def __init__(
        self, openings: TlsOpenings, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]
    ) -> None:
        self._openings = openings
        self._context = context
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._shaking: asyncio.Task[None] | None = None
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._openings.enter(self)
        self._shaking = asyncio.create_task(self._shake(self._transport))

    def data_received(self, data: bytes) -> None:
        """Keep what comes in the turns of the event loop before the handshake begins, and when it ends."""
        self._early += data
        if len(self._early) > EARLY_BYTES_MAX:
            self.abort()

    def connection_lost(self, _error: Exception | None) -> None:
        """The client has left."""
        self._openings.leave(self)
        if self._shaking is not None:
            self._shaking.cancel()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._shaking is not None:
            self._shaking.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _hand_on(self, transport: asyncio.Transport) -> None:
        """Give the protocol of TLS what has come before it: uvloop reads at once."""
        data, self._early = bytes(self._early), bytearray()
        # That of uvloop is a buffered protocol without being of the class.
        shaking = cast(asyncio.BufferedProtocol, transport.get_protocol())
        while data and not transport.is_closing():
            room = memoryview(shaking.get_buffer(len(data)))
            size = min(len(room), len(data))
            room[:size] = data[:size]
            shaking.buffer_updated(size)
            data = data[size:]

    async def _shake(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        begun = asyncio.ensure_future(
            loop.start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._openings.handshake_s,
            )
        )
        try:
            await asyncio.sleep(0)  # from here on the transport's protocol is that of TLS
            await asyncio.sleep(0)  # which knows its transport now
            self._hand_on(transport)
            secured = await begun
        except asyncio.CancelledError:
            begun.cancel()
            transport.abort()
            return
        except OSError as error:  # of TLS too; the client gets its alert
            log.debug("no TLS connection: %s", error)
            return
        finally:
            self._openings.leave(self)
        if secured is None or secured.is_closing():
            return
        protocol = self._make()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        if self._early:
            with contextlib.suppress(ConnectionError):
                protocol.data_received(bytes(self._early))
            self._early.clear()
