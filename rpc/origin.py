"""Decides which callers a server answers: programs and web pages from its own origin, but not pages
from other sites. Pure.

    Origin            sent by browsers with every WebSocket and POST
                      must be the server's own address
    Sec-Fetch-Site    sent by browsers with every request, even a plain GET
                      must be same-origin, or none (typed by the user)
    Host              the name that the caller resolved
                      must be a loopback name, or one of the server's own

Web pages cannot set these headers. Other programs, including keylane's clients, only send `Host`.
Checking `Host` protects against DNS rebinding: if `evil.example` resolves to this server, a page
from `http://evil.example:7000` has the same origin as the server. The port in `Host` is not
checked, because ports may be forwarded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from ..protocol.address import is_host, is_loopback
from ..protocol.errors import InvalidRequestError, Reason

DEFAULT_PORTS = {"http": 80, "https": 443}
SHOWN_CHARS_MAX = 100
ANY_HOST = "*"
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_OWN_SITES = frozenset({"same-origin", "none"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(:[0-9]{0,5})?")


def check_host(
    hosts: Sequence[str], names: Collection[str], patterns: Iterable[str] | None = None
) -> None:
    """
    Check the `Host` header of a request.

    Args:
        hosts: the values of the header; there must be exactly one.
        names: the names and addresses of the server, in lowercase.
        patterns: the setting `metrics_hosts` if it applies to this request, otherwise None.

    Raises:
        InvalidRequestError: the host is not a loopback name or address, is not in `names`, and does
            not match any of `patterns`.
    """
    match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    name = match[1].strip("[]").lower() if match is not None else ""
    if name and (name in names or is_loopback(name)):
        return
    if name and any(_matches(pattern, name) for pattern in patterns or ()):
        return
    excerpt = ", ".join(hosts)[:SHOWN_CHARS_MAX]
    error = InvalidRequestError(
        Reason.FOREIGN_HOST, f"{excerpt!r} is not a name of this server", host=excerpt
    )
    if patterns is not None:
        error.hint += (
            " For scrapes and probes, the server's setting metrics_hosts names other hosts, "
            "addresses and networks."
        )
    raise error


def is_host_pattern(text: str) -> bool:
    """Return True for a valid item of `metrics_hosts`: a name, an address, a network, or `*`."""
    if text == ANY_HOST or is_host(text):
        return True
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def _matches(pattern: str, name: str) -> bool:
    """Return True if the pattern matches a name or address, which must be in lowercase."""
    if pattern == ANY_HOST or pattern.lower() == name:
        return True
    try:
        return ip_address(name) in ip_network(pattern)
    except ValueError:  # one of the two is a name
        return False


def check_fetch_site(sites: Iterable[str]) -> None:
    """
    Check the `Sec-Fetch-Site` headers of a request; most requests have none.

    Raises:
        InvalidRequestError: a browser sent the request for a page from another origin.
    """
    for site in sites:
        if site not in _OWN_SITES:
            excerpt = site[:SHOWN_CHARS_MAX]
            raise InvalidRequestError(
                Reason.ORIGIN,
                f"a web page of another origin ({excerpt!r}) may not call this server",
                origin=excerpt,
            )


def check_origins(
    origins: Iterable[str], names: Collection[str], port: int, *, scheme: str = "http"
) -> None:
    """
    Check the `Origin` headers of a request; most requests have none.

    Args:
        names: the names and addresses of the server; loopback names are always accepted.
        port: the port on which the server listens.
        scheme: the scheme of the server, which is "https" with TLS.

    Raises:
        InvalidRequestError: an origin is not the server's own address.
    """
    for origin in origins:
        if not _is_own(origin, names, port, scheme):
            excerpt = origin[:SHOWN_CHARS_MAX]
            raise InvalidRequestError(
                Reason.ORIGIN, f"a web page of {excerpt!r} may not call this server", origin=excerpt
            )


def _is_own(origin: str, names: Collection[str], port: int, scheme: str) -> bool:
    try:
        parsed = urlsplit(origin)
        parsed_port = DEFAULT_PORTS.get(parsed.scheme) if parsed.port is None else parsed.port
    except ValueError:
        return False
    own_address = {*names, *_LOOPBACK_NAMES}
    return parsed.scheme == scheme and parsed.hostname in own_address and parsed_port == port
