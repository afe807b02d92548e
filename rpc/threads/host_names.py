"""Looks up the names of hosts, in the thread pool of the program's event loop."""

from __future__ import annotations

import socket

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver


class HostNames(ThreadedResolver):
    """
    As aiohttp's, for a program whose event loop has no thread for it.

    A program may have shut down the pool, or may get no more threads.  Callers know what to do where a host cannot be
    reached, and of a RuntimeError nothing.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """
        The addresses of a host.

        Raises:
            OSError: the name is unknown, or there is no thread.
        """
        try:
            return await super().resolve(host, port, family)
        except RuntimeError as error:
            raise OSError(f"no thread looks up the name {host}: {error}") from error
