"""How a shift is set: its plan first, then the cursors of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from keylane import InvalidRequestError
from keylane.admin import ResetTo
from keylane.admin.group_resets import reset_group
from keylane.errors import Reason, UnfinishedError
from keylane.protocol.progress import CursorView, GroupReset, ResetGroup
from support.raising import raises

PLAN = GroupReset(
    subject="s",
    group="g",
    cursors=[CursorView(partition_id=7, queue=0, cursor=3, logic_cursor=3, token=0, before=5)],
    dry_run=True,
)


def fields(**given: Any) -> dict[str, Any]:
    names = ("offset", "at_ms", "queue", "partition_id", "shift", "cursors")
    return dict.fromkeys(names) | {"dry_run": False, "live": False} | given


async def test_shift_is_planned_and_its_plan_is_set():
    asked: list[ResetGroup] = []

    async def call(ask: ResetGroup) -> GroupReset:
        asked.append(ask)
        return PLAN

    await reset_group(call, fields(to="shift", shift=-2, queue=0))
    assert asked == [
        ResetGroup(to=ResetTo.SHIFT, shift=-2, queue=0, dry_run=True),
        ResetGroup(to=ResetTo.CURSORS, cursors={7: 3}, queue=0),
    ]
    asked.clear()
    await reset_group(call, fields(to="shift", shift=-2, dry_run=True))
    await reset_group(call, fields(to="latest"))
    assert [ask.to for ask in asked] == [ResetTo.SHIFT, ResetTo.LATEST]
    with pytest.raises(InvalidRequestError):
        await reset_group(call, fields(to="shift", shift="two"))


async def test_unfinished_shift_names_the_cursors_that_finish_it():
    async def call(ask: ResetGroup) -> GroupReset:
        if ask.dry_run:
            return PLAN
        raise UnfinishedError(
            Reason.RESET_UNFINISHED, "of 2 partitions 1 is set", partitions=2, partitions_set=1
        )

    with raises(Reason.RESET_UNFINISHED, match=r"'cursors', cursors=\{7: 3\}") as refused:
        await reset_group(call, fields(to="shift", shift=-2))
    assert (refused.value.partitions, refused.value.partitions_set) == (2, 1)
