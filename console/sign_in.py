"""The cookie of a sign-in and the tokens of forms. Pure.

A cookie has the access token itself, which a page's script cannot read, so that any metaserver of
the cluster answers the next request. A form has a digest of it: a page of another site that makes a
browser send the cookie does not know the digest.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from ..protocol.access.tokens import check_token
from ..protocol.errors import CapabilityEndedError, ConfigError, UnauthenticatedError

SIGNED_OUT = (UnauthenticatedError, CapabilityEndedError)
"""The errors of a call whose sign-in has ended."""
COOKIE = "keylane_console"
COOKIE_CHARS_MAX = 3_800
"""Browsers drop longer cookies."""
AGE_S = 12 * 3600
"""A sign-in ends after this time, in seconds, whatever the token's end is."""


def cookie_for(token: str, *, is_secure: bool) -> str:
    """Return the header that stores a token in the browser; "" removes it."""
    secure = "; Secure" if is_secure else ""
    age = AGE_S if token else 0
    return f"{COOKIE}={token}; Path=/console; Max-Age={age}; HttpOnly; SameSite=Strict{secure}"


def read_token(text: str) -> str:
    """
    Return the token that a person has typed.

    Raises:
        ConfigError: it is none, or is longer than a browser's cookie.
    """
    token = check_token(text, "what you entered")
    if len(token) > COOKIE_CHARS_MAX:
        raise ConfigError(
            f"the token has {len(token)} characters, and a browser keeps {COOKIE_CHARS_MAX}: "
            "use the keylane command"
        )
    return token


def form_token(secret: str) -> str:
    """Return the token of forms that are sent under a sign-in; `secret` is its access token."""
    return hmac.new(secret.encode(), b"a form of the console", sha256).hexdigest()


def is_own_form(secret: str, given: str) -> bool:
    """Return True if a form was made for this sign-in."""
    return hmac.compare_digest(form_token(secret).encode(), given.encode())
