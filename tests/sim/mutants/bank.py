"""All mutants, by name."""

from __future__ import annotations

from sim.actors import outboxes
from sim.mutants import (
    of_brokers,
    of_consumers,
    of_cut_overs,
    of_features,
    of_loops,
    of_members,
    of_metaservers,
    of_operators,
    of_outbox,
    of_parks,
    of_producers,
    of_retention,
    of_retries,
    of_users,
)
from sim.mutants.mutant import Mutant
from sim.run import FEATURES_FIRST

MUTANTS = {
    breaks.__name__: Mutant(breaks)
    for room in (
        of_brokers,
        of_metaservers,
        of_consumers,
        of_producers,
        of_operators,
        of_retention,
        of_users,
        of_outbox,
        of_features,
        of_parks,
        of_loops,
        of_members,
        of_retries,
        of_cut_overs,
    )
    for breaks in room.BREAKS
}
FIRST_SEEDS = {
    breaks.__name__: first
    for room, first in (
        (of_outbox, outboxes.FIRST_SEED),
        (of_features, FEATURES_FIRST),
        (of_parks, FEATURES_FIRST),
        (of_loops, FEATURES_FIRST + 11),
        (of_members, FEATURES_FIRST),
        (of_retries, FEATURES_FIRST),
        (of_cut_overs, FEATURES_FIRST),
    )
    for breaks in room.BREAKS
}
"""Where the hunt for a mutant begins, if not with seed 0."""
