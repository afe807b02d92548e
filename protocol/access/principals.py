"""Names of principals, which are identified by tokens, certificates (`cert:`), JWTs (`jwt:`) and
groups in JWTs (`group:`). Pure.

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
"""The principals of the tokens in the servers' files."""
BROKER: Final = "broker."
"""The prefix of the names of brokers' principals."""
CERT: Final = "cert:"
JWT: Final = "jwt:"
GROUP: Final = "group:"
_EXTERNAL = re.compile(r"(cert|jwt|group):[A-Za-z0-9][A-Za-z0-9._:/@+=|-]{0,189}")


def is_outside(name: str) -> bool:
    """Return True if the principal is authenticated by a certificate authority or a JWT issuer
    rather than by a keylane token.
    """
    return _EXTERNAL.fullmatch(name) is not None


def check_principal(name: object) -> str:
    """Return the name if it is a valid name of a principal. Raises InvalidRequestError
    otherwise.
    """
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
