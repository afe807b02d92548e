"""The settings of an outside issuer of tokens (JWT), whose keys a metaserver reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
)
"""Algorithms with a public key: not `none`, and no HS*, whose key both sides would have to keep
secret.
"""
LEEWAY_S_MAX: Final = 300
_TEXTS = ("jwt_issuer", "jwt_audience", "jwt_jwks")


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerSettings:
    """The settings of an outside issuer whose tokens are accepted."""

    issuer: str
    audience: str
    jwks: str
    """Path of a file, or an https URL, with the issuer's public keys."""
    jwks_ca: str
    """PEM file of the certificate authority for that URL; "": those of the machine."""
    algorithms: tuple[str, ...]
    principal_claim: str
    groups_claim: str
    """Claim with the groups of a principal; "": tokens have no groups."""
    leeway_s: int


def issuer_problems(values: Mapping[str, object]) -> list[str]:
    """Return the problems of the settings jwt_*, as sentences."""
    given = {name for name in _TEXTS if values.get(name)}
    problems = []
    if given and given != set(_TEXTS):
        missing = [name for name in _TEXTS if name not in given]
        problems.append(f"JWTs need also {' and '.join(missing)}")
    jwks = values.get("jwt_jwks") or ""
    if isinstance(jwks, str) and "://" in jwks and not jwks.startswith("https://"):
        problems.append(
            "jwt_jwks is a path or an https URL, because whoever changes the keys is trusted"
        )
    algorithms = values.get("jwt_algorithms", ALGORITHMS[:1])
    listed = algorithms if isinstance(algorithms, tuple) else (algorithms,)
    strange = [str(name)[:40] for name in listed if name not in ALGORITHMS]
    if strange or not listed:
        problems.append(
            f"jwt_algorithms are some of {', '.join(ALGORITHMS)}, not {', '.join(strange)}"
        )
    return problems
