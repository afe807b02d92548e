"""Sessions that join a group in one transaction get the same row or error as if they
joined alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from keylane.metaserver.access.quota_rows import set_quota
from keylane.metaserver.access.rows import create_access_state
from keylane.metaserver.groups.lease_rows import read_grants, settle_group
from keylane.metaserver.groups.sessions import PendingJoin, SessionRow, join_batch, join_group
from keylane.protocol.access.quota import Quota
from keylane.protocol.control import Join
from keylane.protocol.errors import (
    KeylaneError,
    OverloadedError,
    Reason,
)
from keylane.protocol.http.access import PRINCIPAL, SetQuota
from keylane.protocol.routing import ConsumeStrategy
from support.raising import is_a
from support.sql.rows import Rows
from support.sql.told_groups import hear

PARTITIONS = 24


class JoiningRows(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.report("g1")
        self.create("s", PARTITIONS)

    def join(
        self, *asks: Join, sessions_max: int = 99, principal: str = ""
    ) -> list[SessionRow | KeylaneError]:
        together = [PendingJoin(ask, principal) for ask in asks]
        joined = self.run(join_batch, together, sessions_max=sessions_max)
        return [joined[ask.session] for ask in asks]


@pytest.fixture
def rows() -> JoiningRows:
    return JoiningRows()


def ask(number: int, **more: Any) -> Join:
    return Join(subject="s", group="g", session=f"{number:032x}", ttl_ms=9_000, **more)


def errors_of(joined: list[SessionRow | KeylaneError]) -> list[type[KeylaneError]]:
    return [type(each) for each in joined if isinstance(each, KeylaneError)]


def test_sessions_share_the_partitions_when_they_join_together(rows: JoiningRows):
    joined = rows.join(*map(ask, range(1, 9)))
    assert not errors_of(joined)
    assert [row.new_group for row in joined] == [True] + [False] * 7
    rows.run(hear, joined[0].group_id)
    rows.run(settle_group, joined[0].group_id)
    for number in range(1, 9):
        grants = rows.run(read_grants, f"{number:032x}").grants
        assert len(grants) == PARTITIONS // 8
        assert max(grant.token for grant in grants) <= PARTITIONS, "granted once"


def test_session_keeps_its_row_when_its_join_is_repeated(rows: JoiningRows):
    first = rows.run(join_group, ask(1), sessions_max=99)
    rows.run(settle_group, first.group_id)
    repeated, other = rows.join(ask(1), ask(2))
    assert (repeated.grants_version, repeated.group_id) == (2, first.group_id)
    assert other.grants_version == 3


def test_session_has_an_error_of_its_own_when_its_join_differs(rows: JoiningRows):
    joined = rows.join(ask(1), ask(2, filter="a"), ask(3, strategy=ConsumeStrategy.SHARED), ask(4))
    expected = [SessionRow, Reason.GROUP_FILTER, Reason.GROUP_STRATEGY, SessionRow]
    assert all(map(is_a, joined, expected))


def test_sessions_are_refused_when_the_group_has_room_for_some_of_them(rows: JoiningRows):
    joined = rows.join(*map(ask, range(1, 9)), sessions_max=5)
    assert errors_of(joined) == [OverloadedError] * 3


def test_sessions_are_refused_when_the_quota_has_room_for_some_of_them(rows: JoiningRows):
    rows.run(create_access_state, "c")
    rows.run(set_quota, SetQuota(kind=PRINCIPAL, name="shop", quota=Quota(), sessions=5), now_ms=0)
    joined = rows.join(*map(ask, range(1, 9)), principal="shop")
    assert sum(is_a(each, Reason.SESSION_QUOTA) for each in joined) == 3


def test_instance_is_replaced_when_it_joins_together_with_others(rows: JoiningRows):
    rows.join(ask(1, instance="a"), ask(2))
    replacing, _ = rows.join(ask(3, instance="a"), ask(4))
    assert replacing.replaced_sessions == (f"{1:032x}",)
