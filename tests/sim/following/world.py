"""Worlds whose subject is followed by readers and broadcast consumers through all faults, in seeds
from FOLLOWED_FIRST on.

The story of such a world is that of the usual seed of its number: operators, retention, lost disks,
copies, users.
"""

from __future__ import annotations

from sim.copies import is_copied
from sim.following.company import Following
from sim.run import FOLLOWED_FIRST
from sim.world import Outcome


class FollowedWorld(Following):
    """Every host of one such seed."""

    def __init__(self, seed: int) -> None:
        self.number = seed - FOLLOWED_FIRST
        super().__init__(self.number, draws=f"followers {self.number}")
        for host in self.followers:
            host.sees_copies = is_copied(self.number)

    def judge(self, drained_s: float) -> Outcome:
        outcome = super().judge(drained_s)
        outcome.seed = FOLLOWED_FIRST + self.number
        return outcome
