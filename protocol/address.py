"""Parses and checks `host:port` addresses from users and brokers. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from functools import lru_cache

from .access.tokens import check_address_has_no_token
from .errors import ConfigError, InvalidRequestError, Reason, StoryError
from .text import collect_items

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253}):([0-9]{1,5})")

META_DEFAULT = "127.0.0.1:7000"
"""The metaserver of `keylane dev`, which commands ask unless another one is named."""
VIRTUAL_DOMAIN = ".keylane.invalid"
"""The suffix of the host names of in-memory servers. No real host has it, because RFC 6761 reserves
`.invalid`.
"""
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


def refuse_virtual_address(address: str) -> None:
    """Raise StoryError if `address` belongs to a virtual cluster, which a real network cannot
    reach.
    """
    if VIRTUAL_DOMAIN in address and address.rpartition(":")[0].endswith(VIRTUAL_DOMAIN):
        error = StoryError(
            f"{address} is in a virtual cluster of keylane.testing, which only its story can reach"
        )
        error.hint = (
            "Use the fixture keylane_cluster in an `async def` test, or call cluster.run(story). "
            "keylane.sync, other processes, threads and event loops, such as unittest's, need a "
            "real cluster: `keylane dev`."
        )
        raise error


@lru_cache(maxsize=1024)  # a broker reports its address with each heartbeat
def is_loopback(host: str) -> bool:
    """Return True for `localhost` and for loopback addresses, which must not be in brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=1024)
def is_wildcard(host: str) -> bool:
    """Return True for an address that means all interfaces, such as 0.0.0.0. It must not be in
    brackets.
    """
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Return True for a host name or IP address that others can connect to. It must not be in
    brackets.
    """
    if ":" in text:
        try:
            return not ipaddress.IPv6Address(text).is_unspecified
        except ValueError:
            return False
    return _HOST_NAME.fullmatch(text) is not None and not is_wildcard(text)


def parse_address(text: str) -> tuple[str, int]:
    """
    Split `host:port` into host and port.

    An IPv6 address must be in brackets, which are removed from the returned host.

    Raises:
        ConfigError: `text` is not host:port, or the port is outside 1..65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= 65_535:
        advice = ""
        if "://" in text:
            advice = f": leave out {text.partition('://')[0]:.20}://"
        elif _HOST_NAME.fullmatch(text):
            advice = f": the port is missing, as in {text:.80}:7000"
        elif match is not None:
            advice = ": a port is 1 to 65535"
        raise ConfigError(f"an address is host:port, not {text!r:.80}{advice}")
    return match[1].strip("[]"), int(match[2])


def check_broker_address(address: str, *, anywhere: bool = False) -> None:
    """
    Check the address that a broker advertises to clients and metaservers.

    Args:
        anywhere: True to accept addresses other than loopback ones.

    Raises:
        InvalidRequestError: `address` is not host:port, means all interfaces, or is not a loopback
            address although `anywhere` is False.
    """
    try:
        host, _port = parse_address(address)
    except ConfigError as error:
        raise InvalidRequestError(error.message) from None
    if is_wildcard(host):
        raise InvalidRequestError(
            Reason.BROKER_ADDRESS,
            f"{address!r:.80} means all interfaces: clients cannot connect to it",
            address=address[:80],
        )
    if not anywhere and not is_loopback(host):
        raise InvalidRequestError(
            Reason.BROKER_ADDRESS,
            f"a broker's address must be a loopback address, not {address!r:.80}",
            address=address[:80],
        )


def parse_addresses(given: object) -> list[str]:
    """
    Return the addresses in `given`: a string of comma-separated `host:port` addresses, or an
    iterable of such strings.

    Raises:
        ConfigError: `given` contains no address, or something other than host:port.
        InvalidRequestError: an address contains a token.
    """
    if isinstance(given, Mapping):
        raise ConfigError(
            'give the addresses of metaservers, as in "127.0.0.1:7000", not a dictionary; settings '
            "are further arguments"
        )
    items = [given] if isinstance(given, str) else collect_items(given)
    texts = [item for item in items if isinstance(item, str) and item]
    for text in texts:
        check_address_has_no_token(text)
    addresses = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not addresses or len(texts) < len(items):
        raise ConfigError(
            f"an address is host:port, or several separated by commas, not {given!r:.80}"
        )
    for address in addresses:
        parse_address(address)
    return addresses
