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
    """Principals of its groups, whose rights are among the grants."""
    quota: Quota = NO_QUOTA
    ends_at_ms: int = 0
    """Time when its credential ends, by the metaserver's calendar; 0: it does not end by itself."""
    version: int = 0
    """Version of the access rules that gave the rights, if a metaserver has identified the caller.
    """

    @property
    def is_paced(self) -> bool:
        """True if it has a quota; servers of the cluster have none."""
        return self.quota != NO_QUOTA and not self.is_server

    @property
    def is_server(self) -> bool:
        """True for servers of the cluster."""
        return any(grant.right is Rights.CLUSTER for grant in self.grants)

    def check(self, right: Rights, subject: str, group: str = "", called: str = "") -> None:
        """See `check_allowed`. Raises AccessDeniedError."""
        check_allowed(self.principal, self.grants, right, subject, group, called)


class AccessTarget(NamedTuple):
    """The subject and group of a request: "" for no single subject, and for the whole subject."""

    subject: str = ""
    group: str = ""
    called: str = ""
    """How the caller named the subject, such as "partition 7"; "": by its name."""


UNKNOWN_CALLER = Caller("", ())
"""A caller that has not authenticated itself."""
