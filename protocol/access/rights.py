"""Who may do what: a right on subjects and consumer groups by pattern; what is not granted is
refused.  Pure.

    AccessGrant(right, subject, group)      subject and group: a name, or the beginning of names with `*` behind it

    produce       send to the subject
    consume       be a member of the group on the subject; who may is also let read, as members do of parked messages
    read          read messages of the subject without a group, parked ones too
    administer    create, change and delete the subject and its groups; with `*` the cluster
    cluster       everything: the servers of the cluster among themselves

Invariants
    `a.*` is the names that begin with `a.`: not `a`, and not `ab`.
    What is about no single subject needs a grant of `*`.
    What is about a subject as a whole, and administer, needs a grant with the group `*`.

Source: prefixed ACLs of Kafka (KIP-290), without its rules that deny.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Final

from msgspec import Struct

from ..errors import AccessDeniedError, InvalidRequestError
from ..ids import HIDDEN, check_name


class Rights(enum.StrEnum):
    """The right that a call needs; where access control is on, servers check it
    (`check_allowed`).
    """

    PRODUCE = "produce"
    CONSUME = "consume"
    READ = "read"
    """Messages, without a consumer group."""
    ADMINISTER = "administer"
    """Operators."""
    CLUSTER = "cluster"
    """The servers of the cluster among themselves."""
    JOIN = "join"
    """One of consume and administer, of the group: it is made for the caller, or by who looks after
    the subject.
    """
    ANY = "any"
    """Any of those above, on the same subject: what clients of every kind need."""
    KNOWN = "known"
    """A caller with a token of the cluster."""
    OPEN = "open"
    """Nothing, not even a token."""

    @property
    def doing(self) -> str:
        """How a refusal names what was tried."""
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
"""The rights that are granted; the other members of `Rights` say what a call needs."""
SOME_SUBJECT: Final = "?"
"""In place of a subject: which one it is is not known any more, so a right on any is enough."""
_BY_GROUP = frozenset({Rights.CONSUME, Rights.ADMINISTER})


class AccessGrant(Struct, frozen=True, order=True):
    """A right on the subjects and groups that the patterns mean."""

    right: Rights
    subject: str = ANY
    group: str = ANY


ADMIN_GRANTS: Final = tuple(
    AccessGrant(right) for right in (Rights.PRODUCE, Rights.CONSUME, Rights.READ, Rights.ADMINISTER)
)
"""The rights of the administrator's token."""
CLUSTER_GRANTS: Final = (AccessGrant(Rights.CLUSTER),)
"""The rights of brokers' tokens."""


def check_pattern(what: str, pattern: str) -> str:
    """
    Check a pattern: a name, or the beginning of one with `*` behind it.

    Raises:
        InvalidRequestError
    """
    beginning = pattern[:-1] if pattern.endswith(ANY) else pattern
    try:
        if beginning or not pattern:
            check_name(what, beginning)
    except InvalidRequestError:
        raise InvalidRequestError(
            f"a pattern of a {what} is a name, or its beginning and '*', not {pattern!r:.80}"
        ) from None
    return pattern


def check_granted(right: str) -> None:
    """Raises InvalidRequestError: it is no right that can be granted."""
    if right not in GRANTED:
        raise InvalidRequestError(f"the rights are {', '.join(GRANTED)}, not {str(right)!r:.40}")


def check_grant(grant: AccessGrant) -> AccessGrant:
    """Raises InvalidRequestError: it is of no right that can be granted, or a pattern cannot be
    one.
    """
    check_granted(grant.right)
    if grant.right not in _BY_GROUP and grant.group != ANY:
        raise InvalidRequestError(f"{grant.right} is a right on subjects, not on consumer groups")
    check_pattern("subject", grant.subject)
    check_pattern("consumer group", grant.group)
    return grant


def matches(pattern: str, name: str) -> bool:
    """True if the pattern means the name; "" stands for no single one, which only `*` means."""
    if pattern.endswith(ANY):
        beginning = pattern[:-1]
        return not beginning or name.startswith(beginning)
    return pattern == name


def allows(grants: Iterable[AccessGrant], right: Rights, subject: str, group: str = "") -> bool:
    """
    Whether one of the grants allows `right`.

    Args:
        subject: "" for what is about no single subject; SOME_SUBJECT.
        group: "" for what is about the whole subject.
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
    called: str = "",
) -> None:
    """
    Check a right.

    Args:
        called: what the caller has said in place of the subject, such as "partition 7"; "": the
            name of the subject. A caller without any right on the subject is not told its name, nor
            that of the group.

    Raises:
        AccessDeniedError: says what to ask for.
    """
    if allows(grants, right, subject, group):
        return
    asked = {Rights.ANY: Rights.READ, Rights.JOIN: Rights.CONSUME}.get(right, right)
    if called and not allows(grants, Rights.ANY, subject):
        doing = right.doing if right is Rights.ANY else f"{right.doing} the subject of"
        raise AccessDeniedError(
            f"{principal!r} has no right to {doing} {called}; an administrator, who sees its "
            f"subject, grants it: "
            f"keylane access grant {principal} {asked} --subject NAME",
            principal=principal,
            right=asked.value,
        )
    where = f"subject {subject!r}" if subject else "the whole cluster"
    if subject == SOME_SUBJECT:
        where, subject = "any subject", ""
    if group:
        where += f", consumer group {group!r}"
    pattern = subject or repr(ANY)
    target, hidden, _job = subject.partition(HIDDEN)
    if hidden:  # a client has made the name for one job; the next job has another one
        pattern = repr(f"{target}{hidden}{ANY}")
    options = f" --subject {pattern}" + (f" --group {group}" if group else "")
    others = "; or produce, or consume, in place of read" if right is Rights.ANY else ""
    raise AccessDeniedError(
        f"{principal!r} has no right to {right.doing} {where}; "
        f"an administrator grants it: keylane access grant {principal} {asked}{options}{others}",
        principal=principal,
        right=asked.value,
        subject=subject,
        group=group,
    )


def check_all_allowed(
    principal: str, grants: Collection[AccessGrant], wanted: Iterable[tuple[Rights, str]]
) -> None:
    """
    Check rights on whole subjects: pairs of right and subject.

    Raises:
        AccessDeniedError: says of each that lacks what to ask for; its details are those of the
            first.
    """
    refused: list[AccessDeniedError] = []
    for right, subject in wanted:
        try:
            check_allowed(principal, grants, right, subject)
        except AccessDeniedError as error:
            refused.append(error)
    if refused:
        text = "; ".join(error.message for error in refused)
        raise AccessDeniedError(text, **refused[0].details)
