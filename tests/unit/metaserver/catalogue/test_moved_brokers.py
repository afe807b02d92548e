"""A broker with another address than before: who looks whether one still runs at the old one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from msgspec.structs import replace

from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.cluster.copy_sets import change_copy_set, promote_copy, set_copies
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol.control import BrokerHeartbeat
from keylane.protocol.copies import ChangeCopySet, PromoteCopy, SetCopies
from keylane.testing.machines.database import MemoryDatabase, forget_database
from keylane.testing.machines.loop import SimLoop
from sim.machines.clock import ManualClock

COPY = "c" * 32
REPORT = BrokerHeartbeat(
    broker_group="g1",
    broker_id="folder",
    address="127.0.0.1:1",
    opening="o1",
    log_end=500,
    version="0.3.0",
)


class HangingNetwork:
    """A network on which every call hangs."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def control(self, _method: str, address: str, *_rest: object, **_more: object) -> object:
        self.asked.append(address)
        return await asyncio.Event().wait()


def register_again(tmp_path: Path, *, was_promoted: bool) -> tuple[set[str], bool]:
    """Register a broker at a new address. Return the addresses that were asked, and whether the
    registration has ended by itself.
    """
    forget_database()
    clock, network = ManualClock(), HangingNetwork()
    database = MemoryDatabase(clock)
    catalogue = Catalogue(database, network, MetaserverSettings(data=tmp_path))  # type: ignore[arg-type]

    async def run() -> bool:
        await catalogue.process_report(REPORT)
        if was_promoted:
            await database.write(set_copies, "g1", SetCopies(wanted=2))
            change = ChangeCopySet(
                broker_id="folder", opening="o1", term=0, version=1, members=(COPY,), durable_end=0
            )
            await database.write(change_copy_set, "g1", change)
            clock.advance(60_000)  # it is silent
            place = PromoteCopy(copy_id=COPY, broker_id="folder", log_end=500)
            await database.write(promote_copy, "g1", place)
        opened_after = ("o1", COPY) if was_promoted else ("o1",)
        moved = replace(REPORT, address="127.0.0.1:2", opening="o2", opened_after=opened_after)
        registering = asyncio.ensure_future(catalogue.process_report(moved))
        done, _ = await asyncio.wait((registering,), timeout=30)
        registering.cancel()
        await asyncio.wait((registering,))
        return bool(done)

    loop = SimLoop(random.Random(1))
    try:
        has_ended = loop.run_until_complete(run())
    finally:
        loop.dispose()
    return set(network.asked), has_ended


def test_broker_that_was_given_the_place_of_one_that_hangs_is_registered_at_once(
    tmp_path: Path,
) -> None:
    assert register_again(tmp_path, was_promoted=True) == (set(), True)


def test_old_address_of_a_broker_is_asked_before_a_new_one_is_stored(tmp_path: Path) -> None:
    """Otherwise two brokers could run on copies of one folder."""
    assert register_again(tmp_path, was_promoted=False) == ({"127.0.0.1:1"}, False)
