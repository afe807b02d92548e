"""Counts of what a broker stores and hands out."""

from __future__ import annotations

from keylane.broker.store import traffic as traffic_module
from keylane.broker.store.traffic import OTHER, SERIES_KEPT_MS, Traffic


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
