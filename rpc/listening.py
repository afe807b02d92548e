"""Where a server may listen: on loopback, on a valid port that is free."""

from __future__ import annotations

import errno
import socket

from ..protocol.address import is_loopback
from ..protocol.errors import AddressError, HostError
from .reasons import reason

PORT_MAX = 65_535


def check_loopback(host: str) -> None:
    """
    Let a loopback address through.

    Raises:
        HostError: any other.
    """
    if not is_loopback(host):
        raise HostError(f"{host!r} is not a loopback address", host=host)


def check_port(port: int) -> None:
    """
    Let a port through.

    Raises:
        AddressError: there is no such port.
    """
    if not 0 <= port <= PORT_MAX:
        raise AddressError(f"ports are 0 to {PORT_MAX}, not {port}", port=port)


def check_free(host: str, port: int) -> None:
    """
    Let through what a server may listen on now: asked before a program makes anything on disk.

    Raises:
        HostError, AddressError: not loopback, no port, in use, or not allowed.
    """
    check_loopback(host)
    check_port(port)
    for family, kind, protocol, _name, place in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            # An address family that the machine lacks is for the server to know how to do without.
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError) -> AddressError:
    """The error of a server that was not let listen."""
    return AddressError(f"cannot listen on {host}:{port}: {reason(error)}", port=port)
