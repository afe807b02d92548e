"""Looks up the names of hosts, in the thread pool of the program's event loop; at the end of a
program without it.
"""

from __future__ import annotations

import socket
import threading

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


class HostNames(ThreadedResolver):
    """
    As aiohttp's, for a program whose event loop has no thread for it.

    A program may have shut down the pool, or may get no more threads.  Callers know what to do
    where a host cannot be reached, and of a RuntimeError nothing.

    Once the main thread has ended Python starts no thread for a pool, and clients that were not
    closed are closed then, with what is still to be sent: a name is looked up in the event loop,
    which waits for that.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """
        The addresses of a host.

        Raises:
            OSError: the name is unknown, or there is no thread.
        """
        if not threading.main_thread().is_alive():
            return look_up(host, port, family)
        try:
            return await super().resolve(host, port, family)
        except RuntimeError as error:
            raise OSError(f"no thread looks up the name {host}: {error}") from error


def look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    """The addresses of a host, looked up in this thread.  Raises OSError: the name is unknown."""
    rows = socket.getaddrinfo(
        host, port, family, socket.SOCK_STREAM, flags=int(socket.AI_ADDRCONFIG)
    )
    places = []
    for kind, _type, protocol, _name, address in rows:
        number, service = socket.getnameinfo(address, NUMBERS)
        places.append(
            ResolveResult(
                hostname=host,
                host=number,
                port=int(service),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
        )
    return places
