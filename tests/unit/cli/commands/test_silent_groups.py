"""What `keylane group describe` says of a group of which no consumer is heard."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields, replace

from keylane.admin import GroupDescription, PartitionProgress
from keylane.cli.commands.group_description import _silence_line
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
