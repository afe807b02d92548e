"""Receipts of scheduled messages as JSON, as brokers answer with them."""

from __future__ import annotations

import msgspec

from keylane.protocol.scheduled.receipt import (
    CanceledScheduled,
    CancelOutcome,
    ScheduledList,
    ScheduledReceipt,
)

RECEIPT = ScheduledReceipt(
    scheduled_id="0a", subject="s", broker_group="g1", deliver_at_ms=17, durable="fsync"
)


def test_receipts_and_outcomes_are_read_back_from_json():
    for answer in (
        ScheduledList(receipts=[RECEIPT]),
        *(CanceledScheduled(outcome=outcome) for outcome in CancelOutcome),
    ):
        assert msgspec.json.decode(msgspec.json.encode(answer), type=type(answer)) == answer
    assert msgspec.json.encode(CanceledScheduled(outcome=CancelOutcome.CANCELED)) == (
        b'{"outcome":"canceled"}'
    )
