"""A bounded set of names."""

from __future__ import annotations

from keylane.rpc.liveness.recent import RecentNames


def test_recent_names_are_those_noted_last_when_there_are_too_many():
    names = RecentNames(3)
    for number in range(1_000):
        names.add("in use")
        names.add(f"n{number}")
    assert len(names) == 3
    assert all(name in names for name in ("in use", "n998", "n999"))
    assert "n997" not in names


def test_name_becomes_the_newest_when_it_is_noted_again():
    names = RecentNames(2)
    for name in ("a", "b", "a", "c"):
        names.add(name)
    assert "a" in names
    assert "b" not in names


def test_recent_names_lack_what_was_discarded():
    names = RecentNames(3)
    names.add("a")
    names.discard("a")
    names.discard("b")
    assert "a" not in names
    assert not len(names)
