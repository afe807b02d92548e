"""Access control: a grant gives a right on the subjects and consumer groups that match its
patterns; everything else is refused. Pure.

    AccessGrant(right, subject, group)      subject, group: a name, or a prefix followed by `*`

    produce       send to the subject
    consume       be a member of the group on the subject, and also read, as members do with
                  parked messages
    read          read messages of the subject without a group, parked ones too
    administer    create, change and delete the subject and its groups; with `*` the cluster
    cluster       everything: the servers of the cluster among themselves

Invariants
    `a.*` matches the names that begin with `a.`, but neither `a` nor `ab`.
    A call that concerns no single subject needs a grant on `*`.
    A call that concerns a subject as a whole, and the right administer, need a grant with group
    `*`.

Modelled on Kafka's prefixed ACLs (KIP-290), but without rules that deny.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Final

from msgspec import Struct

from ..errors import AccessDeniedError, InvalidRequestError
from ..ids import HIDDEN, check_name


class Rights(enum.StrEnum):
    """The right that a call requires. Servers with access control check it with `check_allowed`."""

    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    """Read messages without a consumer group."""
    ADMINISTER = "administer"
    """Perform the tasks of an operator."""
    CLUSTER = "cluster"
    """Act as a server of the cluster."""
    JOIN = "join"
    """Have consume or administer on the group, which is created by its first member or by an
    operator.
    """
    ANY = "any"
    """Have any of the rights above on the subject, because all kinds of clients make the call."""
    KNOWN = "known"
    """Have a token of the cluster."""
    OPEN = "open"
    """Anyone may make the call, even without a token."""

    @property
    def doing(self) -> str:
        """The verb for error texts, which describes what the caller tried to do."""
        words = {
            "produce": "produce to",
            "join": "make a group of",
            "any": "see",
            "cluster": "act as a server in",
        }
        return words.get(self, self.value)


ANY: Final = "*"
GRANTED: Final = (
    Rights.PRODUCE,
    Rights.CONSUME,
    Rights.READ,
    Rights.ADMINISTER,
    Rights.CLUSTER,
)
"""The rights that can be granted. The other members of `Rights` only describe what a call
requires.
"""
SOME_SUBJECT: Final = "?"
"""A placeholder for a subject whose name is no longer known. A right on any subject is
sufficient.
"""
_BY_GROUP = frozenset({Rights.CONSUME, Rights.ADMINISTER})


class AccessGrant(Struct, frozen=True, order=True):
    """A right on the subjects and groups that match the patterns."""

    right: Rights
    subject: str = ANY
    group: str = ANY


ADMIN_GRANTS: Final = tuple(
    AccessGrant(right) for right in (Rights.PRODUCE, Rights.CONSUME, Rights.READ, Rights.ADMINISTER)
)
"""The grants of the administrator's token."""
CLUSTER_GRANTS: Final = (AccessGrant(Rights.CLUSTER),)
"""The grants of the brokers' tokens."""


def check_pattern(kind: str, pattern: str) -> str:
    """
    Return the pattern if it is a name, or a prefix followed by `*`.

    Raises:
        InvalidRequestError: the pattern is neither.
    """
    prefix = pattern[:-1] if pattern.endswith(ANY) else pattern
    try:
        if prefix or not pattern:
            check_name(kind, prefix)
    except InvalidRequestError:
        raise InvalidRequestError(
            f"a pattern of a {kind} is a name, or its prefix and '*', not {pattern!r:.80}"
        ) from None
    return pattern


def check_granted(right: str) -> None:
    """Raise InvalidRequestError if this right cannot be granted."""
    if right not in GRANTED:
        raise InvalidRequestError(f"the rights are {', '.join(GRANTED)}, not {str(right)!r:.40}")


def check_grant(grant: AccessGrant) -> AccessGrant:
    """Return the grant if its right can be granted and its patterns are valid. Raises
    InvalidRequestError otherwise.
    """
    check_granted(grant.right)
    if grant.right not in _BY_GROUP and grant.group != ANY:
        raise InvalidRequestError(f"{grant.right} is a right on subjects, not on consumer groups")
    check_pattern("subject", grant.subject)
    check_pattern("consumer group", grant.group)
    return grant


def matches(pattern: str, name: str) -> bool:
    """Return True if the pattern matches the name. Only `*` matches "", which stands for no single
    subject.
    """
    if pattern.endswith(ANY):
        prefix = pattern[:-1]
        return not prefix or name.startswith(prefix)
    return pattern == name


def allows(grants: Iterable[AccessGrant], right: Rights, subject: str, group: str = "") -> bool:
    """
    Return True if one of the grants allows `right`.

    Args:
        subject: "" for a call that concerns no single subject, or SOME_SUBJECT.
        group: "" for a call that concerns the whole subject.
    """
    return right in (Rights.OPEN, Rights.KNOWN) or any(
        _allows(grant, right, subject, group) for grant in grants
    )


def _allows(grant: AccessGrant, right: Rights, subject: str, group: str) -> bool:
    if grant.right is Rights.CLUSTER:
        return True
    if subject != SOME_SUBJECT and not matches(grant.subject, subject):
        return False
    if right is Rights.ANY or (right is Rights.READ and grant.right is Rights.CONSUME):
        return True
    if right is Rights.JOIN and grant.right in _BY_GROUP:
        return matches(grant.group, group)
    return grant.right is right and (right not in _BY_GROUP or matches(grant.group, group))


def check_allowed(
    principal: str,
    grants: Collection[AccessGrant],
    right: Rights,
    subject: str,
    group: str = "",
    call_description: str = "",
) -> None:
    """
    Check that one of the grants allows `right`.

    Args:
        call_description: how the caller identified the subject, such as "partition 7"; "" if it was
            by its name. The error hides the names of the subject and the group from a caller that
            has no right on the subject.

    Raises:
        AccessDeniedError: no grant allows it; the text contains the command that grants it.
    """
    if allows(grants, right, subject, group):
        return
    needed_right = {Rights.ANY: Rights.READ, Rights.JOIN: Rights.CONSUME}.get(right, right)
    if call_description and not allows(grants, Rights.ANY, subject):
        verb_phrase = right.doing if right is Rights.ANY else f"{right.doing} the subject of"
        raise AccessDeniedError(
            f"{principal!r} has no right to {verb_phrase} {call_description}; an administrator, "
            f"who sees its subject, grants it: "
            f"keylane access grant {principal} {needed_right} --subject NAME",
            principal=principal,
            right=needed_right.value,
        )
    scope = f"subject {subject!r}" if subject else "the whole cluster"
    if subject == SOME_SUBJECT:
        scope, subject = "any subject", ""
    if group:
        scope += f", consumer group {group!r}"
    pattern = subject or repr(ANY)
    target, hidden, _job = subject.partition(HIDDEN)
    if hidden:  # the name was generated for one job; the next job has another
        pattern = repr(f"{target}{hidden}{ANY}")
    options = f" --subject {pattern}" + (f" --group {group}" if group else "")
    other_grants = "; or produce, or consume, in place of read" if right is Rights.ANY else ""
    raise AccessDeniedError(
        f"{principal!r} has no right to {right.doing} {scope}; "
        f"an administrator grants it: keylane access grant {principal} {needed_right}{options}"
        f"{other_grants}",
        principal=principal,
        right=needed_right.value,
        subject=subject,
        group=group,
    )


def check_all_allowed(
    principal: str, grants: Collection[AccessGrant], wanted_rights: Iterable[tuple[Rights, str]]
) -> None:
    """
    Check rights on whole subjects, which are given as pairs of a right and a subject.

    Raises:
        AccessDeniedError: a right is missing. The text lists all missing rights; the details are
            those of the first one.
    """
    refused_rights: list[AccessDeniedError] = []
    for right, subject in wanted_rights:
        try:
            check_allowed(principal, grants, right, subject)
        except AccessDeniedError as error:
            refused_rights.append(error)
    if refused_rights:
        text = "; ".join(error.message for error in refused_rights)
        raise AccessDeniedError(text, **refused_rights[0].details)
