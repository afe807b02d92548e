"""Settings of a subject change in the transaction that changes its route, and are read back from
the newest partitions.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.subjects import find_subject, read_route
from keylane.metaserver.groups.sessions import join_group
from keylane.metaserver.operations.journal import read_operation
from keylane.metaserver.sql.schema import groups
from keylane.protocol.control import Join, Retention
from keylane.protocol.errors import InvalidRequestError, Reason
from keylane.protocol.limits import MESSAGE_BYTES_MAX
from keylane.protocol.operations import OperationKind, Reshape, SetSubject
from keylane.protocol.routing import OrderStrategy
from support.raising import raises
from support.sql.kept_by_brokers import rebuilt, status
from support.sql.rows import Rows

BEST_TRIED, STRICT = OrderStrategy.BEST_TRIED, OrderStrategy.STRICT


def setting(**settings: Any) -> SetSubject:
    return SetSubject(subject="s", **settings)


@pytest.fixture
def rows() -> Rows:
    rows = Rows()
    rows.report("g1", "g2")
    rows.create("s", 2)
    return rows


def test_settings_change_with_the_route_and_not_before(rows: Rows):
    before = rows.run(read_route, "s")
    ((operation_id, planned),) = rows.begin(setting(order_strategy=BEST_TRIED))
    assert len(planned.plan.sealed) == len(planned.plan.children) == 2
    operation = rows.run(read_operation, operation_id)
    assert (operation.order_strategy, operation.retention) == (BEST_TRIED, Retention.ACKED)
    assert rows.run(read_route, "s", order_strategy=STRICT) == before
    rows.drive(operation_id)
    after = rows.run(read_route, "s", order_strategy=BEST_TRIED)
    assert after.version == before.version + 1
    old = {partition.partition_id for partition in before.partitions}
    assert old.isdisjoint(partition.partition_id for partition in after.open_partitions())
    with raises(Reason.ORDER_STRATEGY):
        rows.run(read_route, "s", order_strategy=STRICT)


def test_settings_that_the_subject_has_change_nothing(rows: Rows):
    ((operation_id, planned),) = rows.begin(
        setting(order_strategy=STRICT, retention=Retention.ACKED)
    )
    assert (operation_id, planned.plan.sealed) == (0, ())


def test_change_of_partitions_of_the_kind_is_refused(rows: Rows):
    with pytest.raises(InvalidRequestError, match="settings are changed with"):
        rows.begin(Reshape(kind=OperationKind.SET, subject="s"))


@pytest.mark.parametrize("given", ["without_source", "accept_loss"])
@pytest.mark.parametrize("kind", [SetSubject, Reshape])
def test_loss_of_a_broker_group_is_accepted_by_no_change_of_one_subject(rows: Rows, kind, given):
    """Who administers one subject decides nothing about the others that the group has."""
    asked: dict[str, Any] = {"subject": "s", "broker_group": "g2", given: True}
    if kind is Reshape:
        asked |= {"kind": OperationKind.RESIZE, "partitions": 3}
    else:
        asked |= {"retention": Retention.TIME}
    with pytest.raises(InvalidRequestError, match="require an evacuation"):
        rows.begin(kind(**asked))


def test_static_subject_keeps_its_queues(rows: Rows):
    rows.create("q", 3, static=True)
    ask = SetSubject(subject="q", retention=Retention.TIME)
    ((operation_id, _),) = rows.begin(ask)
    assert rows.drive(operation_id) is None
    queues = [partition.queue for partition in rows.run(read_route, "q").open_partitions()]
    assert queues == [0, 1, 2]
    starts = [partition.logic_start for partition in rows.run(read_route, "q").open_partitions()]
    assert starts == [100, 100, 100]


def test_groups_are_told_again_when_retention_waits_for_them_from_now_on(rows: Rows):
    ((operation_id, _),) = rows.begin(setting(retention=Retention.TIME))
    rows.drive(operation_id)
    rows.run(join_group, Join(subject="s", group="g", session="a" * 32), sessions_max=10)
    rows.run(lambda connection: connection.execute(sa.update(groups).values(told=True)))
    ((operation_id, _),) = rows.begin(setting(retention=Retention.ACKED))
    rows.drive(operation_id)
    told = rows.run(lambda connection: connection.execute(sa.select(groups.c.told)).scalars().all())
    assert told == [False]
    row = rows.run(find_subject, "s")
    assert row.retention is Retention.ACKED


def test_limit_of_a_message_reaches_the_route_with_the_partitions(rows: Rows):
    ((operation_id, planned),) = rows.begin(setting(message_bytes_max=4_096))
    assert len(planned.plan.sealed) == 2
    assert rows.run(read_operation, operation_id).message_bytes_max == 4_096
    assert rows.run(read_route, "s").message_bytes_max == MESSAGE_BYTES_MAX
    rows.drive(operation_id)
    assert rows.run(read_route, "s").message_bytes_max == 4_096
    ((operation_id, planned),) = rows.begin(
        setting(message_bytes_max=4_096, retention=Retention.ACKED)
    )
    assert (operation_id, planned.plan.sealed) == (0, ())
    ((operation_id, _),) = rows.begin(setting(retention=Retention.TIME))
    rows.drive(operation_id)
    assert rows.run(find_subject, "s").message_bytes_max == 4_096


def test_rebuild_takes_the_limit_of_the_newest_partitions():
    old, new = {"sealed": True}, {"message_bytes_max": 2_048}
    subject = rebuilt(
        status(1, 0, 512, **old),
        status(2, 512, 1024, **old),
        status(3, 0, 512, parents=(1,), **new),
        status(4, 512, 1024, parents=(2,), **new),
    )
    assert subject.message_bytes_max == 2_048
    with pytest.raises(InvalidRequestError, match="agree on a message size limit"):
        rebuilt(status(1, 0, 512), status(2, 512, 1024, **new))


def test_rebuild_takes_the_settings_of_the_newest_partitions():
    subject = rebuilt(
        status(1, 0, 512, sealed=True),
        status(2, 512, 1024, sealed=True),
        status(3, 0, 512, parents=(1,), strategy=BEST_TRIED),
        status(4, 512, 1024, parents=(2,), strategy=BEST_TRIED),
    )
    assert subject.order_strategy is BEST_TRIED


def test_rebuild_leaves_a_change_that_was_not_begun_to_be_sealed_undone():
    subject = rebuilt(
        status(1, 0, 512),
        status(2, 512, 1024),
        status(3, 0, 512, parents=(1,), strategy=BEST_TRIED, messages=0),
        status(4, 512, 1024, parents=(2,), strategy=BEST_TRIED, messages=0),
    )
    assert subject.order_strategy is STRICT
    with pytest.raises(InvalidRequestError, match="agree on an order strategy"):
        rebuilt(status(1, 0, 512), status(2, 512, 1024, strategy=BEST_TRIED))


def test_rebuild_takes_a_change_that_was_cut_short_as_not_made():
    """The operator makes it again, and `meta verify` shows the partition that it has changed."""
    subject = rebuilt(
        status(1, 0, 512, sealed=True),
        status(2, 512, 1024),
        status(3, 0, 512, parents=(1,), strategy=BEST_TRIED, messages=0),
        status(4, 512, 1024, parents=(2,), strategy=BEST_TRIED, messages=0),
    )
    assert subject.order_strategy is STRICT
    assert subject.canceled_operation is not None
