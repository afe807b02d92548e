"""Which copies may count, by the machines and zones of theirs and of their broker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.broker.copies.commitment import Commitment, decide_set
from keylane.broker.copies.placement import Placement, Site

END = 100
COPIES = "abcdef"


def settled(
    members: frozenset[str], placement: Placement, *, wanted: int, least: int = 1
) -> frozenset[str]:
    """Return the set when nothing changes it any more, if every copy is complete."""
    synced = dict.fromkeys(COPIES, END)
    for _ in range(20):
        found = decide_set(
            Commitment(members, synced=synced, least=least),
            wanted=wanted,
            acked_end=END,
            log_end=END,
            written_end=END,
            is_late=False,
            candidates=sorted(placement.copies),
            placement=placement,
        )
        if found is None:
            return members
        members = found
    raise AssertionError("the set changes for ever")


def placed(**places: tuple[str, str]) -> dict[str, Site]:
    return {copy_id: Site(*place) for copy_id, place in places.items()}


@pytest.mark.parametrize(
    ("members", "wanted", "decided"),
    [
        ("", 2, "c"),
        ("", 3, "bc"),
        ("", 4, "bc"),
        ("a", 2, "c"),
        ("ac", 3, "bc"),
        ("cd", 3, "bc"),
    ],
)
def test_copy_counts_only_on_a_machine_of_its_own(members, wanted, decided):
    """The broker is on m1, and c and d share m3; c is in another zone than the broker."""
    places = placed(a=("m1", "z1"), b=("m2", "z1"), c=("m3", "z2"), d=("m3", "z2"))
    placement = Placement(Site("m1", "z1"), places)
    assert settled(frozenset(members), placement, wanted=wanted) == frozenset(decided)


def test_copies_on_one_machine_count_when_that_is_allowed():
    """Another machine is better all the same."""
    places = placed(a=("m1", ""), b=("m1", ""), c=("m2", ""))
    allowed = Placement(Site("m1"), places, may_share_machine=True)
    assert settled(frozenset(), allowed, wanted=2) == {"c"}
    assert settled(frozenset(), allowed, wanted=4) == {"a", "b", "c"}
    assert settled(frozenset("ab"), allowed, wanted=3) == {"b", "c"}


@pytest.mark.parametrize(
    ("places", "least", "decided"),
    [
        ({"a": ("m1", ""), "b": ("m1", "")}, 1, ""),
        ({"a": ("m1", ""), "b": ("m1", "")}, 2, "b"),
        ({"a": ("m1", ""), "b": ("m1", "")}, 3, "ab"),
        ({"a": ("m2", ""), "b": ("m2", "")}, 2, "a"),
        ({"a": ("m2", ""), "b": ("m2", "")}, 3, "ab"),
        ({"a": ("m1", ""), "b": ("m1", ""), "c": ("m2", "")}, 2, "c"),
        ({"a": ("m1", ""), "b": ("m1", ""), "c": ("m2", "")}, 3, "bc"),
    ],
)
def test_copy_on_a_shared_machine_stays_when_acks_could_not_continue_without_it(
    places, least, decided
):
    """The broker is on m1. Where another machine has a copy, that one takes the place."""
    placement = Placement(Site("m1"), placed(**places))
    assert settled(frozenset("ab"), placement, wanted=3, least=least) == frozenset(decided)


def test_copies_that_do_not_say_where_they_are_count():
    assert settled(frozenset(), Placement(Site("m1"), placed(a=("", ""))), wanted=2) == {"a"}


def test_set_is_left_as_it_is_while_a_member_has_not_said_where_it_is():
    """After a start of the broker, another one may have said so before."""
    placement = Placement(Site("m1", "z1"), placed(a=("m2", "z1"), c=("m3", "z2")))
    assert settled(frozenset("ab"), placement, wanted=3) == {"a", "b"}


def test_neighbour_of_a_copy_is_the_broker_or_a_member():
    places = placed(a=("m1", ""), b=("m2", ""), c=("m2", ""), d=("", ""))
    placement = Placement(Site("m1"), places)
    said = {each: placement.neighbour(each, "abc") for each in "abcde"}
    assert said == {"a": "the broker", "b": "the copy c", "c": "the copy b", "d": "", "e": ""}


_place = st.builds(Site, st.sampled_from(["", "m1", "m2", "m3"]), st.sampled_from(["", "x", "y"]))


@given(
    broker=_place,
    copies=st.dictionaries(st.sampled_from(COPIES), _place),
    members=st.frozensets(st.sampled_from(COPIES), max_size=4),
    wanted=st.integers(2, 5),
    least=st.integers(1, 2),
    may_share=st.booleans(),
)
def test_set_settles_as_large_and_as_spread_as_it_can_be(
    broker, copies, members, wanted, least, may_share
):
    placement = Placement(broker, copies, may_share)
    found = settled(members, placement, wanted=wanted, least=least)
    assert len(found) < wanted
    if not may_share and len(found) >= least:
        assert not placement.sharing(found)
    if len(found) < wanted - 1:
        left_out = [each for each in copies if each not in found]
        assert all(not may_share and placement.neighbour(each, found) for each in left_out)
    if found <= copies.keys():
        zones = {broker.zone, *(copies[each].zone for each in found)}
        for leaving in found:
            for joining in copies.keys() - found:
                others = found - {leaving}
                if placement.sharing(others | {joining}):
                    continue
                other_zones = {broker.zone, *(copies[each].zone for each in others | {joining})}
                assert len(other_zones) <= len(zones) or placement.sharing(found)
