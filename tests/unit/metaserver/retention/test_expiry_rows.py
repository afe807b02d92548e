"""Which sealed partitions may expire, and the effect on routes, groups and queues."""

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import store_report
from keylane.metaserver.cluster.queues import read_queues
from keylane.metaserver.cluster.subjects import open_subject, plan_subject, read_route
from keylane.metaserver.groups.lease_rows import read_grants, release_leases, store_drained
from keylane.metaserver.groups.sessions import join_group, leave_group
from keylane.metaserver.operations.begin import begin_operations
from keylane.metaserver.operations.journal import claim_operation, finish_round
from keylane.metaserver.retention import empty_partitions as expiry_rows
from keylane.metaserver.retention.empty_partitions import (
    delete_progress,
    expiry_candidates,
    mark_expired,
)
from keylane.metaserver.sql.schema import drained, heard, leases, partitions
from keylane.protocol.control import BrokerHeartbeat, CreateSubject, Join, ReleaseGrant
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import PartitionState
from support.sql.rows import Rows
from support.sql.told_groups import settle_group

A = "a" * 16
TTL_MS = 5_000


class ExpiryRows(Rows):
    """A queue of three segments, 1 → 2 → 3, the first two sealed at 10 and at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.report()
        ask = CreateSubject(subject="s", partitions=1, static=True)
        self.run(plan_subject, ask, subjects_max=9)
        self.run(open_subject, "s")
        self.move(1, "g2", 10)
        self.move(2, "g1", 0)

    def report(self) -> None:
        for group in ("g1", "g2"):
            body = BrokerHeartbeat(broker_group=group, broker_id=group, address=f"{group}:1")
            self.run(store_report, body, ttl_ms=TTL_MS)

    def move(self, partition_id: int, to: str, end: int) -> None:
        ask = Reshape(kind=OperationKind.MOVE, partition_ids=(partition_id,), broker_group=to)
        ((operation_id, _),) = self.run(begin_operations, ask, driver="d", lease_ms=1_000)
        state = OperationState.PLAN
        while state is not OperationState.DONE:
            operation = self.run(claim_operation, operation_id, driver="d", lease_ms=1_000)
            seals = state is OperationState.SEAL
            answers = {
                partition.partition_id: end if seals else None for partition in operation.targets
            }
            heard = [group_id for group_id, _ in operation.groups]
            state = self.run(finish_round, operation_id, answers, group_ids=heard)

    def candidates(self) -> list[tuple[int, int]]:
        candidates = self.run(expiry_candidates, after=0, limit=9)
        return [(partition.partition_id, end) for partition, end in candidates]

    def join(self) -> list[int]:
        """Join a consumer of group `g`; returns its grants."""
        ask = Join(subject="s", group="g", session=A, ttl_ms=TTL_MS)
        self.run(join_group, ask, sessions_max=9)
        return self.granted()

    def kept(self) -> dict[str, list[int]]:
        """The partitions of which a group has rows, by table."""
        with self.engine.begin() as connection:
            return {
                table.name: sorted(connection.scalars(sa.select(table.c.partition_id)))
                for table in (drained, heard, leases)
            }

    def granted(self) -> list[int]:
        self.run(settle_group, 1)
        grants = self.run(read_grants, A).grants
        return [grant.partition.partition_id for grant in grants]


@pytest.fixture
def rows() -> ExpiryRows:
    return ExpiryRows()


def test_partition_expires_after_its_parents(rows: ExpiryRows):
    """A partition behind one with messages does not expire, not even an empty one: groups would
    read past the parent.
    """
    assert rows.candidates() == [(1, 10)]
    assert rows.run(mark_expired, {2: 0}) == []
    assert rows.run(mark_expired, {1: 10}) == ["s"]
    assert rows.candidates() == [(2, 0)]
    assert rows.run(mark_expired, {2: 0}) == ["s"]
    assert rows.candidates() == []


def test_expired_partition_leaves_the_route_and_the_queue(rows: ExpiryRows):
    """The route's version rises; the other partitions begin where they began."""
    before = rows.run(read_route, "s")
    rows.run(mark_expired, {1: 10})
    after = rows.run(read_route, "s")
    assert after.version == before.version + 1
    assert [partition.partition_id for partition in after.partitions] == [2, 3]
    (queue,) = rows.run(read_queues, "s").queues
    assert [(segment.partition.logic_start, segment.logic_end) for segment in queue.segments] == [
        (10, 10),
        (10, None),
    ]


def test_group_continues_behind_an_expired_partition_it_had_not_drained(rows: ExpiryRows):
    """A later group is granted the children, and no expired partition."""
    rows.run(mark_expired, {1: 10})
    assert rows.join() == [2]


def test_partition_does_not_expire_while_a_session_holds_it_undrained(rows: ExpiryRows):
    """Its last messages may be in a handler."""
    assert rows.join() == [1]
    assert rows.candidates() == []
    assert rows.run(mark_expired, {1: 10}) == []
    rows.run(store_drained, A, [1])
    assert rows.candidates() == [(1, 10)]
    rows.run(leave_group, A)
    assert rows.run(mark_expired, {1: 10}) == ["s"]


def test_partition_does_not_expire_when_its_facts_have_changed(rows: ExpiryRows):
    """Another end, an open partition, an unknown end, a silent broker: nothing expires."""
    assert rows.run(mark_expired, {1: 9}) == []
    assert rows.run(mark_expired, {3: 0}) == []
    rows.clock.advance(TTL_MS)
    assert rows.candidates() == []
    rows.report()
    unknown = sa.update(partitions).where(partitions.c.partition_id == 1).values(end_offset=None)
    rows.run(lambda connection: connection.execute(unknown))
    assert rows.candidates() == []
    states = rows.run(
        lambda connection: connection.execute(sa.select(partitions.c.state)).scalars().all()
    )
    assert states == [PartitionState.SEALED, PartitionState.SEALED, PartitionState.OPEN]


def test_progress_is_forgotten_when_its_partition_is_gone(rows: ExpiryRows):
    """A subject that is resized for years has rows of groups for what it has now, and its groups go
    on as before.
    """
    assert rows.join() == [1]
    rows.run(store_drained, A, [1])
    assert rows.granted() == [2]
    rows.run(release_leases, [ReleaseGrant(session=A, partition_id=1, token=1)])
    assert rows.kept() == {"drained": [1], "heard": [1, 2, 3], "leases": [1, 2]}
    rows.run(mark_expired, {1: 10})
    assert not rows.run(delete_progress, ["s"])
    assert rows.kept() == {"drained": [], "heard": [2, 3], "leases": [2]}
    assert rows.granted() == [2]
    rows.run(store_drained, A, [2])
    assert rows.granted() == [3]


def test_lease_of_a_gone_partition_stays_until_it_is_released(rows: ExpiryRows):
    """Its session releases it by the token of the row; a free row goes in the next round."""
    rows.join()
    rows.run(store_drained, A, [1])
    rows.run(mark_expired, {1: 10})
    rows.run(delete_progress, ["s"])
    assert rows.kept() == {"drained": [], "heard": [2, 3], "leases": [1]}
    assert rows.granted() == [2]
    rows.run(leave_group, A)
    rows.run(settle_group, 1)
    rows.run(mark_expired, {2: 0})
    rows.run(delete_progress, ["s"])
    assert rows.kept() == {"drained": [], "heard": [3], "leases": []}


def test_progress_is_forgotten_in_portions(rows: ExpiryRows, monkeypatch: pytest.MonkeyPatch):
    """A database of years has millions of such rows: each transaction deletes some of them."""
    monkeypatch.setattr(expiry_rows, "ROWS_AT_ONCE", 2)
    rows.join()
    rows.run(leave_group, A)
    rows.run(mark_expired, {1: 10})
    rows.run(mark_expired, {2: 0})
    other = [{"group_id": 1, "partition_id": number} for number in (1, 2)]
    rows.run(lambda connection: connection.execute(sa.insert(drained), other))
    assert rows.run(delete_progress, ["s"])
    assert not rows.run(delete_progress, ["s"])
    assert rows.kept()["drained"] == []
