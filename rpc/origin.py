"""Which web pages may call a server: those of its own address, so none of another site in a user's browser.  Pure.

A browser says in `Origin` where the page comes from, with every WebSocket and every POST, and lets no page lie.
Other programs, our own clients among them, say nothing.  `Host` is not asked: a name of the other site may lead here.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from ..protocol.errors import OriginError

HTTP_PORT = 80
SHOWN_CHARS_MAX = 100
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def check_origins(origins: Iterable[str], host: str, port: int) -> None:
    """
    Let the `Origin` headers of a request through, most often none.

    Args:
        host: where the server listens; a name of loopback stands for all of them.
        port: the one bound.

    Raises:
        OriginError: one is not the server's own.
    """
    for origin in origins:
        if not _is_own(origin, host, port):
            shown = origin[:SHOWN_CHARS_MAX]
            raise OriginError(f"a web page of {shown!r} may not call this server", origin=shown)


def _is_own(origin: str, host: str, port: int) -> bool:
    try:
        said = urlsplit(origin)
        said_port = HTTP_PORT if said.port is None else said.port
    except ValueError:
        return False
    names = {host, *_LOOPBACK_NAMES}
    return said.scheme == "http" and said.hostname in names and said_port == port
