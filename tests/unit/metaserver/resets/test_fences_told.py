"""A broker's fence raises the tokens: above a database that is behind, and never to where brokers
refuse them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keylane.broker.partition.pull_lock import PullLock, decide_acquire
from keylane.metaserver.groups.lease_rows import read_grants, release_leases
from keylane.metaserver.groups.sessions import join_group, leave_group
from keylane.metaserver.resets.rows import begin_reset, end_reset, read_reset_scope
from keylane.protocol.control import Grant, Join, ReleaseGrant
from keylane.protocol.ids import MAX_I64
from keylane.protocol.limits import TOKEN_STEP_MAX
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import ConsumeStrategy
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

SESSION = "a" * 16


def granted(rows: Rows, strategy: ConsumeStrategy) -> Grant:
    """The grants of the group's only consumer."""
    ask = Join(subject="s", group="g", session=SESSION, strategy=strategy)
    rows.run(settle_group, rows.run(join_group, ask, sessions_max=9).group_id)
    (grant,) = rows.run(read_grants, SESSION).grants
    assert isinstance(grant, Grant)
    return grant


def say_in_a_release(rows: Rows, fence: int, strategy: ConsumeStrategy) -> None:
    """A consumer says that the broker refuses its token, and why."""
    held = granted(rows, strategy)
    ask = ReleaseGrant(
        session=SESSION, partition_id=held.partition.partition_id, token=held.token, fence=fence
    )
    rows.run(release_leases, [ask])


def say_to_a_reset(rows: Rows, fence: int, strategy: ConsumeStrategy) -> None:
    """The broker says it itself."""
    granted(rows, strategy)
    rows.run(leave_group, SESSION)
    scope = rows.run(read_reset_scope, "s", "g", ResetGroup(to=ResetTo.EARLIEST))
    tokens = rows.run(begin_reset, scope, holder="h", lease_ms=1_000, fence=fence)
    rows.run(end_reset, scope.group_id, tokens, {}, holder="h")


Say = Callable[[Rows, int, ConsumeStrategy], None]
WAYS = pytest.mark.parametrize("say", [say_in_a_release, say_to_a_reset])
STRATEGIES = pytest.mark.parametrize("strategy", list(ConsumeStrategy))


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    rows.report("g1")
    rows.create("s", 1)
    return rows


@WAYS
@STRATEGIES
def test_tokens_continue_above_the_fence_when_the_database_is_behind(
    rows: Rows, say: Say, strategy: ConsumeStrategy
):
    """A database restored from an old copy grants above the broker's fence at the next try."""
    for fence in (70_000, 3_000_000_000 // 2):
        say(rows, fence, strategy)
        token = granted(rows, strategy).token
        assert fence < token <= fence + 2
        assert decide_acquire(PullLock(fence=fence), token=token, session=SESSION, ttl_ms=1_000)


@WAYS
@STRATEGIES
def test_tokens_stay_where_brokers_accept_them_whatever_the_fence(
    rows: Rows, say: Say, strategy: ConsumeStrategy
):
    """However high the reported fence, a broker that has seen no token accepts the next one, and so
    does one that has.
    """
    before = granted(rows, strategy).token
    for fence in (TOKEN_STEP_MAX, 2 * TOKEN_STEP_MAX, MAX_I64, -1):
        for _ in range(5):
            say(rows, fence, strategy)
            token = granted(rows, strategy).token
            assert token > before
            for lock in (PullLock(), PullLock(fence=before)):
                assert decide_acquire(lock, token=token, session=SESSION, ttl_ms=1_000)
