"""How long judges wait for messages behind suspects: their owner handles these one at a time, because the one before ended without a release.

A broker syncs a write for each suspect, so that the careful part may last for CAREFUL_MS where disks are slow: longer than
a silent owner takes to expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from keylane.consumer.pulling.suspects import CAREFUL_MS
from sim.actors.consumers import ConsumerHost
from sim.service import PATIENCE_S

LOOK_S = 0.25
LONGEST_S = 1.1 * CAREFUL_MS / 1000 + PATIENCE_S
"""A careful part by a clock that drifts, and what is left behind it."""

Place = tuple[str, int]
"""(group, partition)."""


def careful_places(consumers: Iterable[ConsumerHost]) -> set[Place]:
    """The partitions whose owners handle suspects, and hand nothing else out."""
    return {
        (host.group, int(client.partition_id))
        for host in consumers
        if host.running and host.consumer is not None
        for client in host.consumer._assignments.clients
        if client.is_careful
    }


async def outlast_careful(
    consumers: Iterable[ConsumerHost], late: Callable[[], Collection[Place]]
) -> None:
    """
    Wait while messages are late for this reason alone, for LONGEST_S at most.

    Args:
        consumers: all of them, also those that are added meanwhile.
        late: where messages are late now; those of a place have `PATIENCE_S` once its careful part is over.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    seen_s: dict[Place, float] = {}
    while places := late():
        now_s = loop.time()
        seen_s |= dict.fromkeys(careful_places(consumers), now_s)
        earliest_s = min(seen_s.get(place, float("-inf")) for place in places)
        if now_s > min(began_s + LONGEST_S, earliest_s + PATIENCE_S):
            return
        await asyncio.sleep(LOOK_S)
