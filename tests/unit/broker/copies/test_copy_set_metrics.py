"""What a scrape says of the set of copies that acks wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from keylane.broker.copies.set_keeper import POLL_MS
from keylane.protocol.copies import CopySet
from sim.machines.store import batch
from support.brokers.kept_set import COPY_ID, KeptSet
from support.cluster import eventually


@pytest.fixture
async def kept() -> AsyncIterator[KeptSet]:
    kept = KeptSet()
    await kept.desk.host()
    kept.start()
    yield kept
    await kept.stop()


NOTHING = {
    "keylane_broker_copy_wait_seconds_count": 0,
    "keylane_broker_copy_wait_seconds_sum": 0,
    "keylane_broker_copy_waiting_seconds": 0,
    "keylane_broker_copies_sharing_machine": 0,
    "keylane_broker_set_changes_total": 0,
}


async def test_scrape_says_nothing_of_the_set_before_the_broker_knows_it(kept: KeptSet) -> None:
    kept.keeper._stored = None
    assert await kept.figures() == NOTHING


async def test_scrape_says_that_copies_are_wanted_when_none_follows(kept: KeptSet) -> None:
    await eventually(lambda: kept.keeper.stored is not None)
    assert await kept.figures() == NOTHING | {
        "keylane_broker_copies_wanted": 1,
        "keylane_broker_copies_term": 0,
        "keylane_broker_copies_quarantined": 0,
        "keylane_broker_copies_in_set": 0,
    }


async def test_scrape_says_how_many_copies_are_wanted_and_in_the_set(kept: KeptSet) -> None:
    kept.report()
    await eventually(lambda: kept.keeper.stored is not None)
    await eventually(lambda: kept.keeper.changes == 1)
    appending = asyncio.ensure_future(kept.desk.append(batch()))
    log = kept.desk.store.log
    await eventually(lambda: log.written_end > log.end)
    kept.clock.advance(40)
    assert (await kept.figures())["keylane_broker_copy_waiting_seconds"] == 0.04
    kept.report()
    await appending
    assert await kept.figures() == NOTHING | {
        "keylane_broker_copies_wanted": 1,
        "keylane_broker_copies_term": 0,
        "keylane_broker_copies_quarantined": 0,
        "keylane_broker_copies_in_set": 1,
        "keylane_broker_copy_wait_seconds_count": 1,
        "keylane_broker_copy_wait_seconds_sum": 0.04,
        "keylane_broker_set_changes_total": 1,
    }


async def test_scrape_shows_that_a_copy_too_few_is_in_the_set(kept: KeptSet) -> None:
    kept.report()
    await eventually(lambda: kept.keeper.changes == 1)
    kept.stored = replace(kept.stored, wanted=3, version=kept.stored.version + 1)
    kept.clock.advance(POLL_MS)
    await eventually(lambda: kept.keeper.stored == kept.stored)
    figures = await kept.figures()
    assert figures["keylane_broker_copies_wanted"] == 2
    assert figures["keylane_broker_copies_in_set"] == 1
    assert figures["keylane_broker_set_changes_total"] == 1, "the set is the same"


async def test_set_is_unknown_when_a_copy_was_promoted(kept: KeptSet) -> None:
    kept.report()
    await eventually(lambda: kept.keeper.changes == 1)
    kept.stored = CopySet(wanted=2, term=1, version=9, promoted=COPY_ID)
    kept.clock.advance(POLL_MS)
    await eventually(lambda: kept.keeper.is_replaced)
    assert "keylane_broker_copies_in_set" not in await kept.figures()
