"""Resolves host names in the event loop's thread pool, or without the pool while the interpreter is
shutting down.
"""

from __future__ import annotations

import socket
import threading

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

NUMBERS = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


class HostNames(ThreadedResolver):
    """
    A resolver like aiohttp's that also works if the event loop's thread pool has no thread for it.

    If the pool has been shut down, or the system refuses another thread, this raises OSError,
    because callers can handle an unreachable host, but not a RuntimeError.

    After the main thread has ended, Python starts no more pool threads, but clients that were not
    closed still send their remaining messages. Names are then resolved in the event loop's thread,
    which blocks meanwhile.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """
        Return the addresses of a host.

        Raises:
            OSError: the name is unknown, or no thread is available.
        """
        if not threading.main_thread().is_alive():
            return resolve_blocking(host, port, family)
        try:
            return await super().resolve(host, port, family)
        except RuntimeError as error:
            raise OSError(f"no thread can resolve the name {host}: {error}") from error


def resolve_blocking(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    """Resolve a host in this thread, and return its addresses. Raises OSError if the name is
    unknown.
    """
    entries = socket.getaddrinfo(
        host, port, family, socket.SOCK_STREAM, flags=int(socket.AI_ADDRCONFIG)
    )
    results = []
    for kind, _type, protocol, _name, address in entries:
        number, service = socket.getnameinfo(address, NUMBERS)
        results.append(
            ResolveResult(
                hostname=host,
                host=number,
                port=int(service),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
        )
    return results
