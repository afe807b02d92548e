"""Connection slots: each new principal gets an equal share, and none loses more than necessary."""

from __future__ import annotations

from collections import Counter
from random import Random

from keylane.rpc.access.connection_slots import ConnectionSlots, SlotGrant


def filled(limit: int, **held: int) -> ConnectionSlots[str]:
    places: ConnectionSlots[str] = ConnectionSlots(limit)
    for principal, number in held.items():
        for each in range(number):
            assert places.acquire(f"{principal}{each}", principal) == SlotGrant(True)
    return places


def test_places_are_given_to_one_principal_while_some_are_free():
    places = filled(4, greedy=4)
    assert places.count("greedy") == 4
    assert places.acquire("greedy4", "greedy") == SlotGrant(False)


def test_newest_of_who_has_most_leaves_when_another_principal_comes():
    places = filled(4, greedy=3, modest=1)
    assert places.acquire("shop0", "shop") == SlotGrant(True, "greedy2", "greedy", 3)
    assert places.acquire("shop1", "shop") == SlotGrant(False)
    assert [places.count(name) for name in ("greedy", "modest", "shop")] == [2, 1, 1]


def test_principals_keep_their_places_when_there_are_more_principals_than_places():
    places = filled(2, a=1, b=1)
    assert places.acquire("c0", "c") == SlotGrant(False)


def test_refusal_costs_no_look_at_all_principals_when_its_principal_has_its_share(monkeypatch):
    """With 10,000 principals, each refusal blocked the event loop for a millisecond, and refused
    callers retry.
    """
    places = filled(50, **{f"p{number}_": 1 for number in range(50)})
    asked: list[str] = []
    monkeypatch.setattr(places, "count", lambda principal: asked.append(principal) or 1)
    assert places.acquire("late", "p7_") == SlotGrant(False)
    assert asked == ["p7_"]


def test_connection_keeps_its_place_when_it_asks_again_or_changes_its_principal():
    places = filled(2, a=2)
    assert places.acquire("a0", "a") == SlotGrant(True)
    assert places.acquire("a0", "b") == SlotGrant(True)
    assert (places.count("a"), places.count("b")) == (1, 1)


def test_place_is_free_again_when_its_connection_has_left():
    places = filled(1, a=1)
    places.release("a0")
    places.release("a0")
    assert places.acquire("b0", "b") == SlotGrant(True)


def test_shares_are_equal_when_every_principal_asks_for_all_places():
    random, places = Random(7), ConnectionSlots[int](30)
    whose: dict[int, str] = {}
    for connection in range(2_000):
        principal = random.choice("abcde")
        grant = places.acquire(connection, principal)
        if grant.is_granted:
            whose[connection] = principal
        if grant.evicted_connection is not None:
            assert whose.pop(grant.evicted_connection) == grant.evicted_principal
        assert len(whose) <= 30
    assert Counter(whose.values()) == dict.fromkeys("abcde", 6)
