"""All mutants, by name."""

from __future__ import annotations

from sim.mutants import (
    of_brokers,
    of_consumers,
    of_metaservers,
    of_operators,
    of_producers,
    of_retention,
    of_users,
)
from sim.mutants.mutant import Mutant

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
    )
    for breaks in room.BREAKS
}
