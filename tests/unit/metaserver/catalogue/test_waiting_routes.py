"""Calls that wait for a newer route: how long they wait."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import sqlalchemy as sa

from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.schema import subjects
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.rpc.http_network import HttpNetwork
from keylane.testing.machines.database import MemoryDatabase, forget_database
from keylane.testing.machines.loop import SimLoop
from sim.machines.clock import ManualClock

WAIT_MS = 500


def test_call_waits_when_a_subject_made_anew_has_a_lower_version(tmp_path: Path) -> None:
    """Versions begin anew with the subject; calls that are answered at once would follow each other
    without a pause.
    """
    forget_database()
    database = MemoryDatabase(ManualClock())
    loop = SimLoop(random.Random(1))

    def set_version(version: int) -> None:
        values = sa.update(subjects).values(route_version=version)
        database.transact(lambda connection: connection.execute(values))

    async def waited_s(catalogue: Catalogue, known_version: int) -> float:
        began_s = loop.time()
        route = await catalogue.wait_for_route("s", known_version=known_version, wait_ms=WAIT_MS)
        assert route.version == known_version
        return loop.time() - began_s

    async def main() -> None:
        network = HttpNetwork()
        catalogue = Catalogue(database, network, MetaserverSettings(data=tmp_path))
        report = BrokerHeartbeat(broker_group="g1", broker_id="x", address="127.0.0.1:1")
        database.transact(store_report, report, ttl_ms=60_000)
        database.transact(plan_subject, CreateSubject(subject="s", partitions=1), subjects_max=9)
        database.transact(open_subject, "s")
        for version in (3, 1, 2):
            set_version(version)
            assert await waited_s(catalogue, version) * 1_000 >= WAIT_MS
        woken = asyncio.ensure_future(
            catalogue.wait_for_route("s", known_version=2, wait_ms=WAIT_MS)
        )
        await asyncio.sleep(0.1)
        set_version(4)
        await catalogue.check_for_changes()
        async with asyncio.timeout(0.1):
            assert (await woken).version == 4
        await network.close()

    try:
        loop.run_until_complete(main())
    finally:
        loop.dispose()
