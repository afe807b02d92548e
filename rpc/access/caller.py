"""Who calls a server, and what they may do.  Pure."""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.access.quota import NO_QUOTA, Quota
from ...protocol.access.rights import AccessGrant, Rights, check_allowed


class Caller(NamedTuple):
    """A principal and its rights."""

    principal: str
    grants: tuple[AccessGrant, ...]
    groups: tuple[str, ...] = ()
    """Principals of groups that it is in; their rights are among the grants."""
    quota: Quota = NO_QUOTA
    ends_at_ms: int = 0
    """When what it has shown ends, by the metaserver's calendar; 0: not by itself."""
    version: int = 0
    """The version of access that the rights are of, where a metaserver says who calls."""

    @property
    def is_paced(self) -> bool:
        """True if it has a quota; servers of the cluster have none."""
        return self.quota != NO_QUOTA and not self.is_server

    @property
    def is_server(self) -> bool:
        """True for servers of the cluster."""
        return any(grant.right is Rights.CLUSTER for grant in self.grants)

    def check(self, right: Rights, subject: str, group: str = "", called: str = "") -> None:
        """See `check_allowed`.  Raises AccessDeniedError."""
        check_allowed(self.principal, self.grants, right, subject, group, called)


class AccessTarget(NamedTuple):
    """What a request is about: "" for no single subject, and for the whole subject."""

    subject: str = ""
    group: str = ""
    called: str = ""
    """What the caller has said in place of the subject, such as "partition 7"; "": its name."""


UNKNOWN_CALLER = Caller("", ())
"""Who has not said who they are."""
