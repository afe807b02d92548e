"""Copies in quarantine, because the database fell back: when it begins, and what ends it."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import TERMS_AHEAD, broker_views, store_report
from keylane.metaserver.cluster.copy_sets import (
    change_copy_set,
    offer_place,
    promote_copy,
    read_copy_set,
    set_copies,
)
from keylane.metaserver.cluster.fall_backs import needs_note, note_history, read_history
from keylane.metaserver.sql.origin import Origin, parse_origin
from keylane.metaserver.sql.schema import copy_sets
from keylane.protocol.control import BrokerHeartbeat
from keylane.protocol.copies import ChangeCopySet, CopySet, OfferPlace, PromoteCopy, SetCopies
from keylane.protocol.errors import Reason
from support.raising import raises
from support.sql.rows import Rows

TTL_MS = 10_000


def report(rows: Rows, opening: str, *after: str, group: str = "g1", term: int = 0) -> None:
    heartbeat = BrokerHeartbeat(
        broker_group=group,
        broker_id="folder",
        address=f"{group}:1",
        opening=opening,
        opened_after=after,
        log_end=500,
        term=term,
    )
    rows.run(store_report, heartbeat, ttl_ms=TTL_MS)


def ask(rows: Rows, opening: str, known: CopySet | None = None, **more: Any) -> CopySet:
    """The broker asks which copies count, and says which do there."""
    request = ChangeCopySet(
        broker_id="folder",
        opening=opening,
        term=-1 if known is None else known.term,
        version=0 if known is None else known.version,
        known=known,
        **({"durable_end": 900} | more),
    )
    return rows.run(change_copy_set, "g1", request)


def promote(rows: Rows, copy_id: str, *, lose: bool = False) -> CopySet:
    request = PromoteCopy(copy_id=copy_id, broker_id="folder", log_end=900, lose=lose)
    return rows.run(promote_copy, "g1", request)


class EarlierSets:
    """A database with a broker that has copies, of which one was left out, that is put back to the
    time before that.
    """

    def __init__(self) -> None:
        self.rows = rows = Rows()
        report(rows, "o1")
        report(rows, "p1", group="g2")
        rows.run(set_copies, "g1", SetCopies(wanted=3, least=1))
        self.both = self._change("a", "b")
        [before] = rows.run(lambda connection: list(connection.execute(sa.select(copy_sets))))
        self.one = self._change("b")
        self.changes = rows.run(read_history).changes
        back = sa.update(copy_sets).values(before._mapping)
        rows.run(lambda connection: connection.execute(back))

    def _change(self, *members: str) -> CopySet:
        stored = self.rows.run(read_copy_set, "g1")
        request = ChangeCopySet(
            broker_id="folder",
            opening="o1",
            term=stored.term,
            version=stored.version,
            members=members,
            durable_end=500,
        )
        return self.rows.run(change_copy_set, "g1", request)

    def note(self) -> list[str]:
        fall_back = self.rows.run(note_history, self.changes)
        return [] if fall_back is None else fall_back.broker_groups

    def silence(self) -> None:
        self.rows.clock.advance(TTL_MS + 1)


@pytest.fixture
def past() -> EarlierSets:
    return EarlierSets()


def test_database_fell_back_when_somebody_knows_more_changes(past: EarlierSets) -> None:
    """A broker of any group; and it is noticed once."""
    assert needs_note(past.rows.run(read_history), past.changes)
    assert past.note() == ["g1"], "the other group has no copies"
    stored = past.rows.run(read_copy_set, "g1")
    assert "brokers know 3 changes of copies, and the database has 2" in stored.quarantine
    assert stored.members == ("a", "b")
    assert past.rows.run(read_history).changes > past.changes
    assert past.note() == []
    views = past.rows.run(broker_views)
    assert [view.folders_text for view in views] == ["3 of 3: quarantined", "1"]


def test_database_that_has_as_many_changes_as_anybody_knows_did_not_fall_back(
    past: EarlierSets,
) -> None:
    past.changes -= 1
    assert past.note() == []
    assert past.rows.run(read_copy_set, "g1").quarantine == ""


def test_copy_that_was_left_out_does_not_take_the_place_when_the_database_fell_back(
    past: EarlierSets,
) -> None:
    """Not even with everything that the database has heard of."""
    past.note()
    past.silence()
    with raises(Reason.COPIES_QUARANTINED, match="the database has 2"):
        promote(past.rows, "a")


def test_copy_takes_the_place_in_quarantine_when_an_operator_gives_up_what_it_lacks(
    past: EarlierSets,
) -> None:
    """In a term that was never given, also not in what the database has lost."""
    past.note()
    past.silence()
    promoted = promote(past.rows, "b", lose=True)
    assert (promoted.term, promoted.members, promoted.quarantine) == (TERMS_AHEAD, (), "")


def test_broker_that_lives_says_which_copies_count(past: EarlierSets) -> None:
    """Only once it knows of the quarantine, and those follow it."""
    rows = past.rows
    past.note()
    noted = ask(rows, "o1", past.one, is_followed=True)
    assert noted.quarantine, "it did not know of the quarantine when it was followed"
    known = CopySet(term=noted.term, version=noted.version, members=("b",))
    assert ask(rows, "o1", known, is_followed=False).quarantine
    assert ask(rows, "o1", known, is_followed=False, members=()).members == ("a", "b")
    ended = ask(rows, "o1", known, is_followed=True)
    assert (ended.members, ended.quarantine, ended.durable_end) == (("b",), "", 900)
    past.silence()
    with raises(Reason.COPY_LACKS_ACKED):
        promote(rows, "a")
    assert promote(rows, "b").term == 1


def test_word_from_an_earlier_quarantine_does_not_end_a_later_one(past: EarlierSets) -> None:
    past.note()
    noted = ask(past.rows, "o1", past.one)
    past.changes = past.rows.run(read_history).changes + 1
    past.note()
    assert ask(past.rows, "o1", noted, is_followed=True).quarantine


def test_quarantine_begins_when_the_group_s_own_broker_knows_a_newer_set(past: EarlierSets) -> None:
    """It is asked before anybody else has noticed."""
    noted = ask(past.rows, "o1", past.one, is_followed=True)
    assert "the broker knows version 3 of the set in term 0" in noted.quarantine
    assert noted.version > past.one.version
    ended = ask(past.rows, "o1", noted, is_followed=True)
    assert ended.quarantine == ""


def test_rebuilt_database_learns_the_set_from_the_broker() -> None:
    rows = Rows()
    report(rows, "o1")
    known = CopySet(wanted=3, least=2, members=("a", "b"), term=2, version=9)
    noted = ask(rows, "o1", known)
    assert (noted.wanted, noted.least, noted.members, noted.term) == (3, 2, (), 2)
    ended = ask(rows, "o1", known_as(noted, "a", "b"), is_followed=True)
    assert (ended.members, ended.quarantine) == (("a", "b"), "")


def known_as(stored: CopySet, *members: str) -> CopySet:
    return CopySet(wanted=stored.wanted, term=stored.term, version=stored.version, members=members)


def test_restarted_broker_waits_for_all_copies_that_the_database_names(past: EarlierSets) -> None:
    """It knows of no newer set."""
    past.note()
    report(past.rows, "o2", "o1")
    first = ask(past.rows, "o2", durable_end=0)
    assert (first.members, bool(first.quarantine)) == (("a", "b"), True)
    assert ask(past.rows, "o2", first, is_followed=False, durable_end=0).quarantine
    assert ask(past.rows, "o2", first, is_followed=True).members == ("a", "b")


def test_copy_that_was_promoted_keeps_its_place_when_the_database_lost_that(
    past: EarlierSets,
) -> None:
    """Also when the folder before was opened since; and its term is not given again."""
    rows = past.rows
    report(rows, "o2", "o1")
    with raises(Reason.FOLDER_BEHIND):
        report(rows, "b2", "b", "o1")
    report(rows, "b2", "b", "o1", term=1)
    noted = ask(rows, "b2", CopySet(wanted=3, term=1, version=4))
    assert (noted.term, bool(noted.quarantine)) == (1, True)
    with raises(Reason.FOLDER_BEHIND):
        report(rows, "o2", "o1")
    ask(rows, "b2", known_as(noted, "c"), is_followed=True)
    past.silence()
    assert promote(rows, "c").term == 2


def test_place_is_not_offered_in_quarantine(past: EarlierSets) -> None:
    past.note()
    offer = OfferPlace(broker_id="folder", opening="o1", term=0, copy_id="b")
    with raises(Reason.COPIES_QUARANTINED):
        past.rows.run(offer_place, "g1", offer)


def test_operator_ends_a_quarantine(past: EarlierSets) -> None:
    """Then no copy is promoted without a question before it has joined again."""
    past.note()
    request = SetCopies(wanted=3, least=1)
    assert past.rows.run(set_copies, "g1", request).quarantine
    ended = past.rows.run(set_copies, "g1", SetCopies(wanted=3, least=1, end_quarantine=True))
    assert (ended.members, ended.quarantine) == ((), "")
    past.silence()
    with raises(Reason.COPY_LACKS_ACKED):
        promote(past.rows, "b")


@pytest.mark.parametrize(
    ("before", "now", "has_lost"),
    [
        (Origin("7", "00000001", False), Origin("7", "00000001", True), False),
        (Origin("7", "00000001", True), Origin("7", "00000002", False), False),
        (Origin("7", "00000001", False), Origin("7", "00000002", True), True),
        (Origin("7", "00000001", True), Origin("8", "00000001", True), True),
    ],
)
def test_standby_may_lack_commits_unless_they_waited_for_it(
    before: Origin, now: Origin, has_lost: bool
) -> None:
    assert parse_origin(before.text) == before
    assert before.has_lost(now) is has_lost
