from keylane.admin import BrokerList, BrokerView, GroupReport, PartitionReport, SubjectSummary
from keylane.console.cluster import sum_up
from keylane.protocol.routing import OrderStrategy, PartitionState


def summary(name: str) -> SubjectSummary:
    return SubjectSummary(
        subject=name, order_strategy=OrderStrategy.STRICT, partitions=2, route_version=1
    )


def report(number: int, subject: str = "s", **changes: object) -> PartitionReport:
    fields = {
        "partition_id": number,
        "subject": subject,
        "state": PartitionState.OPEN,
        "first_offset": 10,
        "next_offset": 30,
        "groups": (GroupReport(group="g", lag=5, parked=2),),
    }
    return PartitionReport(**(fields | changes))


def brokers(*available: bool) -> BrokerList:
    return BrokerList(
        brokers=[
            BrokerView(broker_group=f"g{number}", address="h:1", available=each, silent_ms=0)
            for number, each in enumerate(available, 1)
        ],
        refused=[],
    )


def test_partitions_of_all_brokers_are_summed_up_by_subject_and_group():
    sample = sum_up([summary("s")], brokers(True, True), {"g1": [report(1)], "g2": [report(2)]})
    totals = sample.subjects["s"]
    assert (totals.stored, totals.end, totals.unknown) == (40, 60, False)
    assert (totals.groups["g"].lag, totals.groups["g"].parked) == (10, 4)
    assert totals.groups["g"].needs_help


def test_subjects_that_are_not_listed_and_expired_partitions_do_not_count():
    found = [report(1, "hidden"), report(2, state=PartitionState.EXPIRED)]
    sample = sum_up([summary("s")], brokers(True), {"g1": found})
    assert sample.subjects["s"].partitions == 0
    assert list(sample.subjects) == ["s"]


def test_figures_are_unknown_while_a_broker_does_not_answer():
    sample = sum_up([summary("s")], brokers(True, False), {"g1": [report(1)]})
    assert sample.subjects["s"].unknown
    assert sample.subjects["s"].groups["g"].unknown
    assert "g2 is silent" in sample.unknown[0]
    sample = sum_up([summary("s")], brokers(True, True), {"g1": [report(1)], "g2": "no answer"})
    assert sample.unknown == ["no answer"]


def test_figures_are_unknown_when_only_partitions_sealed_before_are_known():
    sealed = [report(number, state=PartitionState.SEALED) for number in (1, 2)]
    sample = sum_up([summary("s")], brokers(True, False), {"g1": sealed})
    assert sample.subjects["s"].unknown
    assert sample.subjects["s"].groups["g"].unknown


def test_group_with_the_largest_lag_is_first():
    found = [
        report(
            1,
            groups=(
                GroupReport(group="a", lag=1, parked=0),
                GroupReport(group="b", lag=7, parked=0),
            ),
        )
    ]
    sample = sum_up([summary("s")], brokers(True), {"g1": found})
    assert [each.group for each in sample.groups()] == ["b", "a"]


def test_of_groups_without_a_lag_those_with_parked_messages_come_first():
    idle, parked = (GroupReport(group=name, lag=0, parked=n) for name, n in (("a", 0), ("z", 3)))
    found = [report(1, groups=(idle, parked))]
    sample = sum_up([summary("s")], brokers(True), {"g1": found})
    assert [each.group for each in sample.groups()] == ["z", "a"]
