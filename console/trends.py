"""The last values of figures that pages draw: lags and ends. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from itertools import pairwise

SAMPLE_S = 0.9
"""How old a sample may be, in seconds."""
TRENDS_MAX = 1_000
"""The maximum number of trends: one for each subject, two for each group."""
STALE_S = 10.0
"""How long a trend without a new value keeps its place, in seconds."""
POINTS_MAX = 60


class Trends:
    """The last values of figures, by name, with their times in seconds."""

    def __init__(self) -> None:
        self._points: OrderedDict[Hashable, deque[tuple[float, float]]] = OrderedDict()

    def add(self, name: Hashable, at_s: float, value: float) -> None:
        """Add a value, unless there is one of the same moment. Where there are too many trends, the
        first ones are kept: if each made room for the next, none would have a second value.
        """
        points = self._points.get(name)
        if points is None:
            if len(self._points) >= TRENDS_MAX:
                oldest_s, _ = next(iter(self._points.values()))[-1]
                if at_s - oldest_s < STALE_S:
                    return
                self._points.popitem(last=False)
            points = self._points[name] = deque(maxlen=POINTS_MAX + 1)
        if not points or at_s - points[-1][0] >= SAMPLE_S / 2:
            points.append((at_s, value))
        self._points.move_to_end(name)

    def values(self, name: Hashable) -> tuple[float, ...]:
        """Return the values, oldest first."""
        return tuple(value for _, value in self._points.get(name, ()))[-POINTS_MAX:]

    def last(self, name: Hashable) -> float:
        """Return the newest value; 0 if there is none."""
        points = self._points.get(name)
        return points[-1][1] if points else 0.0

    def rates(self, name: Hashable) -> tuple[float, ...]:
        """Return the growth per second between two values each, oldest first."""
        points = list(self._points.get(name, ()))
        return tuple(
            max(0.0, round((after - before) / (end_s - start_s), 2))
            for (start_s, before), (end_s, after) in pairwise(points)
        )

    def rate(self, name: Hashable, over: int = 5) -> float | None:
        """Return the growth per second over the last values; None if there is only one."""
        points = list(self._points.get(name, ()))[-over - 1 :]
        if len(points) < 2:
            return None
        return max(0.0, (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))

    def falls_per_s(self, name: Hashable, over: int = 10) -> float:
        """Return how fast the value has fallen over the last values, per second; below 0 it has
        grown.
        """
        points = list(self._points.get(name, ()))[-over - 1 :]
        if len(points) < 2:
            return 0.0
        (start_s, before), (end_s, after) = points[0], points[-1]
        return (before - after) / (end_s - start_s)

    def age_s(self, name: Hashable, value: float) -> float:
        """Return how long before its last point a growing value was first above `value`, in
        seconds, as far as the points reach back.
        """
        points = self._points.get(name)
        if not points:
            return 0.0
        last_s = points[-1][0]
        return last_s - next((at_s for at_s, each in points if each > value), last_s)
