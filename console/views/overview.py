"""The first page: what is wrong now, lag, rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from ...protocol.text import counted
from ..cluster import ClusterSample, GroupTotals, SubjectTotals
from ..feed import Feed
from ..page import Cell, Page, PageColumn, Sentence, Table, TableRow, href
from ..shown import count, rate
from .cells import kept_cell, sum_cell
from .wrong import operation_sentences, sentences, server_sentences

SHOWN_MAX = 15
"""How many groups and subjects are on the first page."""


async def overview(feed: Feed, _names: Mapping[str, str], _query: Mapping[str, str]) -> Page:
    """Return the first page."""
    sample = await feed.cluster()
    explained, pending = feed.explain(sample)
    wrong = server_sentences(sample) + operation_sentences(sample.waiting)
    wrong += sentences(
        (
            (explanation, feed.is_stuck(group.subject, group.group))
            for group, explanation in explained
        ),
        sample.hosted,
    )
    wrong += _creation_problems(sample)
    groups = sample.groups()
    total_lag = sum(group.lag for group in groups)
    available = sum(each.available for each in sample.brokers.brokers)
    brokers = len(sample.brokers.brokers)
    stored = [feed.trends.rate(("end", each)) for each in sample.subjects]
    known = [each for each in stored if each is not None]
    return Page(
        title="Overview",
        section="overview",
        wrong=tuple(wrong),
        pending=f"looking into {counted(pending, 'group')}"
        if pending
        else "looking whether a group is stuck"
        if total_lag and feed.is_new
        else "",
        unknown=tuple(map(Sentence, sample.unknown)),
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
            rate_table(feed, list(sample.subjects.values())),
        ),
    )


def lag_table(feed: Feed, groups: list[GroupTotals], total: int) -> Table:
    """Return the table of groups with their lags."""
    rows = tuple(
        TableRow(
            f"{group.subject}/{group.group}",
            (
                Cell(group.group, href("subjects", group.subject, "groups", group.group)),
                Cell(group.subject, href("subjects", group.subject)),
                sum_cell(group.lag, is_partial=group.unknown),
                Cell(
                    "lag of the last minute",
                    series=feed.trends.values(("lag", group.subject, group.group)),
                ),
                Cell(rate(feed.trends.rate(("acked", group.subject, group.group)))),
                sum_cell(group.parked, is_partial=group.unknown),
            ),
        )
        for group in groups
    )
    more = f" (the {len(groups)} with the most, of {total})" if total > len(groups) else ""
    return Table(
        name="lag",
        caption=f"Lag by consumer group{more}",
        columns=(
            PageColumn("Group"),
            PageColumn("Subject"),
            PageColumn("Lag", is_number=True),
            PageColumn("Last minute"),
            PageColumn("Acked", is_number=True),
            PageColumn("Parked", is_number=True),
        ),
        rows=rows,
        empty="No consumer group reads anything yet. Start a consumer:",
        empty_command="keylane consume SUBJECT --group GROUP",
    )


def rate_table(feed: Feed, subjects: list[SubjectTotals]) -> Table:
    """Return the table of subjects with their rates, the busiest first."""
    ranked = sorted(
        subjects, key=lambda each: (-(feed.trends.rate(("end", each.subject)) or 0), each.subject)
    )
    rows = tuple(
        TableRow(
            each.subject,
            (
                Cell(each.subject, href("subjects", each.subject)),
                Cell(rate(feed.trends.rate(("end", each.subject)))),
                Cell(
                    "messages stored each second, in the last minute",
                    series=feed.trends.rates(("end", each.subject)),
                ),
                kept_cell(each.stored, is_partial=each.unknown),
            ),
        )
        for each in islice(ranked, SHOWN_MAX)
    )
    more = f" (the {len(rows)} busiest, of {len(subjects)})" if len(subjects) > len(rows) else ""
    return Table(
        name="rates",
        caption=f"Rates by subject{more}",
        columns=(
            PageColumn("Subject"),
            PageColumn("Stored", is_number=True),
            PageColumn("Last minute"),
            PageColumn("Messages kept", is_number=True),
        ),
        rows=rows,
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
