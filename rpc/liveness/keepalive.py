"""The kernel's watch over a connection: packets while nothing is sent, so that a firewall on the
way does not forget it.
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
"""A path that is gone is found within 10 s by the kernel, though nothing is sent: a pull may wait
for longer.
"""


def keep_alive(socket: socket_module.socket) -> None:
    """Have the kernel watch a connection, as far as the system can."""
    for level, name, value in KEEPALIVE:
        # Not every system names all of them, or can set those that it names.
        with contextlib.suppress(AttributeError, OSError):
            socket.setsockopt(level, getattr(socket_module, name), value)


def watched_socket(address: tuple[Any, ...]) -> socket_module.socket:
    """A socket for a connection to `address`, in the form of `getaddrinfo`; see aiohttp's
    `socket_factory`.
    """
    family, kind, protocol, *_ = address
    made = socket_module.socket(family, kind, protocol)
    keep_alive(made)
    return made
