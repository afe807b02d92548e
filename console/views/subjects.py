"""The pages of subjects and of their partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from ...admin import (
    GroupSummary,
    OperationView,
    PartitionDescription,
    PartitionProgress,
    SubjectDescription,
)
from ...protocol.errors import AccessDeniedError, PartitionUnknownError
from ...protocol.operations import ROUTE_FINAL, OperationState
from ...protocol.routing import PartitionState
from ...protocol.text import listed, parse_number
from ..acts.table import act_form
from ..cluster import ClusterSample
from ..feed import BROKER_S, Feed
from ..lineage import draw_lineage, fetch_lineage
from ..page import Cell, Link, Page, Sentence, Table, href, table
from ..shown import count, rate
from .cells import (
    broker_cell,
    failing_cell,
    group_cell,
    kept_cell,
    lag_chart,
    or_none_cell,
    partition_cell,
    rate_chart,
    state_cell,
    subject_cell,
    sum_cell,
    warn_cell,
)

OPERATIONS_SHOWN = 10
CHOICES_MAX = 100
"""How many groups can be chosen by name for a question."""
ROOT = Link("Subjects", href("subjects"))


async def subjects(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the list of subjects."""
    sample = await feed.cluster()
    searched = query.get("name", "")
    trends = feed.trends
    listed_subjects = table(
        "subjects",
        "Subjects",
        [each for each in sample.subjects.values() if searched in each.subject],
        lambda each: each.subject,
        (
            ("Subject", lambda each: subject_cell(each.subject)),
            ("#Partitions", lambda each: each.summary.partitions),
            ("#Stored", lambda each: rate(trends.rate(("end", each.subject)))),
            ("Last minute", lambda each: rate_chart(trends, each.subject)),
            ("#Messages kept", lambda each: kept_cell(each.stored, is_partial=each.unknown)),
            ("#Groups", lambda each: len(each.groups)),
            (
                "#Lag",
                lambda each: sum_cell(
                    sum(group.lag for group in each.groups.values()), is_partial=each.unknown
                ),
            ),
        ),
        empty=(
            f"No subject has “{searched}” in its name."
            if searched
            else "There is no subject yet. Create one here, or with:"
        ),
        empty_command="" if searched else "keylane subject create orders --partitions 4",
        query=query,
        path=href("subjects"),
    )
    return Page(
        title="Subjects",
        section="subjects",
        unknown=tuple(map(Sentence, sample.unknown)),
        acts=(Link("Create a subject", href("act", "subject-create")),),
        tables=(listed_subjects,),
        template="subjects.html",
        extra={"searched": searched},
    )


async def subject(feed: Feed, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the page of a subject."""
    name = names["subject"]
    described, groups, operations, sample = await asyncio.gather(
        feed.subject(name), feed.groups(name), feed.operations(name), cluster_or_none(feed)
    )
    open_count = sum(each.state is PartitionState.OPEN for each in described.partitions)
    kept = [each for each in described.partitions if each.next_offset is not None]
    stored = sum((each.next_offset or 0) - (each.first_offset or 0) for each in kept)
    is_partial = len(kept) < len(described.partitions)
    totals = sample.subjects.get(name) if sample else None
    group_totals = totals.groups if totals else {}

    def total(each: GroupSummary, field: str) -> Cell:
        found = group_totals.get(each.group)
        if found is None:
            return warn_cell(None)
        return sum_cell(getattr(found, field), is_partial=found.unknown)

    trends = feed.trends
    group_table = table(
        "groups",
        "Consumer groups",
        groups,
        lambda each: each.group,
        (
            ("Group", lambda each: group_cell(name, each.group)),
            ("Strategy", lambda each: each.strategy.value),
            (
                "#Consumers",
                lambda each: Cell(count(each.sessions), tone="" if each.sessions else "warn"),
            ),
            ("#Lag", lambda each: total(each, "lag")),
            ("Last minute", lambda each: lag_chart(trends, name, each.group)),
            ("#Acked", lambda each: rate(trends.rate(("acked", name, each.group)))),
            ("#Parked", lambda each: total(each, "parked")),
        ),
        empty="No consumer group reads this subject. Start a consumer:",
        empty_command=f"keylane consume {name} --group GROUP",
    )
    running = [each for each in operations if each.state not in ROUTE_FINAL]
    return Page(
        title=name,
        trail=(ROOT,),
        section="subjects",
        tabs=tabs(name),
        unknown=problems(described.partitions),
        acts=(
            Link("Grow", href("act", "grow", subject=name))
            if described.static
            else Link("Resize", href("act", "resize", subject=name, partitions=open_count)),
            Link("Move partitions", href("act", "move", subject=name)),
            Link("Settings", href("act", "subject-set", subject=name)),
            Link("Create a group", href("act", "group-create", subject=name)),
            Link("Delete", href("act", "subject-delete", subject=name), is_destructive=True),
        ),
        facts=(
            ("Stored", Cell(rate(feed.trends.rate(("end", name))))),
            ("Messages kept", kept_cell(stored, is_partial=is_partial)),
            ("Queues" if described.static else "Open partitions", Cell(count(open_count))),
            ("Order", Cell(described.order_strategy.value)),
            ("Kept until", Cell(_RETENTION[described.retention.value])),
            ("Route", Cell(f"version {described.route_version}")),
        ),
        tables=(
            *((operation_table("Running operations", running),) if running else ()),
            group_table,
            _partition_table(described, query),
            operation_table("Latest operations", operations[:OPERATIONS_SHOWN]),
        ),
        extra={
            "tab": "Subject",
            "question": act_form(
                "why",
                {"subject": name, "group": groups[0].group if len(groups) == 1 else ""},
                {"group": [each.group for each in groups[:CHOICES_MAX]]},
            ),
        },
    )


_RETENTION = {"acked": "every group has acked it", "time": "its age"}


def tabs(subject: str) -> tuple[Link, ...]:
    """Return the parts of a subject's page."""
    return (
        Link("Subject", href("subjects", subject)),
        Link("Messages", href("subjects", subject, "messages")),
        Link("Lineage", href("subjects", subject, "lineage")),
    )


async def cluster_or_none(feed: Feed) -> ClusterSample | None:
    """Return the sample of the whole cluster; None to a caller that may see only some subjects."""
    try:
        return await feed.cluster()
    except AccessDeniedError:
        return None


def problems(
    partitions: Iterable[PartitionDescription | PartitionProgress],
) -> tuple[Sentence, ...]:
    """Return why brokers have not described some partitions."""
    return tuple(map(Sentence, sorted({each.problem for each in partitions if each.problem})))


def _partition_table(described: SubjectDescription, query: Mapping[str, str]) -> Table:
    name = described.subject
    return table(
        "partitions",
        "Partitions",
        described.partitions,
        lambda each: str(each.partition_id),
        (
            ("Partition", lambda each: partition_cell(name, each.partition_id)),
            ("Logical partitions", lambda each: f"{each.range_start}–{each.range_end - 1}"),
            ("State", lambda each: state_cell(each.state.value)),
            ("Broker", lambda each: broker_cell(each.broker_group)),
            ("#First offset", lambda each: each.first_offset),
            ("#End offset", lambda each: each.next_offset),
            ("Continues", lambda each: _parents_cell(each.parents)),
        ),
        empty="It has no partition: its creation is not finished, or has failed.",
        empty_command=f"keylane subject create {name}",
        query=query,
        path=href("subjects", name),
    )


def _parents_cell(parents: Sequence[int]) -> Cell:
    return or_none_cell(listed(parents) if parents else "", "muted")


def operation_table(caption: str, operations: Sequence[OperationView]) -> Table:
    """Return the table of operations."""

    def cancel(each: OperationView) -> Cell:
        if each.state is not OperationState.PLAN:
            return Cell("")
        return Cell("cancel", href("act", "operation-cancel", id=each.operation_id))

    return table(
        caption.partition(" ")[0].lower(),
        caption,
        operations,
        lambda each: str(each.operation_id),
        (
            ("Operation", lambda each: str(each.operation_id)),
            ("Kind", lambda each: each.kind.value),
            (
                "State",
                lambda each: Cell(
                    each.state.value, tone="good" if each.state is OperationState.DONE else ""
                ),
            ),
            ("Partitions", lambda each: f"{len(each.sealed)} → {len(each.children)}"),
            ("Waits for", lambda each: or_none_cell(each.problem or "", "warn")),
            ("Cancel", cancel),
        ),
        empty="Its partitions were never changed.",
    )


async def partition(feed: Feed, names: Mapping[str, str], _query: Mapping[str, str]) -> Page:
    """Return the page of a partition."""
    name = names["subject"]
    number = parse_number(names["partition"]) or 0
    described = await feed.subject(name)
    found = next((each for each in described.partitions if each.partition_id == number), None)
    if found is None:
        raise PartitionUnknownError(
            f"subject {name} has no partition {number} with data", partition_id=number
        )
    summaries = await feed.groups(name)
    groups = await feed.present_groups((name, each.group) for each in summaries[:GROUPS_SHOWN])
    progress = table(
        "progress",
        "Progress of consumer groups",
        [
            (group.group, progress)
            for group in groups
            for progress in group.partitions
            if progress.partition_id == number
        ],
        lambda each: each[0],
        (
            ("Group", lambda each: group_cell(name, each[0])),
            (
                "Owner",
                lambda each: Cell(each[1].owner or "nobody", tone="" if each[1].owner else "warn"),
            ),
            ("#Token", lambda each: each[1].token),
            ("#Next offset", lambda each: each[1].offset),
            ("#Lag", lambda each: warn_cell(each[1].lag)),
            ("#Parked", lambda each: warn_cell(each[1].parked)),
            ("Keeps failing", lambda each: failing_cell(each[1].failing)),
        ),
        empty="No consumer group reads this subject.",
    )
    return Page(
        title=f"Partition {number}",
        trail=(ROOT, Link(name, href("subjects", name))),
        section="subjects",
        lead=f"Of the first {GROUPS_SHOWN} groups; the page of a group has its own."
        if len(summaries) > GROUPS_SHOWN
        else "",
        unknown=(Sentence(found.problem),) if found.problem else (),
        acts=_partition_acts(name, found, described),
        facts=(
            ("State", Cell(found.state.value)),
            ("Logical partitions", Cell(f"{found.range_start}–{found.range_end - 1}")),
            ("Broker", broker_cell(found.broker_group)),
            ("First offset", Cell(count(found.first_offset))),
            ("End offset", Cell(count(found.next_offset))),
            ("Continues", Cell(listed(found.parents) if found.parents else "nothing")),
        ),
        tables=(progress,),
    )


GROUPS_SHOWN = 20
"""How many groups are on the page of a partition."""


def _partition_acts(
    name: str, found: PartitionDescription, described: SubjectDescription
) -> tuple[Link, ...]:
    messages = Link(
        "Messages", href("subjects", name, "messages", partition=found.partition_id, start="newest")
    )
    if found.state is not PartitionState.OPEN:
        return (messages,)
    move = Link("Move", href("act", "move", subject=name, partitions=found.partition_id))
    if described.static:
        return messages, move
    return messages, move, Link("Split", href("act", "split", partition=found.partition_id))


async def lineage(feed: Feed, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the lineage of a subject's partitions, drawn, with the progress of its groups."""
    name = names["subject"]
    facts = await feed.sample(
        ("lineage", name), lambda: fetch_lineage(feed.admin, name, within_s=BROKER_S)
    )
    history = facts.history
    every = table(
        "history",
        "Every partition that the subject ever had",
        history.partitions,
        lambda each: str(each.partition.partition_id),
        (
            ("Partition", lambda each: str(each.partition.partition_id)),
            (
                "Logical partitions",
                lambda each: f"{each.partition.range_start}–{each.partition.range_end - 1}",
            ),
            ("State", lambda each: "lost" if each.lost else each.partition.state.value),
            ("Broker", lambda each: broker_cell(each.partition.broker_group)),
            ("Continues", lambda each: _parents_cell(each.partition.parents)),
            (
                "#End offset",
                lambda each: or_none_cell(
                    "" if each.end_offset is None else count(each.end_offset), "muted"
                ),
            ),
        ),
        empty="It has no partition yet.",
        query=query,
        path=href("subjects", name, "lineage"),
    )
    return Page(
        title=name,
        trail=(ROOT,),
        section="subjects",
        tabs=tabs(name),
        tables=(every,),
        template="lineage.html",
        # Live pages, which are built each second, do not draw it.
        extra={"tab": "Lineage", "draw": partial(draw_lineage, facts, with_style=False)},
        drawn=blake2b(msgspec.json.encode(replace(facts, now_ms=0)), digest_size=8).hexdigest(),
    )
