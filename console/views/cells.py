"""Cells that several pages show: names that lead to their pages, lags, charts, errors. Pure."""

from __future__ import annotations

from ...protocol.parked import FailingMessage
from ...protocol.text import sum_text
from ..page import Cell, href
from ..shown import count
from ..trends import Trends

FAILING_CHARS_MAX = 160


def subject_cell(subject: str) -> Cell:
    """Return a subject's name."""
    return Cell(subject, href("subjects", subject))


def group_cell(subject: str, group: str) -> Cell:
    """Return a consumer group's name."""
    return Cell(group, href("subjects", subject, "groups", group))


def partition_cell(subject: str, partition_id: int) -> Cell:
    """Return a partition's id."""
    return Cell(str(partition_id), href("subjects", subject, "partitions", partition_id))


def broker_cell(broker_group: str) -> Cell:
    """Return a broker group's name."""
    return Cell(broker_group, href("brokers", broker_group))


def warn_cell(number: int | None, good: str = "") -> Cell:
    """Return a number of what should not be there; `good` is the tone of 0."""
    return Cell(count(number), tone="warn" if number else good)


def sum_cell(number: int, *, is_partial: bool, good: str = "") -> Cell:
    """Return a `warn_cell` of a sum, of which parts may not be known."""
    tone = "warn" if number else "" if is_partial else good
    return Cell(sum_text(count(number), is_partial=is_partial), tone=tone)


def kept_cell(stored: int, *, is_partial: bool) -> Cell:
    """Return how many messages are kept."""
    text = sum_text(count(stored), is_partial=is_partial)
    return Cell(text, tone="muted" if is_partial else "")


def lag_chart(trends: Trends, subject: str, group: str) -> Cell:
    """Return the lag of a consumer group in the last minute."""
    return Cell("lag of the last minute", series=trends.values(("lag", subject, group)))


def rate_chart(trends: Trends, subject: str) -> Cell:
    """Return the rate of a subject in the last minute."""
    series = trends.rates(("end", subject))
    return Cell("messages stored each second, in the last minute", series=series)


def state_cell(state: str, usual: str = "open") -> Cell:
    """Return a state, muted if it is not the usual one."""
    return Cell(state, tone="" if state == usual else "muted")


def or_none_cell(text: str, tone: str = "") -> Cell:
    """Return a text, or a dash."""
    return Cell(text or "–", tone=tone if text else "muted")


def suspended_cell(suspended: bool) -> Cell:
    """Return whether a consumer is suspended."""
    return Cell("suspended", tone="warn") if suspended else Cell("consuming")


def failing_cell(failing: FailingMessage | None) -> Cell:
    """Return what keeps failing."""
    if failing is None:
        return or_none_cell("")
    text = f"offset {failing.offset}: {failing.kind}: {failing.text}"[:FAILING_CHARS_MAX]
    newest = max((failing, *failing.others), key=lambda each: each.at_ms)
    if failing.others_count:
        text += f"; {failing.others_count:,} more"
    if newest is not failing:
        text += f", the newest at offset {newest.offset}: {newest.kind}"
    return or_none_cell(text, "bad")
