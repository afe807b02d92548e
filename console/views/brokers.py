"""The pages of brokers."""

from __future__ import annotations

from collections.abc import Mapping

from ...admin import BrokerView, PartitionReport
from ...protocol.errors import NotFoundError, Reason
from ..feed import Feed
from ..page import Cell, Link, Page, PageColumn, Sentence, Table, TableRow, href, window
from ..shown import age, count

ROOT = Link("Brokers", href("brokers"))


async def brokers(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the list of brokers."""
    sample = await feed.cluster()
    rows = []
    for each in sample.brokers.brokers:
        hosted = sample.hosted.get(each.broker_group, "")
        rows.append(
            TableRow(
                each.broker_group,
                (
                    Cell(each.broker_group, href("brokers", each.broker_group)),
                    _state_cell(each),
                    Cell(each.address),
                    Cell(count(None if isinstance(hosted, str) else len(hosted))),
                    Cell(f"{age(each.silent_ms)} ago"),
                    Cell(
                        each.folders_text, tone="warn" if each.folders < each.folders_wanted else ""
                    ),
                    Cell(each.version or "?"),
                ),
            )
        )
    refused = tuple(
        Sentence(
            f"the broker at {each.address} may not serve broker group {each.broker_group}: "
            f"{each.problem}",
            each.advice,
            href("brokers", each.broker_group),
            each.broker_group,
        )
        for each in sample.brokers.refused
    )
    shown, pager = window(rows, query, href("brokers"))
    return Page(
        title="Brokers",
        section="brokers",
        wrong=refused or None,
        unknown=tuple(map(Sentence, sample.unknown)),
        tables=(
            Table(
                name="brokers",
                caption="Broker groups",
                columns=(
                    PageColumn("Broker group"),
                    PageColumn("State"),
                    PageColumn("Address"),
                    PageColumn("Partitions", is_number=True),
                    PageColumn("Last report"),
                    PageColumn("Data folders"),
                    PageColumn("Version"),
                ),
                rows=shown,
                empty="No broker has reported yet. Start one:",
                empty_command="keylane broker run --group g1 --data DIR --meta HOST:PORT",
                pager=pager,
            ),
        ),
    )


def _state_cell(broker: BrokerView) -> Cell:
    if not broker.available:
        return Cell("silent", tone="bad")
    if not broker.writable:
        return Cell(broker.state, tone="bad")
    return Cell("cordoned", tone="warn") if broker.cordoned else Cell("available", tone="good")


async def broker(feed: Feed, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the page of a broker."""
    name = names["broker"]
    sample = await feed.cluster()
    found = next((each for each in sample.brokers.brokers if each.broker_group == name), None)
    if found is None:
        raise NotFoundError(Reason.BROKER_GROUP_UNKNOWN, f"broker group {name} has never reported")
    hosted = sample.hosted.get(name, "it is silent")
    unknown = []
    if isinstance(hosted, str):
        unknown.append(Sentence(f"which partitions it hosts is not known: {hosted}"))
    return Page(
        title=name,
        trail=(ROOT,),
        section="brokers",
        unknown=tuple(unknown),
        acts=(
            Link("Uncordon", href("act", "uncordon", broker=name))
            if found.cordoned
            else Link("Cordon", href("act", "cordon", broker=name)),
            Link("Evacuate", href("act", "evacuate", broker=name), is_destructive=True),
        ),
        facts=(
            ("State", _state_cell(found)),
            ("Address", Cell(found.address)),
            ("Last report", Cell(f"{age(found.silent_ms)} ago")),
            ("Takes writes", Cell("yes" if found.writable else found.problem or "no")),
            ("Data folders", Cell(found.folders_text)),
            ("Version", Cell(found.version or "?")),
        ),
        tables=(_hosted_table(name, [] if isinstance(hosted, str) else hosted, query),),
    )


def _hosted_table(name: str, hosted: list[PartitionReport], query: Mapping[str, str]) -> Table:
    rows = [
        TableRow(
            str(each.partition_id),
            (
                Cell(
                    str(each.partition_id),
                    href("subjects", each.subject, "partitions", each.partition_id),
                ),
                Cell(each.subject, href("subjects", each.subject)),
                Cell(each.state.value, tone="" if each.state.value == "open" else "muted"),
                Cell(count(each.first_offset)),
                Cell(count(each.next_offset)),
                Cell(count(len(each.groups))),
            ),
        )
        for each in hosted
    ]
    shown, pager = window(rows, query, href("brokers", name))
    return Table(
        name="hosted",
        caption="Partitions that it hosts",
        columns=(
            PageColumn("Partition"),
            PageColumn("Subject"),
            PageColumn("State"),
            PageColumn("First offset", is_number=True),
            PageColumn("End offset", is_number=True),
            PageColumn("Groups", is_number=True),
        ),
        rows=shown,
        empty="It hosts no partition.",
        pager=pager,
    )
