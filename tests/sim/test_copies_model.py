"""The model of the set of copies keeps its promises, and needs each of its rules."""

from __future__ import annotations

import pytest

from sim.copy_sets.model import FORGETS_FIRST, MUTANTS, BrokenRuleError, walk

WALKS = 100
CAUGHT_BY = {
    "set changes from any version": 51,
    "set changes from any opening": 50,
    "proposed set does not count": 3,
    "unanswered proposal is forgotten": 14,
    "late copy counts no more before SQL has stored it": 14,
    "folder has no marker": 2,
    "restarted broker does not wait for its copies": 5,
    "copy joins that lacks something": 0,
    "copy joins beside a commit that was decided": 4,
    "unsynced bytes count": 3,
    "end of a promoted copy is not checked": 8,
    "copy outside of the set is promoted": 0,
    "copies are not compared": 33,
    "copy is not cut": 33,
    "least is ignored": 1,
    "hand-over has no end": 14,
    "restarted broker calls its log durable": 967,
    "hand-over adopts the set of its answer": 526,
    "silent copy keeps its place": 1,
    "term is not raised by a promotion": 7,
}
"""The walk that catches each mutant."""


def test_no_walk_breaks_a_promise() -> None:
    worlds = [walk(seed) for seed in range(WALKS)]
    assert sum(len(world.acked) for world in worlds) > 20 * WALKS
    assert sum(world.promotions for world in worlds) > WALKS // 4
    assert sum(world.hand_overs for world in worlds) > WALKS // 4


def test_no_walk_breaks_a_promise_when_copies_are_forgotten() -> None:
    worlds = [walk(FORGETS_FIRST + seed) for seed in range(WALKS)]
    assert sum(world.forgotten for world in worlds) > WALKS // 10


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_walk_finds_the_rule_that_is_left_out(mutant: str) -> None:
    seed = CAUGHT_BY[mutant]
    walk(seed)
    with pytest.raises(BrokenRuleError) as found:
        walk(seed, mutant)
    assert found.value.args[0] == MUTANTS[mutant]
