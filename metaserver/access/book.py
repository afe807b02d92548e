"""The access state of SQL in memory: the principal of each token, and the rights of each principal.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...protocol.access.capability import CAPABILITY_MS, AccessNews
from ...protocol.access.quota import EVERYBODY, NO_QUOTA, Quota
from ...protocol.access.rights import AccessGrant
from ...protocol.access.tokens import token_hash
from ...protocol.errors import UnauthenticatedError
from ...rpc.access.caller import Caller

CHANGED_MAX = 1_000
"""Most principals in the news for a broker; with more, every older capability ends."""
CHANGED_MS = 2 * CAPABILITY_MS
"""Time, in milliseconds, for which a change is reported to brokers: capabilities that were signed
before it have ended by then.
"""


@dataclass(frozen=True, slots=True)
class KnownToken:
    """A token that was not revoked; times in milliseconds since 1970, `ends_at` 0 for never."""

    principal: str
    begins_at: int
    ends_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessBook:
    """The state of access at one version."""

    cluster: str = ""
    version: int = 0
    tokens: Mapping[str, KnownToken] = field(default_factory=dict)
    """Token hash → token."""
    grants: Mapping[str, tuple[AccessGrant, ...]] = field(default_factory=dict)
    """Principal → its grants."""
    changed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Principal → version and time of its last change, milliseconds since 1970."""
    keys: Mapping[str, bytes] = field(default_factory=dict)
    """Key id → public key."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Principal → quota; EVERYBODY has the quota of all others."""
    subject_bytes: Mapping[str, int] = field(default_factory=dict)
    """Subject or pattern → limit in bytes per second."""
    scheduled_bytes: Mapping[str, int] = field(default_factory=dict)
    """Subject or pattern → limit in bytes of scheduled messages."""

    def with_files(
        self, tokens: Mapping[str, str], grants: Mapping[str, tuple[AccessGrant, ...]]
    ) -> AccessBook:
        """Return a copy with the tokens of the settings, hash → principal, and the grants of their
        principals.
        """
        known = {text: KnownToken(principal, 0, 0) for text, principal in tokens.items()}
        merged = dict(self.grants)
        for principal, more in grants.items():
            merged[principal] = tuple(dict.fromkeys((*merged.get(principal, ()), *more)))
        return replace(self, tokens={**self.tokens, **known}, grants=merged)

    def caller_of(self, token: str, now_ms: int) -> Caller:
        """
        Return the caller that a token identifies.

        Raises:
            UnauthenticatedError: the token is unknown or revoked, or is not valid now.
        """
        known = self.tokens.get(token_hash(token))
        if known is None:
            raise UnauthenticatedError(
                "the token is not of this cluster, or it was revoked", problem="unknown token"
            )
        if now_ms < known.begins_at:
            raise UnauthenticatedError("the token is not valid yet", problem="not begun")
        if known.ends_at and now_ms >= known.ends_at:
            raise UnauthenticatedError("the token has ended", problem="ended")
        return self.caller_named(known.principal, ends_at_ms=known.ends_at)

    def caller_named(
        self, principal: str, groups: tuple[str, ...] = (), ends_at_ms: int = 0
    ) -> Caller:
        """
        Return a principal as a caller, with its grants and those of its groups.

        Args:
            groups: the principals that stand for its groups.
        """
        given = (self.grants.get(name, ()) for name in (principal, *groups))
        grants = tuple(dict.fromkeys(grant for each in given for grant in each))
        quota = self.quotas.get(principal) or self.quotas.get(EVERYBODY) or NO_QUOTA
        return Caller(principal, grants, groups, quota, ends_at_ms, self.version)

    def news(self, now_ms: int, *, operators: Mapping[str, str]) -> AccessNews:
        """Return the changes that brokers have to know; `operators` as in `AccessNews`."""
        late = {
            principal: version
            for principal, (version, at_ms) in self.changed.items()
            if at_ms > now_ms - CHANGED_MS
        }
        many = len(late) > CHANGED_MAX
        return AccessNews(
            cluster=self.cluster,
            now_ms=now_ms,
            version=self.version,
            keys=dict(self.keys),
            changed={} if many else late,
            floor=max(late.values()) if many else 0,
            subject_bytes=dict(self.subject_bytes),
            scheduled_bytes=dict(self.scheduled_bytes),
            operators=dict(operators),
        )
