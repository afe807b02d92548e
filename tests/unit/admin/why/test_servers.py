"""The sentences about brokers and operations."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keylane.admin import BrokerList, BrokerView, OperationView
from keylane.admin.why.servers import server_causes, waiting_operation
from keylane.protocol.membership.views import RefusedBroker
from keylane.protocol.operations import OperationKind, OperationState


def test_each_problem_of_a_broker_is_named_with_its_step():
    brokers = [
        BrokerView(broker_group="g1", address="h:1", available=True, silent_ms=0),
        BrokerView(broker_group="g2", address="h:2", available=False, silent_ms=12_000),
        BrokerView(
            broker_group="g3",
            address="h:3",
            available=True,
            silent_ms=0,
            writable=False,
            problem="the disk is full",
            refusing_ms=9_000,
            folders=1,
            folders_wanted=2,
        ),
    ]
    refused = [RefusedBroker(broker_group="g1", address="h:4", problem="its folder is older")]
    found = list(server_causes(BrokerList(brokers=brokers, refused=refused)))
    assert [(name, each.code) for name, each in found] == [
        ("g2", "broker_silent"),
        ("g3", "broker_refuses"),
        ("g3", "too_few_folders"),
        ("g1", "broker_refused"),
    ]
    assert found[0][1].text == (
        "broker group g2 has been silent for 12 s: messages for its partitions wait at their "
        "producers, and nobody gets those that are stored there"
    )
    assert found[1][1].text.startswith(
        "broker group g3 has taken no messages for 9.0 s: the disk is full; "
    )
    assert found[3][1].step == "keylane broker accept g1 --dry-run"


def test_broker_whose_copies_are_in_quarantine_is_named():
    """Whether it lives or not; then its copies are not said to be too few."""
    alive = BrokerView(
        broker_group="g1",
        address="h:1",
        available=True,
        silent_ms=0,
        folders_wanted=2,
        quarantine="the database was restored from a backup",
    )
    gone = replace(alive, available=False, silent_ms=12_000)
    [(_, cause)] = server_causes(BrokerList(brokers=[alive], refused=[]))
    assert (cause.code, cause.step) == ("copies_quarantined", "keylane broker copies g1")
    assert "its set does not change: the database was restored from a backup" in cause.text
    silent, quarantined = server_causes(BrokerList(brokers=[gone], refused=[]))
    assert silent[1].text.endswith(
        "No copy takes its place: the database was restored from a backup"
    )
    assert quarantined[1].code == "copies_quarantined"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        (
            {"folders_wanted": 2},
            (
                "no copy takes the place of broker group g2: acks waited for none when it was last "
                "heard, so each may lack acked messages"
            ),
        ),
        (
            {"folders_wanted": 2, "copies": ("c1",)},
            (
                "copy c1 of broker group g2 has everything that was acked, and does not ask for its "
                "place: not running, cut off from the metaservers, or without failover"
            ),
        ),
        (
            {"copies": ("c1",), "refused_copies": {"c3": "it lacks 5 bytes", "c2": "it is new"}},
            (
                "no copy takes the place of broker group g2: copy c2 was refused, because it is new; "
                "copy c3 was refused, because it lacks 5 bytes"
            ),
        ),
        (
            {"promoted": "c1", "refused_copies": {"c2": "it is new"}},
            "copy c1 got the place of broker group g2, and serves nobody yet",
        ),
    ],
)
def test_broker_that_is_gone_is_named_with_why_no_copy_takes_its_place(
    changes: dict[str, object], text: str | None
):
    broker = BrokerView(
        broker_group="g2", address="h:2", available=False, silent_ms=12_000, folders=9, **changes
    )
    found = [cause for _, cause in server_causes(BrokerList(brokers=[broker], refused=[]))]
    assert [each.code for each in found] == [
        "broker_silent",
        *["no_take_over"] * (text is not None),
    ]
    assert text is None or found[1].text == text
    serving = replace(broker, available=True)
    assert not list(server_causes(BrokerList(brokers=[serving], refused=[])))


def test_silent_broker_that_hangs_is_to_be_ended_first():
    broker = BrokerView(broker_group="g2", address="h:2", available=False, silent_ms=12_000)
    found = BrokerList(brokers=[broker], refused=[])
    steps = [next(server_causes(found, hanging))[1].step for hanging in ({"g1"}, {"g2"})]
    assert steps == [
        "start the broker at h:2 again; keylane broker list",
        "end the process at h:2, which hangs; then start the broker again",
    ]


def test_silent_broker_without_partitions_holds_nothing_up():
    broker = BrokerView(
        broker_group="g2", address="h:2", available=False, silent_ms=12_000, has_partitions=False
    )
    [(_, cause)] = server_causes(BrokerList(brokers=[broker], refused=[]))
    assert cause.text == "broker group g2 has been silent for 12 s: no partition is on it"


def test_operation_that_waits_is_named_with_its_subject_the_time_and_the_reason():
    operation = OperationView(
        operation_id=7,
        subject="orders",
        kind=OperationKind.MOVE,
        state=OperationState.SEAL,
        sealed=(1,),
        children=(),
        problem="broker group g2 is silent",
        waiting_since_ms=60_000,
    )
    cause = waiting_operation(operation)
    assert cause.text == (
        "operation 7 (move) on orders waits since 1970-01-01T00:01:00.000+00:00: broker group g2 "
        "is silent"
    )
    assert cause.step == "keylane subject operations orders"
