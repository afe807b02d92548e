"""The bodies of the calls about the copies of a broker group. Pure.

SetCopies       an operator: how many folders the group is to have
ForgetCopy      an operator: a copy is gone for good
ChangeCopySet   the group's broker: which copies have everything that it has acked
PromoteCopy     an operator: a copy takes the place of the broker's folder
TakeOver        a copy: it takes the place of the broker's folder, because the broker is gone or has
                offered it
HandOver        an operator: the broker gives its place to a copy
OfferPlace      the group's broker: a copy may take its place now
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

HAND_OVER_MS = 3_000
"""How long a broker waits until a copy has taken its place, in milliseconds; then it serves on."""
COPIES_MAX = 5
"""The largest number of data folders of a broker group."""
COPY_ID_CHARS_MAX = 64
CopyId = Annotated[str, Meta(min_length=1, max_length=COPY_ID_CHARS_MAX)]
CopyCount = Annotated[int, Meta(ge=1, le=COPIES_MAX)]
Members = Annotated[tuple[CopyId, ...], Meta(max_length=COPIES_MAX)]


class CopySet(Struct, frozen=True, kw_only=True):
    """The copies of a broker group, as the database has them."""

    wanted: CopyCount = 1
    """How many data folders the group is to have, with the broker's own."""
    least: CopyCount = 1
    """How many of them must have a message before it is acked."""
    members: Members = ()
    """The ids of the copies that have everything that the broker has acked; each ack waits for
    them.
    """
    term: int = 0
    """How often a copy was promoted. A broker that knows a lower one acks nothing once it is sent
    of this one.
    """
    version: int = 0
    """How often the set was changed."""
    promoted: str = ""
    """The copy that was promoted last; "" once a broker has asked which copies count since."""
    durable_end: int = 0
    """The end of the durable log, as the broker has said last."""
    handing_to: str = ""
    """The copy to which the broker hands over now; "" if it does not."""
    may_share_machine: bool = False
    """True if an operator has allowed copies on one machine, with the broker or with each other."""
    quarantine: str = ""
    """The reason why no copy takes the broker's place, and the set does not change: the database is
    older than what brokers know, and the broker has not yet said which copies count; otherwise "".
    """


class SetCopies(Struct, frozen=True, kw_only=True):
    """Set how many data folders a broker group is to have. The response is its CopySet."""

    wanted: CopyCount
    least: CopyCount | None = None
    """How many of them must have a message before it is acked, at most `wanted`; None: 2 of three
    and more, otherwise 1.
    """
    may_share_machine: bool | None = None
    """Whether copies on one machine may count; None: as before, at first not."""
    end_quarantine: bool = False
    """True if no copy can have taken the broker's place unnoticed: a quarantine ends, and the
    copies join the set again.
    """


class ForgetCopy(Struct, frozen=True, kw_only=True):
    """Let acks wait no more for a copy that is gone for good. The response is the CopySet."""

    copy_id: CopyId


class ChangeCopySet(Struct, frozen=True, kw_only=True):
    """
    Make `members` the copies that acks wait for, if the set has still this term and version. The
    response is the CopySet that is stored then, whether it was changed or not.
    """

    broker_id: str
    opening: str
    """The opening of the broker's data folder. If it is not the newest one, the call is refused."""
    term: int = -1
    """-1: the broker has just started, and knows of none."""
    version: int = 0
    members: Members | None = None
    """None: nothing is changed."""
    durable_end: int = 0
    """The end of the durable log; 0 if it is not known yet."""
    known: CopySet | None = None
    """The set as the broker knows it. Its copies count there until it is answered otherwise."""
    is_followed: bool = False
    """True if each copy that counts has followed this broker since it knows of a quarantine: none
    of them has its place.
    """


class PromoteCopy(Struct, frozen=True, kw_only=True):
    """
    Let a copy take the place of the broker's data folder. The response is the CopySet.

    A repeat for the same copy changes nothing.
    """

    copy_id: CopyId
    broker_id: str
    """The id of the data folder that it is a copy of."""
    log_end: int
    """The end of the copy's log, in bytes."""
    lose: bool = False
    """True if what the copy lacks may be lost: it is promoted although acks did not wait for it."""


class TakeOver(Struct, frozen=True, kw_only=True):
    """
    Let the copy that asks take the place of the broker's data folder, because it cannot reach the
    broker, or the broker has offered it. The response is the CopySet.

    A repeat for the same copy changes nothing.
    """

    copy_id: CopyId
    broker_id: str
    """The id of the data folder that it is a copy of."""
    log_end: int
    """The end of the copy's log, in bytes."""


class HandOver(Struct, frozen=True, kw_only=True):
    """
    Let a copy take the place of a broker that serves, which becomes a copy then. The response is
    HandedOver.
    """

    copy_id: Annotated[str, Meta(max_length=COPY_ID_CHARS_MAX)] = ""
    """The copy; "": the one of the set that the broker has heard last."""


class HandedOver(Struct, frozen=True, kw_only=True):
    """A hand-over that is done."""

    broker_group: str
    copy_id: str
    """The copy that has the broker's place."""
    paused_ms: int
    """How long the broker has taken no messages, until it knew that its place was taken."""


class OfferPlace(Struct, frozen=True, kw_only=True):
    """
    Let a copy of the set take the broker's place within HAND_OVER_MS, although the broker lives, or
    withdraw that. The response is the CopySet.
    """

    broker_id: str
    opening: str
    """The opening of the broker's data folder. If it is not the newest one, the call is refused."""
    term: int
    copy_id: Annotated[str, Meta(max_length=COPY_ID_CHARS_MAX)] = ""
    """The copy; "": none may take the place any more."""
