"""What `keylane group describe` says of a group of which no consumer is heard."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields, replace

from keylane.admin import EndedMember, GroupDescription, GroupMember, PartitionProgress
from keylane.cli.commands.group_description import _silence_line, member_lines
from keylane.protocol.routing import ConsumeStrategy

UNKNOWN: dict[str, Any] = {each.name: None for each in fields(PartitionProgress) if each.required}
GROUP = GroupDescription(
    subject="orders",
    group="audit",
    strategy=ConsumeStrategy.EXCLUSIVE,
    sessions=0,
    lag=None,
    partitions=(),
)


@pytest.mark.parametrize(
    ("silent_ms", "tokens", "told"),
    [
        (None, (), "no consumer has sent a heartbeat: none is running, or"),
        (7_900, (), "no consumer has sent a heartbeat for at least 7 s: none is running, or"),
        (
            None,
            (0, 5),
            (
                "no consumer has sent a heartbeat; the leases on 1 partition have "
                "ended: none is running"
            ),
        ),
    ],
)
def test_silence_is_told_with_what_is_known_when_no_consumer_is_heard(silent_ms, tokens, told):
    """A consumer whose handler blocks the event loop runs, and was told as 0 consumers alone."""
    parts = tuple(
        PartitionProgress(**UNKNOWN | {"partition_id": number, "token": token})
        for number, token in enumerate(tokens)
    )
    line = _silence_line(replace(GROUP, silent_ms=silent_ms, partitions=parts))
    assert line.startswith(told)
    assert line.endswith("a handler blocks the event loop of each one that is")


def member(client: str, partitions: int, **changed: Any) -> GroupMember:
    known = {"heard_ms": 2_000, "expires_in_ms": 28_000}
    return GroupMember(client=client, partitions=partitions, **known | changed)


PARTS = tuple(
    PartitionProgress(**UNKNOWN | {"partition_id": number, "token": 1}) for number in range(1, 3)
)


@pytest.mark.parametrize(
    ("members", "ended", "lines"),
    [
        ((member("a", 1), member("b", 1)), None, []),
        (
            (member("a", 1), member("b", 1), member("c", 0), member("d", 0)),
            None,
            ["4 members for 2 partitions: c, d wait"],
        ),
        ((member("a", 2), member("b", 0, suspended=True)), None, []),
        (
            (member("a", 2, heard_ms=21_500, expires_in_ms=8_500),),
            None,
            ["a was last heard 21 s ago: its leases end in 8.5 s, unless it is heard again"],
        ),
        (
            (member("a", 2),),
            EndedMember(client="b", left=False, ended_ms=61_000),
            ["b is dead: it sent no heartbeat until its leases ended 61 s ago"],
        ),
        (
            (member("a", 1), member("b", 1)),
            EndedMember(client="b", left=False, ended_ms=61_000),
            [],
        ),
        ((member("a", 2),), EndedMember(client="b", left=True, ended_ms=61_000), []),
        ((member("a", 2),), EndedMember(client="b", left=False, ended_ms=7_200_000), []),
        (
            (),
            EndedMember(client="b", left=True, ended_ms=1_500),
            ["no consumer is running: the last one, b, left 1.5 s ago"],
        ),
        (
            (),
            EndedMember(client="b", left=False),
            [
                (
                    "no consumer has sent a heartbeat; the last one, b, is dead: it sent no "
                    "heartbeat until its leases ended; the leases on 2 partitions have ended: none is running, "
                    "or a handler blocks the event loop of each one that is"
                )
            ],
        ),
    ],
)
def test_members_are_told_that_wait_are_silent_have_left_or_are_dead(members, ended, lines):
    """A client that has joined again is not dead."""
    group = replace(GROUP, sessions=len(members), members=members, ended=ended, partitions=PARTS)
    assert member_lines(group) == lines
