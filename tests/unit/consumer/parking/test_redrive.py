"""Where parked messages are read again: what is given up, and what is waited for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keylane.consumer import ConsumerSettings
from keylane.consumer.pulling.pull_client import PullClient
from keylane.protocol.errors import (
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
)
from keylane.protocol.frames import Batches, ChangeParked, Read
from keylane.protocol.operations import SubjectHistory
from keylane.protocol.parked.changes import AskedChange, Unpark, decode_changes
from keylane.protocol.routing import PartitionState
from support.pulling import NotingOwner, ScriptedBroker, opened
from unit.consumer.reading.test_lineage_order import past

ANCESTOR = 70
KEY = b"k"


class AncestorBroker(ScriptedBroker):
    """Has an ancestor of the partition, and answers each read of it alike."""

    address = "b:2"

    def __init__(self, told: KeylaneError | Batches) -> None:
        super().__init__()
        self.told = told

    async def call(self, request, payload=b"", *, wait_ms=0):
        if not isinstance(request, Read):
            return await super().call(request, payload, wait_ms=wait_ms)
        if isinstance(self.told, KeylaneError):
            raise self.told
        return self.told, b""


class KnowingOwner(NotingOwner):
    """Its metaserver tells this of the ancestor."""

    def __init__(self, **told) -> None:
        super().__init__()
        entry = past(ANCESTOR, 0, 1024, **told)
        there = replace(entry.partition, address=AncestorBroker.address)
        entry = replace(entry, partition=there)
        self._history = SubjectHistory(subject="s", route_version=1, partitions=[entry])

    async def history(self) -> SubjectHistory:
        return self._history


class HomeBroker(ScriptedBroker):
    """Has the partition, and keeps what is changed of what is parked."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[AskedChange] = []

    async def call(self, request, payload=b"", *, wait_ms=0):
        if isinstance(request, ChangeParked):
            self.changes += decode_changes(payload)
        return await super().call(request, payload, wait_ms=wait_ms)


async def read_at(home: HomeBroker, told: KeylaneError | Batches, owner: KnowingOwner) -> None:
    """Have offsets [5, 9) of the ancestor read, which are parked, where its broker tells this."""
    others = (AncestorBroker(told),)
    async with opened(PullClient, home, owner, ConsumerSettings(), others=others) as client:
        assert await client.parking._redrives.read(KEY, ANCESTOR, [(5, 9)])


@pytest.mark.parametrize(
    "told",
    [
        OffsetOutOfRangeError(offset=5, first_offset=0, next_offset=3),
        Batches(0, 5, 5, False),
        PartitionUnknownError(partition_id=ANCESTOR),
    ],
    ids=["a copy that ends before", "a copy that ends there", "a copy from before the partition"],
)
async def test_parked_messages_are_kept_when_the_broker_lacks_them(told):
    """It stands on an older copy of its data folder, and the original may come back."""
    home = HomeBroker()
    with pytest.raises((NotSentError, PartitionUnknownError)):
        await read_at(home, told, KnowingOwner())
    assert home.changes == []


async def test_parked_messages_are_given_up_when_retention_has_removed_them():
    home = HomeBroker()
    told = OffsetOutOfRangeError(offset=5, first_offset=7, next_offset=20)
    await read_at(home, told, KnowingOwner())
    assert home.changes == [Unpark(KEY, ANCESTOR, ((5, 7),))]


@pytest.mark.parametrize("gone", [{"lost": True}, {"state": PartitionState.EXPIRED}])
async def test_parked_messages_are_given_up_when_their_partition_is_gone(gone):
    home = HomeBroker()
    await read_at(home, PartitionUnknownError(), KnowingOwner(**gone))
    assert home.changes == [Unpark(KEY, ANCESTOR, ((5, 9),))]
