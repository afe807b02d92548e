"""The pages of brokers."""

from __future__ import annotations

from collections.abc import Mapping

from ...admin import BrokerView, PartitionReport
from ...protocol.errors import NotFoundError, Reason
from ..feed import Feed
from ..page import Cell, Link, Page, Sentence, Table, href, table
from ..shown import age
from .cells import broker_cell, partition_cell, state_cell, subject_cell
from .wrong import server_sentences

ROOT = Link("Brokers", href("brokers"))


async def brokers(feed: Feed, _names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the list of brokers."""
    sample = await feed.cluster()

    def hosted(name: str) -> int | None:
        found = sample.hosted.get(name, "")
        return None if isinstance(found, str) else len(found)

    return Page(
        title="Brokers",
        section="brokers",
        wrong=tuple(server_sentences(sample)) or None,
        unknown=tuple(map(Sentence, sample.unknown)),
        tables=(
            table(
                "brokers",
                "Broker groups",
                sample.brokers.brokers,
                lambda each: each.broker_group,
                (
                    ("Broker group", lambda each: broker_cell(each.broker_group)),
                    ("State", _state_cell),
                    ("Address", lambda each: each.address),
                    ("#Partitions", lambda each: hosted(each.broker_group)),
                    ("Last report", lambda each: f"{age(each.silent_ms)} ago"),
                    ("Data folders", _folders_cell),
                    ("Version", lambda each: each.version or "?"),
                ),
                empty="No broker has reported yet. Start one:",
                empty_command="keylane broker run --group g1 --data DIR --meta HOST:PORT",
                query=query,
                path=href("brokers"),
            ),
        ),
    )


def _folders_cell(broker: BrokerView) -> Cell:
    return Cell(broker.folders_text, tone="warn" if broker.folders < broker.folders_wanted else "")


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
            ("Data folders", _folders_cell(found)),
            ("Version", Cell(found.version or "?")),
        ),
        tables=(_hosted_table(name, [] if isinstance(hosted, str) else hosted, query),),
    )


def _hosted_table(name: str, hosted: list[PartitionReport], query: Mapping[str, str]) -> Table:
    return table(
        "hosted",
        "Partitions that it hosts",
        hosted,
        lambda each: str(each.partition_id),
        (
            ("Partition", lambda each: partition_cell(each.subject, each.partition_id)),
            ("Subject", lambda each: subject_cell(each.subject)),
            ("State", lambda each: state_cell(each.state.value)),
            ("#First offset", lambda each: each.first_offset),
            ("#End offset", lambda each: each.next_offset),
            ("#Groups", lambda each: len(each.groups)),
        ),
        empty="It hosts no partition.",
        query=query,
        path=href("brokers", name),
    )
