"""Checks the address of a server: it must be loopback unless the server has TLS, and the port must
be valid and free.
"""

from __future__ import annotations

import errno
import socket

from ..protocol.address import is_loopback
from ..protocol.errors import AddressError, Reason
from ..protocol.text import PORT_MAX
from .reasons import reason


def check_loopback(host: str) -> None:
    """
    Check that `host` is a loopback address.

    Raises:
        AddressError: `host` is not a loopback address.
    """
    if not is_loopback(host):
        raise AddressError(
            Reason.INSECURE_HOST,
            f"{host!r} is not a loopback address, and there is no TLS",
            host=host,
        )


def check_port(port: int) -> None:
    """
    Check that a port number is valid; 0 lets the system choose.

    Raises:
        AddressError: the port number is not valid.
    """
    if not 0 <= port <= PORT_MAX:
        raise AddressError(f"ports are 0 to {PORT_MAX}, not {port}", port=port)


def check_free(host: str, port: int, *, anywhere: bool = False) -> None:
    """
    Check that a server can listen at this address. Programs call this before they write to disk.

    Args:
        anywhere: True if the address need not be a loopback address.

    Raises:
        AddressError: the address is not loopback, unknown, in use or not allowed, or the port is
            invalid.
    """
    if not anywhere:
        check_loopback(host)
    check_port(port)
    try:
        candidates = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise AddressError(f"cannot listen on {host!r:.80}: {reason(error)}", port=port) from error
    for family, kind, protocol, _name, sockaddr in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(sockaddr)
        except OSError as error:
            # Other errors are ignored: the server skips address families that the system lacks.
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError) -> AddressError:
    """Return the error for a server that cannot listen at this address."""
    return AddressError(f"cannot listen on {host}:{port}: {reason(error)}", port=port)
