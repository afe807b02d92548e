"""The pages of subjects and of their partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from ...admin import OperationView, PartitionDescription, SubjectDescription
from ...protocol.errors import AccessDeniedError, PartitionUnknownError
from ...protocol.operations import ROUTE_FINAL, OperationState
from ...protocol.routing import PartitionState
from ...protocol.text import listed, parse_number
from ..cluster import ClusterSample
from ..feed import BROKER_S, Feed
from ..lineage import draw_lineage, fetch_lineage
from ..page import Cell, Link, Page, PageColumn, Sentence, Table, TableRow, href, window
from ..shown import count, rate

OPERATIONS_SHOWN = 10
ROOT = Link("Subjects", href("subjects"))


async def subjects(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the list of subjects."""
    sample = await feed.cluster()
    searched = query.get("name", "")
    found = [each for each in sample.subjects.values() if searched in each.subject]
    rows = [
        TableRow(
            each.subject,
            (
                Cell(each.subject, href("subjects", each.subject)),
                Cell(count(each.summary.partitions)),
                Cell(rate(feed.trends.rate(("end", each.subject)))),
                Cell(
                    "messages stored each second, in the last minute",
                    series=feed.trends.rates(("end", each.subject)),
                ),
                Cell(count(each.stored), tone="muted" if each.unknown else ""),
                Cell(count(len(each.groups))),
                _lag_cell(sum(group.lag for group in each.groups.values())),
            ),
        )
        for each in found
    ]
    shown, pager = window(rows, query, href("subjects"))
    table = Table(
        name="subjects",
        caption="Subjects",
        columns=(
            PageColumn("Subject"),
            PageColumn("Partitions", is_number=True),
            PageColumn("Stored", is_number=True),
            PageColumn("Last minute"),
            PageColumn("Messages kept", is_number=True),
            PageColumn("Groups", is_number=True),
            PageColumn("Lag", is_number=True),
        ),
        rows=shown,
        empty=(
            f"No subject has “{searched}” in its name."
            if searched
            else "There is no subject yet. Create one here, or with:"
        ),
        empty_command="" if searched else "keylane subject create orders --partitions 4",
        pager=pager,
    )
    return Page(
        title="Subjects",
        section="subjects",
        unknown=tuple(map(Sentence, sample.unknown)),
        acts=(Link("Create a subject", href("act", "subject-create")),),
        tables=(table,),
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
    group_rows = tuple(
        TableRow(
            each.group,
            (
                Cell(each.group, href("subjects", name, "groups", each.group)),
                Cell(each.strategy.value),
                Cell(count(each.sessions), tone="" if each.sessions else "warn"),
                _lag_cell(
                    total.lag if (total := totals and totals.groups.get(each.group)) else None
                ),
                Cell(
                    "lag of the last minute", series=feed.trends.values(("lag", name, each.group))
                ),
                Cell(rate(feed.trends.rate(("acked", name, each.group)))),
                Cell(count(total.parked if total else None)),
            ),
        )
        for each in groups
    )
    group_table = Table(
        name="groups",
        caption="Consumer groups",
        columns=(
            PageColumn("Group"),
            PageColumn("Strategy"),
            PageColumn("Consumers", is_number=True),
            PageColumn("Lag", is_number=True),
            PageColumn("Last minute"),
            PageColumn("Acked", is_number=True),
            PageColumn("Parked", is_number=True),
        ),
        rows=group_rows,
        empty="No consumer group reads this subject. Start a consumer:",
        empty_command=f"keylane consume {name} --group GROUP",
    )
    running = [each for each in operations if each.state not in ROUTE_FINAL]
    return Page(
        title=name,
        trail=(ROOT,),
        section="subjects",
        tabs=tabs(name),
        unknown=_problems(described),
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
            ("Messages kept", Cell(f"{count(stored)}{' or more' if is_partial else ''}")),
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
        extra={"tab": "Subject"},
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


def _lag_cell(lag: int | None) -> Cell:
    return Cell(count(lag), tone="warn" if lag else "")


def _problems(described: SubjectDescription) -> tuple[Sentence, ...]:
    return tuple(map(Sentence, sorted({p.problem for p in described.partitions if p.problem})))


def _partition_table(described: SubjectDescription, query: Mapping[str, str]) -> Table:
    name = described.subject
    rows = [
        TableRow(
            str(each.partition_id),
            (
                Cell(
                    str(each.partition_id),
                    href("subjects", name, "partitions", each.partition_id),
                ),
                Cell(f"{each.range_start}–{each.range_end - 1}"),
                Cell(each.state.value, tone="" if each.state is PartitionState.OPEN else "muted"),
                Cell(each.broker_group, href("brokers", each.broker_group)),
                Cell(count(each.first_offset)),
                Cell(count(each.next_offset)),
                Cell(listed(each.parents) if each.parents else "–", tone="muted"),
            ),
        )
        for each in described.partitions
    ]
    shown, pager = window(rows, query, href("subjects", name))
    return Table(
        name="partitions",
        caption="Partitions",
        columns=(
            PageColumn("Partition"),
            PageColumn("Logical partitions"),
            PageColumn("State"),
            PageColumn("Broker"),
            PageColumn("First offset", is_number=True),
            PageColumn("End offset", is_number=True),
            PageColumn("Continues"),
        ),
        rows=shown,
        empty="It has no partition: its creation is not finished, or has failed.",
        empty_command=f"keylane subject create {name}",
        pager=pager,
    )


def operation_table(caption: str, operations: Sequence[OperationView]) -> Table:
    """Return the table of operations."""
    rows = tuple(
        TableRow(
            f"{each.operation_id}",
            (
                Cell(str(each.operation_id)),
                Cell(each.kind.value),
                Cell(
                    each.state.value,
                    tone="good" if each.state is OperationState.DONE else "",
                ),
                Cell(f"{len(each.sealed)} → {len(each.children)}"),
                Cell(each.problem or "–", tone="warn" if each.problem else "muted"),
                Cell("cancel", href("act", "operation-cancel", id=each.operation_id))
                if each.state is OperationState.PLAN
                else Cell("", tone="muted"),
            ),
        )
        for each in operations
    )
    return Table(
        name=caption.partition(" ")[0].lower(),
        caption=caption,
        columns=(
            PageColumn("Operation"),
            PageColumn("Kind"),
            PageColumn("State"),
            PageColumn("Partitions"),
            PageColumn("Waits for"),
            PageColumn("Cancel"),
        ),
        rows=rows,
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
    groups = await asyncio.gather(
        *(feed.group(name, each.group) for each in summaries[:GROUPS_SHOWN])
    )
    rows = tuple(
        TableRow(
            group.group,
            (
                Cell(group.group, href("subjects", name, "groups", group.group)),
                Cell(progress.owner or "nobody", tone="" if progress.owner else "warn"),
                Cell(count(progress.token)),
                Cell(count(progress.offset)),
                _lag_cell(progress.lag),
                Cell(count(progress.parked)),
                Cell(
                    "–"
                    if progress.failing is None
                    else f"offset {progress.failing.offset}: {progress.failing.kind}",
                    tone="muted" if progress.failing is None else "bad",
                ),
            ),
        )
        for group in groups
        for progress in group.partitions
        if progress.partition_id == number
    )
    table = Table(
        name="progress",
        caption="Progress of consumer groups",
        columns=(
            PageColumn("Group"),
            PageColumn("Owner"),
            PageColumn("Token", is_number=True),
            PageColumn("Next offset", is_number=True),
            PageColumn("Lag", is_number=True),
            PageColumn("Parked", is_number=True),
            PageColumn("Keeps failing"),
        ),
        rows=rows,
        empty="No consumer group reads this subject.",
    )
    return Page(
        title=f"Partition {number}",
        trail=(ROOT, Link(name, href("subjects", name))),
        section="subjects",
        unknown=(Sentence(found.problem),) if found.problem else (),
        acts=_partition_acts(name, found, described),
        facts=(
            ("State", Cell(found.state.value)),
            ("Logical partitions", Cell(f"{found.range_start}–{found.range_end - 1}")),
            ("Broker", Cell(found.broker_group, href("brokers", found.broker_group))),
            ("First offset", Cell(count(found.first_offset))),
            ("End offset", Cell(count(found.next_offset))),
            ("Continues", Cell(listed(found.parents) if found.parents else "nothing")),
        ),
        tables=(table,),
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
    rows = [
        TableRow(
            str(each.partition.partition_id),
            (
                Cell(str(each.partition.partition_id)),
                Cell(f"{each.partition.range_start}–{each.partition.range_end - 1}"),
                Cell("lost" if each.lost else each.partition.state.value),
                Cell(each.partition.broker_group, href("brokers", each.partition.broker_group)),
                Cell(
                    listed(each.partition.parents) if each.partition.parents else "–", tone="muted"
                ),
                Cell(count(each.end_offset) if each.end_offset is not None else "–", tone="muted"),
            ),
        )
        for each in history.partitions
    ]
    shown, pager = window(rows, query, href("subjects", name, "lineage"))
    table = Table(
        name="history",
        caption="Every partition that the subject ever had",
        columns=(
            PageColumn("Partition"),
            PageColumn("Logical partitions"),
            PageColumn("State"),
            PageColumn("Broker"),
            PageColumn("Continues"),
            PageColumn("End offset", is_number=True),
        ),
        rows=shown,
        empty="It has no partition yet.",
        pager=pager,
    )
    return Page(
        title=name,
        trail=(ROOT,),
        section="subjects",
        tabs=tabs(name),
        tables=(table,),
        template="lineage.html",
        extra={"tab": "Lineage"},
        drawing=draw_lineage(facts, with_style=False),
        drawn=blake2b(msgspec.json.encode(replace(facts, now_ms=0)), digest_size=8).hexdigest(),
    )
