"""Each of the thirteen checks finds its own fault and no other."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from keylane.metaserver.cluster.rows import SubjectRow
from keylane.metaserver.verify.checks import (
    CHECKS,
    IDLE_MS_MAX,
    VIOLATIONS_MAX,
    BrokerAnswer,
    BrokerRow,
    GroupRow,
    OperationRow,
    PartitionView,
    SqlView,
    Views,
    verify,
)
from keylane.protocol.control import (
    GroupStatus,
    HostPartition,
    PartitionStatus,
    PartitionStatusList,
    Retention,
)
from keylane.protocol.operations import OperationState, StepAction
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState

OPEN, SEALED = PartitionState.OPEN, PartitionState.SEALED
BEST = OrderStrategy.BEST_TRIED
END = 10
"""Of the sealed parent."""


def part(number: int, start: int, end: int, group: str, **more) -> Partition:
    facts = {
        "partition_id": number,
        "name": f"s.p{number - 1}",
        "queue": number - 1,
        "range_start": start,
        "range_end": end,
        "broker_group": group,
        "state": OPEN,
        "address": f"{group}:1",
    }
    return Partition(**(facts | more))


PARTS = (
    part(1, 0, 512, "g1", state=SEALED),
    part(2, 512, 1024, "g2"),
    part(3, 0, 256, "g1", parents=(1,)),
    part(4, 256, 512, "g2", parents=(1,)),
)
"""A subject of two partitions, the first of which was split."""


class HealthyCluster:
    """A healthy cluster, to be damaged in one place."""

    def __init__(self) -> None:
        self.subject = SubjectRow(
            subject_id=1,
            name="s",
            order_strategy=BEST,
            partitions_wanted=2,
            partitions_named=4,
            route_version=3,
        )
        self.rows = {
            partition.partition_id: PartitionView(
                subject_id=1,
                partition=partition,
                end_offset=END if partition.state is SEALED else None,
            )
            for partition in PARTS
        }
        self.group = GroupRow(
            group_id=1,
            subject_id=1,
            name="g",
            last_token=7,
            route_version=3,
            tokens={1: 1, 2: 2, 3: 6, 4: 7},
            drained_ids={1},
            announced_ids={1, 2, 3, 4},
        )
        self.operations: list[OperationRow] = []
        self.refused: list[BrokerRow] = []
        self.hosted: dict[str, list[PartitionStatus]] = {"g1": [], "g2": []}
        for partition in PARTS:
            group = GroupStatus(
                group="g",
                token=self.group.tokens[partition.partition_id],
                cursor=END if partition.state is SEALED else 4,
                acked_above=1 if partition.state is OPEN else 0,
                lag=0,
            )
            self.hosted[partition.broker_group].append(
                PartitionStatus(
                    partition_id=partition.partition_id,
                    subject="s",
                    name=partition.name,
                    state=partition.state,
                    first_offset=0,
                    next_offset=END,
                    groups=(group,),
                    facts=HostPartition(
                        subject="s",
                        partition=msgspec.structs.replace(partition, address=None, state=OPEN),
                        order_strategy=BEST,
                        partitions_wanted=2,
                    ),
                )
            )
        self.ids = {"g1": "id1", "g2": "id2"}
        self.answered_ids = dict(self.ids)
        self.silent: set[str] = set()

    def row(self, number: int, **changes) -> None:
        """Change a partition's row: the row's own fields, or those of the partition that clients
        see.
        """
        row = self.rows[number]
        mine = {key: changes.pop(key) for key in ("end_offset", "abandoned") if key in changes}
        partition = msgspec.structs.replace(row.partition, **changes)
        self.rows[number] = replace(row, partition=partition, **mine)

    def status(self, number: int, **changes) -> None:
        """Change the broker's status of a partition."""
        for statuses in self.hosted.values():
            for place, status in enumerate(statuses):
                if status.partition_id == number:
                    statuses[place] = msgspec.structs.replace(status, **changes)

    def at_group(self, number: int, **changes) -> None:
        """Change the broker's status of the group on a partition."""
        for statuses in self.hosted.values():
            for status in statuses:
                if status.partition_id == number:
                    group = msgspec.structs.replace(status.groups[0], **changes)
                    self.status(number, groups=(group,))
                    return

    def views(self) -> Views:
        sql = SqlView(
            subjects={1: self.subject},
            partitions=self.rows,
            groups=[self.group],
            operations=self.operations,
            brokers=[
                BrokerRow(broker_group=name, broker_id=self.ids[name], address=f"{name}:1")
                for name in self.hosted
            ],
            refused=self.refused,
        )
        answers = [
            BrokerAnswer(
                broker_group=name,
                address=f"{name}:1",
                hosted=None
                if name in self.silent
                else PartitionStatusList(
                    broker_group=name, partitions=statuses, broker_id=self.answered_ids[name]
                ),
                problem="no answer" if name in self.silent else "",
            )
            for name, statuses in self.hosted.items()
        ]
        return Views(before=sql, answers=answers, after=sql)


def operation(**changes) -> OperationRow:
    facts = {
        "operation_id": 1,
        "subject_id": 1,
        "state": OperationState.SEAL,
        "running": True,
        "idle_ms": -1_000,
    }
    return OperationRow(**(facts | changes))


def hole(world: HealthyCluster) -> None:
    world.subject = replace(world.subject, partitions_named=4)
    world.row(2, range_start=600)
    facts = world.hosted["g2"][0].facts
    narrow = msgspec.structs.replace(facts.partition, range_start=600)
    world.status(2, facts=msgspec.structs.replace(facts, partition=narrow))


def overlap(world: HealthyCluster) -> None:
    world.row(2, range_start=400)
    facts = world.hosted["g2"][0].facts
    wide = msgspec.structs.replace(facts.partition, range_start=400)
    world.status(2, facts=msgspec.structs.replace(facts, partition=wide))


def unknown_parent(world: HealthyCluster) -> None:
    world.row(4, parents=(1, 99))
    facts = world.hosted["g2"][1].facts
    lineage = msgspec.structs.replace(facts.partition, parents=(1, 99))
    world.status(4, facts=msgspec.structs.replace(facts, partition=lineage))


def not_hosted(world: HealthyCluster) -> None:
    world.hosted["g2"] = world.hosted["g2"][:1]


def other_strategy(world: HealthyCluster) -> None:
    facts = world.hosted["g1"][1].facts
    other = msgspec.structs.replace(facts, order_strategy=OrderStrategy.STRICT)
    world.status(3, facts=other)


def other_range(world: HealthyCluster) -> None:
    facts = world.hosted["g1"][1].facts
    other = msgspec.structs.replace(facts.partition, range_end=255)
    world.status(3, facts=msgspec.structs.replace(facts, partition=other))


def foreign(world: HealthyCluster) -> None:
    strange = msgspec.structs.replace(world.hosted["g1"][0], partition_id=99, groups=())
    world.hosted["g1"].append(strange)


def copied_partition(world: HealthyCluster) -> None:
    world.hosted["g2"].append(world.hosted["g1"][0])


def copied_folder(world: HealthyCluster) -> None:
    world.refused.append(BrokerRow(broker_group="g1", broker_id="id1", address="g1:2"))


def exchanged_folder(world: HealthyCluster) -> None:
    world.answered_ids["g1"] = "another"


def one_folder_twice(world: HealthyCluster) -> None:
    world.ids["g2"] = world.answered_ids["g2"] = "id1"


def open_and_sealed(world: HealthyCluster) -> None:
    world.status(2, state=SEALED)


def drained_before_its_parent(world: HealthyCluster) -> None:
    """Partition 3 is sealed and empty as well, and the group has drained it alone."""
    world.row(3, state=SEALED, end_offset=0)
    world.status(3, state=SEALED, next_offset=0)
    world.at_group(3, cursor=0, acked_above=0)
    world.rows[5] = PartitionView(subject_id=1, partition=AFTER)
    facts = HostPartition(subject="s", partition=msgspec.structs.replace(AFTER, address=None))
    after = msgspec.structs.replace(
        world.hosted["g1"][1], partition_id=5, name=AFTER.name, state=OPEN, groups=(), facts=facts
    )
    world.hosted["g1"].append(after)
    world.subject = replace(world.subject, partitions_named=5)
    world.group = replace(world.group, drained_ids={3})


def planned_without_operation(world: HealthyCluster) -> None:
    world.subject = replace(world.subject, partitions_named=5)
    world.rows[5] = PartitionView(subject_id=1, partition=PLANNED)


def unknown_broker_group_error(world: HealthyCluster) -> None:
    (group,) = world.hosted["g1"][1].groups
    world.status(3, groups=(group, msgspec.structs.replace(group, group="stranger")))


def granted_and_not_heard(world: HealthyCluster) -> None:
    world.group = replace(world.group, announced_ids={1, 2, 4})
    world.status(3, groups=())


PLANNED = part(5, 0, 10, "g1", state=PartitionState.PLANNED)
AFTER = part(5, 0, 256, "g1", parents=(3,))
SPOILT = [
    ("route-covers-once", hole),
    ("route-covers-once", overlap),
    ("parents-overlap", unknown_parent),
    ("hosted-as-known", not_hosted),
    ("hosted-as-known", other_strategy),
    ("hosted-as-known", other_range),
    ("hosted-as-known", lambda world: world.silent.add("g2")),
    ("nothing-foreign", foreign),
    ("nothing-foreign", copied_partition),
    ("seals-agree", open_and_sealed),
    ("seals-agree", lambda world: world.row(1, end_offset=END - 1)),
    ("seals-agree", lambda world: world.row(1, end_offset=None)),
    ("seals-agree", lambda world: world.status(1, state=OPEN)),
    ("one-broker-a-group", copied_folder),
    ("one-broker-a-group", exchanged_folder),
    ("one-broker-a-group", one_folder_twice),
    ("tokens-above-fences", lambda world: world.at_group(3, token=8)),
    ("tokens-above-fences", unknown_broker_group_error),
    (
        "tokens-above-fences",
        lambda world: setattr(world, "group", replace(world.group, last_token=6)),
    ),
    ("cursors-in-range", lambda world: world.at_group(2, cursor=END + 1)),
    ("cursors-in-range", lambda world: world.at_group(2, acked_above=END)),
    ("cursors-in-range", lambda world: world.status(2, first_offset=END + 1)),
    ("drained-to-the-end", lambda world: world.at_group(1, cursor=END - 1)),
    (
        "drained-to-the-end",
        lambda world: setattr(world, "group", replace(world.group, drained_ids={1, 2})),
    ),
    ("drained-to-the-end", drained_before_its_parent),
    (
        "versions-rise",
        lambda world: setattr(world, "group", replace(world.group, route_version=4)),
    ),
    (
        "versions-rise",
        lambda world: setattr(world, "subject", replace(world.subject, partitions_named=3)),
    ),
    ("operations-move", lambda world: world.operations.append(operation(idle_ms=IDLE_MS_MAX + 1))),
    ("operations-move", lambda world: world.operations.append(operation(problem="g2 is silent"))),
    ("operations-move", lambda world: world.operations.append(operation(running=False))),
    ("operations-move", planned_without_operation),
    ("groups-heard", lambda world: world.status(3, groups=())),
    ("groups-heard", granted_and_not_heard),
    ("groups-heard", lambda world: world.status(2, groups_told=False)),
]


def broken(world: HealthyCluster) -> dict[str, list[str]]:
    return {
        check.name: check.violations for check in verify(world.views()).checks if check.violations
    }


def test_healthy_cluster_passes_every_check() -> None:
    """All thirteen hold, also for a subject that was resized and drained."""
    verification = verify(HealthyCluster().views())
    assert broken(HealthyCluster()) == {}
    assert verification.ok
    assert [check.code for check in verification.checks] == [
        f"V{number:02}" for number in range(1, 14)
    ]
    assert len({check.name for check in verification.checks}) == 13


@pytest.mark.parametrize(("name", "spoil"), SPOILT)
def test_fault_is_found_under_its_name(name: str, spoil) -> None:
    """One fault is reported by its own check and by no other."""
    world = HealthyCluster()
    spoil(world)
    assert list(broken(world)) == [name]


def test_open_parent_of_an_open_child_is_found() -> None:
    """A child that is open beside its parent, and a route with two open partitions, are two
    faults.
    """
    world = HealthyCluster()
    world.row(1, state=OPEN, end_offset=None)
    world.status(1, state=OPEN)
    world.group = replace(world.group, drained_ids=())
    assert list(broken(world)) == ["route-covers-once", "children-after-parents"]
    assert len(broken(world)["children-after-parents"]) == 2


def test_every_check_has_a_fault_here() -> None:
    """Every check is tested."""
    assert {name for name, _ in SPOILT} | {"children-after-parents"} == {
        check.name for check in CHECKS
    }


def test_changes_between_the_two_reads_are_no_fault() -> None:
    """A seal, a grant and a drain between the two views of SQL are not reported."""
    before, after = HealthyCluster(), HealthyCluster()
    sealing = {2: StepAction.SEAL}
    before.operations.append(operation(steps=sealing))
    before.status(2, state=SEALED)
    before.at_group(3, token=9)
    after.group = replace(after.group, last_token=9, tokens=dict(after.group.tokens) | {3: 9})
    views = Views(
        before=before.views().before, answers=before.views().answers, after=after.views().after
    )
    assert verify(views).ok


def test_folder_that_is_replaced_between_the_two_reads_is_no_fault() -> None:
    """The broker answers with the new one."""
    world = HealthyCluster()
    before = world.views()
    world.ids["g1"] = world.answered_ids["g1"] = "new"
    assert verify(replace(world.views(), before=before.before)).ok


def test_reset_between_the_two_reads_is_no_fault() -> None:
    """A reset lowers the cursor of a drained partition; that is no fault, during the reset and
    after it.
    """
    for after_it in ((), {1}):
        before, after = HealthyCluster(), HealthyCluster()
        before.at_group(1, token=9, cursor=0)
        tokens = dict(after.group.tokens) | {1: 9}
        after.group = replace(after.group, last_token=9, tokens=tokens, drained_ids=after_it)
        views = Views(
            before=before.views().before, answers=before.views().answers, after=after.views().after
        )
        assert verify(views).ok


def test_abandoned_parent_is_no_fault() -> None:
    """An abandoned source may be open and its end unknown until its broker is back."""
    world = HealthyCluster()
    world.row(1, end_offset=None, abandoned=True)
    world.status(1, state=OPEN)
    world.group = replace(world.group, drained_ids=())
    assert broken(world) == {}


def test_undrained_parent_that_blocks_no_child_is_no_fault() -> None:
    """Drained before a parent that was abandoned, has expired, or was reset alone by an operator:
    no fault.
    """
    for how in ("abandoned", "expired", "set"):
        world = HealthyCluster()
        drained_before_its_parent(world)
        if how == "abandoned":
            world.row(1, abandoned=True)
        elif how == "expired":
            world.row(1, state=PartitionState.EXPIRED)
        else:
            tokens = dict(world.group.tokens) | {1: 8}
            world.group = replace(world.group, tokens=tokens, last_token=8)
        assert broken(world) == {}, how


def test_violations_are_cut_at_the_limit() -> None:
    """The answer for a broken cluster is bounded and says how many violations there are."""
    world = HealthyCluster()
    status = world.hosted["g1"][0]
    world.hosted["g1"] += [
        msgspec.structs.replace(status, partition_id=number, groups=())
        for number in range(100, 400)
    ]
    (failed,) = [check for check in verify(world.views()).checks if check.violations]
    assert (len(failed.violations), failed.violations_total) == (VIOLATIONS_MAX, 300)


def test_unlisted_groups_are_no_fault_when_they_need_no_messages() -> None:
    """A drained partition, a group without tokens, and one that brokers were not told, with
    retention by time, are no faults.
    """
    world = HealthyCluster()
    world.status(1, groups_told=False)
    assert broken(world) == {}
    world = HealthyCluster()
    world.group = replace(world.group, tokens={1: 1, 2: 2, 4: 7}, announced_ids={1, 2, 4})
    world.status(3, groups=())
    assert broken(world) == {}
    world = HealthyCluster()
    world.subject = replace(world.subject, retention=Retention.TIME)
    world.group = replace(world.group, announced_ids=set())
    for some in world.hosted.values():
        for item in list(some):
            timed = msgspec.structs.replace(item.facts, retention=Retention.TIME)
            groups = item.groups if item.state is SEALED else ()
            world.status(item.partition_id, groups=groups, groups_told=False, facts=timed)
    assert broken(world) == {}
