"""Rows of what is over go after a time, those that something still needs do not, and late calls
change nothing wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.catalogue.service import Catalogue
from keylane.metaserver.cluster.removals import (
    extend_deletion_record,
    pending_removals,
    store_removed,
)
from keylane.metaserver.cluster.subjects import (
    check_not_deleted,
    find_subject,
    open_subject,
    read_route,
)
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.operations.journal import cancel_operation
from keylane.metaserver.operations.views import subject_history, subject_operations
from keylane.metaserver.publications.cuts import begin_cut, cut_of
from keylane.metaserver.publications.hiding import plan_hidden
from keylane.metaserver.publications.publishing import begin_publication
from keylane.metaserver.removals.begin import begin_group_deletion, begin_subject_deletion
from keylane.metaserver.retention import history as past_rows
from keylane.metaserver.retention.history import HistoryExpirer
from keylane.metaserver.settings import MetaserverSettings
from keylane.metaserver.sql.clock_restart import restart_times
from keylane.metaserver.sql.schema import deletions, operations, publications, steps
from keylane.protocol.control import AutoCreate, DeleteGroup, DeleteSubject, Join
from keylane.protocol.errors import SubjectDeletedError, SubjectUnknownError
from keylane.protocol.operations import HideSubject, OperationKind, PublishSubject, Reshape
from keylane.rpc.http_network import HttpNetwork
from support.sql.rows import Rows

DAY_MS = 86_400_000
LOOK_MS = 1_200_000


class PastRows(Rows):
    """A database with the subject `s`, and metaservers that remove what has been over for ten
    days.
    """

    def __init__(self) -> None:
        super().__init__()
        self.report("g1", "g2")
        self.create("s", 2)
        self.now_ms = 0
        self.expirer = self.metaserver("m")

    def metaserver(self, holder: str) -> HistoryExpirer:
        settings = MetaserverSettings(data=Path("meta"), history_retention_ms=10 * DAY_MS)
        return HistoryExpirer(self, settings, holder=holder, now_ms=lambda: self.now_ms)  # type: ignore[arg-type]

    async def write(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.run(work, *args, **kwargs)

    read = write

    async def pass_days(self, days: float, *metaservers: HistoryExpirer) -> None:
        """In looks of twenty minutes: after a longer pause, a look counts no more time."""
        for _ in range(round(days * 72)):
            self.now_ms += LOOK_MS
            self.clock.advance(LOOK_MS)
            for each in metaservers or (self.expirer,):
                await each.run_once()
        self.report("g1", "g2")

    def count(self, table: sa.Table, *here: sa.ColumnElement[bool]) -> int:
        return self.run(_count, table, *here)

    def delete_subject(self, name: str = "s") -> int:
        begun = self.run(begin_subject_deletion, name, DeleteSubject(force=True))
        return begun.subject_id

    def brokers_answer(self) -> None:
        left = self.run(pending_removals, limit=100)
        self.run(store_removed, {each.key: each.token for each in left})


def _count(connection: sa.Connection, table: sa.Table, *here: sa.ColumnElement[bool]) -> int:
    return connection.execute(
        sa.select(sa.func.count()).select_from(table).where(*here)
    ).scalar_one()


@pytest.fixture
def rows() -> PastRows:
    return PastRows()


async def test_deletion_is_forgotten_after_its_time_when_brokers_have_done_their_part(
    rows: PastRows,
):
    rows.delete_subject()
    await rows.pass_days(20)
    assert len(rows.run(pending_removals, limit=9)) == 2, "a broker that is away is waited for"
    assert rows.run(find_subject, "s").deleting
    rows.brokers_answer()
    await rows.pass_days(9.9)
    assert rows.count(deletions) == 1
    await rows.pass_days(0.2)
    assert rows.count(deletions) == 0


async def test_time_counts_only_while_a_metaserver_runs(rows: PastRows):
    """Neither a time without metaservers, nor another boot of the machine, nor a second metaserver
    makes a row older.
    """
    rows.delete_subject()
    rows.brokers_answer()
    await rows.pass_days(5)
    rows.now_ms += 50 * DAY_MS
    rows.run(restart_times, broker_ttl_ms=1_000)
    both = rows.metaserver("a"), rows.metaserver("b")
    await rows.pass_days(4.9, *both)
    assert rows.count(deletions) == 1
    await rows.pass_days(0.3, *both)
    assert rows.count(deletions) == 0


async def test_deleted_name_is_remembered_while_programs_ask_for_it(rows: PastRows):
    """A program that sends each day would make the subject again, once the deletion is
    forgotten.
    """
    rows.delete_subject()
    rows.brokers_answer()
    settings = MetaserverSettings(data=Path("meta"), auto_create="*")
    network = HttpNetwork()
    catalogue = Catalogue(rows, network, settings)  # type: ignore[arg-type]
    for _ in range(3):
        await rows.pass_days(9)
        with pytest.raises(SubjectDeletedError):
            await catalogue.auto_create("s", AutoCreate())
    await network.close()
    await rows.pass_days(10.1)
    assert rows.run(check_not_deleted, "s") is False


async def test_late_clients_get_what_is_there_when_a_deletion_is_forgotten(rows: PastRows):
    """Who was away for longer joins the group that is there now, with tokens above those of the
    group it knows.
    """
    known = rows.run(join_group, Join(subject="s", group="g", session="a" * 32), sessions_max=9)
    token = rows.run(_token_above)
    rows.run(begin_group_deletion, "s", "g", DeleteGroup(force=True))
    rows.brokers_answer()
    await rows.pass_days(11)
    assert rows.count(deletions) == 0
    again = Join(subject="s", group="g", session="b" * 32, group_id=known.group_id)
    later = rows.run(join_group, again, sessions_max=9)
    assert later.group_id > known.group_id
    assert rows.run(_token_above) > token
    rows.run(begin_group_deletion, "s", "g", DeleteGroup(force=True, group_id=known.group_id))
    assert not rows.run(pending_removals, limit=9), "a late deletion means the group that is gone"


def _token_above(connection: sa.Connection) -> int:
    row = find_subject(connection, "s")
    assert row is not None
    return connection.exec_driver_sql("SELECT tokens_above FROM subjects").scalar_one()


async def test_subject_of_a_forgotten_name_is_another_one(rows: PastRows):
    """Its partitions and its id are new: nothing of what a late client knows is served."""
    first = rows.run(read_route, "s")
    rows.delete_subject()
    rows.brokers_answer()
    await rows.pass_days(11)
    with pytest.raises(SubjectUnknownError):
        rows.run(read_route, "s", subject_id=first.subject_id)
    rows.create("s", 2)
    route = rows.run(read_route, "s", subject_id=first.subject_id)
    assert route.subject_id > first.subject_id
    assert min(each.partition_id for each in route.partitions) > max(
        each.partition_id for each in first.partitions
    )


async def test_done_operations_go_and_canceled_ones_stay_with_their_subject(rows: PastRows):
    """The steps of a canceled operation say which partitions were never opened."""
    rows.resize("s", 4)
    resize = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=8)
    ((canceled, _),) = rows.begin(resize)
    rows.run(cancel_operation, canceled)
    rows.drive(canceled)
    ((begun, _),) = rows.begin(resize)
    history = rows.run(subject_history, "s")
    await rows.pass_days(11)
    assert [each.operation_id for each in rows.run(subject_operations, "s")] == [begun, canceled]
    assert rows.count(steps, steps.c.operation_id.not_in([begun, canceled])) == 0
    assert rows.run(subject_history, "s").partitions == history.partitions
    rows.drive(begun)
    await rows.pass_days(11)
    assert rows.count(operations) == 1
    rows.resize("s", 2)  # ids go on
    assert max(each.operation_id for each in rows.run(subject_operations, "s")) > begun


async def test_cut_stays_while_its_hidden_subject_is_not_published(rows: PastRows):
    rows.run(plan_hidden, "s", HideSubject(hidden="h", cut=True), subjects_max=9)
    rows.run(open_subject, "h")
    hidden = rows.run(find_subject, "h").subject_id
    cut = rows.run(begin_cut, "h", "s", driver="d", lease_ms=1_000)
    rows.drive(cut)
    ids = rows.run(_ids_of, hidden)
    await rows.pass_days(11)
    assert rows.run(cut_of, ids).operation_id == cut
    rows.delete_subject("h")
    rows.brokers_answer()
    await rows.pass_days(11)
    assert rows.count(operations) == 0


def _ids_of(connection: sa.Connection, subject_id: int) -> list[int]:
    query = sa.text("SELECT partition_id FROM partitions WHERE subject_id = :subject_id")
    return list(connection.execute(query, {"subject_id": subject_id}).scalars())


async def test_publication_is_forgotten_and_a_late_repeat_changes_nothing(rows: PastRows):
    """It names the hidden subject's id: one that was made under its name since is not published in
    its place.
    """
    first = rows.run(plan_hidden, "t", HideSubject(hidden="h", partitions=1), subjects_max=9)
    rows.run(open_subject, "h")
    ask = PublishSubject(target="t", subject_id=first.subject_id)
    publish = {"driver": "d", "lease_ms": 1_000}
    assert rows.run(begin_publication, "h", ask, **publish) == 0
    await rows.pass_days(9)
    assert rows.run(begin_publication, "h", ask, **publish) == 0
    await rows.pass_days(2)
    assert rows.count(publications) == 0
    with pytest.raises(SubjectUnknownError):
        rows.run(begin_publication, "h", ask, **publish)
    rows.run(plan_hidden, "t", HideSubject(hidden="h"), subjects_max=9)
    rows.run(open_subject, "h")
    with pytest.raises(SubjectDeletedError):
        rows.run(begin_publication, "h", ask, **publish)
    assert rows.run(find_subject, "t").subject_id == first.subject_id


async def test_many_rows_go_in_portions(rows: PastRows, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(past_rows, "ROWS_AT_ONCE", 3)
    for number in range(7):
        rows.create(f"t{number}", 1)
        rows.delete_subject(f"t{number}")
    rows.brokers_answer()
    assert rows.run(past_rows.note_ended, 5) is True
    await rows.pass_days(10.1)
    assert rows.count(deletions) == 0


@pytest.mark.parametrize(("canceled", "left"), [(False, 0), (True, 1)])
async def test_publication_stays_until_its_operation_is_done(
    rows: PastRows, canceled: bool, left: int
):
    """A repeat is told how far it is, or that it was canceled; one that is done goes after its
    time.
    """
    hidden = rows.run(plan_hidden, "s", HideSubject(hidden="h"), subjects_max=9)
    rows.run(open_subject, "h")
    ask = PublishSubject(target="s", subject_id=hidden.subject_id)
    publish = {"driver": "d", "lease_ms": 1_000}
    operation_id = rows.run(begin_publication, "h", ask, **publish)
    await rows.pass_days(20)
    assert rows.run(begin_publication, "h", ask, **publish) == operation_id
    if canceled:
        rows.run(cancel_operation, operation_id)
    rows.drive(operation_id)
    await rows.pass_days(11)
    assert rows.count(publications) == left


def test_deletion_that_is_asked_for_meanwhile_is_not_removed(rows: PastRows):
    """PostgreSQL lets another transaction change the row between its choice and its removal."""
    rows.delete_subject()
    rows.brokers_answer()
    rows.run(past_rows.note_ended, 5)

    def remove(connection: sa.Connection) -> None:
        @sa.event.listens_for(connection, "before_cursor_execute")
        def ask_first(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
            if statement.startswith("DELETE FROM deletions"):
                extend_deletion_record(connection, "s")

        past_rows.remove_ended(connection, 6)

    rows.run(remove)
    assert rows.count(deletions) == 1
