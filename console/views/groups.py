"""The pages of consumer groups and of their consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ...admin import GroupDescription, GroupMember, PartitionProgress
from ...protocol.routing import ConsumeStrategy
from ...protocol.text import sum_text
from ..acts.table import act_form
from ..feed import Feed
from ..page import Cell, Link, Page, Sentence, Table, href, table
from ..shown import age, count, rate
from .cells import (
    failing_cell,
    group_cell,
    lag_chart,
    partition_cell,
    state_cell,
    subject_cell,
    sum_cell,
    suspended_cell,
    warn_cell,
)
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
        elif isinstance(explanation, str):
            unknown.append(explanation)
        else:
            heard = {each.partition_id for each in described.partitions if not each.problem}
            is_stuck = feed.is_stuck(subject, name)
            causes = wrong_causes(explanation, is_stuck=is_stuck, heard=heard)
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
            ("Lag", warn_cell(described.lag, "good")),
            ("Last minute", lag_chart(feed.trends, subject, name)),
            ("Acked", Cell(rate(feed.trends.rate(("acked", subject, name))))),
            (
                "Consumers",
                Cell(count(described.sessions), tone="" if described.sessions else "warn"),
            ),
            (
                "Parked messages",
                Cell(
                    sum_text(
                        count(parked),
                        is_partial=any(each.parked is None for each in described.partitions),
                    ),
                    href("subjects", subject, "groups", name, "parked"),
                    "warn" if parked else "",
                ),
            ),
            ("Strategy", Cell(described.strategy.value)),
            ("State", Cell(_state(described), tone="warn" if suspended else "")),
        ),
        tables=(
            _member_table(described, query),
            _progress_table(
                subject,
                "Progress by partition",
                described.partitions,
                query,
                href("subjects", subject, "groups", name),
                empty="The subject has no partition yet.",
            ),
        ),
        extra={"question": act_form("why", {"subject": subject, "group": name})},
    )


def _state(described: GroupDescription) -> str:
    if described.settings is not None and described.settings.suspended:
        return "suspended"
    if described.reset is not None:
        return "being reset"
    return "consuming" if described.sessions else "no consumer"


def _member_table(described: GroupDescription, query: Mapping[str, str]) -> Table:
    is_shared = described.strategy is ConsumeStrategy.SHARED
    return table(
        "members",
        "Consumers",
        described.members,
        lambda each: each.session,
        (
            ("Consumer", lambda each: _client_cell(described.subject, described.group, each)),
            ("#Partitions", lambda each: "all" if is_shared else each.partitions),
            ("Last heartbeat", lambda each: f"{age(each.heard_ms)} ago"),
            ("Leases end", lambda each: f"in {age(each.expires_in_ms)}"),
            ("State", lambda each: suspended_cell(each.suspended)),
        ),
        empty="No consumer is alive. Start one:",
        empty_command=f"keylane consume {described.subject} --group {described.group}",
        query=query,
        path=href("subjects", described.subject, "groups", described.group),
        number="consumers",
    )


def _client_cell(subject: str, group: str, member: GroupMember) -> Cell:
    address = href("consumer", subject=subject, group=group, client=member.client)
    return Cell(member.client or "(no name)", address)


def _progress_table(
    subject: str,
    caption: str,
    partitions: Sequence[PartitionProgress],
    query: Mapping[str, str],
    path: str,
    *,
    empty: str,
) -> Table:
    by_lag = query.get("sort") == "lag"
    return table(
        "progress",
        caption,
        sorted(partitions, key=lambda each: -(each.lag or 0) if by_lag else 0),
        lambda each: str(each.partition_id),
        (
            ("Partition", lambda each: partition_cell(subject, each.partition_id)),
            ("State", lambda each: state_cell(each.state.value)),
            (
                "Owner",
                lambda each: Cell(each.owner) if each.owner else Cell("nobody", tone="muted"),
            ),
            ("#Token", lambda each: each.token),
            ("#Next offset", lambda each: each.offset),
            ("#Lag", lambda each: warn_cell(each.lag)),
            ("#Parked", lambda each: warn_cell(each.parked)),
            ("Keeps failing", lambda each: failing_cell(each.failing)),
        ),
        empty=empty,
        query=query,
        path=path,
    )


# ── consumers ─────────────────────────────────────────────────────────────────────────────────────
async def consumers(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the consumers of all groups."""
    sample = await feed.cluster()
    groups = sorted(sample.groups(), key=lambda each: (each.subject, each.group))
    found = await feed.present_groups((each.subject, each.group) for each in groups[:GROUPS_MAX])
    members = [(described, member) for described in found for member in described.members]
    left_out = len(groups) - GROUPS_MAX
    return Page(
        title="Consumers",
        section="consumers",
        lead=f"Of the first {GROUPS_MAX} groups; the page of a group has its own."
        if left_out > 0
        else "",
        tables=(
            table(
                "consumers",
                "Consumers",
                members,
                lambda each: f"{each[0].subject}/{each[0].group}/{each[1].session}",
                (
                    (
                        "Consumer",
                        lambda each: _client_cell(each[0].subject, each[0].group, each[1]),
                    ),
                    ("Group", lambda each: group_cell(each[0].subject, each[0].group)),
                    ("Subject", lambda each: subject_cell(each[0].subject)),
                    ("#Partitions", lambda each: each[1].partitions),
                    ("Last heartbeat", lambda each: f"{age(each[1].heard_ms)} ago"),
                    ("State", lambda each: suspended_cell(each[1].suspended)),
                ),
                empty="No consumer is alive. Start one:",
                empty_command="keylane consume SUBJECT --group GROUP",
                query=query,
                path=href("consumers"),
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
    is_partial = any(each.lag is None for each in owned)
    facts: tuple[tuple[str, Cell], ...] = (("State", Cell("gone", tone="warn")),)
    if member is not None:
        facts = (
            ("State", suspended_cell(member.suspended)),
            ("Last heartbeat", Cell(f"{age(member.heard_ms)} ago")),
            ("Leases end", Cell(f"in {age(member.expires_in_ms)}")),
            ("Partitions", Cell(count(member.partitions))),
            ("Lag of its partitions", sum_cell(lag, is_partial=is_partial, good="good")),
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
            _progress_table(
                subject,
                "Its partitions",
                owned,
                query,
                href("consumer"),
                empty="It has no partition: others have them, or it is suspended.",
            ),
        ),
    )
