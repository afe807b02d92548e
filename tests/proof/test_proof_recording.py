"""The records of real processes, read: where a handler begins, and which handlers run."""

from __future__ import annotations

from pathlib import Path

from keylane.checker.events import Ended, Sent, Served, Settled, Started, Stored
from keylane.checker.judge import check_history
from proof.recording import (
    Answered,
    Calling,
    Frozen,
    HandlerTail,
    Recorder,
    one_history,
    starts_placed,
)

MS = 1_000_000
LOOK, DEADLINE, FIRST_LINE = 1_000 * MS, 1_001 * MS, 1_500 * MS


def a_start(*, deadline_ns: int = DEADLINE) -> Started:
    return Started("audit", "c", 1, 0, b"a", 7, LOOK, deadline_ns, ours=True)


def judged(stops: list[tuple[int, int]], *, deadline_ns: int = DEADLINE):
    """The findings, and the history, of one handler with a gap between look and first line."""
    log = [Stored(1, 0, b"k", b"a")]
    sent = [(0, Sent(b"a", b"k", "p", 0, True)), (1, Settled(b"a", "stored", 1, 0))]
    written = [
        (FIRST_LINE, a_start(deadline_ns=deadline_ns)),
        (FIRST_LINE + MS, Ended("audit", 1, 0, 7)),
    ]
    events = one_history([*sent, *starts_placed(written, stops)], log)
    return check_history(events), events


def test_gap_before_the_first_line_without_a_stop_is_a_late_start():
    """A delay of the product between the look at the lease and the handler is found."""
    for stops in ([], [(100 * MS, 900 * MS)], [(1_600 * MS, 2_000 * MS)]):
        findings, events = judged(stops)
        assert findings.counts["late start"] == findings.total == 1
        assert not [event for event in events if type(event) is Frozen]


def test_gap_in_which_the_process_was_stopped_is_no_late_start():
    """The handler begins with the look, and its process counts as frozen."""
    findings, events = judged([(100 * MS, 200 * MS), (LOOK + MS // 2, FIRST_LINE - MS)])
    assert not findings.total
    (frozen,) = [event for event in events if type(event) is Frozen]
    assert frozen == (1, 0, 499.0)


def test_lease_that_ends_within_a_moment_of_the_look_is_no_late_start():
    """Between the look and the first line there is always a moment, and the lease may end in it."""
    findings, events = judged([], deadline_ns=LOOK + 1)
    assert findings.counts["late start"] == findings.total == 1
    log = [Stored(1, 0, b"k", b"a")]
    begun = (LOOK + MS, a_start(deadline_ns=LOOK + 1))
    events = one_history(starts_placed([begun], []), log)
    assert check_history(events, drained=False).counts["late start"] == 0
    assert not [event for event in events if type(event) is Frozen]


def test_handler_in_time_begins_with_its_first_line():
    """A stop before a handler whose lease is still valid afterwards is no fault."""
    findings, events = judged([(LOOK, FIRST_LINE)], deadline_ns=FIRST_LINE + 1)
    assert not findings.total
    (begun,) = [event for event in events if type(event) is Started]
    assert begun.clock_ns == FIRST_LINE
    assert not [event for event in events if type(event) is Frozen]


def test_handlers_that_died_with_their_process_are_forgotten(tmp_path: Path):
    """Handlers of a killed process do not run; those of its successor do."""
    path = tmp_path / "c0.events"
    tail = HandlerTail(path)
    tail.forget()  # nothing was written yet
    Recorder(path)(a_start())
    assert tail.poll() == {(1, 0)}
    Recorder(path)(a_start()._replace(offset=1))
    tail.forget()
    assert not tail.poll()
    Recorder(path)(a_start()._replace(offset=2))
    assert tail.poll() == {(1, 2)}


def test_ack_asked_before_a_higher_token_is_no_stale_effect_after_many_calls() -> None:
    """Calls of the metaserver are for another judge: they do not count where an ack stands in the
    history.
    """
    calls = [(number, Calling(number, "join", "s", "audit", 0, 0, None)) for number in range(10)]
    answers = [(number, Answered(number, "", 0, ())) for number in range(10)]

    def history(ack_began: int):
        served = [
            (20, Served("acquire", "audit", 1, 3, 15)),
            (40, Served("acquire", "audit", 1, 15, 30)),
            (50, Served("ack", "audit", 1, 3, ack_began)),
        ]
        return one_history([*calls, *answers, *served], [])

    assert check_history(history(35), drained=False).total == 0
    assert check_history(history(45), drained=False).counts["stale effect"] == 1
