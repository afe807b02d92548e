"""Performs the TLS handshakes of a server's connections, and limits their number and duration.

    accepted ─▶ below the limit? ─no─▶ close the oldest connection in its handshake
                  │yes
                  ▼
    handshake, within `handshake_s` ─▶ protocol, which sees only connections with a handshake

A connection that is in its handshake costs a socket and some kilobytes, so there is a separate
limit for their number.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import cast

from ...protocol.errors import InvalidRequestError, KeylaneError, OverloadedError, Reason
from ..race import start_task

log = logging.getLogger("keylane.rpc")


class TlsHandshakes:
    """
    Performs the TLS handshakes of a server's connections, and limits their number and duration.

    Args:
        context: returns the TLS context for a new connection.
        make: returns the protocol for a connection whose handshake is done.
        limit: the number of connections in their handshake above which the oldest is closed.
        handshake_s: the time limit for a handshake, in seconds.
        on_refused: called with the error and the client's host for each connection that is closed
            before its handshake is done.
    """

    def __init__(
        self,
        context: Callable[[], ssl.SSLContext],
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        limit: int,
        handshake_s: float,
        on_refused: Callable[[KeylaneError, str], None],
    ) -> None:
        self._context = context
        self._make_protocol = make_protocol
        self._limit = limit
        self._handshake_s = handshake_s
        self._on_refused = on_refused
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}
        self._ending_tasks: set[asyncio.Task[None]] = set()
        """Tasks of cancelled handshakes that have not ended yet."""

    def __len__(self) -> int:
        return len(self._handshakes)

    def enter(self, accepted: socket.socket) -> None:
        """Start the handshake of a connection, and close the oldest ones if there are too many."""
        while len(self._handshakes) >= self._limit:
            oldest = next(iter(self._handshakes))
            error = OverloadedError(
                "too many connections in their TLS handshake", limit=self._limit
            )
            self._on_refused(error, _host_of(oldest))
            self._cancel(oldest)
        # Read now, because a client whose handshake fails will have disconnected by then.
        host = _host_of(accepted)
        task = start_task(self._do_handshake(accepted))
        self._handshakes[accepted] = task
        task.add_done_callback(partial(self._on_handshake_done, accepted, host))

    async def close(self) -> None:
        """Cancel all handshakes, and wait until their connections are closed."""
        for accepted in list(self._handshakes):
            self._cancel(accepted)
        await asyncio.gather(*self._ending_tasks, return_exceptions=True)

    def _cancel(self, accepted: socket.socket) -> None:
        """Cancel a handshake. Its connection no longer counts, although it is only closed in later
        iterations of the event loop.
        """
        task = self._handshakes.pop(accepted)
        self._ending_tasks.add(task)
        task.cancel()

    async def _do_handshake(self, accepted: socket.socket) -> None:
        """Perform the handshake of a connection, and hand the connection over to its protocol.
        Raises OSError.
        """
        await asyncio.get_running_loop().connect_accepted_socket(
            partial(_Handover, self._make_protocol, partial(self._handshakes.pop, accepted, None)),
            accepted,
            ssl=self._context(),
            ssl_handshake_timeout=self._handshake_s,
        )

    def _on_handshake_done(
        self, accepted: socket.socket, host: str, task: asyncio.Task[None]
    ) -> None:
        """Forget a handshake. Report a failure, and close the socket if no protocol has taken it
        over.
        """
        self._handshakes.pop(accepted, None)
        self._ending_tasks.discard(task)
        if task.cancelled():
            accepted.close()
        elif (error := task.exception()) is not None:
            log.debug("no TLS connection: %s", error)
            if (refusal := self._refusal(error)) is not None:
                self._on_refused(refusal, host)
            accepted.close()

    def _refusal(self, error: BaseException) -> KeylaneError | None:
        """Return the error for a failed handshake, or None if the client has disconnected, for
        example because it only tested whether the port is open.
        """
        if isinstance(error, ssl.SSLEOFError):
            return None
        if isinstance(error, ssl.SSLError):
            reason = str(error.reason or error)
            if isinstance(error, ssl.SSLCertVerificationError) and error.verify_message:
                reason = f"the client's certificate is refused: {error.verify_message}"
            return InvalidRequestError(
                Reason.HANDSHAKE, f"no TLS connection: {reason}", problem=reason
            )
        if isinstance(error, ConnectionAbortedError):  # how event loops report a timeout
            return InvalidRequestError(
                Reason.REQUEST_TOO_SLOW,
                f"no TLS handshake within {self._handshake_s:g} s",
                limit_ms=int(self._handshake_s * 1000),
            )
        return None


def _host_of(accepted: socket.socket) -> str:
    """Return the address of a connection's client, without the port; "" if the client has
    disconnected.
    """
    try:
        return str(accepted.getpeername()[0])
    except (OSError, IndexError):
        return ""


class _Handover(asyncio.Protocol):
    """The protocol during a handshake. It is replaced afterwards, because the server only then
    decides whether it accepts the connection.
    """

    def __init__(
        self, make_protocol: Callable[[], asyncio.Protocol], on_secured: Callable[[], object]
    ) -> None:
        self._make_protocol = make_protocol
        self._on_secured = on_secured

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand the connection over to its real protocol, because the handshake is done."""
        self._on_secured()
        protocol = self._make_protocol()
        cast(asyncio.Transport, transport).set_protocol(protocol)
        protocol.connection_made(transport)
