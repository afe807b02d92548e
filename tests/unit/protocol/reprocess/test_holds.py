"""Holds on the wire: limits of what is asked."""

from __future__ import annotations

import msgspec
import pytest

from keylane.protocol.ids import MAX_I64
from keylane.protocol.reprocess.holds import HOLD_TTL_MS_MAX, SetHold


@pytest.mark.parametrize(
    "given",
    [
        {"job": "backfill"},
        {"job": "backfill", "ttl_ms": -1},
        {"job": "backfill", "ttl_ms": HOLD_TTL_MS_MAX + 1},
        {"job": "backfill", "ttl_ms": 1, "from_offset": -1},
        {"job": "backfill", "ttl_ms": 1, "from_offset": MAX_I64 + 1},
        {"ttl_ms": 1},
    ],
)
def test_hold_is_refused_when_a_field_is_missing_or_out_of_range(given):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(given, SetHold)


def test_hold_is_ended_by_a_ttl_of_0():
    assert msgspec.convert({"job": "backfill", "ttl_ms": 0}, SetHold).from_offset == 0
