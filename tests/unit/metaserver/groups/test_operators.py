"""Changes of a group by operators: its stored policy and its suspension."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keylane.metaserver.groups import operators
from keylane.metaserver.groups.lease_rows import read_grants, release_leases
from keylane.metaserver.groups.operators import (
    change_policy,
    group_settings,
    set_policy,
    suspend_members,
)
from keylane.metaserver.groups.sessions import join_group, suspend_session
from keylane.protocol.control import Join, ReleaseGrant, Suspend
from keylane.protocol.errors import (
    GroupUnknownError,
    InvalidRequestError,
    Reason,
    SubjectUnknownError,
)
from keylane.protocol.groups import (
    FailurePolicy,
    GroupPolicy,
    OperatorSwitch,
    SetGroup,
    SuspendGroup,
)
from keylane.protocol.routing import ConsumeStrategy
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A, B = "a" * 16, "b" * 16
PARK = GroupPolicy(on_failure=FailurePolicy.PARK, tries_max=5)


@pytest.fixture
def rows(rows: Rows) -> Rows:
    rows.create("s", 4)
    return rows


def join(rows: Rows, session: str, strategy: ConsumeStrategy, *, client: str = "c") -> int:
    ask = Join(subject="s", group="g", session=session, client=client, strategy=strategy)
    group_id: int = rows.run(join_group, ask, sessions_max=10).group_id
    rows.run(settle_group, group_id)
    return group_id


def switch(rows: Rows, *, suspended: bool, client: str | None = None) -> None:
    ask = SuspendGroup(suspended=suspended, client=client)
    group_id, _ = rows.run(suspend_members, "s", "g", ask)
    rows.run(settle_group, group_id)


def hand_over(rows: Rows, session: str) -> None:
    """The partitions 1 to 4, which it was granted first of all."""
    for number in range(1, 5):
        ask = ReleaseGrant(session=session, partition_id=number, token=number)
        rows.run(release_leases, [ask])


def held(rows: Rows, session: str) -> int:
    return len(rows.run(read_grants, session).grants)


@pytest.mark.parametrize(
    ("before", "ask", "after"),
    [
        (GroupPolicy(), SetGroup(on_failure=FailurePolicy.PARK, tries_max=5), PARK),
        (PARK, SetGroup(), PARK),
        (PARK, SetGroup(tries_max=7), GroupPolicy(on_failure=FailurePolicy.PARK, tries_max=7)),
        (PARK, SetGroup(forget=True), GroupPolicy()),
        (PARK, SetGroup(forget=True, tries_max=7), GroupPolicy(tries_max=7)),
        (
            GroupPolicy(backoff_first_ms=1, backoff_max_ms=9),
            SetGroup(backoff_max_ms=5),
            GroupPolicy(backoff_first_ms=1, backoff_max_ms=5),
        ),
    ],
)
def test_change_of_a_policy_leaves_what_it_does_not_name(
    before: GroupPolicy, ask: SetGroup, after: GroupPolicy
):
    """Each field by itself, unless all are forgotten first."""
    assert change_policy(before, ask) == after


@pytest.mark.parametrize(
    "ask",
    [
        SetGroup(backoff_first_ms=1),
        SetGroup(backoff_max_ms=1),
        SetGroup(backoff_first_ms=2, backoff_max_ms=1),
        SetGroup(forget=True, backoff_max_ms=5),
    ],
)
def test_policy_with_half_a_backoff_is_refused(ask: SetGroup):
    """Together, and the first at most as large as the longest; also after what was stored is
    forgotten.
    """
    before = GroupPolicy(backoff_first_ms=1, backoff_max_ms=9) if ask.forget else GroupPolicy()
    with raises(Reason.POLICY_INVALID):
        change_policy(before, ask)


@pytest.mark.parametrize("strategy", ConsumeStrategy)
def test_every_member_hears_of_a_new_policy(rows: Rows, strategy: ConsumeStrategy):
    """The version of its grants rises although the grants are the same."""
    join(rows, A, strategy)
    join(rows, B, strategy)
    before = {session: rows.run(read_grants, session) for session in (A, B)}
    ask = SetGroup(on_failure=FailurePolicy.PARK, tries_max=5)
    _, changes = rows.run(set_policy, "s", "g", ask)
    for session, grants in before.items():
        after = rows.run(read_grants, session)
        assert after.version == changes.versions[session] > grants.version
        assert (after.policy, after.grants) == (PARK, grants.grants)
        assert grants.policy == GroupPolicy()
    assert rows.run(group_settings, "s", "g").policy == PARK


@pytest.mark.parametrize("strategy", ConsumeStrategy)
def test_suspended_group_has_no_grants(rows: Rows, strategy: ConsumeStrategy):
    """Also a session that joins meanwhile; once it is resumed, all are granted again."""
    join(rows, A, strategy)
    version = rows.run(read_grants, A).version
    switch(rows, suspended=True)
    join(rows, B, strategy)
    for session in (A, B):
        grants = rows.run(read_grants, session)
        assert (grants.grants, grants.suspended_by) == ((), OperatorSwitch.GROUP)
        assert grants.version > version
    switch(rows, suspended=False)
    assert rows.run(read_grants, B).suspended_by is OperatorSwitch.OFF
    if strategy is ConsumeStrategy.EXCLUSIVE:
        hand_over(rows, A)
    assert (held(rows, A), held(rows, B)) == (
        (4, 4) if strategy is ConsumeStrategy.SHARED else (2, 2)
    )


@pytest.mark.parametrize("strategy", ConsumeStrategy)
def test_suspended_client_has_no_grants(rows: Rows, strategy: ConsumeStrategy):
    """It is suspended by name, for all its sessions; other clients get its partitions."""
    join(rows, A, strategy, client="sick")
    switch(rows, suspended=True, client="sick")
    join(rows, B, strategy, client="well")
    assert rows.run(read_grants, A).suspended_by is OperatorSwitch.CLIENT
    assert rows.run(read_grants, B).suspended_by is OperatorSwitch.OFF
    assert held(rows, A) == 0
    assert rows.run(group_settings, "s", "g").suspended_clients == ("sick",)
    switch(rows, suspended=True)
    assert rows.run(read_grants, A).suspended_by is OperatorSwitch.GROUP
    switch(rows, suspended=False)
    assert rows.run(read_grants, A).suspended_by is OperatorSwitch.CLIENT  # a switch of its own
    switch(rows, suspended=False, client="sick")
    assert rows.run(read_grants, A).suspended_by is OperatorSwitch.OFF


def suspend_own(rows: Rows) -> None:
    rows.run(suspend_session, Suspend(session=B, suspended=True))


def suspend_client(rows: Rows) -> None:
    rows.run(suspend_members, "s", "g", SuspendGroup(suspended=True, client="late"))


def suspend_group(rows: Rows) -> None:
    rows.run(suspend_members, "s", "g", SuspendGroup(suspended=True))


@pytest.mark.parametrize("suspend", [suspend_own, suspend_client, suspend_group])
def test_release_grants_nothing_to_a_session_when_it_was_suspended_meanwhile(
    rows: Rows, suspend: Callable[[Rows], None]
):
    """The other one hands over for it before the group is settled: it would wait for a consumer
    that takes nothing.
    """
    join(rows, A, ConsumeStrategy.EXCLUSIVE)
    group_id = join(rows, B, ConsumeStrategy.EXCLUSIVE, client="late")
    assert (held(rows, A), held(rows, B)) == (2, 0)
    suspend(rows)
    hand_over(rows, A)
    assert held(rows, B) == 0
    rows.run(settle_group, group_id)
    assert held(rows, B) == 0
    assert held(rows, A) == (0 if suspend is suspend_group else 4)


def test_session_needs_both_switches_off(rows: Rows):
    """Its own code's and the operators'; each is thrown without the other."""
    group_id = join(rows, A, ConsumeStrategy.EXCLUSIVE)

    def suspend_own(suspended: bool) -> None:
        rows.run(suspend_session, Suspend(session=A, suspended=suspended))
        rows.run(settle_group, group_id)

    suspend_own(True)
    switch(rows, suspended=True)
    suspend_own(False)
    assert held(rows, A) == 0
    suspend_own(True)
    switch(rows, suspended=False)
    assert held(rows, A) == 0
    suspend_own(False)
    hand_over(rows, A)
    assert held(rows, A) == 4


def test_only_groups_that_exist_are_set_and_suspended(rows: Rows):
    """Setting one makes none; neither does looking."""
    for call, ask in (
        (set_policy, (SetGroup(tries_max=5),)),
        (suspend_members, (SuspendGroup(suspended=True),)),
        (group_settings, ()),
    ):
        with pytest.raises(GroupUnknownError):
            rows.run(call, "s", "g", *ask)
        with pytest.raises(SubjectUnknownError):
            rows.run(call, "other", "g", *ask)
    join(rows, A, ConsumeStrategy.EXCLUSIVE)
    with pytest.raises(InvalidRequestError, match="NUL"):
        switch(rows, suspended=True, client="a\0b")


def test_names_of_suspended_clients_are_limited(rows: Rows, monkeypatch: pytest.MonkeyPatch):
    """The next one is refused, and a repeat of one of them is not."""
    monkeypatch.setattr(operators, "SUSPENDED_CLIENTS_MAX", 2)
    join(rows, A, ConsumeStrategy.EXCLUSIVE)
    for client in ("x", "y", "x"):
        switch(rows, suspended=True, client=client)
    with raises(Reason.SUSPENDED_CLIENTS) as refused:
        switch(rows, suspended=True, client="z")
    assert refused.value.limit == 2
    assert rows.run(group_settings, "s", "g").suspended_clients == ("x", "y")
