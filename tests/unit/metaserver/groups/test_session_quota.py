"""The number of live sessions of a principal in all groups is limited by its own quota or the
default.
"""

from __future__ import annotations

import pytest

from keylane.metaserver.access.quota_rows import read_quotas, set_quota, unset_quota
from keylane.metaserver.access.rows import create_access_state
from keylane.metaserver.groups.sessions import SessionRow, join_group, leave_group
from keylane.protocol.access.quota import EVERYBODY, Quota
from keylane.protocol.control import Join
from keylane.protocol.errors import Reason
from keylane.protocol.http.access import PRINCIPAL, SetQuota, UnsetQuota
from support.raising import raises
from support.sql.rows import Rows


class QuotaRows(Rows):
    """A subject whose groups are joined by principals."""

    def __init__(self) -> None:
        super().__init__()
        self.report("g1")
        self.create("s", 1)
        self.run(create_access_state, "c")

    def limit(self, principal: str, sessions: int, quota: Quota | None = None) -> None:
        ask = SetQuota(kind=PRINCIPAL, name=principal, quota=quota or Quota(), sessions=sessions)
        self.run(set_quota, ask, now_ms=0)

    def join(self, number: int, principal: str = "shop", **more: str) -> SessionRow:
        ask = Join(subject="s", group=f"g{number}", session=f"{number:032x}", ttl_ms=9_000, **more)
        return self.run(join_group, ask, sessions_max=9, principal=principal)


@pytest.fixture
def rows() -> QuotaRows:
    return QuotaRows()


def test_session_above_the_quota_is_refused_until_another_one_ends(rows: QuotaRows):
    rows.limit("shop", 2)
    rows.join(1)
    rows.join(2)
    with raises(Reason.SESSION_QUOTA) as refused:
        rows.join(3)
    assert (refused.value.principal, refused.value.limit) == ("shop", 2)
    assert rows.join(2).session == f"{2:032x}", "a repeat begins none"
    rows.join(4, "other")
    rows.join(5, "")  # without access control, or a server of the cluster
    rows.run(leave_group, f"{1:032x}")
    rows.join(3)
    rows.clock.advance(9_001)
    rows.join(6)  # the others have expired
    rows.join(7)
    with raises(Reason.SESSION_QUOTA):
        rows.join(1)


def test_restarted_instance_takes_its_own_place_when_there_is_no_other(rows: QuotaRows):
    rows.limit("shop", 1)
    rows.join(1, instance="i")
    ask = Join(subject="s", group="g1", session="f" * 32, instance="i")
    assert rows.run(join_group, ask, sessions_max=9, principal="shop").replaced_sessions


def test_quota_of_everybody_counts_where_a_principal_has_none_of_its_own(rows: QuotaRows):
    rows.limit(EVERYBODY, 1)
    rows.limit("shop", 0, Quota(requests_per_s=5))
    rows.join(1)
    rows.join(2)
    rows.join(3, "a")
    rows.join(4, "b")
    with raises(Reason.SESSION_QUOTA):
        rows.join(5, "a")
    assert [(row.name, row.sessions) for row in rows.run(read_quotas)] == [
        (EVERYBODY, 1),
        ("shop", 0),
    ]
    rows.run(unset_quota, UnsetQuota(kind=PRINCIPAL, name=EVERYBODY), now_ms=0)
    rows.join(5, "a")
