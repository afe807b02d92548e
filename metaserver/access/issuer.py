"""Verifies the tokens (JWTs) of an external issuer: signature, issuer, audience, times, and the
name of the principal.

    header: alg on the list, kid known ─▶ key of that kind ─▶ claims ─▶ jwt:NAME, group:NAME …

Keys in the header (jku, x5u, jwk) are ignored; `crit` is refused.

See RFC 7519 and RFC 8725.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, Final, NamedTuple

import jwt

from ...protocol.access.principals import GROUP, JWT, is_outside
from ...protocol.clock import Clock
from ...protocol.errors import UnauthenticatedError
from ...rpc.access.key_set import KeySet
from ...rpc.access.settings import IssuerSettings

TEXT_CHARS_MAX: Final = 8_000
GROUPS_MAX: Final = 50
CACHE_MAX: Final = 10_000
_KINDS: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
_CURVES: Final = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}


class VerifiedIdentity(NamedTuple):
    """A principal that an issuer vouches for; `ends_at_ms` is in milliseconds since 1970."""

    principal: str
    groups: tuple[str, ...]
    ends_at_ms: int


class Issuer:
    """An external issuer whose tokens are accepted."""

    def __init__(self, settings: IssuerSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._keys = KeySet(settings.jwks, ca=settings.jwks_ca, boot_ms=clock.boot_ms)
        self._cache: OrderedDict[bytes, tuple[str, VerifiedIdentity]] = OrderedDict()
        """Maps the SHA-256 of each token to its key id and the verified identity; has at most
        CACHE_MAX entries.
        """
        self._cached_version = 0
        """Version of the key set with which the cached tokens were verified."""

    @staticmethod
    def looks_like(text: str) -> bool:
        """Return True if the text may be a JWT."""
        return text.count(".") == 2 and len(text) <= TEXT_CHARS_MAX

    async def verify(self, text: str) -> VerifiedIdentity:
        """
        Verify a token and return the identity in it.

        Raises:
            UnauthenticatedError: the token is not valid.
            UnavailableError: the issuer's keys cannot be read.
        """
        digest = hashlib.sha256(text.encode()).digest()
        cached_entry = self._cache.get(digest)
        key_id = (
            cached_entry[0]
            if cached_entry is not None
            else _read_header(text, self._settings.algorithms)[0]
        )
        key = await self._keys.find(key_id)
        if self._cached_version != self._keys.version:
            self._cache.clear()
            self._cached_version = self._keys.version
        cached_entry = self._cache.get(digest)
        if cached_entry is not None and self._clock.wall_ms() < cached_entry[1].ends_at_ms:
            return cached_entry[1]
        _key_id, algorithm = _read_header(text, self._settings.algorithms)
        if key is None:
            raise _token_error("its key is not one of the issuer's", "unknown key")
        identity = self._decode(text, _load_key(key, algorithm), algorithm)
        self._cache[digest] = key_id, identity
        if len(self._cache) > CACHE_MAX:
            self._cache.popitem(last=False)
        return identity

    def _decode(self, text: str, key: jwt.PyJWK, algorithm: str) -> VerifiedIdentity:
        """Check a token's signature and claims. Raises UnauthenticatedError."""
        settings = self._settings
        try:
            claims = jwt.decode(
                text,
                key,
                algorithms=[algorithm],
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise _token_error("it has expired", "ended") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise _token_error(str(error)[:200], type(error).__name__) from None
        name = claims.get(settings.principal_claim)
        principal = f"{JWT}{name}"
        if not isinstance(name, str) or not is_outside(principal):
            raise _token_error(f"its claim {settings.principal_claim} is not a valid name", "name")
        ends_at_ms = (int(claims["exp"]) + settings.leeway_s) * 1000
        return VerifiedIdentity(principal, self._read_groups(claims), ends_at_ms)

    def _read_groups(self, claims: dict[str, Any]) -> tuple[str, ...]:
        """Return the groups in a token, except those whose names are not valid principals."""
        claim = claims.get(self._settings.groups_claim, ()) if self._settings.groups_claim else ()
        names = claim.split() if isinstance(claim, str) else claim
        if not isinstance(names, list | tuple):
            return ()
        groups = (f"{GROUP}{name}" for name in names[:GROUPS_MAX] if isinstance(name, str))
        return tuple(dict.fromkeys(group for group in groups if is_outside(group)))


def _read_header(text: str, allowed_algorithms: tuple[str, ...]) -> tuple[str, str]:
    """Return the key id and the algorithm of a token. Raises UnauthenticatedError."""
    try:
        header = jwt.get_unverified_header(text)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _token_error("it is not a JWT", "no token") from None
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in allowed_algorithms:
        raise _token_error(
            f"its algorithm is not one of {', '.join(allowed_algorithms)}", "algorithm"
        )
    if "crit" in header:
        raise _token_error("it has critical headers", "critical headers")
    if not isinstance(key_id, str) or not 0 < len(key_id) <= 200:
        raise _token_error("it names no key", "unknown key")
    return key_id, str(algorithm)


def _load_key(key: dict[str, Any], algorithm: str) -> jwt.PyJWK:
    """Return the key if its type matches the algorithm. Raises UnauthenticatedError."""
    matches = (
        key.get("kty") == _KINDS[algorithm[:2]]
        and key.get("alg", algorithm) == algorithm
        and key.get("crv") == _CURVES.get(algorithm, key.get("crv"))
    )
    if not matches:
        raise _token_error("its key is for another algorithm", "algorithm")
    try:
        return jwt.PyJWK(key, algorithm=algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise _token_error("the issuer's key cannot be used", "unusable key") from None


def _token_error(why: str, problem: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        f"the token of the outside issuer is refused: {why}", problem=problem
    )
