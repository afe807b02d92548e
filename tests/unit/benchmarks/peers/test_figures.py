"""Medians over rounds, which peers a system is compared with, and how far it is ahead of the best
of them.
"""

import pytest
from peers.durability import Durability
from peers.figures import (
    FIGURES,
    Against,
    best_of,
    has_full_rate,
    is_reached,
    medians_of,
    peers_to_compare,
    ratios_of,
    spreads_of,
)

DURABILITIES = {
    "keylane": Durability.FSYNCED,
    "kafka": Durability.PAGE_CACHE,
    "kafka-fsync": Durability.FSYNCED,
    "redis": Durability.PAGE_CACHE,
    "keylane-cached": Durability.PAGE_CACHE,
}


def test_medians_are_of_the_turns_that_have_the_figure():
    turns = {
        "keylane": [{"sent_per_s": 3.0}, {"sent_per_s": 1.0, "start_s": 7.0}, {"sent_per_s": 2.0}]
    }
    assert medians_of(turns) == {"keylane": {"sent_per_s": 2.0, "start_s": 7.0}}
    assert spreads_of(turns) == {"keylane": {"sent_per_s": (1.0, 3.0), "start_s": (7.0, 7.0)}}


def test_medians_are_empty_when_no_turn_had_a_figure():
    assert medians_of({"kafka": [{}]}) == {"kafka": {}}


def test_fsynced_system_is_compared_with_peers_of_both_grades():
    assert peers_to_compare("keylane", DURABILITIES, Against.ANY) == [
        "kafka",
        "kafka-fsync",
        "redis",
    ]


def test_fsynced_system_has_only_fsynced_peers_when_as_durable_is_asked():
    assert peers_to_compare("keylane", DURABILITIES, Against.SAME) == ["kafka-fsync"]


@pytest.mark.parametrize("against", [Against.ANY, Against.SAME])
def test_peer_that_promises_more_is_left_out(against):
    assert peers_to_compare("keylane-cached", DURABILITIES, against) == ["kafka", "redis"]


def test_ratio_is_by_the_best_peer_when_more_is_better():
    medians = {
        "keylane": {"sent_per_s": 100.0},
        "kafka": {"sent_per_s": 50.0},
        "redis": {"sent_per_s": 80.0},
    }
    best = best_of("sent_per_s", "keylane", medians, ["kafka", "redis"])
    assert best is not None
    assert (best.peer, best.value, best.ratio) == ("redis", 80.0, 1.25)


def test_ratio_is_by_the_best_peer_when_less_is_better():
    medians = {
        "keylane": {"single_p50_ms": 1.0},
        "kafka": {"single_p50_ms": 0.5},
        "redis": {"single_p50_ms": 2.0},
    }
    best = best_of("single_p50_ms", "keylane", medians, ["kafka", "redis"])
    assert best is not None
    assert (best.peer, best.ratio) == ("kafka", 0.5)


def test_batch_handler_is_compared_with_the_one_way_of_peers():
    medians = {"keylane": {"handled_batch_per_s": 90.0}, "kafka": {"handled_per_s": 60.0}}
    best = best_of("handled_batch_per_s", "keylane", medians, ["kafka"])
    assert best is not None
    assert best.ratio == 1.5


def test_peer_without_the_figure_is_passed_over():
    medians = {"keylane": {"sent_per_s": 2.0}, "kafka": {}, "redis": {"sent_per_s": 1.0}}
    best = best_of("sent_per_s", "keylane", medians, ["kafka", "redis"])
    assert best is not None
    assert best.peer == "redis"
    assert best_of("start_s", "keylane", medians, ["kafka", "redis"]) is None


def test_steady_figure_counts_only_at_the_rate_that_was_asked_for():
    slow = {"steady_5000_p50_ms": 0.1, "steady_5000_rate": 2_000, "steady_500_rate": 500}
    assert not has_full_rate("steady_5000_p50_ms", slow)
    assert has_full_rate("steady_500_p50_ms", slow)
    assert has_full_rate("sent_per_s", slow)
    medians = {"keylane": {"steady_5000_p50_ms": 1.0, "steady_5000_rate": 5_000}, "nats": slow}
    assert best_of("steady_5000_p50_ms", "keylane", medians, ["nats"]) is None


def test_ratios_have_both_grades_of_peers():
    medians = {
        "keylane": {"sent_per_s": 100.0},
        "kafka": {"sent_per_s": 50.0},
        "kafka-fsync": {"sent_per_s": 25.0},
    }
    bests = ratios_of(medians, DURABILITIES)["sent_per_s"]
    assert {against: (best.peer, best.ratio) for against, best in bests.items()} == {
        "any": ("kafka", 2.0),
        "same": ("kafka-fsync", 4.0),
    }


def test_ratios_are_empty_when_keylane_was_not_measured():
    assert ratios_of({"kafka": {"sent_per_s": 1.0}}, {"kafka": Durability.PAGE_CACHE}) == {}


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "expected"),
    [
        ("sent_per_s", 250.0, 100.0, True),
        ("sent_per_s", 249.0, 100.0, False),
        ("single_p50_ms", 1.0, 1.0, True),
        ("single_p50_ms", 1.1, 1.0, False),
        ("steady_5000_cpu_us", 100.0, 1.0, True),  # held against itself, whatever peers have
        ("steady_5000_cpu_us", 101.0, 900.0, False),
        ("producers_ratio", 0.9, 2.0, True),
        ("producers_ratio", 0.89, 0.1, False),
        ("broker_mb", 900.0, 1.0, None),  # no aim
    ],
)
def test_aim_is_held_against_peers_or_the_figure_itself(name, ours, theirs, expected):
    medians = {
        "keylane": {name: ours, "steady_5000_rate": 5_000},
        "kafka-fsync": {name: theirs, "steady_5000_rate": 5_000},
    }
    assert is_reached(name, medians, ratios_of(medians, DURABILITIES)) is expected


def test_ratio_of_own_figures_is_compared_with_no_peer():
    medians = {"keylane": {"producers_ratio": 1.0}, "kafka": {"producers_ratio": 9.0}}
    assert ratios_of(medians, DURABILITIES) == {}


def test_aim_is_open_when_its_figure_was_not_taken():
    assert is_reached("sent_per_s", {"keylane": {}}, {}) is None
    assert is_reached("start_s", {"keylane": {}}, {}) is None


def test_figures_of_peers_that_are_compared_exist():
    assert {figure.peer for figure in FIGURES.values()} - {""} <= FIGURES.keys()
