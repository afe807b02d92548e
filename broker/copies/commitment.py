"""Decides when a commit is durable on all copies that count. Pure.

    synced here ─▶ covers(end)? ─┬─ every copy of the set, and of a set that is proposed, has it
                                 ╰─ the set is not known yet, or a copy lacks it ─▶ the commit waits

A set that is proposed counts together with the one that a metaserver has confirmed, until the
metaserver has answered: the set that it has stored is one of the two.

Invariants
    A commit is durable only when every copy has it that a metaserver may let take the place of this
    broker's folder without a loss, and as many folders have it as an operator has asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .placement import Placement

WAITS_FOR_COPIES = (
    "the broker was started, and waits until a metaserver has named the copies that acks wait for, "
    "and they have its log or are left out"
)


@dataclass(slots=True)
class Commitment:
    """The copies that count, and how far each of them has synced the log of this opening."""

    members: frozenset[str] | None = None
    """The set as a metaserver has last confirmed it; None until one has said."""
    proposed: frozenset[str] = frozenset()
    """What a metaserver is asked to make the set; the copies that may have been added."""
    synced: dict[str, int] = field(default_factory=dict)
    """By copy, the end of the log that it has synced; only of copies whose log was compared with
    that of this opening.
    """
    least: int = 1
    """How many data folders must have a commit, with the broker's own."""

    @property
    def counted(self) -> frozenset[str]:
        """The copies that count."""
        return self.proposed if self.members is None else self.members | self.proposed

    def covers(self, end: int) -> bool:
        """Return True if all copies that count have the log up to `end`, and they are enough."""
        if self.members is None:
            return False
        counted = self.members | self.proposed
        if 1 + len(counted) < self.least:
            return False
        return all(self.synced.get(copy_id, -1) >= end for copy_id in counted)

    def missing(self, end: int) -> frozenset[str]:
        """Return the copies that count and lack something before `end`."""
        return frozenset(each for each in self.counted if self.synced.get(each, -1) < end)

    def confirm(self, members: frozenset[str]) -> None:
        """Take the set that a metaserver has stored."""
        self.members, self.proposed = members, frozenset()


def decide_set(
    commitment: Commitment,
    *,
    wanted: int,
    acked_end: int,
    log_end: int,
    written_end: int,
    is_late: bool,
    candidates: Collection[str],
    silent: Collection[str] = (),
    placement: Placement,
) -> frozenset[str] | None:
    """
    Return the copies that acks should wait for, or None if nothing is to be changed.

    A late copy stays where nothing could be acked without it: it may take the broker's place.

    Args:
        wanted: how many data folders the group is to have, with the broker's own.
        acked_end: the end of what has become durable in this opening; 0 if nothing has.
        log_end: the end of the log that is durable, or is about to be without a further copy.
        written_end: the end of the log with a commit that waits.
        is_late: True if that commit has waited for copies for too long.
        candidates: the copies that may join. Of too many members they are those that stay.
        silent: the copies that have not been heard of for long; others may take their places.
        placement: where the broker and the copies run.
    """
    members = commitment.members
    if members is None or commitment.proposed:
        return None
    # What acks have waited for, a copy can lack only if its disk has lost it.
    staying = members - {
        each for each in members if -1 < commitment.synced.get(each, -1) < acked_end
    }
    if is_late:
        staying -= _spared(commitment, staying, commitment.missing(written_end))
    if not placement.may_share_machine:
        staying -= _spared(commitment, staying, placement.sharing(staying))
    if staying != members:
        return staying
    if len(members) >= wanted:
        by_progress = sorted(
            members, key=lambda each: (each not in candidates, -commitment.synced.get(each, -1))
        )
        return frozenset(by_progress[: wanted - 1])
    complete = {each for each in candidates if commitment.synced.get(each, -1) >= log_end}
    chosen = members
    while len(chosen) < wanted - 1 and (added := placement.best(complete - chosen, chosen)):
        chosen |= {added}
    for each in sorted(members & frozenset(silent)):
        if added := placement.best(complete - chosen, chosen - {each}):
            chosen = chosen - {each} | {added}
    if chosen == members:
        chosen = placement.improved(members, complete - members)
    return None if chosen == members else chosen


def _spared(
    commitment: Commitment, members: frozenset[str], leaving: frozenset[str]
) -> frozenset[str]:
    """Return the members that may leave of those that are to: acks need the others. Who has synced
    the least leaves first.
    """
    spare = max(0, 1 + len(members) - commitment.least)
    by_progress = sorted(
        members & leaving, key=lambda each: (commitment.synced.get(each, -1), each)
    )
    return frozenset(by_progress[:spare])
