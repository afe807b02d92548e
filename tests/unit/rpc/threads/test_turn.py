"""Functions that a callback of the event loop schedules for its end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from keylane.rpc.threads.turn import at_end, in_turn


async def test_calls_left_in_a_callback_run_at_its_end_in_order():
    """Including those that they schedule themselves; none waits for the loop's next iteration."""
    loop = asyncio.get_running_loop()
    told: list[str] = []

    def last() -> None:
        told.append("last")

    def second() -> None:
        told.append("second")
        at_end(last, loop)

    def callback(name: str) -> None:
        at_end(second, loop)
        in_turn(told.append, "within")
        told.append(name)

    in_turn(callback, "callback")
    assert told == ["within", "callback", "second", "last"]


async def test_call_left_outside_of_such_a_callback_runs_in_the_next_turn():
    told: list[str] = []
    in_turn(told.append, "callback")
    at_end(lambda: told.append("left"), asyncio.get_running_loop())
    assert told == ["callback"]
    await asyncio.sleep(0)
    assert told == ["callback", "left"]


async def test_failing_call_leaves_the_others_to_run(caplog: pytest.LogCaptureFixture):
    """It is logged; an error of the callback itself is raised afterwards."""
    loop = asyncio.get_running_loop()
    told: list[str] = []

    def fails() -> None:
        raise ValueError("left")

    def callback() -> None:
        at_end(fails, loop)
        at_end(lambda: told.append("runs"), loop)
        raise KeyError("callback")

    with caplog.at_level(logging.ERROR), pytest.raises(KeyError):
        in_turn(callback)
    assert told == ["runs"]
    assert "a function scheduled for the end of a callback failed" in caplog.text


async def test_calls_behind_one_that_ends_the_program_run_in_the_next_turn():
    loop = asyncio.get_running_loop()
    told: list[str] = []

    def ends() -> None:
        raise KeyboardInterrupt

    def callback() -> None:
        at_end(ends, loop)
        at_end(lambda: told.append("runs"), loop)

    with pytest.raises(KeyboardInterrupt):
        in_turn(callback)
    assert told == []
    await asyncio.sleep(0)
    assert told == ["runs"]
