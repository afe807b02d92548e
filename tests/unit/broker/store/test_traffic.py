"""Counts of what a broker stores and hands out."""

from __future__ import annotations

from keylane.broker.store import traffic as traffic_module
from keylane.broker.store.traffic import OTHER, Traffic


def test_traffic_counts_messages_bytes_and_batches_by_subject():
    """Both ways, apart."""
    traffic = Traffic()
    traffic.note_stored("orders", messages=3, size_bytes=100)
    traffic.note_stored("orders", messages=2, size_bytes=50)
    traffic.note_handed("orders", messages=3, size_bytes=100)
    stored, handed = traffic.stored["orders"], traffic.handed["orders"]
    assert (stored.messages, stored.bytes, stored.batches) == (5, 150, 2)
    assert (handed.messages, handed.bytes, handed.batches) == (3, 100, 1)


def test_traffic_counts_further_subjects_together_when_there_are_too_many(monkeypatch):
    """So a broker's memory and its answer stay bounded."""
    monkeypatch.setattr(traffic_module, "SUBJECTS_MAX", 2)
    traffic = Traffic()
    for subject in ("a", "b", "c", "d", "a"):
        traffic.note_stored(subject, messages=1, size_bytes=1)
    assert {name: flow.messages for name, flow in traffic.stored.items()} == {
        "a": 2,
        "b": 1,
        OTHER: 2,
    }
