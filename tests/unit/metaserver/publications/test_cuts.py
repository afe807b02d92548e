"""The SQL of cuts: a target goes on behind a hidden subject, which then takes the place of all
before, or of nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.partitions import HOSTED_BY_ID, read_partitions
from keylane.metaserver.cluster.queues import read_queues
from keylane.metaserver.cluster.removals import complete_removals, pending_removals
from keylane.metaserver.cluster.subjects import read_route
from keylane.metaserver.groups.sessions import end_sessions, join_group
from keylane.metaserver.operations.journal import (
    cancel_operation,
    claim_operation,
    finish_round,
)
from keylane.metaserver.operations.views import subject_history
from keylane.metaserver.publications.cuts import begin_cut
from keylane.metaserver.publications.hiding import plan_hidden
from keylane.metaserver.publications.publishing import begin_publication
from keylane.metaserver.removals.begin import begin_subject_deletion
from keylane.metaserver.sql.schema import drained, leases, partitions
from keylane.metaserver.starts.rows import complete_starts, pending_starts
from keylane.metaserver.verify.checks import Views, verify
from keylane.metaserver.verify.service import read_sql_view
from keylane.protocol.control import DeleteSubject, Join
from keylane.protocol.errors import Reason, SubjectUnknownError
from keylane.protocol.operations import HideSubject, OperationState, PublishSubject
from keylane.protocol.routing import PartitionState
from support.raising import raises
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

H = "s.new"
ENDS = {1: 100, 2: 100}
SESSION = "a" * 32


class Cuts(Rows):
    """A subject `s` of two partitions, and a hidden one for it; every sealed partition ends at
    100.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.report("g1", "g2")
        self.create("s", 2, **settings)
        self.hide()

    def hide(self, name: str = H) -> None:
        from keylane.metaserver.cluster.subjects import open_subject

        self.run(plan_hidden, "s", HideSubject(hidden=name), subjects_max=100)
        self.run(open_subject, name)

    def begin_cut(self, name: str = H) -> int:
        begun: int = self.run(begin_cut, name, "s", driver="d", lease_ms=1_000)
        return begun

    def cut(self) -> None:
        self.drive(self.begin_cut())

    def publish(self, **fields: Any) -> int:
        ask = PublishSubject(target="s", replace=True, **fields)
        begun: int = self.run(begin_publication, H, ask, driver="d", lease_ms=1_000)
        return begun

    def route(self) -> dict[int, tuple[PartitionState, tuple[int, ...]]]:
        """Partition → its state, and the parents that clients are told of."""
        route = self.run(read_route, "s")
        return {int(each.partition_id): (each.state, each.parents) for each in route.partitions}

    def hosted_parents(self, *ids: int) -> list[tuple[int, ...]]:
        return [each.parents for each in self.run(read_partitions, HOSTED_BY_ID, ids=list(ids))]

    def state_of(self, partition_id: int) -> str:
        chosen = sa.select(partitions.c.state).where(partitions.c.partition_id == partition_id)
        return str(self.run(lambda connection: connection.execute(chosen).scalar_one()))

    def join(self) -> int:
        ask = Join(subject="s", group="g", session=SESSION)
        row = self.run(join_group, ask, sessions_max=10)
        self.run(settle_group, row.group_id)
        return int(row.group_id)

    def granted(self) -> set[int]:
        rows = self.run(lambda connection: connection.execute(sa.select(leases)).all())
        return {row.partition_id for row in rows if row.session == SESSION and not row.withdrawn}

    def drain(self, group_id: int, *ids: int) -> None:
        rows = [{"group_id": group_id, "partition_id": each} for each in ids]
        self.run(lambda connection: connection.execute(sa.insert(drained), rows))

    def violations(self, *but: str) -> list[str]:
        """What `meta verify` finds in the database alone."""
        view = self.run(read_sql_view)
        result = verify(Views(before=view, answers=(), after=view))
        return [
            text for check in result.checks if check.code not in but for text in check.violations
        ]


@pytest.fixture
def cuts() -> Cuts:
    return Cuts()


OPEN, SEALED = PartitionState.OPEN, PartitionState.SEALED


def test_target_goes_on_behind_the_hidden_subject_when_it_is_cut(cuts):
    """Brokers host what goes on with both parents; clients are told of the one that they can
    read.
    """
    operation_id = cuts.begin_cut()
    assert cuts.begin_cut() == operation_id
    assert cuts.hosted_parents(5, 6) == [(1, 3), (2, 4)]
    cuts.drive(operation_id)
    assert cuts.route() == {1: (SEALED, ()), 2: (SEALED, ()), 5: (OPEN, (1,)), 6: (OPEN, (2,))}
    history = cuts.run(subject_history, "s")
    assert [each.partition.parents for each in history.partitions] == [(), (), (1,), (2,)]
    assert cuts.begin_cut() == operation_id
    assert cuts.violations("V03", "V05") == []


def test_rows_take_the_place_of_what_lies_before_the_cut(cuts):
    """One change of the route: older partitions are dropped, the hidden ones are sealed before the
    open ones.
    """
    cuts.cut()
    cuts.resize("s", 3)  # after the cut any operation may come
    before = cuts.route()
    operation_id = cuts.publish(ends=ENDS)
    assert cuts.route() == before, "until the rows are sealed nothing is visible"
    assert cuts.violations("V03", "V05") == []
    cuts.drive(operation_id)
    after = cuts.route()
    assert after.keys() == before.keys() - {1, 2} | {3, 4}
    assert (after[3], after[4]) == ((SEALED, (1,)), (SEALED, (2,)))
    assert (after[5], after[6]) == ((SEALED, (1, 3)), (SEALED, (2, 4)))
    dropped = cuts.run(pending_removals, limit=10)
    assert [(each.partition_id, each.last_id) for each in dropped] == [(1, 2), (2, 2)]
    cuts.run(complete_removals, {each.key: 0 for each in dropped})
    assert cuts.route() == after
    assert cuts.publish(ends=ENDS) == operation_id
    assert cuts.violations("V03", "V05") == []


def test_publication_is_refused_when_messages_lie_behind_the_rows(cuts):
    """The error says how many of which partition; nothing is changed, and a publication with the
    right ends passes.
    """
    with raises(Reason.PUBLISH_TARGET, match="without a cut"):
        cuts.publish(ends=ENDS)
    cuts.cut()
    before = cuts.route()
    with raises(Reason.PUBLISH_BEHIND, match="3 messages of partition 2") as told:
        cuts.publish(ends={1: 100, 2: 97})
    error = told.value
    assert (error.partition_id, error.from_offset, error.messages) == (2, 97, 3)
    with raises(Reason.PUBLISH_BEHIND, match="100 messages of partition 1, from offset 0"):
        cuts.publish(ends={2: 100})
    with raises(Reason.PUBLISH_TARGET, match="--replace"):
        cuts.run(begin_publication, H, PublishSubject(target="s"), driver="d", lease_ms=1_000)
    assert cuts.route() == before
    cuts.drive(cuts.publish(ends=ENDS))
    assert cuts.route().keys() == {3, 4, 5, 6}


@pytest.mark.parametrize("with_cut", [True, False])
def test_publication_is_refused_when_rows_behind_its_cut_were_published_first(cuts, with_cut):
    """They have taken the place of the same messages: the rows of both would be there."""
    cuts.cut()
    cuts.hide("s.later")
    ends = None
    if with_cut:
        cuts.drive(cuts.begin_cut("s.later"))
        ends = dict.fromkeys([1, 2, 5, 6], 100)
    ask = PublishSubject(target="s", replace=True, ends=ends)
    cuts.drive(cuts.run(begin_publication, "s.later", ask, driver="d", lease_ms=1_000))
    before = cuts.route()
    assert set(before) == ({7, 8, 9, 10} if with_cut else {7, 8})
    for fields in ({"ends": ENDS}, {}):
        with raises(Reason.PUBLISH_OUTDATED, match="another publication replaced the messages"):
            cuts.publish(**fields)
    assert cuts.route() == before
    assert cuts.violations("V03", "V05") == []


def test_publications_follow_each_other_when_the_first_cut_is_published_first(cuts):
    """The second job has to have the rows of the first, or is told that it lacks them."""
    cuts.cut()
    cuts.hide("s.later")
    cuts.drive(cuts.begin_cut("s.later"))
    cuts.drive(cuts.publish(ends=ENDS))
    ends = dict.fromkeys([1, 2, 5, 6], 100)
    later = {"driver": "d", "lease_ms": 1_000}
    ask = PublishSubject(target="s", replace=True, ends=ends)
    with raises(Reason.PUBLISH_BEHIND, match="100 messages of partition 3"):
        cuts.run(begin_publication, "s.later", ask, **later)
    ask = PublishSubject(target="s", replace=True, ends=ends | {3: 100, 4: 100})
    cuts.drive(cuts.run(begin_publication, "s.later", ask, **later))
    assert set(cuts.route()) == {7, 8, 9, 10}


def test_cut_is_refused_when_the_target_has_changed_before_it(cuts):
    cuts.resize("s", 3)
    with raises(Reason.PUBLISH_OUTDATED):
        cuts.begin_cut()
    with pytest.raises(SubjectUnknownError):
        cuts.begin_cut("s.other")


def test_publication_waits_for_the_cut_to_be_done(cuts):
    """Nor is the hidden subject deleted meanwhile: brokers are told of its partitions as
    parents.
    """
    operation_id = cuts.begin_cut()
    with raises(Reason.OPERATION_RUNNING):
        cuts.publish(ends=ENDS)
    with raises(Reason.OPERATION_RUNNING):
        cuts.run(begin_subject_deletion, H, DeleteSubject())
    cuts.drive(operation_id)
    cuts.publish(ends=ENDS)


def test_cut_is_made_again_when_it_was_canceled(cuts):
    """What it had planned is never opened."""
    operation_id = cuts.begin_cut()
    cuts.run(cancel_operation, operation_id)
    assert cuts.route() == {1: (OPEN, ()), 2: (OPEN, ())}
    again = cuts.begin_cut()
    assert again != operation_id
    cuts.drive(again)
    assert cuts.route().keys() == {1, 2, 7, 8}


def test_target_goes_on_as_it_is_when_the_hidden_subject_is_deleted(cuts):
    """Its groups wait for it no more than before."""
    group_id = cuts.join()
    cuts.cut()
    cuts.run(settle_group, group_id)
    cuts.drain(group_id, 1, 2)
    cuts.run(begin_subject_deletion, H, DeleteSubject())
    dropped = cuts.run(pending_removals, limit=10)
    assert [(each.partition_id, each.subject) for each in dropped] == [(3, H), (4, H)]
    cuts.run(complete_removals, {each.key: 0 for each in dropped})
    assert cuts.hosted_parents(5, 6) == [(1,), (2,)]
    cuts.run(lambda connection: _unsettle(connection, group_id))
    cuts.run(settle_group, group_id)
    assert cuts.granted() == {5, 6}
    assert cuts.violations("V03", "V05", "V13") == []


def _unsettle(connection: Any, group_id: int) -> None:
    from keylane.metaserver.cluster.announcements import mark_unsettled

    mark_unsettled(connection, group_id)


def test_group_reads_behind_the_cut_without_the_hidden_subject_until_it_is_published(cuts):
    """Then it goes on in the rows where it is placed, and behind them where it was."""
    group_id = cuts.join()
    cuts.cut()
    cuts.run(settle_group, group_id)
    assert cuts.granted() == {1, 2}
    cuts.drain(group_id, 1)
    cuts.run(lambda connection: _unsettle(connection, group_id))
    cuts.run(settle_group, group_id)
    assert cuts.granted() == {2, 5}
    cuts.run(end_sessions, [SESSION])
    operation_id = cuts.publish(ends=ENDS, starts={"g": {3: 90, 4: 30}})
    cuts.join()
    assert cuts.granted() == set(), (
        "where it goes on is fixed: nothing is granted before it goes on there"
    )
    cuts.drive(operation_id)
    pending = cuts.run(pending_starts, limit=10)
    assert {each.partition_id: each.cursor for each in pending} == {3: 90, 4: 30}
    cuts.run(settle_group, group_id)
    assert cuts.granted() == set()
    cuts.run(complete_starts, group_id, pending)
    cuts.run(settle_group, group_id)
    assert cuts.granted() == {3, 4}, "what lies behind waits for the rows"
    cuts.drain(group_id, 3)
    cuts.run(lambda connection: _unsettle(connection, group_id))
    cuts.run(settle_group, group_id)
    assert cuts.granted() == {4, 5}


def test_groups_are_granted_again_when_the_publication_is_canceled(cuts):
    """The rows are given up, and the messages stay."""
    group_id = cuts.join()
    cuts.cut()
    cuts.run(end_sessions, [SESSION])
    operation_id = cuts.publish(ends=ENDS, starts={"g": {3: 0, 4: 0}})
    cuts.join()
    assert cuts.granted() == set()
    cuts.run(cancel_operation, operation_id)
    assert (cuts.state_of(3), cuts.state_of(4)) == (PartitionState.EXPIRED, PartitionState.EXPIRED)
    cuts.run(settle_group, group_id)
    assert cuts.granted() == {1, 2}
    assert cuts.route() == {1: (SEALED, ()), 2: (SEALED, ()), 5: (OPEN, (1, 3)), 6: (OPEN, (2, 4))}


def test_logic_offsets_have_no_gap_when_a_static_subject_is_replaced():
    """The rows count on from what they replace, and what has come since the cut counts on from the
    rows.
    """
    cuts = Cuts(static=True)
    cuts.cut()
    starts = lambda: {  # noqa: E731 - a name for one expression
        int(segment.partition.partition_id): segment.partition.logic_start
        for queue in cuts.run(read_queues, "s").queues
        for segment in queue.segments
    }
    assert starts() == {1: 0, 2: 0, 5: 100, 6: 100}
    assert cuts.violations("V03", "V05") == []
    operation_id = cuts.publish(ends=ENDS)
    state = None
    while state is not OperationState.DONE:
        operation = cuts.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
        sealing = operation.state is OperationState.SEAL
        done = {each.partition_id: 7 if sealing else None for each in operation.targets}
        state = cuts.run(finish_round, operation_id, done)
    assert starts() == {3: 100, 4: 100, 5: 107, 6: 107}
    assert cuts.violations("V03", "V05") == []


def test_every_round_of_a_publication_may_be_repeated_by_another_metaserver(cuts):
    """A driver that dies after any round leaves what the next one finishes; what is done twice
    changes nothing.
    """
    cuts.cut()
    operation_id = cuts.publish(ends=ENDS)
    seen = []
    for number in range(10):
        cuts.clock.advance(2_000)  # the lease of the dead one has ended
        operation = cuts.run(claim_operation, operation_id, driver=f"d{number}", lease_ms=1_000)
        if operation is None:
            break
        seen.append(operation.state)
        hosts = operation.state in {OperationState.PLAN, OperationState.OPEN}
        done = {each.partition_id: None if hosts else 100 for each in operation.targets}
        for _ in range(2):
            cuts.run(finish_round, operation_id, done)
    assert seen[:2] == [OperationState.PLAN, OperationState.SEAL]
    assert cuts.route().keys() == {3, 4, 5, 6}
    assert len(cuts.run(pending_removals, limit=10)) == 2
