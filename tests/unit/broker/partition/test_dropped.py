"""Ids of dropped partitions: refused for ever, and in a bounded number of ranges."""

from __future__ import annotations

import pytest

from keylane.broker.partition import dropped
from keylane.broker.partition.records import DroppedBody
from keylane.broker.partition.state import BrokerState
from sim.machines.store import facts

KEPT = 100


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(dropped, "KEPT_MAX", KEPT)


def drop(state: BrokerState, *ids: int) -> None:
    for number in ids:
        state.note_dropped(DroppedBody([(number, number + 1)], {}))


def ranges(state: BrokerState) -> list[tuple[int, int]]:
    return [each for body in state.dropped.bodies() for each in body.ranges]


def test_ranges_stay_few_when_every_second_id_is_dropped():
    """As of two broker groups that share the partitions of subjects that come and go."""
    state = BrokerState()
    ids = range(1, 2_000, 2)
    drop(state, *ids)
    assert len(ranges(state)) <= KEPT + KEPT // 10
    assert all(number in state.dropped for number in ids)
    assert state.dropped.highest_id == ids[-1]
    newest = ids[-KEPT + 1 :]
    assert not any(number + 1 in state.dropped for number in newest)


def test_ranges_are_not_joined_over_ids_that_are_taken():
    state = BrokerState()
    hosted = [200, 2, 1_000]
    for number in hosted:
        state.host(facts(number))
    state.orphans[300] = 0
    state.dropped.begin(400, DroppedBody([(400, 401)], {}))
    drop(state, *range(1, 2_000, 2))
    assert not any(number in state.dropped for number in (*hosted, 300))
    state.dropped.undo(400)
    assert 400 not in state.dropped
    assert len(ranges(state)) <= KEPT + KEPT // 10
    assert set(hosted) <= set(state.partitions.ids())


def test_ranges_are_looked_at_seldom_when_none_can_be_joined(monkeypatch):
    state = BrokerState()
    for number in range(2, 1_000, 2):
        state.host(facts(number))
    looks = []
    join = state.dropped.join_oldest
    monkeypatch.setattr(
        type(state.dropped), "join_oldest", lambda _self, taken: (looks.append(1), join(taken))
    )
    drop(state, *range(1, 1_000, 2))
    assert len(ranges(state)) == 500
    assert len(looks) <= 500 // (KEPT // 10)
