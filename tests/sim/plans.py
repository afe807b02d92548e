"""The plans of usual seeds: what each has drawn, changed for what operators, retention, copies,
lost disks and users do in it. Pure.
"""

from __future__ import annotations

import random

from sim.actors.losing import for_losses, is_losing
from sim.actors.operators import for_operators, is_operated
from sim.actors.outages import for_outages, is_away
from sim.actors.retaining import for_retention, is_retaining
from sim.actors.users import for_users
from sim.copies import for_copies, is_copied
from sim.swarm import Swarm, draw


def usual_plan(seed: int, drawn: Swarm) -> Swarm:
    """The plan of a seed, out of what it has drawn."""
    if is_operated(seed):
        drawn = for_operators(seed, drawn)
    elif is_retaining(seed):
        drawn = for_retention(seed, drawn)
    if is_copied(seed):
        drawn = for_copies(drawn)
    if is_away(seed):
        drawn = for_outages(seed, drawn)
    if is_losing(seed):
        drawn = for_losses(drawn)
    return for_users(seed, drawn)


def plan_of(seed: int) -> Swarm:
    """The plan of a usual seed, without its world."""
    return usual_plan(seed, draw(random.Random(seed)))
