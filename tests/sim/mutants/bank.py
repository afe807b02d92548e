"""All mutants, by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from sim.actors import outboxes
from sim.actors.copying import EVERY_NUMBER
from sim.features.cut_overs import CutOvers
from sim.features.harder.cut_off import CutOffs
from sim.features.harder.killers import Killers
from sim.features.harder.parked import DamagedParks, RetainedParks
from sim.features.harder.past import ForgottenCutOvers, ForgottenDeletions
from sim.features.harder.quotas import Quotas
from sim.features.instances import Instances
from sim.features.live_resets import LiveResetting
from sim.features.loops import Loops
from sim.features.parks import Parks
from sim.features.retries import Retries
from sim.features.world import FEATURES, HARDER, HARDER_FROM, LACKING, kind_of
from sim.mutants import (
    of_brokers,
    of_consumers,
    of_copies,
    of_cut_overs,
    of_deciders,
    of_features,
    of_followed_features,
    of_following,
    of_loops,
    of_members,
    of_metaservers,
    of_operators,
    of_outbox,
    of_producers,
    of_retention,
    of_users,
    of_witness,
)
from sim.mutants.catches import CATCHES
from sim.mutants.harder import of_cut_off, of_past
from sim.mutants.mutant import Mutant
from sim.mutants.rare import CAUGHT_BY
from sim.mutants.waiting import of_parks, of_retries, of_sources, of_uneasy_ground
from sim.mutants.worlds import shows
from sim.run import FEATURES_FIRST, FOLLOWED_FEATURES_FIRST, FOLLOWED_FIRST

ROOMS = (
    of_brokers,
    of_metaservers,
    of_consumers,
    of_producers,
    of_operators,
    of_retention,
    of_users,
    of_outbox,
    of_deciders,
    of_features,
    of_parks,
    of_loops,
    of_members,
    of_retries,
    of_sources,
    of_uneasy_ground,
    of_past,
    of_cut_off,
    of_cut_overs,
    of_following,
    of_followed_features,
    of_copies,
    of_witness,
)
MUTANTS = {breaks.__name__: Mutant(breaks) for room in ROOMS for breaks in room.BREAKS}
_FEATURES = {
    of_features: FEATURES,
    of_parks: (Parks,),
    of_loops: (Loops,),
    of_members: (LiveResetting, Instances, Parks),
    of_retries: (Retries,),
    of_sources: LACKING,
    of_uneasy_ground: (DamagedParks, RetainedParks, Killers),
    of_past: (ForgottenCutOvers, ForgottenDeletions, Quotas),
    of_cut_off: (CutOffs,),
    of_cut_overs: (CutOvers,),
}
"""The features of the worlds in which a hunt looks for the mutants of a module."""
_FIRSTS = {
    of_copies: EVERY_NUMBER.start,
    of_outbox: outboxes.FIRST_SEED,
    of_following: FOLLOWED_FIRST,
    of_followed_features: FOLLOWED_FEATURES_FIRST,
}
"""The first seeds of the worlds in which a hunt looks for the mutants of other modules; 0 where
none is named.
"""


def hunted_mutants() -> list[str]:
    """The mutants that seeds catch. A test catches each of the others."""
    return sorted(name for name in MUTANTS if name in CATCHES or name not in CAUGHT_BY)


def seeds_for(name: str) -> Iterator[int]:
    """The seeds of a hunt for a mutant, rising without an end: those of the worlds that may show
    it.
    """
    room = next(room for room in ROOMS if any(breaks.__name__ == name for breaks in room.BREAKS))
    if room in _FEATURES:
        kinds = _FEATURES[room]
        first = HARDER_FROM if set(kinds) <= set(HARDER.values()) else 0
        seeds: Iterator[int] = (
            FEATURES_FIRST + number for number in count(first) if kind_of(number) in kinds
        )
    else:
        seeds = count(_FIRSTS.get(room, 0))
    return (seed for seed in seeds if shows(name, seed))
