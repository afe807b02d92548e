"""The figures that the screen takes from metrics."""

from __future__ import annotations

import pytest

from keylane.cli.top.figures import read_figures

TEXT = """\
# HELP keylane_broker_stored_messages_total Messages that became durable.
# TYPE keylane_broker_stored_messages_total counter
keylane_broker_stored_messages_total{subject="orders"} 12.0
keylane_broker_stored_messages_total{subject="events"} 3.0
keylane_group_lag_messages{group="billing",subject="orders"} 7.0
keylane_broker_disk_bytes 1e+09
keylane_broker_disk_free_bytes 2.5e+08
process_open_fds 12.0
"""


def test_figures_are_those_of_the_screen_by_labels():
    figures = read_figures(TEXT, at_s=5.0)
    assert figures.at_s == 5.0
    assert figures.of("keylane_broker_stored_messages_total") == {
        ("orders",): 12.0,
        ("events",): 3.0,
    }
    assert figures.of("keylane_group_lag_messages") == {("orders", "billing"): 7.0}
    assert figures.one("keylane_broker_disk_free_bytes") == 2.5e8
    assert figures.one("keylane_broker_partitions") is None
    assert "process_open_fds" not in figures.values


def test_figures_of_no_metrics_are_refused():
    with pytest.raises(ValueError, match=r"."):
        read_figures('keylane_broker_disk_bytes{ "x', at_s=0.0)
