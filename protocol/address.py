"""Addresses as users give them.  Pure."""

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


def check_broker_address(address: str) -> None:
    """
    Let the address through that a broker reports for itself: clients and metaservers will connect to it.

    Raises:
        InvalidRequestError: it is not host:port.
        BrokerAddressError: it is not on loopback, where all of our servers are.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) <= 65_535:
        raise InvalidRequestError(f"an address is host:port, not {address!r:.80}")
    if not is_loopback(match[1].strip("[]")):
        raise BrokerAddressError(
            f"a broker's address is a loopback address, not {address!r:.80}", address=address[:80]
        )


def addresses_of(meta: object) -> list[str]:
    """
    The addresses in `meta`: `host:port`, or several, in one text with commas or in a list of such texts.

    Whether anybody is there is for the connection to find out.

    Raises:
        ConfigError: none, or something that is no text.
    """
    given = [meta] if isinstance(meta, str) or not isinstance(meta, Iterable) else list(meta)
    texts = [one for one in given if isinstance(one, str) and one]
    addresses = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not addresses or len(texts) < len(given):
        raise ConfigError(f"meta is host:port of a metaserver, or several, not {meta!r:.80}")
    return addresses
