"""The memory of unfinished messages is limited, and the slowest are dropped."""

from __future__ import annotations

from keylane.rpc.frames.incoming import (
    CHECK_INTERVAL_S,
    HARD_FACTOR,
    RATE_MIN,
    RATE_WINDOW_S,
    IncomingBudget,
)

MIB = 1 << 20


class Senders:
    """Reports progress of messages at times that the test sets."""

    def __init__(self, bytes_max: int) -> None:
        self.room = IncomingBudget(bytes_max)
        self.given_up: list[object] = []
        self.now_s = 0.0

    def note(self, name: object, size: int) -> None:
        self.room.record_progress(name, size, self.now_s, lambda: self.given_up.append(name))


def test_slowest_message_is_given_up_when_all_hold_too_much():
    """The oldest message comes from an honest sender, and is not dropped."""
    senders = Senders(10 * MIB)
    senders.note("first", MIB)
    senders.note("stuck", 8 * MIB)
    for step in range(1, 9):
        senders.now_s = step * 1.0
        senders.note("first", MIB + step * 4 * RATE_MIN)
        senders.note("other", 2 * MIB)
    assert senders.given_up == ["stuck"]
    assert senders.room.used_bytes == 3 * MIB + 8 * 4 * RATE_MIN


def test_no_message_is_given_up_when_all_come_at_an_honest_rate():
    """260 clients send frames of 135 kB in 4 s each, at a tenth of a broker's limits: those nearest
    to their end were dropped.
    """
    senders = Senders(12 * MIB)
    frame_bytes, steps = 135_000, 40
    most = 0
    for tick in range(600):
        senders.now_s = tick / 10
        for client in range(260):
            step = (tick + client) % steps
            if step:
                senders.note(client, frame_bytes * step // steps)
            else:
                senders.room.release(client)
        most = max(most, senders.room.used_bytes)
    assert most > senders.room.bytes_max
    assert not senders.given_up


def test_young_messages_stay_when_they_hold_less_than_the_hard_limit():
    senders = Senders(100)
    for number in range(HARD_FACTOR):
        senders.note(number, 100)
    senders.now_s = RATE_WINDOW_S - 0.1
    senders.note(0, 100)
    assert not senders.given_up
    senders.note("more", 1)
    assert len(senders.given_up) == 1


def test_slowest_is_given_up_first_when_all_hold_more_than_the_hard_limit():
    senders = Senders(MIB)
    for step in range(5):
        senders.now_s = step * 1.0
        senders.note("slow", 10_000 * (step + 1))
        senders.note("fast", 100_000 * (step + 1))
    senders.note("young", HARD_FACTOR * MIB - 540_000)
    assert senders.given_up == ["slow", "fast"]


def test_message_is_not_slow_when_it_is_the_server_that_reads_nothing():
    senders = Senders(100)
    senders.note("held", 90)
    senders.room.pause("held", 0.0)
    senders.now_s = 10 * RATE_WINDOW_S
    senders.note("other", 90)
    assert not senders.given_up
    senders.room.resume("held", senders.now_s)
    senders.now_s += RATE_WINDOW_S - 0.1
    senders.note("other", 91)
    assert not senders.given_up
    for _ in range(4):
        senders.now_s += RATE_WINDOW_S + CHECK_INTERVAL_S
        senders.note("other", 91)
    assert "held" in senders.given_up


def test_message_that_grows_counts_once_and_is_free_when_it_is_whole():
    senders = Senders(100)
    senders.note("a", 10)
    senders.now_s = 9.0
    senders.note("a", 90)
    assert senders.room.used_bytes == 90
    senders.room.release("a")
    senders.room.release("a")
    assert (senders.room.used_bytes, senders.given_up) == (0, [])
