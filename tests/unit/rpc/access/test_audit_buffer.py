"""The buffer of audit events is bounded and ordered, and counts equal refusals as one event."""

from __future__ import annotations

from typing import Any

from keylane.protocol.http.access import EVENTS_MAX, AuditEvent
from keylane.rpc.access.audit_events import WAITING_MAX, AuditBuffer


def event(**changes: Any) -> AuditEvent:
    given = {
        "at_ms": 1,
        "who": "shop",
        "remote": "10.0.0.1",
        "did": "POST /v1/subjects",
        "subject": "s",
        "group": "",
        "outcome": "refused",
        "code": 1351,
    }
    return AuditEvent(**(given | changes))


def test_same_refusal_is_counted_and_what_was_done_is_listed_each_time():
    buffer = AuditBuffer("g1")
    for at_ms in range(1_000):
        buffer.add(event(at_ms=at_ms))
    buffer.add(event(who="other"))
    for _ in range(3):
        buffer.add(event(outcome="done", code=0))
    taken = buffer.pop_oldest()
    assert [each.times for each in taken] == [1_000, 1, 1, 1, 1]
    assert {each.server for each in taken} == {"g1"}
    assert not buffer.pop_oldest()


def test_events_without_room_are_counted_as_lost():
    buffer = AuditBuffer("g1")
    for number in range(WAITING_MAX + 7):
        buffer.add(event(who=f"p{number}"))
    assert (len(buffer), buffer.dropped_count) == (WAITING_MAX, 7)


def test_events_that_were_not_stored_come_first_again():
    buffer = AuditBuffer("g1")
    for number in range(EVENTS_MAX + 10):
        buffer.add(event(outcome="done", who=f"p{number}"))
    first = buffer.pop_oldest()
    buffer.requeue(first)
    buffer.requeue([])
    assert buffer.pop_oldest() == first
    assert len(buffer.pop_oldest()) == 10
    buffer.requeue([event(outcome="done")] * (WAITING_MAX + 3))
    assert (len(buffer), buffer.dropped_count) == (WAITING_MAX, 3)
