"""The model of leases that outlive the database keeps its promises, and needs each of its rules."""

from __future__ import annotations

import pytest

from sim.witness.model import MUTANTS, FoundError, walk

WALKS = 40
CAUGHT_BY = {
    "waiting token does not end the promise": 1,
    "waiting token is let in at once": 1,
    "start lets anybody in": 58,
    "promotion lets anybody in": 3,
    "promise counts from the receipt of the answer": 73,
    "promise is given before the copies have it": 58,
    "promise is answered though a higher token came in": 1,
    "late answer revives a lease that has ended": 1,
    "lock is released while a handler runs": 8,
    "waiting token is not let in when the promise has run out": 1,
    "nobody gets a whole ttl when the database is back": 4,
    "each reconnection gives a whole ttl": 0,
    "consumer asks for no promise": 4,
}
"""The walk that catches each mutant."""


def test_no_walk_breaks_a_promise() -> None:
    worlds = [walk(seed) for seed in range(WALKS)]
    assert sum(world.promises for world in worlds) > WALKS
    assert sum(world.promotions for world in worlds) > WALKS // 4
    assert sum(world.outages for world in worlds) > WALKS // 4


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_walk_finds_the_rule_that_is_left_out(mutant: str) -> None:
    seed = CAUGHT_BY[mutant]
    walk(seed)
    with pytest.raises(FoundError) as found:
        walk(seed, mutant)
    assert found.value.args[0] == MUTANTS[mutant]
