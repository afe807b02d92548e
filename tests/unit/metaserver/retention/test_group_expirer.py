"""Groups without consumers are deleted after a time, which the log says before; a consumer that
comes keeps its group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keylane.metaserver.groups.sessions import join_group, leave_group
from keylane.metaserver.removals.begin import begin_group_deletion
from keylane.metaserver.retention.idle_groups import GroupExpirer, list_idle_groups
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.clock_restart import restart_times
from keylane.protocol.control import DeleteGroup, Join
from keylane.protocol.errors import ConfigError
from keylane.protocol.limits import TTL_MS_DEFAULT
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

DAY_MS = 86_400_000


class IdleRows(Rows):
    """A subject with groups, and an expirer of groups idle for `expires_ms`."""

    def __init__(self, expires_ms: int = 10 * DAY_MS) -> None:
        super().__init__()
        self.report("g1")
        self.create("s", 1)
        settings = MetaserverSettings(data=Path("meta"), group_expires_ms=expires_ms)
        self._expirer = GroupExpirer(self, settings, self.delete, holder="m")  # type: ignore[arg-type]
        self.deleted: list[str] = []

    async def write(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.run(work, *args, **kwargs)

    read = write

    async def delete(self, subject: str, group: str, ask: DeleteGroup) -> None:
        self.run(begin_group_deletion, subject, group, ask)
        self.deleted.append(group)

    def join(self, group: str) -> str:
        session = f"{ord(group[0]):016x}"
        ask = Join(subject="s", group=group, session=session)
        self.run(settle_group, self.run(join_group, ask, sessions_max=9).group_id)
        return session

    async def after(self, days: float) -> int:
        """Let time pass, and look."""
        self.clock.advance(int(days * DAY_MS))
        return await self._expirer.run_once()


async def test_group_is_deleted_after_its_time_and_told_before(caplog: pytest.LogCaptureFixture):
    """Counted from the first look without a session; one warning in the last tenth."""
    rows = IdleRows()
    session = rows.join("a")
    assert await rows.after(0) == 0
    rows.run(leave_group, session)
    with caplog.at_level(logging.WARNING, "keylane.metaserver"):
        assert [await rows.after(days) for days in (0, 8.9)] == [0, 0]
        assert not caplog.messages
        assert [await rows.after(days) for days in (0.2, 0.5)] == [0, 0]
        assert len(caplog.messages) == 1
        assert "will be deleted in 77760 s unless one joins" in caplog.messages[0]
        assert await rows.after(0.5) == 1
    assert rows.deleted == ["a"]
    assert await rows.after(20) == 0, "it is on its way"


async def test_consumer_that_comes_keeps_its_group():
    """Also one that comes and leaves between two looks, and one that is there all the time."""
    rows = IdleRows()
    stays = rows.join("b")
    rows.run(leave_group, rows.join("a"))
    await rows.after(0)
    rows.clock.advance(9 * DAY_MS)
    rows.run(leave_group, rows.join("a"))
    assert await rows.after(2) == 0
    assert await rows.after(9) == 0
    assert await rows.after(2) == 1
    assert (rows.deleted, stays) == (["a"], f"{ord('b'):016x}")


async def test_group_of_a_dead_consumer_counts_from_the_end_of_its_session():
    """Its session is swept when a group is settled, as the periodic work does."""
    rows = IdleRows()
    rows.join("a")
    rows.clock.advance(TTL_MS_DEFAULT + 1)
    rows.run(settle_group, 1)
    assert [await rows.after(days) for days in (0, 9, 1)] == [0, 0, 1]


async def test_times_begin_anew_when_the_clock_of_the_database_does():
    rows = IdleRows()
    rows.run(leave_group, rows.join("a"))
    await rows.after(0)
    assert await rows.after(9) == 0
    rows.run(restart_times, broker_ttl_ms=10**9)
    assert await rows.after(2) == 0
    assert await rows.after(10) == 1


async def test_groups_stay_when_no_time_is_set():
    rows = IdleRows(expires_ms=0)
    rows.run(leave_group, rows.join("a"))
    assert [await rows.after(days) for days in (0, 10_000)] == [0, 0]
    assert rows.run(list_idle_groups, at_least_ms=0) == []


@pytest.mark.parametrize("expires_ms", [-1, 10**15])
def test_impossible_times_are_refused(expires_ms: int):
    with pytest.raises(ConfigError):
        MetaserverSettings(data=Path("meta"), group_expires_ms=expires_ms)
