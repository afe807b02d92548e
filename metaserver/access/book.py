"""The access state in memory: the principal of each token, and the rights of each principal.
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
"""Maximum number of changed principals that are sent to a broker. If there are more, all older
capabilities become invalid.
"""
CHANGED_MS = 2 * CAPABILITY_MS
"""How long, in milliseconds, a change is sent to brokers. After this time, all capabilities that
were signed before the change have expired.
"""


@dataclass(frozen=True, slots=True)
class KnownToken:
    """A token that has not been revoked. Times are in milliseconds since 1970; an `ends_at` of 0
    means that it never expires.
    """

    principal: str
    begins_at: int
    ends_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessState:
    """The access state at a given version."""

    cluster: str = ""
    version: int = 0
    tokens: Mapping[str, KnownToken] = field(default_factory=dict)
    """Maps each token hash to its token."""
    grants: Mapping[str, tuple[AccessGrant, ...]] = field(default_factory=dict)
    """Maps each principal to its grants."""
    changed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Maps each principal to the version and time (in milliseconds since 1970) of its last
    change.
    """
    keys: Mapping[str, bytes] = field(default_factory=dict)
    """Maps each key id to its public key."""
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """Maps each principal to its quota; EVERYBODY is mapped to the quota of all other
    principals.
    """
    subject_bytes: Mapping[str, int] = field(default_factory=dict)
    """Maps each subject or pattern to its limit in bytes per second."""
    scheduled_bytes: Mapping[str, int] = field(default_factory=dict)
    """Maps each subject or pattern to its limit in bytes of scheduled messages."""

    def with_settings(
        self, tokens: Mapping[str, str], grants: Mapping[str, tuple[AccessGrant, ...]]
    ) -> AccessState:
        """
        Return a copy with the tokens and grants that the settings define.

        Args:
            tokens: maps each token hash to its principal.
            grants: maps each principal to its grants.
        """
        settings_tokens = {
            token: KnownToken(principal, 0, 0) for token, principal in tokens.items()
        }
        merged_grants = dict(self.grants)
        for principal, new_grants in grants.items():
            merged_grants[principal] = tuple(
                dict.fromkeys((*merged_grants.get(principal, ()), *new_grants))
            )
        return replace(self, tokens={**self.tokens, **settings_tokens}, grants=merged_grants)

    def identify_caller(self, token: str, now_ms: int) -> Caller:
        """
        Return the caller that a token identifies.

        Raises:
            UnauthenticatedError: the token is unknown, revoked, not valid yet or expired.
        """
        known_token = self.tokens.get(token_hash(token))
        if known_token is None:
            raise UnauthenticatedError(
                "the token is unknown in this cluster, or was revoked", problem="unknown token"
            )
        if now_ms < known_token.begins_at:
            raise UnauthenticatedError("the token is not valid yet", problem="not begun")
        if known_token.ends_at and now_ms >= known_token.ends_at:
            raise UnauthenticatedError("the token has expired", problem="ended")
        return self.build_caller(known_token.principal, ends_at_ms=known_token.ends_at)

    def build_caller(
        self, principal: str, groups: tuple[str, ...] = (), ends_at_ms: int = 0
    ) -> Caller:
        """
        Return a caller with the grants of a principal and of its groups.

        Args:
            groups: the groups, which are principals too.
        """
        names = (principal, *groups)
        all_grants = (grant for name in names for grant in self.grants.get(name, ()))
        grants = tuple(dict.fromkeys(all_grants))
        quota = self.quotas.get(principal) or self.quotas.get(EVERYBODY) or NO_QUOTA
        return Caller(principal, grants, groups, quota, ends_at_ms, self.version)

    def news(self, now_ms: int, *, operators: Mapping[str, str]) -> AccessNews:
        """Return the recent changes to send to brokers. `operators` has the same meaning as in
        `AccessNews`.
        """
        recent_changes = {
            principal: version
            for principal, (version, at_ms) in self.changed.items()
            if at_ms > now_ms - CHANGED_MS
        }
        is_overflow = len(recent_changes) > CHANGED_MAX
        return AccessNews(
            cluster=self.cluster,
            now_ms=now_ms,
            version=self.version,
            keys=dict(self.keys),
            changed={} if is_overflow else recent_changes,
            floor=max(recent_changes.values()) if is_overflow else 0,
            subject_bytes=dict(self.subject_bytes),
            scheduled_bytes=dict(self.scheduled_bytes),
            operators=dict(operators),
        )
