"""The first page: what is wrong now, lag, rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...admin import Explanation
from ...protocol.text import counted
from ..cluster import ClusterSample, GroupTotals, SubjectTotals
from ..feed import Feed
from ..page import Cell, Page, Sentence, Table, href, table
from ..shown import count, rate
from .cells import group_cell, kept_cell, lag_chart, rate_chart, subject_cell, sum_cell
from .wrong import operation_sentences, sentences, server_sentences

SHOWN_MAX = 15
"""How many groups and subjects are on the first page."""


async def overview(feed: Feed, _names: Mapping[str, str], _query: Mapping[str, str]) -> Page:
    """Return the first page."""
    sample = await feed.cluster()
    explained = feed.explain(sample)
    pending = sum(found is None for _, found in explained)
    wrong = server_sentences(sample) + operation_sentences(sample.waiting)
    wrong += sentences(
        (
            (found, feed.is_stuck(group.subject, group.group))
            for group, found in explained
            if isinstance(found, Explanation)
        ),
        sample.hosted,
    )
    wrong += _creation_problems(sample)
    groups = sample.groups()
    total_lag = sum(group.lag for group in groups)
    available = sum(each.available for each in sample.brokers.brokers)
    brokers = len(sample.brokers.brokers)
    rates = {each: feed.trends.rate(("end", each)) for each in sample.subjects}
    known = [each for each in rates.values() if each is not None]
    return Page(
        title="Overview",
        section="overview",
        wrong=tuple(wrong),
        pending=f"looking into {counted(pending, 'group')}"
        if pending
        else "looking whether a group is stuck"
        if total_lag and feed.is_new
        else "",
        unknown=tuple(
            Sentence(text)
            for text in (
                *sample.unknown,
                *dict.fromkeys(found for _, found in explained if isinstance(found, str)),
            )
        ),
        facts=(
            (
                "Lag of all groups",
                sum_cell(total_lag, is_partial=any(each.unknown for each in groups)),
            ),
            ("Stored", Cell(rate(sum(known) if known else None))),
            ("Subjects", Cell(count(len(sample.subjects)), href("subjects"))),
            (
                "Brokers",
                Cell(
                    f"{available} of {brokers}",
                    href("brokers"),
                    "bad" if available < brokers else "",
                ),
            ),
        ),
        tables=(
            lag_table(feed, groups[:SHOWN_MAX], len(groups)),
            rate_table(feed, sample.subjects, rates),
        ),
    )


def lag_table(feed: Feed, groups: list[GroupTotals], total: int) -> Table:
    """Return the table of groups with their lags."""
    more = f" (the {len(groups)} with the most, of {total})" if total > len(groups) else ""
    return table(
        "lag",
        f"Lag by consumer group{more}",
        groups,
        lambda each: f"{each.subject}/{each.group}",
        (
            ("Group", lambda each: group_cell(each.subject, each.group)),
            ("Subject", lambda each: subject_cell(each.subject)),
            ("#Lag", lambda each: sum_cell(each.lag, is_partial=each.unknown)),
            ("Last minute", lambda each: lag_chart(feed.trends, each.subject, each.group)),
            ("#Acked", lambda each: rate(feed.trends.rate(("acked", each.subject, each.group)))),
            ("#Parked", lambda each: sum_cell(each.parked, is_partial=each.unknown)),
        ),
        empty="No consumer group reads anything yet. Start a consumer:",
        empty_command="keylane consume SUBJECT --group GROUP",
    )


def rate_table(
    feed: Feed, subjects: Mapping[str, SubjectTotals], rates: Mapping[str, float | None]
) -> Table:
    """Return the table of subjects with their rates, the busiest first."""
    ranked = sorted(subjects.values(), key=lambda each: (-(rates[each.subject] or 0), each.subject))
    shown = ranked[:SHOWN_MAX]
    more = f" (the {len(shown)} busiest, of {len(ranked)})" if len(ranked) > len(shown) else ""
    return table(
        "rates",
        f"Rates by subject{more}",
        shown,
        lambda each: each.subject,
        (
            ("Subject", lambda each: subject_cell(each.subject)),
            ("#Stored", lambda each: rate(rates[each.subject])),
            ("Last minute", lambda each: rate_chart(feed.trends, each.subject)),
            ("#Messages kept", lambda each: kept_cell(each.stored, is_partial=each.unknown)),
        ),
        empty="There is no subject yet. Create one here, or with:",
        empty_command="keylane subject create orders --partitions 4",
    )


def _creation_problems(sample: ClusterSample) -> Iterator[Sentence]:
    for subject in sample.subjects.values():
        if subject.summary.problem:
            yield Sentence(
                f"subject {subject.subject} was not created: {subject.summary.problem}",
                f"keylane subject create {subject.subject}",
                href("subjects", subject.subject),
                subject.subject,
            )
