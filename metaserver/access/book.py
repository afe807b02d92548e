"""All that SQL has about access, in memory: which principal a token is of, and what it may do.
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
"""Principals in the news of a broker; above it every older capability ends."""
CHANGED_MS = 2 * CAPABILITY_MS
"""For this long a change is told: what was signed before it has ended by then."""


@dataclass(frozen=True, slots=True)
class KnownToken:
    """A token that was not revoked; times of the calendar, in milliseconds, `ends_at` 0 for
    never.
    """

    principal: str
    begins_at: int
    ends_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessBook:
    """The state of access as of one version."""

    cluster: str = ""
    version: int = 0
    tokens: Mapping[str, KnownToken] = field(default_factory=dict)
    """By hash."""
    grants: Mapping[str, tuple[AccessGrant, ...]] = field(default_factory=dict)
    """By principal."""
    changed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Principal → version and time of its last change."""
    keys: Mapping[str, bytes] = field(default_factory=dict)
    """Id → public key."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By principal, EVERYBODY among them."""
    subject_bytes: Mapping[str, int] = field(default_factory=dict)
    """Limits of subjects, by name or pattern."""
    scheduled_bytes: Mapping[str, int] = field(default_factory=dict)
    """The same, of scheduled messages."""

    def with_files(
        self, tokens: Mapping[str, str], grants: Mapping[str, tuple[AccessGrant, ...]]
    ) -> AccessBook:
        """The same, with tokens of files, hash → principal, and the rights of these principals."""
        known = {text: KnownToken(principal, 0, 0) for text, principal in tokens.items()}
        merged = dict(self.grants)
        for principal, more in grants.items():
            merged[principal] = tuple(dict.fromkeys((*merged.get(principal, ()), *more)))
        return replace(self, tokens={**self.tokens, **known}, grants=merged)

    def caller_of(self, token: str, now_ms: int) -> Caller:
        """
        Who has this token.

        Raises:
            UnauthenticatedError: it is unknown, revoked, has ended or has not begun.
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
        A principal, with its rights and those of its groups.

        Args:
            groups: principals of groups.
        """
        given = (self.grants.get(name, ()) for name in (principal, *groups))
        grants = tuple(dict.fromkeys(grant for each in given for grant in each))
        quota = self.quotas.get(principal) or self.quotas.get(EVERYBODY) or NO_QUOTA
        return Caller(principal, grants, groups, quota, ends_at_ms, self.version)

    def news(self, now_ms: int, *, operators: Mapping[str, str]) -> AccessNews:
        """What brokers have to know; see `AccessNews.operators`."""
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
