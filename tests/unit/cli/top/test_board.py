"""What the screen knows, and what it says is wrong."""

from __future__ import annotations

import pytest

from keylane.admin import Cause, Explanation
from keylane.cli.top.board import STUCK_S, Board, age_text
from keylane.cli.top.figures import Figures
from support.boards import ADDRESSES, META, board, brokers, figures

KEY = ("orders", "billing")


def explanation(text: str = "no consumer of billing") -> Explanation:
    cause = Cause(code="no_consumer", text=text, step="start one")
    return Explanation(subject=KEY[0], group=KEY[1], key=None, causes=(cause,))


def test_rates_are_sums_over_brokers():
    made = board(seconds=3, lag=10, rises=20)
    (group,) = made.groups(3.0)
    (subject,) = made.subjects(3.0)
    assert (group.lag, group.slope_per_s) == (140, 40)
    assert (subject.stored_per_s, subject.handed_per_s, subject.bytes_per_s) == (100, 50, 10_000)
    assert group.acked_per_s == 60, "100 were stored a second, and the lag grew by 40"
    assert [each.stored_per_s for each in made.brokers(3.0)] == [50, 50]
    assert made.brokers(3.0)[0].disk_used == pytest.approx(0.3)


def test_rates_are_of_the_last_seconds():
    made = board(seconds=10)
    for address in ADDRESSES:
        for second in range(11, 17):
            made.note_figures(address, figures(float(second), stored=500.0))
    assert made.subjects(16.0)[0].stored_per_s == 0


def test_rate_is_unknown_after_one_answer_and_after_a_restart_of_a_broker():
    assert board().subjects(0.0)[0].stored_per_s is None
    made = board(seconds=3)
    made.note_figures(ADDRESSES[0], figures(4.0, stored=1.0))
    assert [each.stored_per_s for each in made.brokers(4.0)] == [None, 50]


def test_group_whose_lag_does_not_fall_is_explained_once_in_a_while():
    made = board(seconds=int(STUCK_S), lag=5)
    assert made.take_next_to_explain(STUCK_S) == KEY
    assert made.take_next_to_explain(STUCK_S + 1) is None
    (problem,) = made.problems(STUCK_S)
    assert problem.text == "billing on orders: its lag has not fallen for 10 s"
    assert problem.step == "keylane why orders --group billing"
    made.note_explanation(KEY, explanation())
    (problem,) = made.problems(STUCK_S)
    assert problem.text == "billing on orders: no consumer of billing"
    assert made.take_next_to_explain(STUCK_S + 30) == KEY


def test_group_whose_lag_falls_is_not_a_problem():
    made = board(seconds=20, lag=100, rises=-1)
    assert made.take_next_to_explain(20.0) is None
    assert made.problems(20.0) == []


def test_group_that_always_lags_by_young_messages_is_not_a_problem():
    made = board(seconds=20, lag=100)
    for address in ADDRESSES:
        made.note_figures(address, figures(20.5, stored=1100, lag=100, lag_s=0.2))
    assert made.problems(20.5) == []


def test_explanation_is_forgotten_when_the_lag_is_gone():
    made = board(seconds=int(STUCK_S), lag=5)
    made.note_explanation(KEY, explanation())
    for address in ADDRESSES:
        made.note_figures(address, figures(11.0, stored=600, lag=0))
    assert made.problems(11.0) == []
    for second in range(12, 25):
        made.note_brokers(brokers(), float(second))
        for address in ADDRESSES:
            made.note_figures(address, figures(float(second), stored=600, lag=1, lag_s=12))
    (problem,) = made.problems(24.0)
    assert "has not fallen" in problem.text


def test_explanation_that_comes_when_the_lag_is_gone_is_not_shown():
    made = board(seconds=3)
    made.note_explanation(KEY, explanation())
    assert made.problems(3.0) == []


def test_dead_metaserver_leaves_the_figures_and_is_named_with_its_reason():
    made = board(seconds=3)
    for second in range(4, 13):
        made.note_failure(None, "cannot reach it: connection refused")
        for address in ADDRESSES:
            made.note_figures(address, figures(float(second), stored=50.0 * second))
    assert made.stale_for_s(12.0) == 9
    (problem,) = made.problems(12.0)
    assert problem.text == (
        f"no figures from the metaserver at {META} for 9 s: cannot reach it: connection refused"
    )
    assert made.subjects(12.0)[0].stored_per_s == 100
    made.note_brokers(brokers(), 12.0)
    assert made.stale_for_s(12.0) is None
    assert made.problems(12.0) == []


def test_dead_metaserver_beside_a_live_one_is_named():
    made = board(seconds=1)
    made.note_metaservers({"a:1": "connection refused", "b:1": Figures(1.0)})
    assert [each.text for each in made.problems(1.0)] == [
        "the metaserver at a:1 gives no figures: connection refused"
    ]
    made.note_metaservers({"a:1": "connection refused"})
    assert made.problems(1.0) == [], "it answers otherwise"


def test_metaserver_that_never_answered_is_named():
    made = Board(META)
    made.note_failure(None, "connection refused\x1b[2J")
    (problem,) = made.problems(1.0)
    assert problem.text == f"no figures from the metaserver at {META}: connection refused\\x1b[2J"
    assert made.brokers(1.0) == made.groups(1.0) == made.subjects(1.0) == []


def test_broker_that_does_not_answer_keeps_its_figures_and_says_so():
    made = board(seconds=3, lag=5)
    for second in range(4, 9):
        made.note_brokers(brokers(), float(second))
        made.note_figures(ADDRESSES[0], figures(float(second), stored=50.0 * second, lag=5))
        made.note_failure(ADDRESSES[1], "it hangs")
    assert [each.state for each in made.brokers(8.0)] == ["available", "no figures for 5 s"]
    (group,) = made.groups(8.0)
    assert group.lag == 10
    assert group.stale
    (problem,) = made.problems(8.0)
    assert problem.text == f"no figures from broker group g2 at {ADDRESSES[1]} for 5 s: it hangs"


def test_broker_that_the_metaserver_finds_silent_is_named_once():
    made = board(seconds=1)
    made.note_brokers(brokers(silent=True), 20.0)
    made.note_figures(ADDRESSES[0], figures(20.0, stored=1000.0))
    (problem,) = made.problems(20.0)
    assert problem.text == "broker group g2 has been silent for 12 s"
    assert problem.step == f"keylane broker health {ADDRESSES[1]}"


def test_operations_that_wait_are_named():
    made = board(seconds=1)
    figures_now = Figures(1.0, {"keylane_metaserver_waiting_operations": {(): 2.0}})
    made.note_metaservers({META: figures_now})
    assert [each.text for each in made.problems(1.0)] == ["2 operations on partitions cannot go on"]


def test_group_with_consumers_and_no_lag_known_is_listed():
    made = board(seconds=1)
    figures_now = Figures(1.0, {"keylane_group_sessions": {("orders", "audit"): 2.0}})
    made.note_metaservers({META: figures_now})
    assert [(each.group, each.consumers) for each in made.groups(1.0)] == [
        ("audit", 2),
        ("billing", 0),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (150, "2 min"), (7200, "2 h"), (1e6, "12 d")]
)
def test_age_has_one_unit(seconds, text):
    assert age_text(seconds) == text
