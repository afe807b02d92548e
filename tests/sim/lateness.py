"""How long judges wait for messages that are late for a reason which their owner cannot help: the
broker's disk is slow.

suspects   the owner before ended without a release: they are handled one at a time, and each takes a sync, so that
           the careful part may last for CAREFUL_MS, longer than a silent owner takes to expire
retries    the same of what waits for retry: its careful part is as long
pulls      each takes a read, and may bring one message
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping

from keylane.consumer.session.state import CAREFUL_MS
from keylane.consumer.session_shell import SessionShell
from sim.actors.consumers import ConsumerHost
from sim.machines.database import Shelf
from sim.service import PATIENCE_S

LOOK_S = 0.25
LONGEST_S = 1.1 * CAREFUL_MS / 1000 + PATIENCE_S
"""A careful part by a clock that drifts, and what is left behind it."""

Place = tuple[str, int]
"""(group, partition)."""
Late = Mapping[Place, Collection[int]]
"""Offsets of the messages that are late; a place has at least one."""


class Reasons:
    """Where messages are late for a reason, from one look to the next."""

    def __init__(self, consumers: Iterable[ConsumerHost]) -> None:
        self._consumers = consumers
        self._pulled: dict[Place, int] = {}
        """One past the last message that was pulled at the last look."""

    def look(self, late: Late) -> set[Place]:
        """The places whose owner handles suspects, or has pulled more and not yet anything that is
        late.
        """
        excused: set[Place] = set()
        for host in self._consumers:
            if not host.running or host.consumer is None:
                continue
            if (assignments := host.consumer._assignments) is None:
                continue  # it closes by itself
            for client in assignments.clients:
                place = host.group, int(client.partition_id)
                if place not in late:
                    continue
                before = self._pulled.get(place, -1)
                upto = self._pulled[place] = client.state.offsets.next_offset
                if _is_careful(client) or before < upto <= min(late[place]):
                    excused.add(place)
        return excused


def _is_careful(shell: SessionShell) -> bool:
    """True while suspects, or messages that waited for a retry, are handed out one at a time."""
    state = shell.state
    is_retrying = (
        state.redrives.has_waiting and shell._clock.boot_ms() < state.redrives.careful_until_ms
    )
    return state.suspects is not None or is_retrying


async def outlast_reasons(consumers: Iterable[ConsumerHost], late: Callable[[], Late]) -> None:
    """
    Wait while messages are late for such reasons alone, for LONGEST_S at most.

    Args:
        late: what is late now; a place has `PATIENCE_S` once it has no reason any more.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    reasons = Reasons(consumers)
    excused_s: dict[Place, float] = {}
    while offsets := late():
        now_s = loop.time()
        excused_s |= dict.fromkeys(reasons.look(offsets), now_s)
        earliest_s = min(excused_s.get(place, float("-inf")) for place in offsets)
        if now_s > min(began_s + LONGEST_S, earliest_s + PATIENCE_S):
            return
        await asyncio.sleep(LOOK_S)


async def misallocated(shelf: Shelf, limit_s: float) -> list[str]:
    """
    What is wrong with who was granted what, and, once all is quiet, with who has how much.

    The members of a group have as many partitions then, but for one; a hand-over that is under way
    has `limit_s`.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + limit_s
    while (uneven := shelf.uneven_shares()) and loop.time() < until_s:
        await asyncio.sleep(LOOK_S)
    return uneven + shelf.problems[:8]
