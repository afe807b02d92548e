"""The listening sockets of a TLS server.

    host ─▶ its addresses ─▶ a listening socket for each ─▶ accept ─▶ on_accepted(socket)

`loop.create_server` could accept connections too, but with TLS it only reports a connection once
its handshake is done.

Invariants
    A listener survives a failure to accept a connection, for example because too many files are
    open, and continues after `PAUSE_S`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

log = logging.getLogger("keylane.rpc")

PAUSE_S = 1.0
"""The time in seconds after a failure during which no connections are accepted."""
ABSENT = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
"""Error numbers for an address family that this host does not have."""


class Listeners:
    """The listening sockets of one server. aiohttp closes this object like an asyncio server."""

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
        """Stop listening; further calls do nothing."""
        for listener in self.sockets:
            if (pause := self._pauses.pop(listener, None)) is not None:
                pause.cancel()
            self._loop.remove_reader(listener)
            listener.close()
        self.sockets = []

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. If there are more, the loop calls this again after other
        callbacks.
        """
        try:
            accepted, _address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the client has disconnected
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
        on_accepted: called with each accepted socket, which is non-blocking.

    Raises:
        OSError: no address can be bound, or one of them is in use or not allowed.
    """
    infos = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    absent_error: OSError | None = None
    try:
        for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
            try:
                # This also sets SO_REUSEADDR and IPV6_V6ONLY.
                listener = socket.create_server(address, family=family, backlog=backlog)
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent_error = error
                continue
            sockets.append(listener)
            listener.setblocking(False)
        if not sockets:
            raise absent_error or OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    except OSError:
        for listener in sockets:
            listener.close()
        raise
    return Listeners(sockets, on_accepted)
