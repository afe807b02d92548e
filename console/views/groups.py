"""The pages of consumer groups, of their consumers, and of what they have parked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ...admin import GroupDescription, PartitionProgress
from ...protocol.errors import GroupUnknownError
from ...protocol.routing import ConsumeStrategy
from ..feed import Feed
from ..page import Cell, Link, Page, PageColumn, Sentence, Table, TableRow, href, window
from ..shown import age, count, rate
from .subjects import ROOT, cluster_or_none
from .wrong import wrong_causes

GROUPS_MAX = 30
"""How many groups are asked for their consumers, for one page of consumers."""


async def group(feed: Feed, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the page of a consumer group."""
    subject, name = names["subject"], names["group"]
    described, _trends = await asyncio.gather(feed.group(subject, name), cluster_or_none(feed))
    parked = sum(each.parked or 0 for each in described.partitions)
    wrong: tuple[Sentence, ...] = ()
    unknown = [each.problem for each in described.partitions if each.problem]
    pending = ""
    if described.lag or parked or unknown:
        explanation = feed.explanation(subject, name)
        if explanation is None:
            pending = "looking into it"
        else:
            causes = wrong_causes(explanation, stands=feed.stands(subject, name))
            wrong = tuple(Sentence(each.text, each.step) for each in causes)
            unknown += explanation.unknown
    suspended = described.settings is not None and described.settings.suspended
    return Page(
        title=name,
        trail=(ROOT, Link(subject, href("subjects", subject))),
        section="subjects",
        wrong=wrong,
        pending=pending,
        unknown=tuple(map(Sentence, sorted(set(unknown)))),
        acts=(
            Link("Resume", href("act", "group-resume", subject=subject, group=name))
            if suspended
            else Link("Suspend", href("act", "group-suspend", subject=subject, group=name)),
            Link("Reset", href("act", "group-reset", subject=subject, group=name)),
            *(
                (
                    Link(
                        "Cancel the reset", href("act", "reset-cancel", subject=subject, group=name)
                    ),
                )
                if described.reset is not None and not described.reset.begun
                else ()
            ),
            Link("Failure policy", href("act", "group-set", subject=subject, group=name)),
            Link("Parked keys", href("subjects", subject, "groups", name, "parked")),
            Link(
                "Delete",
                href("act", "group-delete", subject=subject, group=name),
                is_destructive=True,
            ),
        ),
        facts=(
            ("Lag", Cell(count(described.lag), tone="warn" if described.lag else "good")),
            (
                "Last minute",
                Cell("lag of the last minute", series=feed.trends.values(("lag", subject, name))),
            ),
            ("Acked", Cell(rate(feed.trends.rate(("acked", subject, name))))),
            (
                "Consumers",
                Cell(count(described.sessions), tone="" if described.sessions else "warn"),
            ),
            (
                "Parked messages",
                Cell(
                    count(parked),
                    href("subjects", subject, "groups", name, "parked"),
                    "warn" if parked else "",
                ),
            ),
            ("Strategy", Cell(described.strategy.value)),
            ("State", Cell(_state(described), tone="warn" if suspended else "")),
        ),
        tables=(
            _member_table(described, query),
            _progress_table(described, query),
        ),
    )


def _state(described: GroupDescription) -> str:
    if described.settings is not None and described.settings.suspended:
        return "suspended"
    if described.reset is not None:
        return "being reset"
    return "consuming" if described.sessions else "no consumer"


def _member_table(described: GroupDescription, query: Mapping[str, str]) -> Table:
    address = href("subjects", described.subject, "groups", described.group)
    rows = [
        TableRow(
            f"{index}",
            (
                Cell(
                    each.client or "(no name)",
                    href(
                        "consumer",
                        subject=described.subject,
                        group=described.group,
                        client=each.client,
                    ),
                ),
                Cell(
                    "all"
                    if described.strategy is ConsumeStrategy.SHARED
                    else count(each.partitions)
                ),
                Cell(f"{age(each.heard_ms)} ago"),
                Cell(f"in {age(each.expires_in_ms)}"),
                Cell(
                    "suspended" if each.suspended else "consuming",
                    tone="warn" if each.suspended else "",
                ),
            ),
        )
        for index, each in enumerate(described.members)
    ]
    shown, pager = window(rows, query, address, name="consumers")
    return Table(
        name="members",
        caption="Consumers",
        columns=(
            PageColumn("Consumer"),
            PageColumn("Partitions", is_number=True),
            PageColumn("Last heartbeat"),
            PageColumn("Leases end"),
            PageColumn("State"),
        ),
        rows=shown,
        empty="No consumer is alive. Start one:",
        empty_command=f"keylane consume {described.subject} --group {described.group}",
        pager=pager,
    )


def _progress_table(described: GroupDescription, query: Mapping[str, str]) -> Table:
    subject, name = described.subject, described.group
    by_lag = query.get("sort") == "lag"
    partitions = sorted(described.partitions, key=lambda each: -(each.lag or 0) if by_lag else 0)
    rows = [TableRow(str(each.partition_id), _progress_cells(subject, each)) for each in partitions]
    shown, pager = window(rows, query, href("subjects", subject, "groups", name))
    return Table(
        name="progress",
        caption="Progress by partition",
        columns=(
            PageColumn("Partition"),
            PageColumn("State"),
            PageColumn("Owner"),
            PageColumn("Token", is_number=True),
            PageColumn("Next offset", is_number=True),
            PageColumn("Lag", is_number=True),
            PageColumn("Parked", is_number=True),
            PageColumn("Keeps failing"),
        ),
        rows=shown,
        empty="The subject has no partition yet.",
        pager=pager,
    )


def _progress_cells(subject: str, each: PartitionProgress) -> tuple[Cell, ...]:
    failing = each.failing
    return (
        Cell(str(each.partition_id), href("subjects", subject, "partitions", each.partition_id)),
        Cell(each.state.value, tone="" if each.state.value == "open" else "muted"),
        Cell(each.owner or "nobody", tone="" if each.owner else "muted"),
        Cell(count(each.token)),
        Cell(count(each.offset)),
        Cell(count(each.lag), tone="warn" if each.lag else ""),
        Cell(count(each.parked), tone="warn" if each.parked else ""),
        Cell(
            "–"
            if failing is None
            else f"offset {failing.offset}: {failing.kind}: {failing.text}"[:160],
            tone="muted" if failing is None else "bad",
        ),
    )


# ── consumers ─────────────────────────────────────────────────────────────────────────────────────
async def consumers(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the consumers of all groups."""
    sample = await feed.cluster()
    groups = sorted(sample.groups(), key=lambda each: (each.subject, each.group))
    rows: list[TableRow] = []
    asked = groups[:GROUPS_MAX]
    found = await asyncio.gather(
        *(feed.group(each.subject, each.group) for each in asked), return_exceptions=True
    )
    for each, described in zip(asked, found, strict=True):
        if isinstance(described, GroupUnknownError):
            continue  # deleted meanwhile
        if isinstance(described, BaseException):
            raise described
        rows += [
            TableRow(
                f"{each.subject}/{each.group}/{index}",
                (
                    Cell(
                        member.client or "(no name)",
                        href(
                            "consumer", subject=each.subject, group=each.group, client=member.client
                        ),
                    ),
                    Cell(each.group, href("subjects", each.subject, "groups", each.group)),
                    Cell(each.subject, href("subjects", each.subject)),
                    Cell(count(member.partitions)),
                    Cell(f"{age(member.heard_ms)} ago"),
                    Cell("suspended" if member.suspended else "consuming"),
                ),
            )
            for index, member in enumerate(described.members)
        ]
    shown, pager = window(rows, query, href("consumers"))
    left_out = len(groups) - GROUPS_MAX
    return Page(
        title="Consumers",
        section="consumers",
        lead=f"Of the first {GROUPS_MAX} groups; the page of a group has its own."
        if left_out > 0
        else "",
        tables=(
            Table(
                name="consumers",
                caption="Consumers",
                columns=(
                    PageColumn("Consumer"),
                    PageColumn("Group"),
                    PageColumn("Subject"),
                    PageColumn("Partitions", is_number=True),
                    PageColumn("Last heartbeat"),
                    PageColumn("State"),
                ),
                rows=shown,
                empty="No consumer is alive. Start one:",
                empty_command="keylane consume SUBJECT --group GROUP",
                pager=pager,
            ),
        ),
    )


async def consumer(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the page of a consumer."""
    subject, name, client = (query.get(each, "") for each in ("subject", "group", "client"))
    described = await feed.group(subject, name)
    member = next((each for each in described.members if each.client == client), None)
    owned = [each for each in described.partitions if each.owner and each.owner == client]
    lag = sum(each.lag or 0 for each in owned)
    rows = [TableRow(str(each.partition_id), _progress_cells(subject, each)) for each in owned]
    shown, pager = window(rows, query, href("consumer"))
    facts: tuple[tuple[str, Cell], ...] = (("State", Cell("gone", tone="warn")),)
    if member is not None:
        facts = (
            ("State", Cell("suspended" if member.suspended else "consuming")),
            ("Last heartbeat", Cell(f"{age(member.heard_ms)} ago")),
            ("Leases end", Cell(f"in {age(member.expires_in_ms)}")),
            ("Partitions", Cell(count(member.partitions))),
            ("Lag of its partitions", Cell(count(lag), tone="warn" if lag else "good")),
        )
    given = {"subject": subject, "group": name, "client": client}
    return Page(
        title=client or "(no name)",
        trail=(
            ROOT,
            Link(subject, href("subjects", subject)),
            Link(name, href("subjects", subject, "groups", name)),
        ),
        section="consumers",
        lead="" if member else "It has left, or its session has ended.",
        facts=facts,
        acts=(
            (Link("Resume", href("act", "group-resume", **given)),)
            if member is not None and member.suspended
            else (Link("Suspend", href("act", "group-suspend", **given)),)
        ),
        tables=(
            Table(
                name="progress",
                caption="Its partitions",
                columns=(
                    PageColumn("Partition"),
                    PageColumn("State"),
                    PageColumn("Owner"),
                    PageColumn("Token", is_number=True),
                    PageColumn("Next offset", is_number=True),
                    PageColumn("Lag", is_number=True),
                    PageColumn("Parked", is_number=True),
                    PageColumn("Keeps failing"),
                ),
                rows=shown,
                empty="It has no partition: others have them, or it is suspended.",
                pager=pager,
            ),
        ),
    )
