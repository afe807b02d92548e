"""Parked messages that are read from where they are stored: what is given up, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from keylane.consumer import ConsumerSettings
from keylane.consumer.session.events import SourceUnreadable, WindowRead
from keylane.consumer.session.ready import ReadWindow
from keylane.protocol.errors import KeylaneError, OffsetOutOfRangeError, PartitionUnknownError
from keylane.protocol.frames import Batches, ParkedRows, Read, ReadParked
from keylane.protocol.operations import SubjectHistory
from keylane.protocol.routing import PartitionState
from support.pulling import NotingOwner, ScriptedBroker, opened
from unit.consumer.reading.test_lineage_order import past

KEY = b"k"
ANCESTOR = 30
AWAY = "b:2"


class ParkedRowsBroker(ScriptedBroker):
    """Has parked offsets [5, 9) of the ancestor."""

    async def call(self, request: Any, payload: bytes = b"", *, wait_ms: int = 0) -> Any:
        if isinstance(request, ReadParked):
            return ParkedRows(((ANCESTOR, 5, 9),), None), b""
        return await super().call(request, payload, wait_ms=wait_ms)


class ReadBroker(ScriptedBroker):
    """Has an ancestor of the partition, and answers each read of it alike."""

    address = AWAY

    def __init__(self, told: KeylaneError | Batches) -> None:
        super().__init__()
        self.told = told

    async def call(self, request: Any, payload: bytes = b"", *, wait_ms: int = 0) -> Any:
        if not isinstance(request, Read):
            return await super().call(request, payload, wait_ms=wait_ms)
        if isinstance(self.told, KeylaneError):
            raise self.told
        return self.told, memoryview(b"")


class HistoryOwner(NotingOwner):
    """Its metaserver tells this of the ancestor."""

    def __init__(self, **told: Any) -> None:
        super().__init__()
        entry = past(ANCESTOR, 0, 1024, **told)
        entry = replace(entry, partition=replace(entry.partition, address=AWAY))
        self._history = SubjectHistory(subject="s", route_version=1, partitions=[entry])

    async def history(self) -> SubjectHistory:
        return self._history


async def read_at(told: KeylaneError | Batches, **known: Any) -> WindowRead | SourceUnreadable:
    """Have the first window of the key read, where the ancestor's broker tells this."""
    others = (ReadBroker(told),)
    owner = HistoryOwner(**known)
    async with opened(ParkedRowsBroker(), owner, ConsumerSettings(), others=others) as shell:
        return await shell._reads.read_window(ReadWindow(1, KEY, 0, (), 100))


@pytest.mark.parametrize(
    "told",
    [
        OffsetOutOfRangeError(offset=5, first_offset=0, next_offset=3),
        Batches(0, 5, 5, False),
        PartitionUnknownError(partition_id=ANCESTOR),
    ],
    ids=["a copy that ends before", "a copy that ends there", "a copy from before the partition"],
)
async def test_parked_messages_are_kept_when_the_broker_lacks_them(told: KeylaneError | Batches):
    """It stands on an older copy of its data folder, and the original may come back."""
    assert await read_at(told) == SourceUnreadable(1, ANCESTOR)


async def test_parked_messages_are_given_up_when_retention_has_removed_them():
    read = await read_at(OffsetOutOfRangeError(offset=5, first_offset=7, next_offset=20))
    assert isinstance(read, WindowRead)
    assert list(read.gone)[:1] == [(ANCESTOR, 5, 7)]


@pytest.mark.parametrize("gone", [{"lost": True}, {"state": PartitionState.EXPIRED}])
async def test_parked_messages_are_given_up_when_their_partition_is_gone(gone: dict[str, Any]):
    read = await read_at(PartitionUnknownError(), **gone)
    assert isinstance(read, WindowRead)
    assert list(read.gone) == [(ANCESTOR, 5, 9)]
