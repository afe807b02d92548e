"""Version compatibility: programs work together if they are at most one minor version apart. Pure.

    client ─ Hello(version) ─▶ server                 refused if they are further apart; the error
                                                      says which one to upgrade
    broker, metaserver ─ their version ─▶ database    cluster's version: the lowest of all members

The cluster's version determines which formats every member can read, and never falls. So far, all
formats that members exchange are those of the first release
(`tests/golden/versions/release_0_2_0.json`): a newer format is written only when the cluster's
version includes it. A member whose version is more than one
minor version away from the cluster's is refused, so an upgrade must proceed one minor version at a
time.

Compare Kubernetes' version skew policy and CockroachDB's cluster version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import InvalidRequestError, Reason, VersionError

VERSION = "0.3.0"
"""The version of this program; the same as in `pyproject.toml`."""
VERSION_HEADER = "Keylane-Version"
REQUEST_ID_HEADER = "Keylane-Request-Id"
"""The header of an answer with the id that the log of the server has in its lines about it."""
"""The HTTP header that contains the version, in requests and answers. Only keylane's clients send
it.
"""
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})([.+a-z-][0-9A-Za-z.+-]{0,40})?")


class Version(NamedTuple):
    """The part of a version that determines compatibility."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class MemberVersion(NamedTuple):
    """A server of the cluster."""

    name: str
    version: str
    """The version of its program; "" if unknown, because the broker has not reported since the
    database was restored.
    """


def parse_version(text: str) -> Version:
    """Parse a version such as "0.2.0" or "0.2". Raises InvalidRequestError."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise InvalidRequestError(f"{text!r:.80} is not a version of keylane")
    return Version(int(match[1]), int(match[2]))


OWN = parse_version(VERSION)
FIRST_RELEASE = Version(0, 2)
"""The first released version, and the oldest one that is accepted."""


def minor_version_steps(old: Version, new: Version) -> float:
    """Return the number of minor versions from `old` to `new`. It is negative if `new` is older,
    and infinite between major versions.
    """
    if old.major != new.major:
        return float("inf") if new > old else float("-inf")
    return new.minor - old.minor


def check_client(reported: str, own: str) -> None:
    """
    Check, on a server, the version that a client reports.

    Raises:
        InvalidRequestError: `reported` is not a version.
        VersionError: the version is more than one minor version away, or was never released.
    """
    _check_pair(client=reported, server=own)


def check_server(reported: str, own: str) -> None:
    """Check, on a client, the version that a server reports. Raises the same errors as
    `check_client`.
    """
    _check_pair(client=own, server=reported)


def _check_pair(*, client: str, server: str) -> None:
    ours, theirs = parse_version(client), parse_version(server)
    steps_ahead = minor_version_steps(ours, theirs)
    both = f"the client is keylane {client[:48]}, the server {server[:48]}"
    if steps_ahead > 1 or ours < min(FIRST_RELEASE, theirs):
        raise VersionError(
            Reason.CLIENT_TOO_OLD, f"{both}: upgrade the client", client=client, server=server
        )
    if steps_ahead < -1 or theirs < min(FIRST_RELEASE, ours):
        raise VersionError(
            Reason.SERVER_TOO_OLD, f"{both}: upgrade the server", client=client, server=server
        )


def check_member(reported: str, cluster: Version, name: str) -> None:
    """
    Check that a server may join a cluster of this version, or remain in it.

    Raises:
        InvalidRequestError: `reported` is not a version.
        VersionError: the version is more than one minor version newer, or it is older, so that
            other members may write formats that the server cannot read.
    """
    version = parse_version(reported)
    steps_ahead = minor_version_steps(cluster, version)
    if steps_ahead > 1:
        raise VersionError(
            Reason.UPGRADE_SKIPPED,
            f"{name} is keylane {version}, and the cluster is at {cluster}: run the version after "
            f"{cluster} first, on every host",
            version=str(version),
            cluster=str(cluster),
        )
    if steps_ahead < 0:
        raise VersionError(
            Reason.MEMBER_TOO_OLD,
            f"{name} is keylane {version}, and the cluster is at {cluster} already",
            version=str(version),
            cluster=str(cluster),
        )


def decide_cluster_version(cluster: Version, members: Iterable[MemberVersion]) -> Version:
    """Return the cluster's version for these members, which is never below the present one. It does
    not rise while the version of any member is unknown.
    """
    versions = [parse_version(member.version) if member.version else cluster for member in members]
    return max(cluster, min(versions, default=cluster))


def members_holding_back(cluster: Version, members: Iterable[MemberVersion]) -> list[str]:
    """Return the members that are older than the newest one, and therefore hold back the cluster's
    version.
    """
    member_versions = [
        (member.name, parse_version(member.version or str(cluster))) for member in members
    ]
    newest = max((version for _, version in member_versions), default=cluster)
    return sorted(name for name, version in member_versions if version < newest)
