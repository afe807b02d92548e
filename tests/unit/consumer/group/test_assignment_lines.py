"""The lines about a consumer's partitions and its lag."""

from __future__ import annotations

import pytest

from keylane.consumer.group.log_lines import (
    LAG_EACH_MS,
    LINE_MS_MIN,
    AssignmentLines,
    source_text,
    waiting_text,
)
from keylane.protocol.control import GroupMember, GroupView, LeaseEnd, OwnerView, PreviousOwner
from keylane.protocol.routing import Partition, PartitionState


def test_line_names_partitions_when_they_change():
    log = AssignmentLines()
    assert log.format_partitions({3, 1}, 0) == "has partitions 1, 3"
    assert log.format_partitions({1, 3}, 9_000) == ""
    assert log.format_partitions({1, 4}, 10_000) == "has partitions 1, 4; got 4; no longer has 3"
    assert log.format_partitions({1}, 20_000) == "has partition 1; no longer has 4"


def test_line_says_that_a_member_waits_when_it_has_no_partition():
    log = AssignmentLines()
    assert (
        log.format_partitions((), 0)
        == "has no partition yet; other members have them, or leases of dead ones must end"
    )
    assert log.format_partitions({2}, 5_000) == "has partition 2"
    assert (
        log.format_partitions((), 9_000)
        == "has no partition now; other members have them, or leases of dead ones must end; no longer has 2"
    )


def test_line_says_why_partitions_ended():
    log = AssignmentLines()
    assert log.format_partitions({1, 2, 3, 4}, 0)
    for partition_id, cause in ((2, "rebalance"), (3, "lease ran out"), (4, "rebalance")):
        log.note_end(partition_id, cause)
    assert log.format_partitions({1}, 5_000) == (
        "has partition 1; no longer has 2, 4 (rebalance), 3 (lease ran out)"
    )


def previous(client: str, end: LeaseEnd) -> str:
    return source_text(PreviousOwner(client=client, end=end))


def test_line_says_from_whom_partitions_came_and_why():
    log = AssignmentLines()
    log.note_start(1, source_text(None))
    log.note_start(2, source_text(None))
    assert log.format_partitions({1, 2}, 0) == "has partitions 1, 2"
    log.note_start(3, previous("vm:812", LeaseEnd.EXPIRED))
    log.note_start(4, previous("vm:813", LeaseEnd.REBALANCE))
    log.note_start(5, previous("vm:812", LeaseEnd.EXPIRED))
    log.note_start(6, source_text(None))
    assert log.format_partitions({1, 2, 3, 4, 5, 6}, 5_000) == (
        "has partitions 1, 2, 3, 4, 5, 6; got 3, 5 from vm:812, whose lease ended, "
        "4 from vm:813 (rebalance), 6"
    )
    assert log.format_partitions({1, 2, 3, 4, 5, 6, 7}, 10_000).endswith("; got 7")


def test_first_line_names_only_partitions_that_another_member_had():
    log = AssignmentLines()
    log.note_start(1, source_text(None))
    log.note_start(2, previous("vm:812", LeaseEnd.LEFT))
    assert log.format_partitions({1, 2}, 0) == (
        "has partitions 1, 2; got 2 from vm:812, which left"
    )


@pytest.mark.parametrize("end", LeaseEnd)
def test_every_end_of_a_lease_has_a_text(end):
    text = previous("vm:812", end)
    assert text.startswith("from vm:812")
    assert text != "from vm:812"


def test_line_names_few_members_when_partitions_came_from_many():
    log = AssignmentLines()
    assert log.format_partitions({1}, 0)
    for number in range(2, 8):
        log.note_start(number, previous(f"c{number}", LeaseEnd.REBALANCE))
    assert log.format_partitions(set(range(1, 8)), 5_000).endswith(
        "; got 2 from c2 (rebalance), 3 from c3 (rebalance), 4 from c4 (rebalance), "
        "5, 6, 7 from other members"
    )


def test_cause_is_that_of_the_last_end_when_a_partition_came_back():
    log = AssignmentLines()
    assert log.format_partitions({1, 2}, 0)
    log.note_end(2, "lease ran out")
    assert log.format_partitions({1}, 5_000).endswith("no longer has 2 (lease ran out)")
    assert log.format_partitions({1, 2}, 10_000) == "has partitions 1, 2; got 2"
    log.note_end(2, "suspended")
    assert log.format_partitions({1}, 15_000).endswith("no longer has 2 (suspended)")


def test_lines_of_a_rebalance_are_one_when_they_come_at_once():
    log = AssignmentLines()
    assert log.format_partitions({1}, 0)
    assert log.format_partitions({1, 2}, LINE_MS_MIN - 1) == ""
    assert log.format_partitions({1, 2, 3}, LINE_MS_MIN) == "has partitions 1, 2, 3; got 2, 3"


def test_lag_is_logged_ever_more_rarely_while_it_lasts():
    log = AssignmentLines()
    assert log.format_lag(5, 1.0, 0) == ""
    assert log.format_lag(1, 31.0, 0) == "is 1 message behind; the oldest has waited 31 s"
    assert log.format_lag(9, 40.0, LAG_EACH_MS - 1) == ""
    assert log.format_lag(9, 90.0, LAG_EACH_MS).startswith("is 9 messages behind")
    assert log.format_lag(9, 150.0, 2 * LAG_EACH_MS) == ""
    assert log.format_lag(0, 0.0, 2 * LAG_EACH_MS) == ""
    assert log.format_lag(3, 60.0, 3 * LAG_EACH_MS)
    assert log.format_lag(3, 120.0, 4 * LAG_EACH_MS)


def owner(partition_id: int, client: str | None) -> OwnerView:
    partition = Partition(
        partition_id=partition_id,
        name=f"p{partition_id}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=PartitionState.OPEN,
        address="a:1",
    )
    return OwnerView(partition=partition, token=1, client=client)


def member(client: str, partitions: int, heard_ms: int = 1_000) -> GroupMember:
    return GroupMember(
        client=client,
        partitions=partitions,
        heard_ms=heard_ms,
        expires_in_ms=30_000 - heard_ms,
    )


def test_line_names_those_who_have_the_partitions_when_a_member_waits():
    """And until when they are kept for one that is not heard."""
    group = GroupView(
        subject="orders",
        group="billing",
        sessions=3,
        owners=(owner(1, "a"), owner(2, "a"), owner(3, "b"), owner(4, None)),
        members=(member("a", 2), member("b", 1, 22_000), member("c", 0)),
    )
    assert waiting_text(group, "c") == (
        "3 members for 4 partitions: this one waits for its share; a has 1, 2; b has 3 until its lease ends in "
        "8.0 s, or it is heard"
    )


def test_line_names_few_of_many_holders_when_a_member_waits():
    clients = [f"c{number}" for number in range(6)]
    group = GroupView(
        subject="s",
        group="g",
        sessions=7,
        owners=tuple(owner(number + 1, client) for number, client in enumerate(clients)),
    )
    assert waiting_text(group, "c") == (
        "7 members for 6 partitions: this one waits; c0 has 1; c1 has 2; c2 has 3; 3 more members "
        "have others"
    )


@pytest.mark.parametrize(
    ("sessions", "owners", "text"),
    [
        (0, (None,), "it is being granted them"),
        (1, ("vm:1", None), "it is being granted them"),
        (1, ("vm:1", "vm:2"), "it is being granted them; vm:2 has 2"),
    ],
)
def test_line_of_a_member_that_is_alone_does_not_name_it_as_another(sessions, owners, text):
    """It is told of its partitions a moment later, and may not be counted yet."""
    group = GroupView(
        subject="s",
        group="g",
        sessions=sessions,
        owners=tuple(owner(number + 1, client) for number, client in enumerate(owners)),
    )
    assert waiting_text(group, "vm:1") == text
