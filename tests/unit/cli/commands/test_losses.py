"""What the command line says of messages that an accepted loss gives up."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.admin import GroupDescription
from keylane.cli.commands.group_description import _show_given_up
from keylane.cli.commands.operations import _copies_lines, _show_views
from keylane.protocol.control import GivenUpPartition
from keylane.protocol.membership.views import BrokerView
from keylane.protocol.operations import (
    GroupLoss,
    LossView,
    OperationKind,
    OperationState,
    OperationView,
)
from keylane.protocol.routing import ConsumeStrategy


def loss(partition_id: int, end_offset: int | None, **messages_max: int | None) -> LossView:
    return LossView(
        partition_id=partition_id,
        end_offset=end_offset,
        unread_by=tuple(messages_max),
        losses=tuple(
            GroupLoss(group=group, messages_max=most) for group, most in messages_max.items()
        ),
    )


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, on one line."""
    return " ".join(capsys.readouterr().out.split())


def test_copies_are_named_before_the_loss_of_a_folder_is_accepted():
    """They have everything that was acked, and would be given up with it."""
    brokers = [
        BrokerView(broker_group=group, address="h:1", available=False, silent_ms=9, folders=folders)
        for group, folders in (("g1", 3), ("g2", 1))
    ]
    (line,) = _copies_lines(brokers, "g1")
    assert line.startswith("Acks waited for 2 copies of the data folder of g1")
    assert line.endswith("keylane broker promote DIR")
    assert _copies_lines(brokers, "g2") == []


def test_plan_says_a_number_for_each_group_when_a_loss_is_accepted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = OperationView(
        operation_id=0,
        subject="orders",
        kind=OperationKind.EVACUATE,
        state=OperationState.PLAN,
        sealed=(3, 4),
        children=(),
        losses=(loss(3, 100, paid=1, ship=100), loss(4, None, paid=None, late=None)),
    )
    _show_views([plan], planned=True)
    text = shown(capsys)
    assert (
        "partition 3 of orders would be given up: ends at 100; not read to its end by "
        "paid (at most 1 message), ship (at most 100 messages)"
    ) in text
    assert "partition 4 of orders would be given up: its end is not known; not read" in text
    assert (
        "paid of orders would lose at most 1 message, and an unknown number on 1 partition" in text
    )
    assert "ship of orders would lose at most 100 messages" in text
    assert "late of orders would lose an unknown number of messages" in text


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((7, 1), "the loss of 2 partitions that the group had not read to the end: at most 8 m"),
        ((1, None), "at most 1 message, and an unknown number on 1 partition; --all shows each"),
        ((None, None), "not read to the end: an unknown number of messages; --all shows each"),
    ],
)
def test_description_says_a_number_when_a_group_has_lost_partitions(
    capsys: pytest.CaptureFixture[str], numbers: tuple[int | None, ...], told: str
) -> None:
    given_up: Any = tuple(
        GivenUpPartition(
            partition_id=number, name=f"orders.p{number}", broker_group="g2", messages_max=most
        )
        for number, most in enumerate(numbers)
    )
    group = GroupDescription(
        subject="orders",
        group="paid",
        strategy=ConsumeStrategy.EXCLUSIVE,
        sessions=0,
        lag=None,
        partitions=(),
        given_up=given_up,
    )
    _show_given_up(group, all_partitions=False)
    assert told in shown(capsys)
    _show_given_up(group, all_partitions=True)
    text = shown(capsys)
    assert "--all" not in text
    for number in range(len(numbers)):
        assert f"partition {number} (orders.p{number}) was lost with broker group g2: " in text
