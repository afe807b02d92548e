"""Addresses, `host:port`, as users and brokers give them.  Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from .errors import BrokerAddressError, ConfigError, InvalidRequestError

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253}):([0-9]{1,5})")


def is_loopback(host: str) -> bool:
    """True for `localhost` and for loopback addresses; `host` is without brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """
    Host and port of `host:port`; an IPv6 address is in brackets, and comes back without them.

    Whether anything listens there is for the connection to find out.

    Raises:
        ConfigError: it is not host:port, or no program can listen on that port.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= 65_535:
        raise ConfigError(f"an address is host:port, not {text!r:.80}")
    return match[1].strip("[]"), int(match[2])


def check_broker_address(address: str) -> None:
    """
    Let the address through that a broker reports for itself: clients and metaservers will connect to it.

    Raises:
        InvalidRequestError: it is not host:port.
        BrokerAddressError: it is not on loopback, where all of our servers are.
    """
    try:
        host, _port = parse_address(address)
    except ConfigError as error:
        raise InvalidRequestError(error.message) from None
    if not is_loopback(host):
        raise BrokerAddressError(
            f"a broker's address is a loopback address, not {address!r:.80}", address=address[:80]
        )


def addresses_of(given: object) -> list[str]:
    """
    The addresses in `given`: one `host:port`, or several, in one text with commas or in an iterable of such texts.

    Raises:
        ConfigError: none, or something that is not host:port.
    """
    items = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    texts = [item for item in items if isinstance(item, str) and item]
    addresses = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not addresses or len(texts) < len(items):
        raise ConfigError(f"an address is host:port, or several with commas, not {given!r:.80}")
    for address in addresses:
        parse_address(address)
    return addresses
