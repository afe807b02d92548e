"""How often processes call each other: a loop without a pause is found, although each of its calls takes time."""

from __future__ import annotations

from collections.abc import Callable

WINDOW_S = 5.0
CONTROLS_MAX = 300
"""Control calls of one path, and new connections, by one process, in such a window of true time."""
FRAMES_MAX = 1_000
"""Requests on its connections, likewise.  Each is four times the most that ordinary seeds show."""


class CallRates:
    """Counts calls in windows of true time; reports each process and kind of call with too many once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._window = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._told: set[tuple[str, str]] = set()

    def note(self, now_s: float, process: str, kind: str, *, most: int) -> None:
        """Count a call of a process, which makes at most `most` in a window; queries in a path are not told apart."""
        window = int(now_s // WINDOW_S)
        if window != self._window:
            self._window = window
            self._counts.clear()
        who = (process, kind.partition("?")[0])
        count = self._counts[who] = self._counts.get(who, 0) + 1
        if count > most and who not in self._told:
            self._told.add(who)
            self._tell(
                f"hot loop: {process} asks {who[1]} more than {most} times in {WINDOW_S:.0f} s"
            )
