"""What the log says of a full disk."""

from __future__ import annotations

import logging

from keylane.broker.retention.disk_notes import QUIET_MS, DiskNotes
from sim.machines.clock import ManualClock


def texts(caplog):
    return [record.getMessage().split(":")[0] for record in caplog.records]


def test_refusal_and_its_end_are_told_once(caplog):
    caplog.set_level(logging.WARNING, "keylane.broker")
    notes = DiskNotes(ManualClock())
    for reason in ("", "91 %", "92 %", "", ""):
        notes.refusing(reason)
    assert texts(caplog) == ["messages are refused", "messages are taken again"]


def test_lines_stay_few_when_the_disk_crosses_the_limit_at_every_check(caplog):
    caplog.set_level(logging.WARNING, "keylane.broker")
    clock = ManualClock()
    notes = DiskNotes(clock)
    for _ in range(360):
        notes.refusing("91 %")
        notes.refusing("")
        notes.removed_early(91, 7)
        clock.advance(10_000)
    checks = 360 * 10_000 // QUIET_MS
    assert len(caplog.records) == 3 * checks
