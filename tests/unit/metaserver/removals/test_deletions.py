"""The SQL of deletions: marked in one transaction, ended when no broker has anything left, repeated
without a change.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.catalogue.creations import replan_creation
from keylane.metaserver.cluster.announcements import read_announcements
from keylane.metaserver.cluster.removals import (
    GROUPS_PER_DELETE,
    PendingRemoval,
    cancel_removals,
    complete_removals,
    pending_removals,
)
from keylane.metaserver.cluster.subjects import (
    check_not_deleted,
    open_subject,
    plan_subject,
    read_route,
)
from keylane.metaserver.groups.lease_rows import settle_group, store_drained
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.operations.journal import finish_round
from keylane.metaserver.removals.begin import begin_group_deletion, begin_subject_deletion
from keylane.metaserver.sql.schema import metadata, partitions
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.control import CreateSubject, DeleteGroup, DeleteSubject, Join
from keylane.protocol.errors import (
    GroupDeletedError,
    Reason,
    SessionUnknownError,
    SubjectDeletedError,
    SubjectUnknownError,
)
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import PartitionState
from support.raising import raises
from support.sql.rows import Rows

FORCE_GROUP, FORCE_SUBJECT = DeleteGroup(force=True), DeleteSubject(force=True)
SESSION = "a" * 32


class DeletionRows(Rows):
    """A database with two broker groups and the subjects `s` and `other`."""

    def __init__(self) -> None:
        super().__init__()
        self.report("g1", "g2")
        self.create("other", 2)
        self.create("s", 2)

    def join(self, subject: str = "s", *, session: str = SESSION, group_id: int = 0) -> int:
        ask = Join(subject=subject, group="g", session=session, group_id=group_id)
        row = self.run(join_group, ask, sessions_max=10)
        self.run(settle_group, row.group_id)
        return int(row.group_id)

    def pending(self) -> list[PendingRemoval]:
        return list(self.run(pending_removals, limit=100))

    def remove(self, removals: list[PendingRemoval], *, token: int = 0) -> list[str]:
        done = {removal.key: token or removal.token for removal in removals}
        return list(self.run(complete_removals, done))

    def counts(self) -> dict[str, int]:
        """Table → number of rows, without those that deletions leave for ever."""
        return {
            table.name: self.run(_count, table)
            for table in metadata.sorted_tables
            if table.name not in {"deletions", "duties", "brokers"}
        }

    def last_token(self, subject: str = "s") -> int:
        text = (
            "SELECT last_token FROM groups JOIN subjects USING (subject_id) "
            f"WHERE subjects.name = '{subject}'"
        )
        return int(self.run(lambda connection: connection.exec_driver_sql(text).scalar_one()))


def _count(connection: sa.Connection, table: sa.Table) -> int:
    return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


@pytest.fixture
def rows() -> DeletionRows:
    return DeletionRows()


# ── groups ────────────────────────────────────────────────────────────────────────────────────────
def test_group_with_live_sessions_is_not_deleted_unless_forced(rows: DeletionRows):
    rows.join()
    with raises(Reason.GROUP_BUSY) as busy:
        rows.run(begin_group_deletion, "s", "g", DeleteGroup())
    assert busy.value.sessions == 1
    assert "force=True (--force)" in busy.value.message
    assert "live" not in busy.value.hint
    assert rows.pending() == []
    assert list(rows.run(begin_group_deletion, "s", "g", FORCE_GROUP).ended_sessions) == [SESSION]
    with pytest.raises(SessionUnknownError):
        rows.run(store_drained, SESSION, [1])


def test_rows_of_a_group_go_when_every_broker_has_forgotten_it_and_not_before(rows: DeletionRows):
    before = rows.counts()
    rows.join("other", session="b" * 32)
    others = rows.counts()
    group_id = rows.join()
    granted = rows.last_token()
    rows.run(begin_group_deletion, "s", "g", FORCE_GROUP)
    again = rows.run(begin_group_deletion, "s", "g", DeleteGroup())
    assert (again.group_id, list(again.ended_sessions)) == (group_id, [])
    first, second = rows.pending()
    assert first.token > granted
    assert (first.subject, first.group) == ("s", "g")
    rows.remove([first])
    with pytest.raises(GroupDeletedError, match="being deleted"):
        rows.join()
    rows.remove([first])
    rows.remove([second])
    assert rows.counts() == others
    assert before["groups"] == 0


def test_later_group_of_the_name_has_another_id_and_higher_tokens(rows: DeletionRows):
    """Also above what a broker refuses, which knows more if the database was restored from an older
    copy.
    """
    group_id = rows.join()
    rows.run(begin_group_deletion, "s", "g", FORCE_GROUP)
    rows.remove(rows.pending(), token=1_000)
    with pytest.raises(GroupDeletedError, match="since this consumer joined"):
        rows.join(group_id=group_id)
    later = rows.join(session="c" * 32)
    assert later > group_id
    assert rows.last_token() >= 1_000
    deletion = rows.run(begin_group_deletion, "s", "g", DeleteGroup(group_id=group_id))
    assert deletion.group_id == group_id
    assert rows.pending() == []  # the later group is left alone
    assert rows.join(session="c" * 32, group_id=later) == later


def test_announcements_leave_a_deleting_group_out_and_have_its_token(rows: DeletionRows):
    rows.join()
    rows.run(begin_group_deletion, "s", "g", FORCE_GROUP)
    (first, _) = rows.pending()
    (told,) = rows.run(read_announcements, [first.partition_id])
    assert told.groups == ()
    assert told.tokens_above == first.token


def test_settling_of_a_group_that_is_gone_changes_nothing(rows: DeletionRows):
    group_id = rows.join()
    rows.run(begin_group_deletion, "s", "g", FORCE_GROUP)
    rows.remove(rows.pending())
    assert rows.run(settle_group, group_id).ended_sessions == ()


# ── subjects ──────────────────────────────────────────────────────────────────────────────────────
def test_rows_of_a_subject_go_when_every_broker_has_dropped_its_partitions(rows: DeletionRows):
    expected = rows.counts()
    rows.create("t", 4)
    rows.resize("t", 3)
    rows.join("t")
    highest = rows.run(
        lambda connection: connection.execute(
            sa.select(sa.func.max(partitions.c.partition_id))
        ).scalar()
    )
    with raises(Reason.GROUP_BUSY):
        rows.run(begin_subject_deletion, "t", DeleteSubject())
    deletion = rows.run(begin_subject_deletion, "t", FORCE_SUBJECT)
    pending = rows.pending()
    assert len(pending) > 4  # the sealed ones as well
    assert {removal.last_id for removal in pending} == {highest}
    assert rows.remove(pending[:-1]) == []
    for refused in (
        lambda: rows.run(read_route, "t"),
        lambda: rows.join("t"),
        lambda: rows.run(plan_subject, CreateSubject(subject="t"), subjects_max=10),
    ):
        with pytest.raises(SubjectDeletedError) as error:
            refused()
        assert error.value.left == 1
    assert rows.remove(pending) == ["t"]
    assert rows.counts() == expected
    with pytest.raises(SubjectDeletedError):
        rows.run(read_route, "t", subject_id=deletion.subject_id)
    with pytest.raises(SubjectUnknownError):
        rows.run(read_route, "t")
    rows.create("t", 1)
    route = rows.run(read_route, "t")
    assert route.subject_id > deletion.subject_id
    assert route.partitions[0].partition_id > highest
    with pytest.raises(SubjectDeletedError):
        rows.run(read_route, "t", subject_id=deletion.subject_id)
    again = DeleteSubject(subject_id=deletion.subject_id)
    assert rows.run(begin_subject_deletion, "t", again) == deletion.__class__(
        subject_id=deletion.subject_id
    )
    assert rows.run(read_route, "t") == route


def test_deleted_name_is_told_from_one_that_never_was_until_it_is_planned_again(rows: DeletionRows):
    assert not rows.run(check_not_deleted, "t")
    rows.create("t", 1)
    rows.run(begin_subject_deletion, "t", FORCE_SUBJECT)
    rows.remove(rows.pending())
    with pytest.raises(SubjectDeletedError, match="sending does not recreate it"):
        rows.run(check_not_deleted, "t")
    rows.run(plan_subject, CreateSubject(subject="t"), subjects_max=10)
    assert rows.run(check_not_deleted, "t")


def test_subject_whose_partitions_change_is_not_deleted(rows: DeletionRows):
    ask = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=3)
    ((operation_id, _),) = rows.begin(ask)
    with raises(Reason.OPERATION_RUNNING):
        rows.run(begin_subject_deletion, "s", DeleteSubject())
    rows.drive(operation_id)
    rows.run(begin_subject_deletion, "s", DeleteSubject())
    rows.remove(rows.pending())
    late = rows.run(finish_round, operation_id, {1: 100}, "late")
    assert late is OperationState.DONE


def test_creation_that_is_under_way_ends_when_its_subject_is_deleted(rows: DeletionRows):
    row = rows.run(plan_subject, CreateSubject(subject="new"), subjects_max=10)
    rows.run(begin_subject_deletion, "new", DeleteSubject())
    assert not rows.run(open_subject, "new")
    assert not rows.run(replan_creation, row.subject_id)
    assert {removal.state for removal in rows.pending()} == {PartitionState.EXPIRED}
    assert rows.remove(rows.pending()) == ["new"]
    assert not rows.run(open_subject, "new")


def test_loss_of_a_broker_group_ends_the_waiting_for_it(rows: DeletionRows):
    rows.run(begin_subject_deletion, "s", DeleteSubject())
    rows.remove([removal for removal in rows.pending() if removal.broker_group == "g1"])
    rows.silence("g2")
    assert [removal.address for removal in rows.pending()] == [None]
    rows.run(cancel_removals, "g2")
    with pytest.raises(SubjectUnknownError):
        rows.run(read_route, "s")
    folders = rows.run(
        lambda connection: connection.exec_driver_sql("SELECT broker_id FROM lost_folders").all()
    )
    assert [tuple(row) for row in folders] == [("g2",)]


def test_verification_shows_deletions_that_are_not_finished(rows: DeletionRows):
    rows.join("other")
    rows.run(begin_group_deletion, "other", "g", FORCE_GROUP)
    rows.run(begin_subject_deletion, "s", DeleteSubject())
    view: Any = rows.run(read_sql_view)
    assert [row.name for row in view.subjects.values() if row.deleting] == ["s"]
    assert [row.name for row in view.groups if row.deleting] == ["g"]


def test_rows_of_many_groups_go_in_portions(rows: DeletionRows):
    """PostgreSQL gives a statement 10 s, and each of the groups may have rows for a thousand
    partitions.
    """
    before = rows.counts()
    for number in range(2 * GROUPS_PER_DELETE + 1):
        rows.run(
            join_group,
            Join(subject="s", group=f"g{number}", session=f"{number:032x}"),
            sessions_max=10,
        )
    rows.run(begin_subject_deletion, "s", FORCE_SUBJECT)
    sizes: list[int] = []

    def note(
        _connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool
    ) -> None:
        if statement.startswith("DELETE FROM sessions"):
            sizes.append(len(parameters))

    def noted(connection: sa.Connection) -> list[str]:
        sa.event.listen(connection, "before_cursor_execute", note)
        return complete_removals(connection, {each.key: each.token for each in pending})

    pending = rows.pending()
    assert rows.run(noted) == ["s"]
    assert sizes == [GROUPS_PER_DELETE, GROUPS_PER_DELETE, 1]
    assert rows.counts()["sessions"] == before["sessions"] == 0
