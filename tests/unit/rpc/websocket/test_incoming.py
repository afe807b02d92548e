"""Messages whose end has not come: what they hold together has a bound, and the oldest are given up."""

from __future__ import annotations

from keylane.rpc.websocket.incoming import HARD_FACTOR, PATIENCE_S, IncomingRoom


def noted(
    room: IncomingRoom, given_up: list[str], name: str, size: int, *, begun_s: float, now_s: float
):
    room.note(name, size, begun_s, now_s, lambda: given_up.append(name))


def test_oldest_message_is_given_up_when_all_hold_too_much():
    room, given_up = IncomingRoom(100), []
    noted(room, given_up, "first", 60, begun_s=0.0, now_s=0.0)
    noted(room, given_up, "second", 40, begun_s=1.0, now_s=1.0)
    assert not given_up
    noted(room, given_up, "third", 1, begun_s=PATIENCE_S, now_s=PATIENCE_S)
    assert given_up == ["first"]
    assert room.held_bytes == 41


def test_young_messages_stay_when_they_hold_less_than_the_hard_limit():
    room, given_up = IncomingRoom(100), []
    for number in range(HARD_FACTOR):
        noted(room, given_up, str(number), 100, begun_s=0.0, now_s=0.1)
    assert not given_up
    noted(room, given_up, "more", 1, begun_s=0.1, now_s=0.1)
    assert given_up == ["0"]


def test_message_that_grows_counts_once_and_is_free_when_it_is_whole():
    room, given_up = IncomingRoom(100), []
    noted(room, given_up, "a", 10, begun_s=0.0, now_s=0.0)
    noted(room, given_up, "a", 90, begun_s=0.0, now_s=9.0)
    assert room.held_bytes == 90
    room.free("a")
    room.free("a")
    assert (room.held_bytes, given_up) == (0, [])
