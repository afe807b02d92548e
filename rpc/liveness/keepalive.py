"""The kernel's watch over a connection: it sends packets while nothing else is sent, so that a
firewall on the way does not forget the connection.
"""

from __future__ import annotations

import contextlib
import socket as socket_module
from socket import IPPROTO_TCP, SOL_SOCKET
from typing import Any

KEEPALIVE = (
    (SOL_SOCKET, "SO_KEEPALIVE", 1),
    (IPPROTO_TCP, "TCP_KEEPIDLE", 4),
    (IPPROTO_TCP, "TCP_KEEPINTVL", 2),
    (IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
"""Options with which the kernel notices a lost path within 10 s though nothing is sent; a pull may
wait for longer.
"""


def keep_alive(socket: socket_module.socket) -> None:
    """Have the kernel watch a connection, as far as the system can."""
    for level, name, value in KEEPALIVE:
        # Not every system has all of these names, or can set all that it has.
        with contextlib.suppress(AttributeError, OSError):
            socket.setsockopt(level, getattr(socket_module, name), value)


def watched_socket(address: tuple[Any, ...]) -> socket_module.socket:
    """Return a socket for a connection to `address`, in the form of `getaddrinfo`; see aiohttp's
    `socket_factory`.
    """
    family, kind, protocol, *_ = address
    made = socket_module.socket(family, kind, protocol)
    keep_alive(made)
    return made
