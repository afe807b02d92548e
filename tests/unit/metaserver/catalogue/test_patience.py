"""Right after a start, an unknown subject is told as unknown only when every broker has had the
time to report itself.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from keylane.broker.registration import Registration
from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol.control import BrokerHeartbeat, BrokerWelcome
from keylane.protocol.errors import Reason, SubjectUnknownError
from keylane.testing.machines.database import MemoryDatabase, forget_database
from keylane.testing.machines.loop import SimLoop
from sim.machines.clock import ManualClock
from support.raising import raises


class NoNetwork:
    """A network that nothing uses."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(name)


class LosingDesk:
    """The metaserver that a broker reports itself to: one whose database knows it, then one with an
    empty database.
    """

    def __init__(self, settings: MetaserverSettings) -> None:
        forget_database()
        self.catalogue = Catalogue(MemoryDatabase(ManualClock()), NoNetwork(), settings)
        self._welcome = BrokerWelcome(
            heartbeat_ms=settings.broker_heartbeat_ms, ttl_ms=settings.broker_ttl_ms
        )
        self.lost = False

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        return await self.catalogue.process_report(body) if self.lost else self._welcome


@pytest.mark.parametrize("ttl_ms", [10_000, 20_000, 60_000])
@pytest.mark.parametrize("lost_at_s", [0.1, 1.9])
def test_lost_database_is_not_told_as_unknown_subject_while_brokers_are_quiet(
    tmp_path: Path, ttl_ms: int, lost_at_s: float
) -> None:
    """A broker without news leaves reports out for a quarter of the ttl; clients end when a subject
    is unknown.
    """
    settings = MetaserverSettings(data=tmp_path, broker_ttl_ms=ttl_ms)
    report = BrokerHeartbeat(broker_group="g1", broker_id="x", address="127.0.0.1:1", hosted=2)
    loop = SimLoop(random.Random(1))

    async def main() -> None:
        desk = LosingDesk(settings)
        reporting = Registration(desk, lambda: report, rng=random.Random(1))
        task = asyncio.create_task(reporting.run())
        await asyncio.sleep(lost_at_s)
        desk.lost = True
        try:
            await desk.catalogue.retry_while_empty(partial(desk.catalogue.wait_for_route, "old"))
        finally:
            task.cancel()

    try:
        with raises(Reason.DATABASE_BEHIND):
            loop.run_until_complete(main())
    finally:
        loop.dispose()


@pytest.mark.parametrize(("ttl_ms", "within_s"), [(10_000, (3, 5)), (600_000, (5, 7))])
def test_unknown_subject_of_an_empty_database_is_told_after_the_longest_silence_of_a_broker(
    tmp_path: Path, ttl_ms: int, within_s: tuple[float, float]
) -> None:
    """With no broker that has partitions, nothing was lost: the wait is once a start, and short
    with any ttl.
    """
    loop = SimLoop(random.Random(1))

    async def main() -> list[float]:
        settings = MetaserverSettings(data=tmp_path, broker_ttl_ms=ttl_ms)
        catalogue = LosingDesk(settings).catalogue
        took_s = []
        for _ in range(2):
            began = loop.time()
            with pytest.raises(SubjectUnknownError):
                await catalogue.retry_while_empty(partial(catalogue.wait_for_route, "old"))
            took_s.append(loop.time() - began)
        return took_s

    try:
        first_s, second_s = loop.run_until_complete(main())
    finally:
        loop.dispose()
    assert within_s[0] < first_s < within_s[1]
    assert second_s < 0.01
