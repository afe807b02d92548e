"""The caller of a server, and its rights. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.access.quota import NO_QUOTA, Quota
from ...protocol.access.rights import AccessGrant, Rights, check_allowed


class Caller(NamedTuple):
    """A principal and its rights."""

    principal: str
    grants: tuple[AccessGrant, ...]
    groups: tuple[str, ...] = ()
    """The groups of the principal; their rights are included in `grants`."""
    quota: Quota = NO_QUOTA
    ends_at_ms: int = 0
    """When the caller's credential expires, in milliseconds since 1970 by the metaserver's clock; 0
    for never.
    """
    version: int = 0
    """The version of the access rules with which a metaserver identified the caller."""

    @property
    def has_quotas(self) -> bool:
        """True if quotas apply to the caller. They never apply to servers of the cluster."""
        return self.quota != NO_QUOTA and not self.is_server

    @property
    def is_server(self) -> bool:
        """True for a server of the cluster."""
        return any(grant.right is Rights.CLUSTER for grant in self.grants)

    def check(self, right: Rights, subject: str, group: str = "", called: str = "") -> None:
        """Check that the caller has a right; see `check_allowed`. Raises AccessDeniedError."""
        check_allowed(self.principal, self.grants, right, subject, group, called)


class AccessTarget(NamedTuple):
    """The subject and consumer group on which a request needs rights. An empty subject means that
    the request has no single subject; an empty group means all groups.
    """

    subject: str = ""
    group: str = ""
    called: str = ""
    """What the caller named instead of the subject, such as "partition 7"; "" if it named the
    subject.
    """


UNKNOWN_CALLER = Caller("", ())
"""A caller that has not authenticated."""
