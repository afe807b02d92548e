"""Bodies of the calls about a group's settings: what decodes, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from keylane.protocol.groups import (
    CreateGroup,
    FailurePolicy,
    GroupPolicy,
    GroupSettings,
    GroupStart,
    OperatorSwitch,
    SetGroup,
    StartAt,
    SuspendGroup,
)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SetGroup, {"tries_max": 0}),
        (SetGroup, {"tries_max": 1_000_001}),
        (SetGroup, {"on_failure": "again"}),
        (SetGroup, {"backoff_first_ms": -1}),
        (SetGroup, {"backoff_max_ms": 0}),
        (CreateGroup, {"start": {"at": "newest"}}),
        (CreateGroup, {"start": {"at": "time", "at_ms": -1}}),
        (SuspendGroup, {}),
        (SuspendGroup, {"suspended": True, "client": ""}),
        (SuspendGroup, {"suspended": True, "client": "x" * 513}),
    ],
)
def test_value_out_of_its_range_is_refused(kind: type, fields: dict[str, object]):
    """Before anything is changed."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, kind)


def test_settings_come_back_from_json():
    """Every field, as a metaserver sends it."""
    settings = GroupSettings(
        subject="s",
        group="g",
        policy=GroupPolicy(on_failure=FailurePolicy.DEAD, tries_max=3),
        start=GroupStart(at=StartAt.TIME, at_ms=5),
        unstarted=(1,),
        suspended=True,
        suspended_clients=("c",),
    )
    assert msgspec.json.decode(msgspec.json.encode(settings), type=GroupSettings) == settings
    assert str(settings.start) == "1970-01-01T00:00:00.005+00:00"
    assert OperatorSwitch("off") is OperatorSwitch.OFF
