"""A reset while the partitions of its subject change: it sets those that exist when it begins."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keylane.metaserver.groups.lease_rows import read_grants, store_drained
from keylane.metaserver.groups.sessions import join_group, leave_group
from keylane.metaserver.resets.service import PLANS_MAX, ResetService
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol.control import GroupStatus, Join, PartitionStatus
from keylane.protocol.errors import Reason
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import PartitionState
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

SESSION = "a" * 16


class InMemory:
    """The database of the rows, asked from an event loop."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    async def write(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._rows.run(work, *args, **kwargs)

    read = write


class Brokers:
    """A network with brokers behind it that take every cursor; whenever the first partition is
    asked for, something happens.
    """

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile
        self.cursors: dict[int, int] = {}

    async def control(self, method: str, address: str, path: str, *args: Any, **kwargs: Any) -> Any:
        (number,) = re.findall(r"/(\d+)", path)
        groups: tuple[GroupStatus, ...] = ()
        if method == "GET" and number == "1":
            self._meanwhile()
        elif method == "POST":
            body = kwargs["body"]
            self.cursors[int(number)] = body.cursor
            groups = (
                GroupStatus(
                    group="g", token=body.token, cursor=body.cursor, acked_above=0, lag=100
                ),
            )
        return PartitionStatus(
            partition_id=int(number),
            subject="s",
            name=f"p{number}",
            state=PartitionState.OPEN,
            first_offset=0,
            next_offset=100,
            groups=groups,
        )


@pytest.fixture
def rows() -> Rows:
    """With a group that has read nothing and whose consumer is gone."""
    rows = Rows()
    rows.report("g1")
    rows.create("s", 1)
    read_all(rows)
    return rows


def read_all(rows: Rows, *drained: int) -> set[int]:
    """A consumer joins, reads these to their end, is granted the children, and leaves; returns what
    it held.
    """
    ask = Join(subject="s", group="g", session=SESSION)
    group_id = rows.run(join_group, ask, sessions_max=9).group_id
    rows.run(settle_group, group_id)
    if drained:
        rows.run(store_drained, SESSION, drained)
        rows.run(settle_group, group_id)
    held = {int(grant.partition.partition_id) for grant in rows.run(read_grants, SESSION).grants}
    rows.run(leave_group, SESSION)
    return held


async def reset(rows: Rows, brokers: Brokers) -> None:
    settings = MetaserverSettings(data=Path("meta"))
    resetter = ResetService(InMemory(rows), brokers, settings, holder="m")  # type: ignore[arg-type]
    await resetter.reset("s", "g", ResetGroup(to=ResetTo.EARLIEST))


async def test_reset_includes_children_that_were_read_while_it_was_planned(rows: Rows):
    """The subject was resized, and a consumer read the parent to its end, began the children and
    left.
    """
    held: set[int] = set()

    def meanwhile() -> None:
        if not held:
            rows.resize("s", 2)
            held.update(read_all(rows, 1))

    brokers = Brokers(meanwhile)
    await reset(rows, brokers)
    assert held == {2, 3}
    assert brokers.cursors == {1: 0, 2: 0, 3: 0}
    assert read_all(rows) == {1}, "the parent is read again before its children"


async def test_reset_is_refused_when_the_partitions_keep_changing(rows: Rows):
    """It gives up after a few plans, and nothing was set."""
    counts = iter(range(2, 2 + PLANS_MAX))
    brokers = Brokers(lambda: rows.resize("s", next(counts)))
    with raises(Reason.GROUP_BUSY, match="keep changing"):
        await reset(rows, brokers)
    assert brokers.cursors == {}
    assert next(counts, None) is None
