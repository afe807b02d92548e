"""Rounds of the expirer over SQL: what groups have of gone partitions goes, also what an earlier
round has left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.retention import empty_partitions as of_expirer
from keylane.metaserver.retention.empty_partitions import PartitionExpirer, mark_expired
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.schema import drained, groups, heard, leases
from support.sql.rows import Rows

END = 100


class ExpiredRows(Rows):
    """Subjects whose first partition was sealed at END and marked EXPIRED by a metaserver that died
    behind it.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.report("g1")
        self.writes = 0
        for number, name in enumerate(names, 1):
            self.create(name, 1)
            self.run(self._insert_group, number)
        for name in names:
            self.resize(name, 2)
        for number in range(1, len(names) + 1):
            assert self.run(mark_expired, {number: END})
            self.run(self._insert_rows, number)
        settings = MetaserverSettings(data=Path("meta"))
        self.expirer = PartitionExpirer(self, object(), settings, catalogue=self, holder="m")  # type: ignore[arg-type]

    @staticmethod
    def _insert_group(connection: sa.Connection, number: int) -> None:
        row = {"group_id": number, "subject_id": number, "name": "g", "last_token": 0}
        row |= {"version": 0, "settled": True, "route_version": 0}
        connection.execute(sa.insert(groups), row)

    @staticmethod
    def _insert_rows(connection: sa.Connection, number: int) -> None:
        key = {"group_id": number, "partition_id": number}
        connection.execute(sa.delete(heard).where(heard.c.partition_id == number))
        for table in (drained, heard):
            connection.execute(sa.insert(table), key)
        connection.execute(sa.insert(leases), key | {"token": 1, "withdrawn": False})

    def wake_route_waiters(self, names: object) -> None:
        """As the catalogue's."""

    async def read(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.run(work, *args, **kwargs)

    renew = read

    async def write(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.writes += 1
        return self.run(work, *args, **kwargs)

    def left(self, number: int) -> list[str]:
        """The tables that have rows of this partition."""
        return [table.name for table in (drained, heard, leases) if self.run(_count, table, number)]


def _count(connection: sa.Connection, table: sa.Table, number: int) -> int:
    of = sa.select(sa.func.count()).select_from(table).where(table.c.partition_id == number)
    return connection.execute(of).scalar_one()


async def test_expirer_forgets_progress_when_the_marking_metaserver_died():
    """No partition expires in this round; the rows that an earlier one left go all the same."""
    rows = ExpiredRows("s")
    assert rows.left(1) == ["drained", "heard", "leases"]
    assert await rows.expirer.run_once() == 0
    assert rows.left(1) == []


async def test_expirer_forgets_progress_of_many_subjects_when_it_reads_some_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    """A page of subjects is followed by the next one."""
    monkeypatch.setattr(of_expirer, "SUBJECTS_AT_ONCE", 1)
    rows = ExpiredRows("a", "b", "c")
    await rows.expirer.run_once()
    assert [rows.left(number) for number in (1, 2, 3)] == [[], [], []]


async def test_expirer_writes_nothing_when_no_progress_is_left():
    """A lease that a session holds stays, and is no reason for a write."""
    rows = ExpiredRows("s")
    await rows.expirer.run_once()
    key = {"group_id": 1, "partition_id": 1, "token": 1, "withdrawn": False}
    rows.run(lambda connection: connection.execute(sa.insert(leases), key | {"session": "a" * 16}))
    rows.writes = 0
    await rows.expirer.run_once()
    assert rows.writes == 0
    assert rows.left(1) == ["leases"]
