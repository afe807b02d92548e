"""The access control settings of server programs, and the settings for an external token issuer
(JWT). Pure.

access = auto    on, unless the server listens on a loopback address
access = off everyone who reaches the server may do anything; must be set explicitly
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ...protocol.address import is_loopback

ON, OFF, AUTO = "on", "off", "auto"
_HASH = re.compile(r"[0-9a-f]{64}")
_NAMED_HASH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}:[0-9a-f]{64}")


def is_access_on(access: object, host: object) -> bool:
    """Return True if a server that listens on `host` authenticates its callers."""
    return access == ON or (access == AUTO and isinstance(host, str) and not is_loopback(host))


def access_problems(values: Mapping[str, object], *required: tuple[str, ...]) -> list[str]:
    """
    Return the problems with the setting `access` and its tokens, as sentences.

    Args:
        required: tuples of setting names; if access is on, at least one of each tuple must be set.
    """
    access, host = values.get("access", AUTO), values.get("host", "127.0.0.1")
    if access not in (ON, OFF, AUTO):
        return [f"access is {ON}, {OFF} or {AUTO}, not {access!r:.40}"]
    # Without either, the server refuses to start at this address, and gives advice about TLS.
    served = values.get("tls_cert") is not None or values.get("insecure_network") is True
    if access == OFF or not is_access_on(access, host) or (access == AUTO and not served):
        return []
    reason = f"access = {ON} needs it"
    if access == AUTO:
        reason = (
            f"access is on because {host} is not a loopback address; "
            f'access = "{OFF}" serves everybody'
        )
    return [
        f"{' or '.join(names)} is missing; {reason}"
        for names in required
        if not any(values.get(name) for name in names)
    ]


def hash_problems(values: Mapping[str, object], name: str, *, named: bool = False) -> list[str]:
    """
    Return the problems with a setting that contains token hashes, as sentences.

    Args:
        named: True if the setting is a list of NAME:HASH, False if it is a single hash.
    """
    value = values.get(name)
    if not value:
        return []
    if not named:
        is_hash = isinstance(value, str) and _HASH.fullmatch(value) is not None
        return [] if is_hash else [f"{name} is the SHA-256 of a token: 64 hexadecimal digits"]
    items = value if isinstance(value, tuple) else (value,)
    if all(isinstance(item, str) and _NAMED_HASH.fullmatch(item) for item in items):
        return []
    return [f"{name} are NAME:HASH, a name and the SHA-256 of a token in 64 hexadecimal digits"]


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
"""Signature algorithms with public keys. `none` and HS* are excluded; the latter needs a shared
secret.
"""
LEEWAY_S_MAX: Final = 300
_REQUIRED = ("jwt_issuer", "jwt_audience", "jwt_jwks")


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerSettings:
    """The settings for an external issuer whose JWTs are accepted."""

    issuer: str
    audience: str
    jwks: str
    """The path of a file, or an https URL, with the issuer's public keys."""
    jwks_ca: str
    """PEM file of the certificate authority for that URL; "" for the system's authorities."""
    algorithms: tuple[str, ...]
    principal_claim: str
    groups_claim: str
    """The claim that lists the groups of a principal; "" if tokens contain no groups."""
    leeway_s: int


def issuer_problems(values: Mapping[str, object]) -> list[str]:
    """Return the problems with the jwt_* settings, as sentences."""
    present = {name for name in _REQUIRED if values.get(name)}
    problems = []
    if present and present != set(_REQUIRED):
        missing_names = [name for name in _REQUIRED if name not in present]
        problems.append(f"JWTs need also {' and '.join(missing_names)}")
    jwks = values.get("jwt_jwks") or ""
    if isinstance(jwks, str) and "://" in jwks and not jwks.startswith("https://"):
        problems.append(
            "jwt_jwks is a path or an https URL, because whoever changes the keys is trusted"
        )
    algorithms = values.get("jwt_algorithms", ALGORITHMS[:1])
    names = algorithms if isinstance(algorithms, tuple) else (algorithms,)
    unknown = [str(name)[:40] for name in names if name not in ALGORITHMS]
    if unknown or not names:
        problems.append(
            f"jwt_algorithms are some of {', '.join(ALGORITHMS)}, not {', '.join(unknown)}"
        )
    return problems
