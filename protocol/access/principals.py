"""Names of principals, which tokens, certificates (`cert:`), JWTs (`jwt:`) and groups in JWTs
(`group:`) identify. Pure.

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
"""Principals of the tokens in the servers' files."""
BROKER: Final = "broker."
"""Prefix of the principals of brokers."""
CERT: Final = "cert:"
JWT: Final = "jwt:"
GROUP: Final = "group:"
_EXTERNAL = re.compile(r"(cert|jwt|group):[A-Za-z0-9][A-Za-z0-9._:/@+=|-]{0,189}")


def is_outside(name: str) -> bool:
    """Return True if a certificate authority or a JWT issuer authenticates the principal, not a
    token of keylane.
    """
    return _EXTERNAL.fullmatch(name) is not None


def check_principal(name: object) -> str:
    """Return the name, or raise InvalidRequestError if it is not a legal name of a principal."""
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
