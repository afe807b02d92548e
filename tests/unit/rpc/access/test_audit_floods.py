"""Audit lines for refusals and reads are limited per kind, host and server; suppressed ones are
counted.
"""

from __future__ import annotations

import logging

import pytest

from keylane.protocol.errors import InvalidRequestError, Reason
from keylane.rpc.access.audit import audit_log
from keylane.rpc.access.audit_events import AuditBuffer
from keylane.rpc.access.caller import AccessTarget, Caller
from keylane.rpc.access.guard import READS_PER_KIND, REFUSALS_PER_KIND, Guard


class ToldClock:
    """A clock that the test sets."""

    now_ms = 1_000

    def boot_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, audit_log.name)
    return lambda: [record.fields for record in caplog.records]


def test_line_about_a_handshake_says_why_it_failed(lines):
    """In SQL too; without a caller's bytes, as the texts of other refusals may have."""
    clock, buffer = ToldClock(), AuditBuffer("g1")
    guard = Guard(None, None, clock=clock, on_audit=buffer.add)
    guard.record_refusal(
        "10.0.0.1", "TLS handshake", InvalidRequestError(Reason.HANDSHAKE, "no", problem="ended")
    )
    guard.record_refusal("10.0.0.1", "HTTP request", InvalidRequestError("bytes of the caller"))
    assert [line.get("detail") for line in lines()] == ["ended", None]
    assert [event.detail for event in buffer.pop_oldest()] == ["ended", ""]


def test_flood_of_handshakes_writes_few_lines_and_says_what_is_left_out(lines):
    """In SQL too, where a flood would push out what was done before."""
    clock, buffer = ToldClock(), AuditBuffer("g1")
    guard = Guard(None, None, clock=clock, on_audit=buffer.add)
    for _ in range(50_000):
        guard.record_refusal(
            "10.0.0.1", "TLS handshake", InvalidRequestError(Reason.HANDSHAKE, "no")
        )
    assert len(lines()) == REFUSALS_PER_KIND.burst
    assert [event.times for event in buffer.pop_oldest()] == [REFUSALS_PER_KIND.burst]
    assert guard.refusals.left_out == 50_000 - REFUSALS_PER_KIND.burst
    clock.now_ms += 1_500
    guard.record_refusal("10.0.0.1", "TLS handshake", InvalidRequestError(Reason.HANDSHAKE, "no"))
    assert lines()[-1]["detail"] == f"{50_000 - REFUSALS_PER_KIND.burst} more were refused before"


def test_flood_of_reads_writes_few_lines_and_hides_no_other_read(lines):
    """Otherwise reads by one caller would push all other events out of the database."""
    clock, buffer = ToldClock(), AuditBuffer("g1")
    guard = Guard(None, None, clock=clock, on_audit=buffer.add)
    shop, did = Caller("shop", ()), "GET /v1/subjects/{subject}/messages"
    for _ in range(5_000):
        guard.record_read(shop, "10.0.0.1", did, AccessTarget("orders"), "")
    assert len(lines()) == len(buffer.pop_oldest()) == READS_PER_KIND.burst
    guard.record_read(shop, "10.0.0.1", did, AccessTarget("secrets"), "id 7")
    assert (lines()[-1]["subject"], lines()[-1]["detail"]) == ("secrets", "id 7")
    clock.now_ms += 61_000
    guard.record_read(shop, "10.0.0.1", did, AccessTarget("orders"), "")
    left_out = 5_000 - READS_PER_KIND.burst
    assert lines()[-1]["detail"] == f"{left_out} more were done before"
    assert guard.reads.left_out == left_out
