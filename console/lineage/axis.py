"""The axis of time: where each moment lies, and the words for times and spans. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

CROWDED = 0.55
"""The share of the axis that is divided equally among the spans, if some would be too short."""
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_UNITS_MS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000))
_YEARS_MS = 253_402_300_799_000
"""The end of the year 9999, the last one of datetime."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The moments from left to right, and now."""

    places: tuple[float, ...]
    """The place of each moment, and then of now, from 0 to the width of the axis."""
    widened: frozenset[int]
    """The moments after which time is drawn wider than it was; none if the axis is to scale."""


def place_moments(
    times_ms: Sequence[int | None], now_ms: int, width: float, span_min: float
) -> Axis:
    """
    Place moments on an axis of time. A span between two of them that would be too short to read is
    widened, and the others share the rest by their time.

    Args:
        times_ms: the time of each moment; None if it is not known. They rise.
        span_min: the width below which a span is too short, unless there are too many.
    """
    spans_ms = spans_between(times_ms, now_ms)
    count = len(spans_ms)
    least = min(span_min, CROWDED * width / count) if count else 0.0
    widened: set[int] = set()
    while True:
        room = width - least * len(widened)
        total_ms = sum((spans_ms[index] or 0) for index in range(count) if index not in widened)
        scale = room / total_ms if total_ms else 0.0
        short = {
            index
            for index in range(count)
            if index not in widened and (spans_ms[index] or 0) * scale < least
        }
        if not short:
            break
        widened |= short
    if len(widened) == count and count:
        least = width / count
    places = [0.0]
    for index, span_ms in enumerate(spans_ms):
        places.append(places[-1] + (least if index in widened else (span_ms or 0) * scale))
    return Axis(tuple(places), frozenset(widened))


def spans_between(times_ms: Sequence[int | None], now_ms: int) -> list[int | None]:
    """Return the time from each moment to the next one, and from the last one to now, in
    milliseconds; None if it is not known.
    """
    later = [*times_ms[1:], now_ms]
    return [
        None if start is None or end is None else max(0, end - start)
        for start, end in zip(times_ms, later, strict=True)
    ]


def say_times(times_ms: Sequence[int | None]) -> list[str]:
    """Return the words for moments that rise: the date where it changes, the year if it is not that
    of the last one, and seconds if two of them are less than a minute apart. "" where the time is
    not known.
    """
    known = [time_ms for time_ms in times_ms if time_ms is not None]
    close = any(later - time_ms < 60_000 for time_ms, later in pairwise(known))
    words = []
    before: datetime | None = None
    last_year = _calendar(known[-1]).year if known else 0
    for time_ms in times_ms:
        if time_ms is None:
            words.append("")
            continue
        at = _calendar(time_ms)
        text = f"{at.hour:02}:{at.minute:02}" + (f":{at.second:02}" if close else "")
        if before is None or before.date() != at.date():
            year = "" if at.year == last_year else f" {at.year}"
            text = f"{at.day} {_MONTHS[at.month - 1]}{year}, {text}"
        words.append(text)
        before = at
    return words


def say_span(span_ms: int | None) -> str:
    """Return the words for a length of time, such as "2 h 5 min", with at most two units; "" if it
    is not known.
    """
    if span_ms is None:
        return ""
    if span_ms < 1_000:
        return "under 1 s"
    for index, (unit, unit_ms) in enumerate(_UNITS_MS):
        if span_ms >= unit_ms:
            count, rest_ms = divmod(span_ms, unit_ms)
            if index + 1 < len(_UNITS_MS) and count < 10:
                smaller, smaller_ms = _UNITS_MS[index + 1]
                if rest_ms >= smaller_ms:
                    return f"{count} {unit} {rest_ms // smaller_ms} {smaller}"
            return f"{count} {unit}"
    raise AssertionError


def _calendar(time_ms: int) -> datetime:
    return datetime.fromtimestamp(min(max(time_ms, 0), _YEARS_MS) / 1000, UTC)
