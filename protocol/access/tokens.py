"""Creates, checks and hashes tokens, and rejects tokens in URLs. Pure.

A token is kl_ followed by 256 random bits in base64url, which are 43 characters. The database
stores only its SHA-256 hash. A random secret of that size needs no salt.
"""

from __future__ import annotations

import hashlib
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from typing import Final

from ..errors import ConfigError, InvalidRequestError, Reason

TOKEN_BYTES: Final = 32
_TOKEN = re.compile(r"kl_[A-Za-z0-9_-]{43}")
_JWT = re.compile(r"ey[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
JWT_CHARS_MAX: Final = 8_000
_SECRET = re.compile(r"k[lc]_[A-Za-z0-9_-]{43,}|ey[A-Za-z0-9_-]{10,}\.ey[A-Za-z0-9_-]{10,}\.")
"""Matches a token, a capability or a JWT inside other text."""
_NAMES = frozenset({"token", "access_token", "authorization", "capability", "api_key", "apikey"})
"""The names of URL parameters in which other systems accept tokens."""


def make_token(draw_bits: Callable[[int], int]) -> str:
    """Return a new token. `draw_bits` must be a cryptographically secure random generator."""
    drawn = draw_bits(8 * TOKEN_BYTES).to_bytes(TOKEN_BYTES, "big")
    return "kl_" + urlsafe_b64encode(drawn).decode().rstrip("=")


def check_token(text: object, origin: str) -> str:
    """
    Strip whitespace from `text`, and check that it is a keylane token or a JWT.

    Args:
        origin: where the text comes from, for the error, which never contains the text itself.

    Raises:
        ConfigError: the text is not a token.
    """
    token = text.strip() if isinstance(text, str) else ""
    is_jwt = len(token) <= JWT_CHARS_MAX and _JWT.fullmatch(token) is not None
    if _TOKEN.fullmatch(token) is None and not is_jwt:
        raise ConfigError(
            Reason.TOKEN_INVALID,
            f"{origin} has no token: one is kl_ and 43 letters, or a JWT of an outside issuer",
        )
    return token


def is_own_token(text: str) -> bool:
    """Return True for a keylane token, False for a JWT."""
    return _TOKEN.fullmatch(text) is not None


def check_own_token(token: str, origin: object) -> str:
    """Return the token if it is a keylane token, which servers need. Raises ConfigError for a
    JWT.
    """
    if not is_own_token(token):
        raise ConfigError(
            Reason.TOKEN_INVALID, f"{origin} needs a token of keylane: kl_ and 43 letters"
        )
    return token


def token_hash(token: str) -> str:
    """Return the hash under which the database stores a token, as 64 hexadecimal digits."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def check_no_token(path: str, query: Mapping[str, str]) -> None:
    """Raise InvalidRequestError if a request's path or parameters contain a token, or if a
    parameter has a name that other systems use for tokens.
    """
    has_secret_parameter = any(name.lower() in _NAMES for name in query)
    if has_secret_parameter or _SECRET.search(path) or any(map(_SECRET.search, query.values())):
        raise InvalidRequestError(Reason.TOKEN_IN_URL)


def check_address_has_no_token(text: str) -> None:
    """Raise InvalidRequestError if an address contains a token."""
    if _SECRET.search(text):
        raise InvalidRequestError(Reason.TOKEN_IN_URL, "an address contains a token")
