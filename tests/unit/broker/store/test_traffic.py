"""Counts of what a broker stores and hands out."""

from __future__ import annotations

from keylane.broker.store import traffic as traffic_module
from keylane.broker.store.traffic import OTHER, SERIES_KEPT_MS, Traffic
from keylane.protocol.parked import (
    RETRIED,
    DeadLetterKey,
    FailAgain,
    Failure,
    Free,
    Park,
    Redrive,
    Shift,
)


def test_traffic_counts_messages_bytes_and_batches_by_subject():
    """Both ways, apart."""
    traffic = Traffic()
    traffic.count_stored("orders", messages=3, size_bytes=100)
    traffic.count_stored("orders", messages=2, size_bytes=50)
    traffic.count_delivered("orders", messages=3, size_bytes=100)
    stored, handed = traffic.stored["orders"], traffic.delivered["orders"]
    assert (stored.messages, stored.bytes, stored.batches) == (5, 150, 2)
    assert (handed.messages, handed.bytes, handed.batches) == (3, 100, 1)


def test_traffic_counts_further_subjects_together_when_there_are_too_many(monkeypatch):
    """So a broker's memory and its answer stay bounded."""
    monkeypatch.setattr(traffic_module, "SUBJECTS_MAX", 2)
    traffic = Traffic()
    for subject in ("a", "b", "c", "d", "a"):
        traffic.count_stored(subject, messages=1, size_bytes=1)
    assert {name: flow.messages for name, flow in traffic.stored.items()} == {
        "a": 2,
        "b": 1,
        OTHER: 2,
    }


def test_traffic_gives_the_place_of_a_deleted_subject_to_another_when_it_is_gone_for_long(
    monkeypatch,
):
    """Both ways; what is stored under a new name is counted under it."""
    monkeypatch.setattr(traffic_module, "SUBJECTS_MAX", 1)
    traffic = Traffic()
    traffic.count_stored("a", messages=1, size_bytes=1)
    traffic.count_delivered("a", messages=1, size_bytes=1)
    traffic.record_drop("a", 1_000)
    assert not traffic.due_subjects(1_000 + SERIES_KEPT_MS - 1)
    due = traffic.due_subjects(1_000 + SERIES_KEPT_MS)
    traffic.remove_series(due, hosted=[])
    assert due == {"a"}
    traffic.count_stored("b", messages=1, size_bytes=1)
    assert (set(traffic.stored), set(traffic.delivered)) == ({"b"}, set())
    assert not traffic.due_subjects(10 * SERIES_KEPT_MS)


def test_traffic_goes_on_with_the_counts_of_a_subject_when_it_is_made_anew_soon():
    """They begin at 0 only after a gap."""
    traffic = Traffic()
    traffic.count_stored("a", messages=2, size_bytes=1)
    traffic.record_drop("a", 0)
    traffic.count_stored("a", messages=1, size_bytes=1)
    traffic.remove_series(traffic.due_subjects(SERIES_KEPT_MS), hosted=["a"])
    assert traffic.stored["a"].messages == 3
    assert not traffic.due_subjects(10 * SERIES_KEPT_MS)


FAILURE = Failure("ValueError", "no", "c", 1, 3)
PARK_CHANGES = (
    Park(b"key", ((0, 2),), FAILURE),  # a key is parked
    Park(b"key", ((5, 6),)),  # and a later message of it
    Park(None, ((6, 7),), FAILURE),  # one without a key
    DeadLetterKey(b"other", ((7, 10),), FAILURE),
    Park(1, ((10, 11),), FAILURE),  # waits for its next try
    Shift(1, 2, 3, ((10, 11),), FAILURE),  # which fails as well
    Shift(2, -3, 3, ((10, 11),)),  # begins alone
    Shift(2, None, 3, ((10, 11),), FAILURE),  # given up
    Redrive(b"key"),
    FailAgain(b"", 3, ((20, 22),), FAILURE),
    Shift(None, RETRIED, 3, ((10, 11),)),  # selected by an operator
    Free(b"key"),
)


def test_changes_of_parked_messages_are_counted_by_what_becomes_of_them():
    flow = Traffic().group("orders", "billing")
    flow.count_park_changes(PARK_CHANGES)
    assert (flow.parked, flow.dead, flow.failed_tries, flow.redrives) == (3, 5, 4, 2)


def test_groups_beyond_the_limit_are_counted_together(monkeypatch):
    monkeypatch.setattr(traffic_module, "GROUPS_MAX", 2)
    traffic = Traffic()
    for group in ("a", "b", "c", "d"):
        traffic.group("orders", group).dead += 1
    traffic.group("orders", "a").dead += 1
    assert {key: flow.dead for key, flow in traffic.groups.items()} == {
        ("orders", "a"): 2,
        ("orders", "b"): 1,
        (OTHER, OTHER): 2,
    }
    traffic.remove_groups({("orders", "b")})
    assert set(traffic.groups) == {("orders", "b"), (OTHER, OTHER)}
