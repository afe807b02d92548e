"""Looks up host names in the thread pool of the program's event loop, and without it at the end of
a program.
"""

from __future__ import annotations

import socket
import threading

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


class HostNames(ThreadedResolver):
    """
    A resolver like aiohttp's, but also for a program whose event loop has no thread for it.

    A program may have shut down the pool, or may get no more threads. Callers can handle a host
    that cannot be reached, but not a RuntimeError.

    After the end of the main thread Python starts no thread for a pool. Clients that were not
    closed are closed then, and send what is left: a name is looked up in the event loop, which
    waits for that.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """
        Return the addresses of a host.

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
    """Return the addresses of a host, looked up in this thread. Raises OSError if the name is
    unknown.
    """
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
