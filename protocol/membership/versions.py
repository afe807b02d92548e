"""Versions of programs, and which of them work with each other: those at most one minor version
apart.  Pure.

    client ─ Hello(version) ─▶ server                    refused if they are further apart; the error says who has to be upgraded
    broker, metaserver ─ their version ─▶ database       the cluster's version: the lowest of all members, and it never falls

The cluster's version says which formats every member reads.  So far all are those of the first
release (`tests/golden/versions/release_0_2_0.json`): a newer one is written only where the
cluster's version has it. A member further than one minor version from the cluster's is refused: an
upgrade takes one minor version after another.

Source: Kubernetes' version skew policy; CockroachDB's cluster version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import InvalidRequestError, Reason, VersionError

VERSION = "0.2.0"
"""Of this program; `pyproject.toml` has the same."""
VERSION_HEADER = "Keylane-Version"
"""Of HTTP requests and answers.  Other HTTP clients than keylane's send none."""
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})([.+a-z-][0-9A-Za-z.+-]{0,40})?")


class Version(NamedTuple):
    """The part of a version by which programs fit each other."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class MemberVersion(NamedTuple):
    """A server of the cluster."""

    name: str
    version: str
    """"": it is not known yet, because the broker has not reported itself since a restore."""


def parse_version(text: str) -> Version:
    """The version in "0.2.0" or "0.2".  Raises InvalidRequestError."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise InvalidRequestError(f"{text!r:.80} is no version of keylane")
    return Version(int(match[1]), int(match[2]))


OWN = parse_version(VERSION)
FIRST_RELEASE = Version(0, 2)
"""Programs of an earlier version are refused: none was released."""


def steps(old: Version, new: Version) -> float:
    """Minor versions from one to the other, negative if `new` is the older one; infinite between
    major versions.
    """
    if old.major != new.major:
        return float("inf") if new > old else float("-inf")
    return new.minor - old.minor


def check_client(told: str, own: str) -> None:
    """
    Check, in a server, the version that a client tells.

    Raises:
        InvalidRequestError: it is no version.
        VersionError: it is more than one minor version away, or was never
            released.
    """
    _check_pair(client=told, server=own)


def check_server(told: str, own: str) -> None:
    """Check, in a client, the version that a server tells.  Raises as `check_client`."""
    _check_pair(client=own, server=told)


def _check_pair(*, client: str, server: str) -> None:
    ours, theirs = parse_version(client), parse_version(server)
    ahead = steps(ours, theirs)
    said = f"the client is keylane {client[:48]}, the server {server[:48]}"
    if ahead > 1 or ours < min(FIRST_RELEASE, theirs):
        raise VersionError(
            Reason.CLIENT_TOO_OLD, f"{said}: upgrade the client", client=client, server=server
        )
    if ahead < -1 or theirs < min(FIRST_RELEASE, ours):
        raise VersionError(
            Reason.SERVER_TOO_OLD, f"{said}: upgrade the server", client=client, server=server
        )


def check_member(told: str, cluster: Version, name: str) -> None:
    """
    Check that a server may join, or go on in, a cluster of this version.

    Raises:
        InvalidRequestError: `told` is no version.
        VersionError: it is more than one minor version newer.
        VersionError: it is older, and others may write what it does not read.
    """
    version = parse_version(told)
    ahead = steps(cluster, version)
    if ahead > 1:
        raise VersionError(
            Reason.UPGRADE_SKIPPED,
            f"{name} is keylane {version}, and the cluster is at {cluster}: run the version after "
            f"{cluster} first,"
            " on every host",
            version=str(version),
            cluster=str(cluster),
        )
    if ahead < 0:
        raise VersionError(
            Reason.MEMBER_TOO_OLD,
            f"{name} is keylane {version}, and the cluster is at {cluster} already",
            version=str(version),
            cluster=str(cluster),
        )


def raised_version(cluster: Version, members: Iterable[MemberVersion]) -> Version:
    """The cluster's version once these are all its members; a member that tells no version keeps it
    where it is.
    """
    versions = [parse_version(member.version) if member.version else cluster for member in members]
    return max(cluster, min(versions, default=cluster))


def holding_back(cluster: Version, members: Iterable[MemberVersion]) -> list[str]:
    """The members that keep the cluster from the version of the newest one."""
    told = [(member.name, parse_version(member.version or str(cluster))) for member in members]
    newest = max((version for _, version in told), default=cluster)
    return sorted(name for name, version in told if version < newest)
