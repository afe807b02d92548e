"""Parses and checks addresses, `host:port`, that users and brokers give. Pure."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from .access.tokens import check_address_has_no_token
from .errors import ConfigError, InvalidRequestError, Reason, StoryError
from .text import items_of

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253}):([0-9]{1,5})")

VIRTUAL_DOMAIN = ".keylane.invalid"
"""Suffix of the names of servers in memory; no machine has a name that ends in `.invalid` (RFC
6761).
"""
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


def check_real(address: str) -> None:
    """Raise StoryError if `address` is a server of a virtual cluster, because this network is
    real.
    """
    if VIRTUAL_DOMAIN in address and address.rpartition(":")[0].endswith(VIRTUAL_DOMAIN):
        error = StoryError(
            f"{address} is in a virtual cluster of keylane.testing, which only its story reaches"
        )
        error.hint = (
            "Take keylane_cluster in an `async def` test, or call cluster.run(story). "
            "keylane.sync, other threads and event "
            "loops, as unittest's, and other processes need a real cluster: `keylane dev`."
        )
        raise error


@lru_cache(maxsize=1024)  # a broker reports its address with each heartbeat
def is_loopback(host: str) -> bool:
    """Return True for `localhost` and loopback addresses; `host` has no brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=1024)
def is_wildcard(host: str) -> bool:
    """Return True for an address that means all addresses of a machine; `host` has no brackets."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Return True for a host name or address, without brackets, to which others may connect."""
    if ":" in text:
        try:
            return not ipaddress.IPv6Address(text).is_unspecified
        except ValueError:
            return False
    return _HOST_NAME.fullmatch(text) is not None and not is_wildcard(text)


def parse_address(text: str) -> tuple[str, int]:
    """
    Split `host:port` into host and port.

    An IPv6 address must be in brackets; the returned host has none. No connection is made.

    Raises:
        ConfigError: `text` is not host:port, or the port is outside 1..65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= 65_535:
        raise ConfigError(f"an address is host:port, not {text!r:.80}")
    return match[1].strip("[]"), int(match[2])


def check_broker_address(address: str, *, anywhere: bool = False) -> None:
    """
    Check the address that a broker reports for itself, to which clients and metaservers connect.

    Args:
        anywhere: the address need not be a loopback address.

    Raises:
        InvalidRequestError: `address` is not host:port.
        InvalidRequestError: `address` means every address of a machine, or is no loopback address
            though `anywhere` is False.
    """
    try:
        host, _port = parse_address(address)
    except ConfigError as error:
        raise InvalidRequestError(error.message) from None
    if is_wildcard(host):
        raise InvalidRequestError(
            Reason.BROKER_ADDRESS,
            f"no machine has the address {address!r:.80}",
            address=address[:80],
        )
    if not anywhere and not is_loopback(host):
        raise InvalidRequestError(
            Reason.BROKER_ADDRESS,
            f"a broker's address is a loopback address, not {address!r:.80}",
            address=address[:80],
        )


def addresses_of(given: object) -> list[str]:
    """
    Return the addresses in `given`: a text of one or more `host:port` separated by commas, or an
    iterable of such texts.

    Raises:
        ConfigError: `given` has no address, or something that is not host:port.
        InvalidRequestError: a text contains a token.
    """
    items = [given] if isinstance(given, str) else items_of(given)
    texts = [item for item in items if isinstance(item, str) and item]
    for text in texts:
        check_address_has_no_token(text)
    addresses = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not addresses or len(texts) < len(items):
        raise ConfigError(f"an address is host:port, or several with commas, not {given!r:.80}")
    for address in addresses:
        parse_address(address)
    return addresses
