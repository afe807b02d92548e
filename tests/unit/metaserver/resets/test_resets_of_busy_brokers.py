"""A reset continues while a broker is overloaded for a moment."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from keylane.metaserver.resets.rows import ResetScope
from keylane.metaserver.resets.service import OVERLOADED_PAUSES_MS, ResetService
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol.control import GroupStatus, PartitionStatus
from keylane.protocol.errors import OverloadedError, Reason
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import ConsumeStrategy, Partition, PartitionState
from support.raising import raises


class BusyBroker:
    """A network with one broker behind it, which takes nothing the first `full` times it is
    asked.
    """

    def __init__(self, full: int) -> None:
        self.full = full
        self.asked = 0

    async def control(self, method: str, address: str, path: str, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        if self.asked <= self.full:
            raise OverloadedError("223 bytes are waiting for the disk")
        body = kwargs["body"]
        group = GroupStatus(
            group=body.group, token=body.token, cursor=body.cursor, acked_above=0, lag=6
        )
        return PartitionStatus(
            partition_id=1,
            subject="s",
            name="p1",
            state=PartitionState.OPEN,
            first_offset=0,
            next_offset=9,
            groups=(group,),
        )


async def tell(broker: BusyBroker) -> dict[int, int]:
    """The cursors that are reported as set."""
    partition = Partition(
        partition_id=1,
        name="p1",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=PartitionState.OPEN,
        address="127.0.0.1:1",
    )
    ask = ResetGroup(to=ResetTo.EARLIEST)
    scope = ResetScope(
        group_id=1,
        subject_id=1,
        static=False,
        strategy=ConsumeStrategy.EXCLUSIVE,
        request=ask,
        partitions=(partition,),
    )
    settings = MetaserverSettings(data=Path("meta"))
    resetter = ResetService(None, broker, settings, holder="m")  # type: ignore[arg-type]
    done: dict[int, GroupStatus] = {}
    await resetter._set_cursors("g", scope, [1], {1: 5}, {1: 3}, done)
    return {number: status.cursor for number, status in done.items()}


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _seconds: sleep(0))


async def test_reset_retries_an_overloaded_broker():
    """The broker takes the cursor when its disk has caught up."""
    broker = BusyBroker(3)
    assert await tell(broker) == {1: 3}
    assert broker.asked == 4


async def test_reset_is_unfinished_when_a_broker_stays_overloaded():
    """After a few seconds the error says why."""
    broker = BusyBroker(1_000)
    with raises(Reason.RESET_UNFINISHED, match="waiting for the disk"):
        await tell(broker)
    assert broker.asked == len(OVERLOADED_PAUSES_MS) + 1
