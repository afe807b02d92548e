"""Listening sockets that pass on accepted connections as sockets, not as protocols.

    host ─▶ its addresses ─▶ a listening socket for each ─▶ accept ─▶ on_accepted(socket)

`loop.create_server` does the same for protocols, but with TLS it reports no connection before its
handshake.

Invariants
    A failure to accept, for example without free files, ends no listener: it continues after
    `PAUSE_S`.

Connections between their acceptance and the end of their TLS handshake; their number and time are
limited.

    accepted ─▶ room? ─no─▶ the oldest one without a handshake is closed
                  │yes
                  ▼
    handshake, in `handshake_s` ─▶ the protocol after it, which never sees the others

A connection whose handshake is not done costs a socket and some kilobytes, so their number has its
own limit.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import cast

from ...protocol.errors import InvalidRequestError, KeylaneError, OverloadedError, Reason
from ..race import start_task

log = logging.getLogger("keylane.rpc")

PAUSE_S = 1.0
"""Seconds without accepting after a failure."""
ABSENT = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
"""Error numbers for an address family that this host does not have."""


class Listeners:
    """The listening sockets of one server; aiohttp closes them as it closes an asyncio server."""

    def __init__(
        self, sockets: list[socket.socket], on_accepted: Callable[[socket.socket], None]
    ) -> None:
        self.sockets = sockets
        self._on_accepted = on_accepted
        self._loop = asyncio.get_running_loop()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        for listener in sockets:
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Stop listening; a repeat changes nothing."""
        for listener in self.sockets:
            if (pause := self._pauses.pop(listener, None)) is not None:
                pause.cancel()
            self._loop.remove_reader(listener)
            listener.close()
        self.sockets = []

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection; the loop calls this again if there are more, with others in
        between.
        """
        try:
            accepted, _address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has left the queue
        except OSError as error:
            log.warning("accepting no connections for %g s: %s", PAUSE_S, error)
            self._loop.remove_reader(listener)
            self._pauses[listener] = self._loop.call_later(PAUSE_S, self._resume, listener)
            return
        accepted.setblocking(False)
        self._on_accepted(accepted)

    def _resume(self, listener: socket.socket) -> None:
        del self._pauses[listener]
        self._loop.add_reader(listener, self._accept, listener)


async def listen(
    host: str, port: int, *, backlog: int, on_accepted: Callable[[socket.socket], None]
) -> Listeners:
    """
    Listen at every address of a host.

    Args:
        on_accepted: gets each accepted socket, which is non-blocking.

    Raises:
        OSError: no address can be bound, or one of them is in use or not allowed.
    """
    rows = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, address in dict.fromkeys((row[0], row[4]) for row in rows):
            try:
                # It also sets SO_REUSEADDR, and separates IPv6 from IPv4.
                listener = socket.create_server(address, family=family, backlog=backlog)
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error
                continue
            sockets.append(listener)
            listener.setblocking(False)
        if not sockets:
            raise absent or OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    except OSError:
        for listener in sockets:
            listener.close()
        raise
    return Listeners(sockets, on_accepted)


class TlsOpenings:
    """
    The connections of one server that are in their handshake.

    Args:
        context: returns the TLS context of a new connection.
        make: makes the protocol that takes over a connection.
        most: number of connections above which the oldest is closed.
        on_refused: called for each connection that is closed without a handshake, with the address
            of its host.
    """

    def __init__(
        self,
        context: Callable[[], ssl.SSLContext],
        make: Callable[[], asyncio.Protocol],
        *,
        most: int,
        handshake_s: float,
        on_refused: Callable[[KeylaneError, str], None],
    ) -> None:
        self._context = context
        self._make = make
        self._most = most
        self._handshake_s = handshake_s
        self._on_refused = on_refused
        self._under_way: dict[socket.socket, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._under_way)

    def enter(self, accepted: socket.socket) -> None:
        """Make room, and begin the handshake of a connection."""
        while len(self._under_way) >= self._most:
            oldest = next(iter(self._under_way))
            error = OverloadedError("too many connections in their TLS handshake", limit=self._most)
            self._on_refused(error, _host_of(oldest))
            self._end(oldest)
        # Asked now: who is refused has left when the handshake has failed.
        host = _host_of(accepted)
        task = start_task(self._shake(accepted))
        self._under_way[accepted] = task
        task.add_done_callback(partial(self._done, accepted, host))

    async def close(self) -> None:
        """Close all, and wait until they are closed."""
        for accepted in list(self._under_way):
            self._end(accepted)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self, accepted: socket.socket) -> None:
        """Cancel one connection. It no longer counts, although it is closed in the next turns of
        the event loop.
        """
        task = self._under_way.pop(accepted)
        self._ending.add(task)
        task.cancel()

    async def _shake(self, accepted: socket.socket) -> None:
        """Do the handshake of a connection. Raises OSError."""
        await asyncio.get_running_loop().connect_accepted_socket(
            partial(_Handover, self._make, partial(self._under_way.pop, accepted, None)),
            accepted,
            ssl=self._context(),
            ssl_handshake_timeout=self._handshake_s,
        )

    def _done(self, accepted: socket.socket, host: str, task: asyncio.Task[None]) -> None:
        """Forget a connection, and close its socket if its task was cancelled before it began."""
        self._under_way.pop(accepted, None)
        self._ending.discard(task)
        if task.cancelled():
            accepted.close()
        elif (error := task.exception()) is not None:  # of TLS; the client gets its alert
            log.debug("no TLS connection: %s", error)
            if (refusal := self._refusal(error)) is not None:
                self._on_refused(refusal, host)
            accepted.close()

    def _refusal(self, error: BaseException) -> KeylaneError | None:
        """Return the error for a failed handshake; None if the client has left, for example after
        testing whether the port is open.
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
        if isinstance(error, ConnectionAbortedError):  # so event loops tell that the time is over
            return InvalidRequestError(
                Reason.REQUEST_TOO_SLOW,
                f"no TLS handshake in {self._handshake_s:g} s",
                limit_ms=int(self._handshake_s * 1000),
            )
        return None


def _host_of(accepted: socket.socket) -> str:
    """Return the address of a connection's other end, without the port; "" if it has left."""
    try:
        return str(accepted.getpeername()[0])
    except (OSError, IndexError):
        return ""


class _Handover(asyncio.Protocol):
    """A stand-in until the handshake is done, because only then the server knows whether there is
    room for a connection.
    """

    def __init__(
        self, make: Callable[[], asyncio.Protocol], on_secured: Callable[[], object]
    ) -> None:
        self._make = make
        self._on_secured = on_secured

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the connection to its protocol."""
        self._on_secured()
        protocol = self._make()
        cast(asyncio.Transport, transport).set_protocol(protocol)
        protocol.connection_made(transport)
