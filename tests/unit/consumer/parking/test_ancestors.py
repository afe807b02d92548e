"""What a child does about an ancestor's parked messages where the ancestor's broker lacks it, or is gone."""

from __future__ import annotations

import pytest

from keylane.consumer import ConsumerSettings
from keylane.consumer.pulling.pull_client import PullClient
from keylane.protocol.errors import KeylaneError, PartitionUnknownError
from keylane.protocol.frames import LeaveParked, TakeParked
from keylane.protocol.parked import Adopt, AncestorTold
from keylane.protocol.routing import PartitionState
from support.pulling import ScriptedBroker, opened
from unit.consumer.parking.test_redrive import ANCESTOR, AncestorBroker, HomeBroker, KnowingOwner
from unit.consumer.reading.test_lineage_order import past

GONE = [{"lost": True}, {"state": PartitionState.EXPIRED}]
NO_SUCH = PartitionUnknownError(partition_id=ANCESTOR)


class Silent(ScriptedBroker):
    """Has an older copy from before the ancestor."""

    address = AncestorBroker.address

    async def call(self, request, payload=b"", *, wait_ms=0):
        if isinstance(request, TakeParked | LeaveParked):
            self.requests.append(request)
            raise NO_SUCH
        return await super().call(request, payload, wait_ms=wait_ms)


async def told_by(home: HomeBroker, owner: KnowingOwner) -> Silent:
    """Have the ancestor told that nothing of it is needed; its broker."""
    away = Silent()
    async with opened(PullClient, home, owner, ConsumerSettings(), others=(away,)) as client:
        ancestors = client.parking._ancestors
        ancestors.unneeded = (ANCESTOR,)

        async def known() -> None:
            """It is known what is parked."""

        ancestors._refresh = known
        await ancestors._tell()
    return away


async def test_ancestor_counts_as_told_only_when_its_broker_has_heard_it():
    """Its messages would be kept for ever when the original comes back."""
    home = HomeBroker()
    away = await told_by(home, KnowingOwner())
    assert len(away.requests) == 1
    assert home.changes == []


@pytest.mark.parametrize("gone", GONE)
async def test_ancestor_counts_as_told_when_its_messages_are_gone(gone):
    """No broker is asked."""
    home = HomeBroker()
    away = await told_by(home, KnowingOwner(**gone))
    assert away.requests == []
    assert home.changes == [AncestorTold(ANCESTOR)]


async def adopted_from(home: HomeBroker, owner: KnowingOwner) -> None:
    """Have what the parent has parked taken over."""
    parent = past(ANCESTOR, 0, 1024).partition
    async with opened(PullClient, home, owner, ConsumerSettings(), others=(Silent(),)) as client:
        await client.parking._ancestors._adopt(parent)


async def test_child_takes_nothing_over_when_the_broker_of_its_parent_lacks_it():
    home = HomeBroker()
    with pytest.raises(KeylaneError) as caught:
        await adopted_from(home, KnowingOwner())
    assert caught.value is NO_SUCH
    assert home.changes == []


@pytest.mark.parametrize("gone", GONE)
async def test_child_goes_on_when_the_disk_of_its_parent_is_lost(gone, caplog):
    """What was parked there is given up, with a warning: a child that waits for it gives no message."""
    home = HomeBroker()
    await adopted_from(home, KnowingOwner(**gone))
    assert home.changes == [Adopt(ANCESTOR, (), True)]
    assert f"parent {ANCESTOR} had parked is gone" in caplog.text
