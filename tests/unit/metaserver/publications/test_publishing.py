"""The SQL of publications: one change of the target's route, repeated without a change, refused
when the target has changed.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.removals import complete_removals, pending_removals
from keylane.metaserver.cluster.subjects import (
    open_subject,
    read_route,
    subject_summaries,
)
from keylane.metaserver.groups.lease_rows import settle_group
from keylane.metaserver.groups.sessions import end_sessions, join_group
from keylane.metaserver.groups.views import read_group
from keylane.metaserver.operations.journal import cancel_operation
from keylane.metaserver.publications.hiding import plan_hidden
from keylane.metaserver.publications.publishing import begin_publication
from keylane.metaserver.removals.begin import begin_subject_deletion
from keylane.metaserver.resets.rows import begin_reset, end_reset, read_reset_scope
from keylane.metaserver.sql.schema import leases, starts
from keylane.metaserver.starts.rows import complete_starts, pending_starts
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.control import DeleteSubject, Join
from keylane.protocol.errors import (
    InvalidRequestError,
    Reason,
    SubjectDeletedError,
    SubjectUnknownError,
)
from keylane.protocol.operations import (
    HideSubject,
    OperationKind,
    OperationState,
    PublishSubject,
    Reshape,
)
from keylane.protocol.progress import ResetGroup, ResetTo
from keylane.protocol.routing import PartitionState
from support.raising import raises
from support.sql.rows import Rows

H = "s.hidden-1"
SESSION = "a" * 32


class Published(Rows):
    """Two broker groups, a subject `s` of two partitions, and calls that hide and publish."""

    def __init__(self, *, target: bool = True) -> None:
        super().__init__()
        self.report("g1", "g2")
        if target:
            self.create("s", 2)

    def hide(self, name: str = H, target: str = "s", **settings: Any) -> Any:
        ask = HideSubject(hidden=name, **settings)
        row = self.run(plan_hidden, target, ask, subjects_max=100)
        self.run(open_subject, name)
        return row

    def publish(self, name: str = H, target: str = "s", **fields: Any) -> int:
        ask = PublishSubject(target=target, **fields)
        begun: int = self.run(begin_publication, name, ask, driver="d", lease_ms=1_000)
        return begun

    def route(self, name: str = "s") -> Any:
        return self.run(read_route, name)

    def open(self, name: str = "s") -> dict[int, tuple[int, ...]]:
        """Open partition → its parents."""
        return {
            partition.partition_id: partition.parents
            for partition in self.route(name).partitions
            if partition.state is PartitionState.OPEN
        }

    def join(self, subject: str = "s", group: str = "g", session: str = SESSION) -> int:
        ask = Join(subject=subject, group=group, session=session)
        row = self.run(join_group, ask, sessions_max=10)
        self.run(settle_group, row.group_id)
        return int(row.group_id)


@pytest.fixture
def published() -> Published:
    return Published()


def test_publication_opens_the_hidden_partitions_behind_the_sealed_ones_of_the_target(published):
    """The route changes once, from the target's partitions to the hidden subject's, which are their
    children.
    """
    published.hide()
    before, hidden = published.open(), published.open(H)
    assert list(before) == [1, 2]
    assert hidden == {3: (1,), 4: (2,)}
    version = published.route().version
    operation_id = published.publish()
    assert published.open() == before, "until the parents are sealed nothing is visible"
    with pytest.raises(SubjectUnknownError):
        published.route(H)
    published.drive(operation_id)
    assert published.open() == hidden
    assert published.route().version == version + 1
    assert {each.state for each in published.route().partitions} == {
        PartitionState.OPEN,
        PartitionState.SEALED,
    }


def test_publication_changes_nothing_when_repeated(published):
    """Before and after its operation is done, a repeat finds it; another target is refused."""
    published.hide()
    operation_id = published.publish()
    assert published.publish() == operation_id
    published.drive(operation_id)
    version = published.route().version
    assert published.publish() == operation_id
    assert published.route().version == version
    with raises(Reason.PUBLISH_TARGET):
        published.publish(target="t")
    with raises(Reason.PUBLISH_TARGET, match="before"):
        published.hide()


def test_hidden_subject_takes_the_name_when_there_is_no_target():
    """The name changes in the one transaction, and no operation is left."""
    published = Published(target=False)
    with pytest.raises(SubjectUnknownError, match="give the number of its partitions"):
        published.hide()
    published.hide(partitions=3)
    with pytest.raises(SubjectUnknownError):
        published.route()
    hidden = published.open(H)
    assert published.publish() == 0
    assert published.open() == hidden
    assert len(hidden) == 3
    assert published.publish() == 0


def test_hidden_subject_has_no_groups_no_operations_and_no_namesake(published):
    """No consumer subscribes to a hidden subject by accident, and its partitions are those that
    publishing expects.
    """
    published.hide()
    with raises(Reason.SUBJECT_HIDDEN):
        published.join(H)
    with raises(Reason.SUBJECT_HIDDEN):
        published.begin(Reshape(kind=OperationKind.RESIZE, subject=H, partitions=4))
    with raises(Reason.SUBJECT_HIDDEN):
        published.begin(Reshape(kind=OperationKind.MOVE, partition_ids=(3,), broker_group="g2"))
    with raises(Reason.SUBJECT_HIDDEN):
        published.begin(Reshape(kind=OperationKind.EVACUATE, broker_group="g1"))
    with raises(Reason.SUBJECT_HIDDEN):
        published.hide("s.hidden-2", target=H)
    with raises(Reason.SUBJECT_HIDDEN):
        published.create(H, 2)
    shown = {each.subject: each.hidden_for for each in published.run(subject_summaries)}
    assert shown == {"s": "", H: "s"}


@pytest.mark.parametrize("change", ["resized", "deleted", "created"])
def test_publication_is_refused_when_the_target_has_changed(change: str):
    """Messages that came behind other partitions would be read before them: nothing is
    published.
    """
    published = Published(target=change != "created")
    published.hide(partitions=2)
    if change == "resized":
        published.resize("s", 3)
    elif change == "deleted":
        published.run(begin_subject_deletion, "s", DeleteSubject())
        done = {each.key: 0 for each in published.run(pending_removals, limit=10)}
        published.run(complete_removals, done)
    else:
        published.create("s", 2)
    with raises(Reason.PUBLISH_OUTDATED, match=change):
        published.publish()
    assert len(published.open(H)) == 2


def test_publication_waits_for_no_other_operation(published):
    """One operation runs on a subject at a time, and a hidden subject is made beside one that
    stands still.
    """
    published.hide()
    ask = Reshape(kind=OperationKind.RESIZE, subject="s", partitions=4)
    ((operation_id, _),) = published.begin(ask)
    with raises(Reason.OPERATION_RUNNING):
        published.publish()
    with raises(Reason.OPERATION_RUNNING):
        published.hide("s.hidden-2")
    published.run(cancel_operation, operation_id)
    published.drive(published.publish())
    assert list(published.open()) == [3, 4]


def test_subject_that_is_not_hidden_is_not_published(published):
    """Nor one that is made for another target, nor one that does not exist."""
    published.create("t", 2)
    with raises(Reason.PUBLISH_TARGET, match="not hidden"):
        published.publish("t")
    with pytest.raises(SubjectUnknownError):
        published.publish("u")
    published.hide()
    with raises(Reason.PUBLISH_TARGET, match="made for 's'"):
        published.publish(target="t")
    with raises(Reason.PUBLISH_TARGET, match="is not hidden"):
        published.hide("t")
    with pytest.raises(InvalidRequestError):
        published.hide("s")


def test_publication_can_be_deleted_before_and_canceled_in_its_first_state(published):
    """An aborted job leaves the target as it was."""
    published.hide()
    published.run(begin_subject_deletion, H, DeleteSubject())
    dropped = published.run(pending_removals, limit=10)
    assert {(each.subject, each.partition_id) for each in dropped} == {(H, 3), (H, 4)}
    published.run(complete_removals, {each.key: 0 for each in dropped})
    published.hide("s.hidden-2")
    operation_id = published.publish("s.hidden-2")
    published.run(cancel_operation, operation_id)
    assert list(published.open()) == [1, 2]
    published.resize("s", 4)


def test_static_queues_continue_their_logic_offsets_when_published():
    """Each hidden partition is the next of its queue: it begins where the parent was sealed."""
    published = Published(target=False)
    published.create("s", 2, static=True)
    published.hide()
    published.drive(published.publish())
    opened = {
        each.partition_id: (each.queue, each.logic_start)
        for each in published.route().partitions
        if each.state is PartitionState.OPEN
    }
    assert opened == {3: (0, 100), 4: (1, 100)}


def test_replaced_subject_drops_its_older_partitions_when_the_route_changes(published):
    """They expire with the change of the route; brokers drop exactly those, and a later subject has
    higher ids.
    """
    published.resize("s", 4)
    published.hide()
    operation_id = published.publish(replace=True)
    assert not published.run(pending_removals, limit=100)
    published.drive(operation_id)
    hidden = set(published.open())
    dropped = published.run(pending_removals, limit=100)
    assert {each.partition_id for each in dropped}.isdisjoint(hidden)
    assert {each.last_id for each in dropped} == {min(hidden) - 1}
    published.run(complete_removals, {each.key: 0 for each in dropped})
    assert set(published.open()) == hidden
    assert {each.partition_id for each in published.route().partitions} == hidden


def test_groups_of_a_replaced_subject_begin_where_they_are_placed(published):
    """The positions are fixed with the publication, and stored by brokers as starts of groups
    are.
    """
    group_id = published.join()
    published.hide()
    with raises(Reason.PUBLISH_GROUPS, match="g"):
        published.publish(replace=True)
    with raises(Reason.GROUP_BUSY, match="live"):
        published.publish(replace=True, starts={"g": {3: 5, 4: 7}})
    published.run(end_sessions, [SESSION])
    with pytest.raises(InvalidRequestError):
        published.publish(replace=True, starts={"g": {3: 5}})
    operation_id = published.publish(replace=True, starts={"g": {3: 5, 4: 7}})
    published.drive(operation_id)
    pending = published.run(pending_starts, limit=10)
    assert {each.partition_id: each.cursor for each in pending} == {3: 5, 4: 7}
    assert len({each.token for each in pending}) == 2
    published.join()
    published.run(complete_starts, group_id, pending)
    assert not published.run(lambda connection: connection.execute(sa.select(starts)).all())
    published.run(settle_group, group_id)
    leased = published.run(lambda connection: connection.execute(sa.select(leases)).all())
    held = {row.partition_id for row in leased if row.session == SESSION and not row.withdrawn}
    assert held == {3, 4}


@pytest.mark.parametrize("change", ["reset", "consumer"])
def test_replacement_is_refused_when_a_group_has_changed_since_the_look_at_it(published, change):
    """Its cursors may be others; a new look has its new revision. Nothing is changed."""
    group_id = published.join()
    with_consumer = published.run(read_group, "s", "g").revision
    published.run(end_sessions, [SESSION])
    published.run(settle_group, group_id)
    published.hide()
    before = published.run(read_group, "s", "g").revision
    if change == "reset":
        scope = published.run(read_reset_scope, "s", "g", ResetGroup(to=ResetTo.EARLIEST))
        tokens = published.run(begin_reset, scope, holder="one", lease_ms=60_000)
        while_set = published.run(read_group, "s", "g").revision
        published.run(end_reset, group_id, tokens, dict.fromkeys(tokens, 0), holder="one")
        told = [with_consumer, before, while_set]
    else:
        published.join(session="b" * 32)
        published.run(end_sessions, ["b" * 32])
        told = [with_consumer, before]
    placed = {"replace": True, "starts": {"g": {3: 5, 4: 7}}}
    for revision in told:
        with raises(Reason.PUBLISH_CURSORS) as refused:
            published.publish(**placed, revisions={"g": revision})
        assert refused.value.details == {"subject": "s", "group": "g"}
    assert published.open(H) == {3: (1,), 4: (2,)}
    now = published.run(read_group, "s", "g").revision
    assert published.publish(**placed, revisions={"g": now})
    assert published.publish(**placed, revisions={"g": before}), "a repeat changes nothing"


def test_operation_of_a_publication_is_marked_as_one(published):
    """It has its own kind; the children are hosted already."""
    published.hide()
    operation_id = published.publish()
    (operation,) = published.run(read_sql_view).operations
    assert operation.operation_id == operation_id
    assert operation.state is OperationState.PLAN
    with raises(Reason.SUBJECT_EXISTS):
        published.create("s", 5)


def test_deletion_of_a_published_subject_leaves_a_later_one_of_its_name_alone():
    """Its id says which one is meant; a job that failed late gives it."""
    rows = Published()
    hidden = rows.hide()
    rows.drive(rows.publish())
    rows.create(H, 1)
    rows.run(begin_subject_deletion, H, DeleteSubject(force=True, subject_id=hidden.subject_id))
    assert len(rows.open(H)) == 1


@pytest.mark.parametrize("target", [True, False])
def test_hidden_subject_of_another_job_is_refused_until_it_is_deleted(target: bool):
    """Also where it has no messages yet: two jobs would count, and delete, the rows of both."""
    rows = Published(target=target)
    partitions = 0 if target else 2
    made = rows.hide(partitions=partitions, filled_by="job 1").subject_id
    assert rows.hide(partitions=partitions, filled_by="job 1").subject_id == made
    with raises(Reason.HIDDEN_TAKEN, match="is filled by job 1"):
        rows.hide(partitions=partitions, filled_by="job 2")
    assert (
        rows.hide(partitions=partitions).subject_id == made
    )  # an earlier version does not say what it is


def test_hidden_subject_without_a_job_is_of_the_first_one_that_asks():
    rows = Published()
    rows.hide()
    rows.hide(filled_by="job 1")
    with raises(Reason.HIDDEN_TAKEN):
        rows.hide(filled_by="job 2")


def test_hidden_subject_made_anew_is_not_published_in_place_of_the_one_that_is_meant():
    """Nor does its publication count as one of the other; without an id it is published as
    before.
    """
    rows = Published()
    older = rows.hide().subject_id
    rows.run(begin_subject_deletion, H, DeleteSubject(force=True))
    dropped = rows.run(pending_removals, limit=10)
    rows.run(complete_removals, {each.key: 0 for each in dropped})
    newer = rows.hide().subject_id
    assert newer != older
    with pytest.raises(SubjectDeletedError, match=f"with id {older} was deleted"):
        rows.publish(subject_id=older)
    begun = rows.publish(subject_id=newer)
    assert begun
    with pytest.raises(SubjectDeletedError):
        rows.publish(subject_id=older)
    assert rows.publish(subject_id=newer) == begun
    assert rows.publish() == begun
