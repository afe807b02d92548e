"""What the screen knows, and what it says is wrong."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keylane.admin import BrokerList, Cause, Explanation, OperationView
from keylane.admin.why.servers import silent_broker
from keylane.cli.top.board import STUCK_S, Board, age_text
from keylane.cli.top.figures import Figures
from keylane.protocol.operations import OperationKind, OperationState
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
    assert (problem.about, problem.text) == ("billing on orders", "its lag has not fallen for 10 s")
    assert problem.step == "keylane why orders --group billing"
    made.note_explanation(KEY, explanation())
    (problem,) = made.problems(STUCK_S)
    assert problem.text == "no consumer of billing"
    assert made.take_next_to_explain(STUCK_S + 30) == KEY


def test_first_cause_that_is_wrong_is_shown_and_scheduled_messages_are_not_wrong():
    made = board(seconds=int(STUCK_S), lag=5)
    scheduled = Cause(code="scheduled", text="1 message waits for its delivery time", step="s")
    made.note_explanation(KEY, replace(explanation(), causes=(scheduled,)))
    (problem,) = made.problems(STUCK_S)
    assert not problem.is_wrong
    both = (scheduled, *explanation().causes)
    made.note_explanation(KEY, replace(explanation(), causes=both))
    (problem,) = made.problems(STUCK_S)
    assert (problem.text, problem.is_wrong) == ("no consumer of billing", True)


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
    assert problem.text == (
        "broker group g2 has given no figures for 5 s: it hangs, although the metaserver heard "
        "from it 0.0 s ago: if it hangs, nothing is stored in its partitions, and nobody gets what "
        "is stored there"
    )
    assert problem.step == f"look at the process and the log of the broker at {ADDRESSES[1]}"


def test_lag_is_partial_while_a_broker_has_never_given_its_figures():
    made = Board(META)
    made.note_brokers(brokers(silent=True), 1.0)
    made.note_figures(ADDRESSES[0], figures(1.0, lag=0))
    assert made.groups(1.0)[0].is_partial
    assert made.subjects(1.0)[0].is_partial
    made.note_figures(ADDRESSES[1], figures(1.0, lag=0))
    assert not made.groups(1.0)[0].is_partial
    assert not made.subjects(1.0)[0].is_partial


def test_broker_that_the_metaserver_finds_silent_is_named_once():
    made = board(seconds=1)
    made.note_brokers(brokers(silent=True), 20.0)
    made.note_figures(ADDRESSES[0], figures(20.0, stored=1000.0))
    (problem,) = made.problems(20.0)
    assert problem.text.startswith("broker group g2 has been silent for 12 s: messages for its ")
    assert problem.step == f"start the broker at {ADDRESSES[1]} again; keylane broker list"


def test_silent_broker_is_named_once_with_the_step_of_why_while_it_hangs():
    made = board(seconds=int(STUCK_S), lag=5)
    made.take_next_to_explain(STUCK_S)
    silent = brokers(silent=True)
    made.note_brokers(silent, STUCK_S)
    made.note_hanging({"g2"})
    causes = (silent_broker(silent.brokers[1], (2,), accepts=True), *explanation().causes)
    made.note_explanation(KEY, replace(explanation(), causes=causes))
    assert [each.step for each in made.problems(STUCK_S)] == [
        f"end the process at {ADDRESSES[1]}, which hangs; then start the broker again",
        "start one",
    ]
    made.note_brokers(brokers(), STUCK_S)
    assert [each.step for each in made.problems(STUCK_S)] == ["start one"], "it is heard again"


def test_group_that_only_waits_for_a_broker_is_named_once_the_broker_is_heard():
    made = board(seconds=int(STUCK_S), lag=5)
    made.take_next_to_explain(STUCK_S)
    silent = brokers(silent=True)
    made.note_explanation(
        KEY, replace(explanation(), causes=(silent_broker(silent.brokers[1], (2,)),))
    )
    made.note_brokers(silent, STUCK_S)
    (problem,) = made.problems(STUCK_S)
    assert problem.text.startswith("broker group g2 has been silent for 12 s")
    made.note_brokers(brokers(), STUCK_S)
    (problem,) = made.problems(STUCK_S)
    assert problem.text == "its lag has not fallen for 10 s"
    assert problem.about == "billing on orders"


def test_operations_that_wait_are_named():
    made = board(seconds=1)
    operation = OperationView(
        operation_id=7,
        subject="orders",
        kind=OperationKind.RESIZE,
        state=OperationState.SEAL,
        sealed=(),
        children=(),
        problem="broker group g2 is silent",
    )
    made.note_operations([operation])
    (problem,) = made.problems(1.0)
    assert problem.text == "operation 7 (resize) on orders waits: broker group g2 is silent"


def test_board_is_looking_until_it_can_know_whether_a_group_is_stuck():
    made = Board(META)
    assert made.is_looking(100.0)
    made.note_brokers(BrokerList(brokers=[], refused=[]), 100.0)
    assert not made.is_looking(100.0), "no broker can say more"
    made.note_brokers(brokers(), 100.0)
    assert made.is_looking(200.0), "no broker has given its figures"
    made.note_figures(ADDRESSES[0], figures(200.0, lag=5, lag_s=60))
    assert made.is_looking(200.0 + STUCK_S - 1)
    assert not made.is_looking(200.0 + STUCK_S)


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
