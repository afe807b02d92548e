"""Who calls a server, and what they may do.  Pure."""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.access.rights import AccessGrant, Rights, check_allowed


class Caller(NamedTuple):
    """A principal and its rights."""

    principal: str
    grants: tuple[AccessGrant, ...]

    def check(self, right: Rights, subject: str, group: str = "") -> None:
        """Raises AccessDeniedError."""
        check_allowed(self.principal, self.grants, right, subject, group)


class AccessTarget(NamedTuple):
    """What a request is about: "" for no single subject, and for the whole subject."""

    subject: str = ""
    group: str = ""


UNKNOWN_CALLER = Caller("", ())
"""Who has not said who they are."""
