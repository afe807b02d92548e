"""A live reset that has begun ends, whatever retention removes before its metaserver goes on with
it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.groups.lease_rows import read_grants, release_leases
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.resets.live import CALL_TIMEOUT_MS, LiveResets
from keylane.metaserver.resets.service import ResetService
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.schema import partitions
from keylane.protocol.clock import SystemClock
from keylane.protocol.control import GroupStatus, Join, PartitionStatus, ReleaseGrant
from keylane.protocol.errors import NotSentError, OffsetOutOfRangeError, Reason
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import PartitionState
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group
from unit.metaserver.resets.test_resets_in_a_resize import InMemory

SESSION = "a" * 16


class RetainingBrokers:
    """A network with brokers behind it that store `[first_offset, 100)` of each partition, and take
    cursors or not.
    """

    def __init__(self) -> None:
        self.first_offset = 0
        self.takes_cursors = False
        self.refused = 0
        """Cursors that were not taken."""
        self.cursors: dict[int, int] = {}
        self.before_read: Callable[[], Awaitable[None]] | None = None
        """What happens once, before the next partition is read."""

    async def control(self, method: str, address: str, path: str, *args: Any, **kwargs: Any) -> Any:
        (number,) = re.findall(r"/(\d+)", path)
        groups: tuple[GroupStatus, ...] = ()
        if method == "POST":
            if not self.takes_cursors:
                self.refused += 1
                raise NotSentError("the broker was killed")
            body = kwargs["body"]
            self.cursors[int(number)] = body.cursor
            status = GroupStatus(
                group="g", token=body.token, cursor=body.cursor, acked_above=0, lag=100
            )
            groups = (status,)
        elif self.before_read is not None:
            happen, self.before_read = self.before_read, None
            await happen()
        return PartitionStatus(
            partition_id=int(number),
            subject="s",
            name=f"p{number}",
            state=PartitionState.OPEN,
            first_offset=self.first_offset,
            next_offset=100,
            groups=groups,
        )


class RefusalClock(SystemClock):
    """A clock that moves by CALL_TIMEOUT_MS at each refusal of the brokers, and not before: a slow
    machine ends no wait.
    """

    def __init__(self, brokers: RetainingBrokers) -> None:
        self._brokers = brokers

    def boot_ms(self) -> int:  # type: ignore[override]  # a method in place of a static one
        return self._brokers.refused * CALL_TIMEOUT_MS


class ResetHouse:
    """A subject of two partitions, its group with one live member, and a metaserver that resets."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.rows.report("g1")
        self.rows.create("s", 2)
        self.brokers = RetainingBrokers()
        ask = Join(subject="s", group="g", session=SESSION)
        self.rows.run(join_group, ask, sessions_max=9)
        self.rows.run(settle_group, 1)
        settings = MetaserverSettings(data=Path("meta"))
        database: Any = InMemory(self.rows)
        network: Any = self.brokers
        resets = ResetService(database, network, settings, holder="m")
        clock = RefusalClock(self.brokers)
        self.resets = LiveResets(database, resets, self.settle, clock=clock)
        self.other_resets = LiveResets(database, resets, self.settle, clock=clock)
        """Those of another metaserver."""

    async def settle(self, group_id: int) -> None:
        """Settle the group; its member hands over what it is not granted any more at once."""
        before = self.held
        self.rows.run(settle_group, group_id)
        gone = before.items() - self.held.items()
        asks = [ReleaseGrant(session=SESSION, partition_id=p, token=t) for p, t in gone]
        if asks:
            self.rows.run(release_leases, asks)

    @property
    def held(self) -> dict[int, int]:
        """Partition id → token."""
        grants = self.rows.run(read_grants, SESSION).grants
        return {int(grant.partition.partition_id): grant.token for grant in grants}

    async def begin(self, ask: ResetGroup) -> None:
        """Have a reset begin that no broker takes."""
        with raises(Reason.RESET_UNFINISHED, match="it continues automatically"):
            await self.resets.reset("s", "g", ask)
        assert self.held == {}


@pytest.mark.parametrize(
    "ask",
    [
        ResetGroup(to=ResetTo.OFFSET, partition_id=1, offset=10, live=True),
        ResetGroup(to=ResetTo.CURSORS, cursors={1: 10, 2: 90}, live=True),
    ],
    ids=["offset", "cursors"],
)
async def test_begun_reset_goes_to_the_first_stored_message_when_retention_has_removed_its_own(
    ask: ResetGroup,
):
    """One that has not begun is refused, and changes nothing."""
    house = ResetHouse()
    await house.begin(ask)
    house.brokers.first_offset = 40
    house.brokers.takes_cursors = True
    await house.resets.resume()
    assert house.brokers.cursors == ({1: 40} if ask.to is ResetTo.OFFSET else {1: 40, 2: 90})
    assert house.held.keys() == {1, 2}
    with pytest.raises(OffsetOutOfRangeError):
        await house.resets.reset("s", "g", ask)
    assert house.held.keys() == {1, 2}


@pytest.mark.parametrize(
    "ask",
    [
        ResetGroup(to=ResetTo.OFFSET, partition_id=1, offset=10, live=True),
        ResetGroup(to=ResetTo.CURSORS, cursors={1: 10, 2: 90}, live=True),
    ],
    ids=["offset", "cursors"],
)
async def test_begun_reset_ends_when_its_partition_has_expired(
    ask: ResetGroup,
):
    house = ResetHouse()
    await house.begin(ask)
    expired = sa.update(partitions).where(partitions.c.partition_id == 1)
    expired = expired.values(state=PartitionState.EXPIRED, end_offset=100)
    house.rows.run(lambda connection: connection.execute(expired))
    house.brokers.takes_cursors = True
    await house.resets.resume()
    assert house.brokers.cursors == ({} if ask.to is ResetTo.OFFSET else {2: 90})
    assert house.held.keys() == {2}


async def test_begun_reset_is_not_refused_when_another_metaserver_ends_it_during_a_repeat():
    """The repeat would be out of range by now, but its cursor was set while it was under way."""
    house = ResetHouse()
    ask = ResetGroup(to=ResetTo.OFFSET, partition_id=1, offset=10, live=True)
    await house.begin(ask)
    house.brokers.first_offset = 40
    house.brokers.takes_cursors = True
    house.brokers.before_read = house.other_resets.resume
    answer = await house.resets.reset("s", "g", ask)
    assert {view.partition_id: view.cursor for view in answer.cursors} == {1: 40}
    assert house.brokers.cursors == {1: 40}
