"""When a commit is durable on all copies that count, and which copies are to count."""

from __future__ import annotations

import pytest

from keylane.broker.copies.commitment import Commitment, decide_set
from keylane.broker.copies.placement import Placement


def test_no_commit_is_covered_before_a_metaserver_has_said_which_copies_count():
    commitment = Commitment()
    assert not commitment.covers(0)
    commitment.confirm(frozenset())
    assert commitment.covers(100)


def test_commit_is_covered_when_every_copy_of_both_sets_has_it():
    """A set that is proposed may be stored already."""
    commitment = Commitment(frozenset({"a"}), synced={"a": 100, "b": 90})
    assert commitment.covers(100)
    commitment.proposed = frozenset({"a", "b"})
    assert not commitment.covers(100)
    assert commitment.missing(100) == {"b"}
    commitment.synced["b"] = 100
    assert commitment.covers(100)
    commitment.proposed = frozenset()
    commitment.synced["a"] = 90
    assert not commitment.covers(100), "a copy that is proposed to leave still counts"


@pytest.mark.parametrize(
    ("members", "wanted", "is_late", "candidates", "decided"),
    [
        ((), 1, False, ("a", "b"), None),
        ((), 2, False, ("a", "b"), ("a",)),
        ((), 3, False, ("a", "b", "slow"), ("a", "b")),
        (("a",), 3, False, ("slow",), None),
        (("a", "slow"), 3, True, ("b",), ("a",)),
        (("a", "slow"), 3, False, (), ("a",)),
        (("a", "unheard"), 3, False, (), None),
        (("a", "slow"), 2, False, (), ("a",)),
        (("a", "b"), 1, False, (), ()),
        (("a", "b"), 2, False, ("b",), ("b",)),
    ],
)
def test_set_follows_what_is_wanted_and_who_has_everything(
    members, wanted, is_late, candidates, decided
):
    """A copy that lacks what acks have waited for has lost it, and leaves."""
    commitment = Commitment(frozenset(members), synced={"a": 100, "b": 100, "slow": 60})
    found = decide_set(
        commitment,
        wanted=wanted,
        acked_end=100,
        log_end=100,
        written_end=100,
        is_late=is_late,
        candidates=candidates,
        placement=Placement(),
    )
    assert found == (None if decided is None else frozenset(decided))


def test_set_is_left_as_it_is_while_a_proposal_is_unanswered():
    commitment = Commitment(frozenset(), frozenset({"a"}), {"a": 100, "b": 100})
    given = {"acked_end": 100, "log_end": 100, "written_end": 100, "is_late": True}
    assert (
        decide_set(commitment, wanted=3, **given, candidates=["b"], placement=Placement()) is None
    )


@pytest.mark.parametrize(
    ("wanted", "silent", "candidates", "decided"),
    [
        (3, ("gone",), ("b",), ("a", "b")),
        (3, ("gone",), ("slow",), None),
        (3, (), ("b",), None),
        (3, ("gone", "a"), ("b",), ("b", "gone")),
        (4, ("gone",), ("b",), ("a", "b", "gone")),
        (4, ("gone",), ("b", "c"), ("a", "b", "c")),
    ],
)
def test_copy_that_is_gone_gives_its_place_to_a_complete_one(wanted, silent, candidates, decided):
    """Without a commit that waits for it, nothing else tells that it is gone."""
    members = frozenset({"a", "gone"})
    commitment = Commitment(members, synced={"a": 100, "b": 100, "c": 100, "slow": 60})
    given = {"acked_end": 0, "log_end": 100, "written_end": 100, "is_late": False}
    found = decide_set(
        commitment,
        wanted=wanted,
        **given,
        candidates=candidates,
        silent=silent,
        placement=Placement(),
    )
    assert found == (None if decided is None else frozenset(decided))


def test_no_commit_is_covered_when_too_few_folders_count():
    """What is proposed counts as well: no answer can make it fewer than the folders that have it."""
    commitment = Commitment(frozenset(), synced={"a": 100}, least=2)
    assert not commitment.covers(100)
    commitment.proposed = frozenset({"a"})
    assert commitment.covers(100)
    commitment.confirm(frozenset({"a"}))
    assert commitment.covers(100)
    assert not commitment.covers(101)


@pytest.mark.parametrize(
    ("members", "synced", "candidates", "decided"),
    [
        (("a", "b"), {"a": 90, "b": 100}, (), ("b",)),
        (("a", "b"), {"a": 90, "b": 80}, (), ("a",)),
        (("a", "b"), {"a": 90}, (), ("a",)),
        (("a",), {"a": 90}, (), None),
        (("a",), {"a": 90, "b": 90}, ("b",), None),
        (("a",), {"a": 90, "b": 100}, ("b",), ("a", "b")),
    ],
)
def test_late_copy_stays_when_acks_could_not_go_on_without_it(members, synced, candidates, decided):
    """It may take the broker's place; and where another one joins, it is left out after that."""
    commitment = Commitment(frozenset(members), synced=synced, least=2)
    found = decide_set(
        commitment,
        wanted=3,
        acked_end=80,
        log_end=95,
        written_end=100,
        is_late=True,
        candidates=candidates,
        placement=Placement(),
    )
    assert found == (None if decided is None else frozenset(decided))


def test_copy_that_has_lost_what_was_acked_is_left_out_although_too_few_are_left():
    commitment = Commitment(frozenset({"a"}), synced={"a": 79}, least=2)
    given = {"acked_end": 80, "log_end": 95, "written_end": 100, "is_late": False}
    found = decide_set(commitment, wanted=3, **given, candidates=(), placement=Placement())
    assert found == frozenset()
