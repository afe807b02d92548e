"""A lost database of a subject with a cut: what was sent stays, and rows count only if they are
known to be published.
"""

from __future__ import annotations

import msgspec
import pytest

from keylane.metaserver.cluster.removals import pending_removals
from keylane.metaserver.rebuild.plan import plan_rebuild
from keylane.metaserver.rebuild.rows import BrokerSource, RebuiltSubject
from keylane.metaserver.rebuild.writer import store_rebuilt
from keylane.protocol.control import PartitionStatus
from keylane.protocol.errors import InvalidRequestError
from support.sql.kept_by_brokers import EXPIRED, OPEN, SEALED, source, states, status
from support.sql.rows import Rows

OLD = (status(1, 0, 512, sealed=True), status(2, 512, 1024, sealed=True))
HIDDEN = (
    status(3, 0, 512, parents=(1,), hidden="s.new"),
    status(4, 512, 1024, parents=(2,), hidden="s.new"),
)
NEW = (status(5, 0, 512, parents=(1, 3)), status(6, 512, 1024, parents=(2, 4)))
NEW_EMPTY = tuple(msgspec.structs.replace(each, next_offset=0) for each in NEW)


def of(*statuses: PartitionStatus, dropped: int = 0) -> BrokerSource:
    there = source(*statuses)
    names = {"s": dropped} if dropped else {}
    hosted = msgspec.structs.replace(there.hosted, dropped=names, dropped_id=dropped)
    return BrokerSource(address=there.address, hosted=hosted)


def rebuilt(*statuses: PartitionStatus, dropped: int = 0) -> RebuiltSubject:
    (subject,) = plan_rebuild([of(*statuses, dropped=dropped)]).subjects
    return subject


def parents(subject: RebuiltSubject) -> dict[int, tuple[int, ...]]:
    return {int(row.partition.partition_id): row.partition.parents for row in subject.partitions}


@pytest.mark.parametrize("sealed", [False, True])
def test_hidden_subject_is_given_up_when_nothing_before_it_was_dropped(sealed):
    """Also one whose publication had begun to seal it: its rows were made of messages that are
    there.
    """
    hidden = [msgspec.structs.replace(each, state=SEALED if sealed else OPEN) for each in HIDDEN]
    subject = rebuilt(*OLD, *hidden, *NEW)
    assert states(subject) == {1: SEALED, 2: SEALED, 3: EXPIRED, 4: EXPIRED, 5: OPEN, 6: OPEN}
    assert parents(subject) == {1: (), 2: (), 3: (), 4: (), 5: (1,), 6: (2,)}
    assert subject.operation is None
    assert subject.fences == []
    assert subject.canceled_operation is not None
    assert subject.canceled_operation.steps.keys() == {3, 4}


def test_cut_is_done_where_it_had_sealed_and_given_up_elsewhere():
    """As any operation: each logical partition has one open partition."""
    subject = rebuilt(OLD[0], status(2, 512, 1024), *HIDDEN, *NEW_EMPTY)
    assert subject.operation is None
    assert states(subject) == {1: SEALED, 2: OPEN, 3: EXPIRED, 4: EXPIRED, 5: OPEN, 6: EXPIRED}


def test_rows_of_a_publication_stay_when_brokers_have_dropped_what_they_replace():
    """What is left of it is dropped, too, whether all or a part of it is gone."""
    shown = [msgspec.structs.replace(each, state=SEALED) for each in HIDDEN]
    for old in ((), OLD[1:]):
        cluster = plan_rebuild([of(*old, *shown, *NEW, dropped=2)])
        (subject,) = cluster.subjects
        assert not subject.deleting
        left = dict.fromkeys([2][: len(old)], EXPIRED)
        assert states(subject) == {3: SEALED, 4: SEALED, 5: OPEN, 6: OPEN} | left
        assert {number: parents(subject)[number] for number in (3, 4, 5, 6)} == {
            3: (),
            4: (),
            5: (3,),
            6: (4,),
        }
        rows = Rows()
        rows.report("g1")
        rows.run(store_rebuilt, cluster, route_version=1_000)
        pending = rows.run(pending_removals, limit=10)
        assert [(each.partition_id, each.last_id) for each in pending] == [
            (number, 2) for number in left
        ]


def test_hidden_subject_that_was_deleted_is_missed_by_no_one():
    """Its partitions are facts of those behind it for ever; a parent with messages still has to be
    named.
    """
    subject = rebuilt(*OLD, *NEW)
    assert states(subject) == {1: SEALED, 2: SEALED, 5: OPEN, 6: OPEN}
    assert parents(subject) == {1: (), 2: (), 5: (1,), 6: (2,)}
    with pytest.raises(InvalidRequestError, match="continues partition 1"):
        rebuilt(OLD[1], *HIDDEN, *NEW)
