"""Names of principals: of tokens, of certificates (`cert:`), of JWTs (`jwt:`) and of groups in JWTs
(`group:`).  Pure.

Invariants
    A token is of a principal with a plain name, so no token stands for a certificate, a JWT or a
    group.
"""

from __future__ import annotations

import re
from typing import Final

from ..errors import InvalidRequestError, Reason
from ..ids import check_name

ADMIN: Final = "admin"
CLUSTER: Final = "cluster"
"""The principals of the tokens in files of servers."""
BROKER: Final = "broker."
"""What names of brokers' own principals begin with."""
CERT: Final = "cert:"
JWT: Final = "jwt:"
GROUP: Final = "group:"
_OUTSIDE = re.compile(r"(cert|jwt|group):[A-Za-z0-9][A-Za-z0-9._:/@+=|-]{0,189}")


def is_outside(name: str) -> bool:
    """True for the name of a principal that another vouches for: an authority or an issuer."""
    return _OUTSIDE.fullmatch(name) is not None


def check_principal(name: object) -> str:
    """Raises InvalidRequestError: it is no name of a principal."""
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
