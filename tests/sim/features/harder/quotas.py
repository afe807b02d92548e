"""A tenant that may have fewer consumers than it runs: never more of them are live, and a place
that is free is taken.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from keylane.metaserver.sql.dialect import insert_or_replace
from keylane.metaserver.sql.schema import access_quotas
from keylane.protocol.http.access import PRINCIPAL
from sim.features.feature import Feature
from sim.swarm import Swarm

TENANT = "tenant"
LOOK_S = 0.05
FREE_S = 20.0
"""Within this each consumer has a session, once there is no limit: the pause of a refused join, a
ttl, and a few calls.
"""


class Quotas(Feature):
    """See the module."""

    faults = frozenset({"consumer_crash", "consumer_leave", "consumer_join", "lost_lease"})

    @classmethod
    def plan(cls, swarm: Swarm, rng: random.Random) -> Swarm:
        return replace(swarm, consumers=3, groups=1, messages=40)

    def build(self) -> None:
        for meta in self.world.metas:
            meta.tenant = TENANT
        self._set(self.rng.choice((1, 2)))
        self._lifted = False

    def _set(self, sessions: int) -> None:
        """The limit; 0: none."""
        self._limit = sessions
        row = {"kind": PRINCIPAL, "name": TENANT, "sessions": sessions}
        row |= dict.fromkeys(("bytes_per_s", "requests_per_s", "connections"), 0)
        self.world.shelf.run(insert_or_replace, (access_quotas, row), {}, durable=True)

    async def work(self) -> None:
        """Watch while faults strike; then lift the limit: every consumer finds a place."""
        while not self.world.faults.healed or not self._served():
            await asyncio.sleep(LOOK_S)
            live = self._live()
            if len(live) > self._limit and not self.problems:
                self.problems.append(f"{len(live)} consumers live, and {self._limit} may")
        self._set(0)
        until = self.world.loop.now + FREE_S
        while self.world.loop.now < until and len(self._live()) < len(self.world.consumers):
            await asyncio.sleep(LOOK_S)
        if len(self._live()) < len(self.world.consumers):
            self.problems.append(
                f"{len(self._live())} of {len(self.world.consumers)} consumers have "
                f"joined without a limit"
            )
        self._lifted = True

    def _served(self) -> bool:
        return not any(each.busy or each.waiting for each in self.world.producers) and bool(
            self.world.service.drained
        )

    def _live(self) -> list[str]:
        raw, now = self.world.shelf._raw, self.world.metas[0].machine.boot_ms()
        ask = "SELECT session FROM sessions WHERE principal = ? AND expires_at > ?"
        return [row[0] for row in raw.execute(ask, (TENANT, now))]

    @property
    def drained(self) -> bool:
        return self._lifted
