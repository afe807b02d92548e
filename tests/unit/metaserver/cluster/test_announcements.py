"""Announcements of groups to brokers, and the grants and openings that wait for them."""

from __future__ import annotations

import sqlite3

import pytest
import sqlalchemy as sa

from keylane.metaserver.catalogue.accepted import accept_complete_folder, accept_folder
from keylane.metaserver.cluster import announcements as hearing
from keylane.metaserver.cluster.announcements import (
    forget_announced,
    lock_groups,
    mark_announced,
    pending_announcements,
    read_announcements,
    record_announced,
    unannounced_groups,
)
from keylane.metaserver.cluster.brokers import store_refusal, store_report
from keylane.metaserver.groups.lease_rows import read_grants, settle_group, store_drained
from keylane.metaserver.groups.locked_group import raise_group_versions
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.groups.views import grants_versions, group_versions
from keylane.metaserver.operations.journal import claim_operation, finish_round
from keylane.metaserver.sql.schema import (
    drained,
    groups,
    heard,
    leases,
    partitions,
    subjects,
)
from keylane.protocol.control import AcceptFolder, BrokerHeartbeat, Join, PartitionStatus, Retention
from keylane.protocol.errors import InvalidRequestError, OverloadedError, Reason
from keylane.protocol.limits import GROUPS_PER_SUBJECT_MAX
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import PartitionState
from support.raising import raises
from support.sql.rows import Rows


class Groups(Rows):
    """Subject `s` with four partitions on two brokers."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.report("g1", "g2")
        self.create("s", 4, **settings)

    def join(self, name: str) -> int:
        session = name.encode().hex() * 16
        ask = Join(subject="s", group=name, session=session[:16])
        group_id: int = self.run(join_group, ask, sessions_max=9).group_id
        self.run(settle_group, group_id)
        return group_id

    def granted(self, name: str) -> list[int]:
        group_id = self.join(name)  # its session lives: this only settles
        assert group_id
        grants = self.run(read_grants, (name.encode().hex() * 16)[:16]).grants
        return [grant.partition.partition_id for grant in grants]

    def told(self, **which) -> list[tuple[int, tuple[str, ...]]]:
        unheard = self.run(pending_announcements, **which)
        return [
            (partition.partition_id, tuple(name for _, name in partition.groups))
            for partition in unheard
        ]

    def hear(self, *ids: int) -> None:
        self.run(record_announced, self.run(read_announcements, ids))


def test_partition_is_granted_when_its_broker_knows_the_group():
    """A new group holds nothing until brokers know it, then the partitions of these brokers."""
    rows = Groups()
    group_id = rows.join("a")
    assert rows.granted("a") == []
    assert rows.told() == [(partition_id, ("a",)) for partition_id in (1, 2, 3, 4)]
    rows.hear(1, 3)
    assert rows.granted("a") == [1, 3]
    assert rows.told() == [(2, ("a",)), (4, ("a",))]
    rows.hear(2, 4)
    assert rows.granted("a") == [1, 2, 3, 4]
    rows.run(mark_announced)
    assert rows.run(unannounced_groups) == 0
    assert rows.told(group_id=group_id) == []


def test_grant_does_not_count_as_heard():
    """A consumer keeps a partition that it held before, and its broker still has to be told."""
    rows = Groups()
    rows.join("a")
    rows.hear(1, 2, 3, 4)
    assert rows.granted("a") == [1, 2, 3, 4]
    rows.run(lambda connection: connection.execute(sa.delete(heard)))
    assert rows.granted("a") == [1, 2, 3, 4]
    tokens = rows.run(
        lambda connection: connection.execute(sa.select(leases.c.token)).scalars().all()
    )
    assert min(tokens) > 0
    assert [partition_id for partition_id, _ in rows.told()] == [1, 2, 3, 4]


def test_silent_brokers_are_told_when_they_are_back():
    """Only live brokers are told; the group counts as told when the others have heard too."""
    rows = Groups()
    rows.join("a")
    rows.silence("g2")
    rows.join("a")
    assert [partition_id for partition_id, _ in rows.told()] == [1, 3]
    rows.hear(1, 3)
    rows.run(mark_announced)
    assert rows.run(unannounced_groups) == 1
    rows.report("g2")
    assert [partition_id for partition_id, _ in rows.told()] == [2, 4]
    rows.hear(2, 4)
    rows.run(mark_announced)
    assert rows.run(unannounced_groups) == 0


def test_unheard_partitions_come_in_pages(monkeypatch):
    """Each is on one page, in order, with every group of its subject, known ones too."""
    rows = Groups()
    for name in "abc":
        rows.join(name)
    rows.hear(2)
    every = [(partition_id, ("a", "b", "c")) for partition_id in (1, 3, 4)]
    for limit in (1, 2, 3, 9):
        monkeypatch.setattr(hearing, "PARTITIONS_MAX", limit)
        unheard, after = [], 0
        while page := rows.run(pending_announcements, after=after):
            assert len(page) <= limit
            unheard += [
                (partition.partition_id, tuple(name for _, name in partition.groups))
                for partition in page
            ]
            after = page[-1].partition_id
        assert unheard == every


def test_group_is_granted_at_once_when_retention_is_by_time():
    """Brokers are told all the same, so that they count what they remove before the group has read
    it.
    """
    rows = Groups()
    timed = sa.update(subjects).values(retention=Retention.TIME)
    rows.run(lambda connection: connection.execute(timed))
    rows.join("a")
    assert rows.granted("a") == [1, 2, 3, 4]
    assert rows.told() == [(number, ("a",)) for number in (1, 2, 3, 4)]
    rows.run(mark_announced)
    assert rows.run(unannounced_groups) == 1


def begun(rows: Groups) -> int:
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(1,), broker_group="g2")
    ((operation_id, _),) = rows.begin(ask)
    return operation_id


def step(rows: Groups, operation_id: int, *, hears: bool = True) -> OperationState:
    """One round with brokers that answer; `hears`: hosting ones know the groups, too."""
    operation = rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
    hosts = operation.state in {OperationState.PLAN, OperationState.OPEN}
    done = {partition.partition_id: None if hosts else 100 for partition in operation.targets}
    names = [group_id for group_id, _ in operation.groups] if hears else []
    state: OperationState = rows.run(finish_round, operation_id, done, group_ids=names)
    return state


def test_child_opens_when_its_broker_knows_all_groups():
    """A child that was hosted before a group was made waits in OPEN until its broker knows that
    group too.
    """
    rows = Groups()
    rows.join("a")
    rows.hear(1, 2, 3, 4)
    operation_id = begun(rows)
    assert step(rows, operation_id) is OperationState.SEAL
    rows.join("b")
    assert step(rows, operation_id) is OperationState.OPEN
    assert step(rows, operation_id, hears=False) is OperationState.OPEN
    operation = rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
    assert [partition.partition_id for partition in operation.targets] == [5]
    assert step(rows, operation_id) is OperationState.DONE
    pairs = rows.run(lambda connection: connection.execute(sa.select(heard)).all())
    assert {(row.group_id, row.partition_id) for row in pairs} >= {(1, 5), (2, 5)}
    rows.run(store_drained, (b"a".hex() * 16)[:16], [1])


def test_reset_has_brokers_told_again():
    """A group may need again what it had drained, so its brokers are checked again."""
    rows = Groups()
    group_id = rows.join("a")
    rows.hear(1, 2, 3, 4)
    rows.run(mark_announced)
    assert rows.run(unannounced_groups) == 0
    from keylane.metaserver.groups.sessions import leave_group
    from keylane.metaserver.resets.rows import begin_reset, read_reset_scope
    from keylane.protocol.progress import ResetGroup, ResetTo

    rows.run(leave_group, (b"a".hex() * 16)[:16])
    scope = rows.run(read_reset_scope, "s", "a", ResetGroup(to=ResetTo.EARLIEST))
    assert rows.run(begin_reset, scope, holder="h", lease_ms=1_000)
    assert rows.run(unannounced_groups) == 1
    assert scope.group_id == group_id


def test_group_is_refused_when_the_subject_has_too_many():
    """One more than brokers keep for a partition is refused, and nothing is stored."""
    rows = Groups()
    subject_id = 1
    some = [
        {
            "subject_id": subject_id,
            "name": f"g{number}",
            "last_token": 0,
            "version": 0,
            "settled": True,
            "route_version": 1,
        }
        for number in range(GROUPS_PER_SUBJECT_MAX)
    ]
    rows.run(lambda connection: connection.execute(sa.insert(groups), some))
    with pytest.raises(OverloadedError, match="too many consumer groups"):
        rows.join("more")
    assert rows.join("g7")


def test_older_copy_does_not_count_as_told_when_the_original_was_told_before():
    """A metaserver that is paused notes late what the original has answered; the copy was told of
    no group.
    """
    rows = Groups()
    rows.silence("g1")
    rows.run(store_report, report_of("2", end=900), ttl_ms=1_000)
    group_id = rows.join("g")
    answered = rows.run(read_announcements, range(1, 5))
    rows.clock.advance(2_000)
    rows.run(store_refusal, report_of("1", end=100), ttl_ms=1_000)
    rows.run(accept_folder, "g1", AcceptFolder())
    rows.run(store_report, report_of("1", end=100), ttl_ms=1_000)
    rows.run(record_announced, answered)
    known = sa.select(heard.c.partition_id).where(heard.c.group_id == group_id)
    on_copy = sa.select(partitions.c.partition_id).where(partitions.c.broker_group == "g1")
    lists = [
        set(rows.run(lambda connection, chosen=chosen: connection.execute(chosen).scalars().all()))
        for chosen in (known, on_copy)
    ]
    assert lists[0]
    assert lists[1]
    assert not lists[0] & lists[1]


def report_of(opening: str, *, end: int) -> BrokerHeartbeat:
    return BrokerHeartbeat(
        broker_group="g1", broker_id="g1", address="g1:1", opening=opening, log_end=end
    )


def accept_older_copy(rows: Groups) -> None:
    """The broker of `g1` is dead, and a copy of its data folder from before is accepted."""
    rows.clock.advance(2_000)
    rows.run(store_refusal, report_of("1", end=100), ttl_ms=1_000)
    rows.run(accept_folder, "g1", AcceptFolder())
    rows.run(store_report, report_of("1", end=100), ttl_ms=1_000)


@pytest.mark.parametrize("state", [OperationState.PLAN, OperationState.SEAL])
def test_older_copy_has_not_hosted_or_sealed_what_the_original_did_when_it_answers_late(state):
    """A metaserver is paused between a broker's answer and its note; the copy lacks the child, or
    the seal.
    """
    rows = Groups()
    rows.silence("g1")
    rows.run(store_report, report_of("2", end=900), ttl_ms=1_000)
    rows.join("a")
    rows.hear(2, 4)
    whence, whither = ((2, "g1"), (1, "g2"))[state is OperationState.SEAL]
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(whence,), broker_group=whither)
    ((operation_id, _),) = rows.begin(ask)
    while (
        operation := rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
    ).state is not state:
        assert step(rows, operation_id)
    (asked,) = operation.targets
    assert asked.broker_group == "g1"
    end = None if state is OperationState.PLAN else 100
    accept_older_copy(rows)
    names = [group_id for group_id, _ in operation.groups]
    late = {asked.partition_id: end}
    stays = rows.run(finish_round, operation_id, late, group_ids=names, openings=operation.openings)
    assert stays is state
    rows.clock.advance(1_000)
    rows.report("g2")
    rows.run(store_report, report_of("1", end=100), ttl_ms=1_000)
    again = rows.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
    assert [partition.partition_id for partition in again.targets] == [asked.partition_id]
    row = sa.select(partitions.c.end_offset).where(partitions.c.partition_id == asked.partition_id)
    assert rows.run(lambda connection: connection.execute(row).scalar_one()) is None
    there = sa.select(heard).where(heard.c.partition_id == asked.partition_id)
    assert rows.run(lambda connection: connection.execute(there).all()) == []


def test_drained_partition_keeps_its_token_when_an_older_copy_is_accepted():
    """Children take over again what is parked on a partition whose token rose, as if it had been
    reset and parked anew.
    """
    rows = Groups()
    rows.silence("g1")
    rows.run(store_report, report_of("2", end=900), ttl_ms=1_000)
    group_id = rows.join("g")
    held = [
        {"group_id": group_id, "partition_id": number, "token": 2 + number, "withdrawn": False}
        for number in (1, 3)
    ]
    through = {"group_id": group_id, "partition_id": 1, "parked": True}

    def write(connection: sa.Connection) -> None:
        connection.execute(sa.delete(leases))
        connection.execute(sa.insert(leases), held)
        connection.execute(sa.insert(drained), through)
        connection.execute(sa.update(groups).values(last_token=9))

    rows.run(write)
    accept_older_copy(rows)
    tokens = sa.select(leases.c.partition_id, leases.c.token)
    after = rows.run(lambda connection: connection.execute(tokens).all())
    assert dict(map(tuple, after)) == {1: 3, 3: 10}


def test_older_copy_is_refused_when_a_child_is_hosted_since_it_was_looked_at():
    """The copy was complete when its broker listed its partitions; nothing of it is accepted."""
    rows = Groups()
    rows.silence("g1")
    rows.run(store_report, report_of("2", end=900), ttl_ms=1_000)
    ask = Reshape(kind=OperationKind.MOVE, partition_ids=(2,), broker_group="g1")
    ((operation_id, _),) = rows.begin(ask)
    hosted = [
        PartitionStatus(
            partition_id=key,
            subject="s",
            name=f"p{key}",
            state=PartitionState.OPEN,
            first_offset=0,
            next_offset=0,
        )
        for key in (1, 3)
    ]
    assert step(rows, operation_id) is OperationState.SEAL
    rows.clock.advance(2_000)
    rows.run(store_refusal, report_of("1", end=100), ttl_ms=1_000)
    with pytest.raises(InvalidRequestError, match=r"it lacks 5 \(not in the copy\)"):
        rows.run(accept_complete_folder, "g1", AcceptFolder(), hosted)
    with raises(Reason.FOLDER_BEHIND):
        rows.run(store_report, report_of("1", end=100), ttl_ms=1_000)


MANY_GROUPS = 33_000
"""More than the 32,767 parameters that a statement may have on PostgreSQL, or the 32,766 on
SQLite.
"""


def with_many_groups(*, told: bool) -> Groups:
    """A database whose statements take no more parameters than SQLite takes by default."""
    rows = Groups()

    def write(connection: sa.Connection) -> None:
        raw = connection.connection.driver_connection
        while not hasattr(raw, "setlimit"):
            raw = raw._connection
        raw.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)
        some = [
            {
                "subject_id": 1,
                "name": f"g{number}",
                "last_token": 0,
                "version": 0,
                "settled": True,
                "route_version": 1,
                "told": told,
            }
            for number in range(MANY_GROUPS)
        ]
        connection.execute(sa.insert(groups), some)

    rows.run(write)
    return rows


def test_groups_are_locked_and_marked_told_when_a_statement_cannot_name_all():
    """All of them, in one transaction."""
    rows = with_many_groups(told=False)
    ids = list(range(1, MANY_GROUPS + 2))  # the last one does not exist
    assert rows.run(lock_groups, ids) == set(ids[:-1])
    rows.run(lambda connection: connection.execute(sa.update(partitions).values(state="expired")))
    rows.run(mark_announced)
    assert rows.run(unannounced_groups) == 0


def test_groups_are_told_again_when_a_statement_cannot_name_all():
    """Each of them is marked to be settled too."""
    rows = with_many_groups(told=True)
    rows.run(forget_announced, "g1")
    assert rows.run(unannounced_groups) == MANY_GROUPS
    marked = sa.select(sa.func.count()).where(sa.not_(groups.c.settled), groups.c.version == 1)
    assert rows.run(lambda connection: connection.execute(marked).scalar_one()) == MANY_GROUPS


def test_versions_are_read_and_raised_when_a_statement_cannot_name_all_groups():
    """Heartbeats that wait at one metaserver may be of all these groups, and an accepted copy may
    concern them.
    """
    rows = with_many_groups(told=True)
    ids = range(1, MANY_GROUPS + 1)
    assert rows.run(group_versions, ids) == dict.fromkeys(ids, 0)
    begun = Join(subject="s", group="g7", session="a" * 16)
    assert rows.run(join_group, begun, sessions_max=9).group_id == 8
    rows.run(raise_group_versions, ids)
    assert list(rows.run(grants_versions, ids)) == ["a" * 16]
