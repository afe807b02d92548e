"""The calendar that a broker judges ages and times by, where the one of the machine is set."""

from __future__ import annotations

from keylane.broker.wall_clock import FORWARD_MS, HOLD_MS, WallClock
from sim.machines.clock import ManualClock

YEAR_MS = 365 * 24 * 3_600_000


def test_calendar_is_believed_while_it_agrees_with_the_boot_clock():
    """However long no check looked, and also where it is set a little, or back."""
    clock = ManualClock()
    calendar = WallClock(clock)
    for forward_ms in (0, FORWARD_MS, -YEAR_MS):
        clock.advance(YEAR_MS)
        clock.wall_offset_ms += forward_ms
        assert calendar.now_ms() == clock.wall_ms()
        assert calendar.problem == ""


def test_calendar_of_before_goes_on_when_it_is_set_forward():
    clock = ManualClock()
    calendar = WallClock(clock)
    clock.wall_offset_ms += FORWARD_MS + 1
    clock.advance(10_000)
    assert calendar.now_ms() == clock.wall_ms() - FORWARD_MS - 1
    assert "set forward by 2.0 hours: for 24.0 more hours" in calendar.problem
    clock.advance(HOLD_MS - 3_600_000)
    assert calendar.now_ms() == clock.wall_ms() - FORWARD_MS - 1
    assert "for 1.0 more hours" in calendar.problem


def test_calendar_is_believed_again_when_it_is_set_right():
    clock = ManualClock()
    calendar = WallClock(clock)
    clock.wall_offset_ms += YEAR_MS
    assert calendar.now_ms() == clock.wall_ms() - YEAR_MS
    clock.wall_offset_ms -= YEAR_MS
    assert calendar.now_ms() == clock.wall_ms()
    assert calendar.problem == ""


def test_calendar_is_believed_when_a_day_has_passed():
    clock = ManualClock()
    calendar = WallClock(clock)
    clock.wall_offset_ms += YEAR_MS
    calendar.now_ms()
    clock.advance(HOLD_MS)
    assert calendar.now_ms() == clock.wall_ms()
    assert calendar.problem == ""


def test_calendar_is_believed_when_an_operator_says_so():
    clock = ManualClock()
    calendar = WallClock(clock)
    clock.wall_offset_ms += YEAR_MS
    calendar.now_ms()
    calendar.trust_now()
    assert calendar.problem == ""
    assert calendar.now_ms() == clock.wall_ms()


def test_calendar_tells_the_time_that_ages_are_judged_by_when_it_is_held():
    """Telling it is no look: the calendar of before goes on only behind one."""
    clock = ManualClock()
    calendar = WallClock(clock)
    clock.wall_offset_ms += YEAR_MS
    assert calendar.reported_ms() == clock.wall_ms() - YEAR_MS
    assert calendar.problem == ""
    calendar.now_ms()
    clock.advance(HOLD_MS)
    assert calendar.reported_ms() == clock.wall_ms()
    assert calendar.problem != ""
    calendar.now_ms()
    assert calendar.problem == ""


def test_calendar_is_not_believed_when_it_is_set_forward_during_a_look():
    """A look takes one reading: another one behind it would be believed unseen."""
    clock = ManualClock()
    calendar = WallClock(clock)
    true_ms = clock.wall_ms()
    readings = iter([true_ms])
    clock.wall_ms = lambda: next(readings, true_ms + YEAR_MS)
    assert calendar.now_ms() == true_ms
    assert calendar.now_ms() == true_ms
    assert calendar.problem != ""


def test_calendar_tells_both_times_when_it_is_held():
    clock = ManualClock()
    calendar = WallClock(clock)
    assert calendar.trusted_and_wall_ms() == (clock.wall_ms(), clock.wall_ms())
    clock.wall_offset_ms += YEAR_MS
    assert calendar.trusted_and_wall_ms() == (clock.wall_ms() - YEAR_MS, clock.wall_ms())
