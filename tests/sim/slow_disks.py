"""A world with slow disks, whose consumer ends with much in hand: the next one handles most of a
partition one message at a time.
"""

from __future__ import annotations

from dataclasses import replace

from sim.swarm import Swarm
from sim.world import World, run_seed

SYNC_S = 0.3
"""The longest sync of a broker's disk: a suspect takes one, and there are up to 120."""


class SlowDisks(World):
    """Keys fail as well, so that the world is judged before all is handled."""

    def _plan(self, swarm: Swarm) -> Swarm:
        return replace(
            swarm,
            faults=frozenset({"consumer_crash"}),
            habits=frozenset({"poison"}),
            strict=True,
            static=False,
            partitions=1,
            groups=1,
            consumers=1,
            producers=1,
            metaservers=1,
            keys=6,
            messages=120,
            pace=1.0,
            padding_bytes=0,
            ttl_ms=1_000,
            fault_s=8.0,
            gap_s=1.0,
            disk_s=SYNC_S,
            queued_bytes=1 << 25,
            manners={"slow": 1.0, "fails": 0.0, "by_hand": 1.0, "quick": 0.0, "bad_keys": 0.0},
            consumer={
                "buffer_messages": 10_000,
                "concurrency": 1,
                "ack_linger_ms": 0,
                "pull_bytes": 1 << 20,
            },
        )


def run_slow(seed: int) -> list[str]:
    """What the judges of such a world tell."""
    outcome = run_seed(seed, SlowDisks)
    return outcome.findings.examples + outcome.problems
