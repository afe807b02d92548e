"""The table and the page say what the result says, and name what was left out."""

import pytest
from peers.figures import FIGURES
from peers.page import (
    better_lines,
    cell_of,
    conditions_of,
    format_value,
    kept_runs,
    missing_lines,
    page_of,
    table_of,
)


def about(durability, title):
    return {
        "title": title,
        "durability": durability,
        "promise": f"what {title} promises",
        "settings": "none",
        "versions": {title: "1.2"},
    }


@pytest.fixture
def result():
    return {
        "machine": {
            "cores": 2,
            "memory_gb": 24,
            "cpu": "Z80",
            "kernel": "6.1",
            "python": "3.11.7",
            "python_loop_ns": 30.4,
        },
        "run": {
            "began": "2026-01-02 03:04",
            "rounds": 5,
            "quick": False,
            "load_before": 0.1,
            "seconds": 3_600,
        },
        "systems": {
            "keylane": about(2, "keylane"),
            "kafka": about(1, "Kafka"),
            "nats": about(2, "NATS"),
        },
        "missing": {"redis-fsync": "no redis-server"},
        "failed": {"nats": {"both": "TimeoutError: a client"}},
        "medians": {
            "keylane": {
                "sent_per_s": 1_000.0,
                "handled_batch_per_s": 400.0,
                "start_s": 0.7,
                "steady_5000_p50_ms": 2.0,
                "steady_5000_rate": 5_000,
            },
            "kafka": {"sent_per_s": 200.0, "handled_per_s": 800.0},
            "nats": {"sent_per_s": 10.0, "steady_5000_p50_ms": 0.5, "steady_5000_rate": 2_000},
        },
    }


def row_of(table, what):
    rows = [row for row in table.splitlines() if row.startswith(f"| {what}")]
    assert len(rows) == 1
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


def test_table_has_each_system_and_both_ratios(result):
    row = row_of(table_of(result), "sent, every receipt")
    assert row[1:] == ["1,000", "200", "10.0", "5.00 (kafka)", "100.00 (nats)", "≥ 2.5 (any)"]


def test_table_says_what_is_not_reached(result):
    assert row_of(table_of(result), "start of 50")[-1] == "≤ 0.5 s (itself): not reached"
    assert row_of(table_of(result), "handled, a batch")[-1] == "≥ 1 (any): not reached"


def test_table_has_no_row_when_no_system_has_the_figure(result):
    assert "Arrow" not in table_of(result)


def test_cell_has_the_rate_when_a_system_could_not_keep_up(result):
    assert cell_of("steady_5000_p50_ms", "nats", result["medians"]["nats"]) == "0.50 (at 2,000/s)"
    assert row_of(table_of(result), "send to handler at 5,000/s")[4] == "–"


def test_table_has_the_one_way_of_a_peer_beside_each_of_keylane(result):
    row = row_of(table_of(result), "handled, a batch")
    assert row[1:4] == ["400", "800", "–"]


def test_better_peers_are_named_with_how_far_they_are_ahead(result):
    lines = list(better_lines(result))
    assert lines == [
        "* handled, a batch handler (`max_records=500`) (keylane 400 a second): kafka 2.00 times"
    ]


def test_figures_have_names_of_their_own_because_the_list_of_better_peers_leaves_some_out():
    names = [(figure.what, figure.unit) for figure in FIGURES.values()]
    assert len(set(names)) == len(names)


def test_page_names_what_is_missing_and_what_failed(result):
    page = page_of([result])
    assert "* NOT MEASURED: redis-fsync: no redis-server" in page
    assert "* FAILED: nats, both: TimeoutError: a client" in page
    assert missing_lines({"kafka": "no java"}) == ["NOT MEASURED: kafka: no java"]


def test_page_has_promise_version_and_plot_of_each_system(result):
    page = page_of([result])
    for title in ("keylane", "Kafka", "NATS"):
        assert f"what {title} promises" in page
        assert f"{title} 1.2" in page
    assert "](peers.svg)" in page
    assert table_of(result) in page


def test_page_says_when_no_peer_is_ahead(result):
    result["medians"]["kafka"] = {"sent_per_s": 1.0}
    assert "no peer is ahead" in page_of([result])


def on_machine(result, ns):
    return result | {"machine": result["machine"] | {"python_loop_ns": ns}}


def test_page_shows_the_run_of_each_kind_of_machine(result):
    fast = on_machine(result, 16.0)
    fast["medians"] = fast["medians"] | {"kafka": {"sent_per_s": 2_000.0}}
    page = page_of(kept_runs([result], fast))
    assert page.index(table_of(fast)) < page.index(table_of(result))
    behind = [line for line in page.splitlines() if line.startswith("* sent, every receipt")]
    assert behind == [
        "* sent, every receipt awaited (keylane 1,000 a second): kafka 2.00 times; at 16 ns"
    ]


def test_run_takes_the_place_of_an_earlier_one_of_the_same_kind_of_machine(result):
    runs = kept_runs(kept_runs([], result), on_machine(result, 16.0))
    runs = kept_runs(runs, on_machine(result, 33.0))
    assert [run["machine"]["python_loop_ns"] for run in runs] == [16.0, 33.0]


@pytest.mark.parametrize(
    ("load", "quick", "words"),
    [(0.1, False, ("a quiet machine", "full takes")), (6.5, True, ("other work", "small takes"))],
)
def test_page_says_what_kind_of_run_it_was(result, load, quick, words):
    result["run"] |= {"load_before": load, "quick": quick}
    assert all(word in conditions_of(result) for word in words)
    assert "5 rounds" in conditions_of(result)
    assert "60 minutes" in conditions_of(result)


@pytest.mark.parametrize(
    ("value", "text"), [(1_234_567.8, "1,234,568"), (12.34, "12.3"), (0.456, "0.46")]
)
def test_figure_is_shown_with_three_digits(value, text):
    assert format_value(value) == text


def test_page_has_a_section_of_systems_with_copies_when_they_were_measured(result):
    copied = result | {
        "systems": {
            "keylane-copies": about(2, "three folders"),
            "kafka-replicated": about(1, "K3"),
        },
        "medians": {
            "keylane-copies": {"sent_per_s": 900.0, "single_p50_ms": 1.0},
            "kafka-replicated": {"sent_per_s": 300.0, "single_p50_ms": 0.5},
        },
    }
    page = page_of([result], [copied])
    assert "## With copies on several servers" in page
    assert "| sent, every receipt awaited, a second | 900 | 300 | 3.00 (kafka-replicated) |" in page
    assert "p50, ms | 1.00 | 0.50 | 0.50 (kafka-replicated) |" in page
    assert "* `keylane-copies`: three folders (fsynced). Its ack promises:" in page
    assert "With copies on several servers" not in page_of([result])
