"""Names of principals, which come from tokens, certificates (`cert:`), JWTs (`jwt:`), or groups in
JWTs (`group:`). Pure.

Invariants
    The principal of a token has a plain name, so a token never stands for a certificate, a JWT or a
    group.
"""

from __future__ import annotations

import re
from typing import Final

from ..errors import InvalidRequestError, Reason
from ..ids import check_name

ADMIN: Final = "admin"
CLUSTER: Final = "cluster"
"""The principals of the tokens in the servers' files are `admin` and `cluster`."""
BROKER: Final = "broker."
"""Prefix of the names of the brokers' own principals."""
CERT: Final = "cert:"
JWT: Final = "jwt:"
GROUP: Final = "group:"
_OUTSIDE = re.compile(r"(cert|jwt|group):[A-Za-z0-9][A-Za-z0-9._:/@+=|-]{0,189}")


def is_outside(name: str) -> bool:
    """Return True if somebody else vouches for the principal: a certificate authority or a JWT
    issuer.
    """
    return _OUTSIDE.fullmatch(name) is not None


def check_principal(name: object) -> str:
    """Return the name, or raise InvalidRequestError if no principal can have it."""
    if isinstance(name, str) and is_outside(name):
        return name
    try:
        return check_name("principal", name)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            Reason.NAME_INVALID,
            f"{error.message}; or cert:NAME, jwt:NAME, group:NAME",
            kind="principal",
        ) from None
