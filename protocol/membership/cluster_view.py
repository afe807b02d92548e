"""The metaserver's view of its cluster: name, version and members. Pure."""

from __future__ import annotations

from msgspec import Struct


class MemberView(Struct, frozen=True):
    """A server of the cluster."""

    name: str
    version: str
    """Version of its program; "": it reports none."""


class ClusterView(Struct, frozen=True, kw_only=True):
    """A cluster, and the progress of its upgrade."""

    name: str
    """Name of the cluster; "": no settings name it."""
    version: str
    """Lowest version of all members, which decides what formats are written; it never falls."""
    members: tuple[MemberView, ...]
    held_back_by: tuple[str, ...]
    """Names of members that are older than the newest one."""
