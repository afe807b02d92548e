"""What a metaserver says of its cluster: name, version, members.  Pure."""

from __future__ import annotations

from msgspec import Struct


class MemberView(Struct, frozen=True):
    """A server of the cluster."""

    name: str
    version: str
    """"": it tells none."""


class ClusterView(Struct, frozen=True, kw_only=True):
    """A cluster, and how far an upgrade of it is."""

    name: str
    """"": no settings have one."""
    version: str
    """The lowest version of all members, which decides what formats are written; it never falls."""
    members: tuple[MemberView, ...]
    held_back_by: tuple[str, ...]
    """Names of members that are older than the newest one."""
