"""`keylane subject`: create, list, describe."""

from __future__ import annotations

import asyncio

from ...protocol.control import CreateSubject, PartitionStatus, Retention, SubjectView
from ...protocol.ids import check_name
from ...protocol.routing import Partition
from ..connection import connect, partition_status
from ..options import OutputFormat
from ..screen import make_table, show_json, show_line, show_table


async def create_subject(meta: str, form: OutputFormat, ask: CreateSubject) -> None:
    """Create a subject and show its partitions.  Raises RefusedError and its kin."""
    check_name("subject", ask.subject)
    async with connect(meta) as (client, _network):
        view = await client.create_subject(ask)
    if form is OutputFormat.JSON:
        show_json(view)
        return
    rows = [_place(one) for one in _by_range(view)]
    show_table(make_table(_title(view), _PLACE, rows))


async def list_subjects(meta: str, form: OutputFormat) -> None:
    """Show all subjects."""
    async with connect(meta) as (client, _network):
        found = (await client.subjects()).subjects
    if form is OutputFormat.JSON:
        show_json(found)
        return
    rows = [(one.subject, one.order_strategy, one.partitions, one.route_version) for one in found]
    columns = ("subject", "strategy", "partitions#", "route version#")
    show_table(make_table("subjects" if rows else "no subjects yet", columns, rows))
    for one in found:
        if one.problem:
            show_line(f"{one.subject}: {one.problem}")


async def describe_subject(meta: str, form: OutputFormat, *, subject: str) -> None:
    """Show a subject's partitions: where each is, its range, state and offsets."""
    check_name("subject", subject)
    async with connect(meta) as (client, network):
        view = await client.subject(subject)
        partitions = _by_range(view)
        found = await asyncio.gather(*(partition_status(network, one) for one in partitions))
    if form is OutputFormat.JSON:
        described = [
            _facts(partition, status) for partition, status in zip(partitions, found, strict=True)
        ]
        show_json(
            {
                "subject": view.subject,
                "order_strategy": view.order_strategy,
                "static": view.static,
                "retention": view.retention,
                "route_version": view.route.version,
                "partitions": described,
            }
        )
        return
    rows = [
        (*_place(partition), *_offsets(status))
        for partition, status in zip(partitions, found, strict=True)
    ]
    show_table(make_table(_title(view), (*_PLACE, "first#", "next#"), rows))
    for status in found:
        if isinstance(status, str):
            show_line(f"offsets unknown: {status}")


_PLACE = ("id#", "partition", "logical", "broker group", "state", "address")


def _place(partition: Partition) -> tuple[object, ...]:
    logical = f"[{partition.range_start}, {partition.range_end})"
    return (
        partition.partition_id,
        partition.name,
        logical,
        partition.broker_group,
        partition.state,
        partition.address,
    )


def _offsets(status: PartitionStatus | str) -> tuple[int | None, int | None]:
    if isinstance(status, str):
        return None, None
    return status.first_offset, status.next_offset


def _facts(partition: Partition, status: PartitionStatus | str) -> dict[str, object]:
    first, following = _offsets(status)
    return {
        "partition_id": partition.partition_id,
        "name": partition.name,
        "queue": partition.queue,
        "logic_start": partition.logic_start,
        "range_start": partition.range_start,
        "range_end": partition.range_end,
        "broker_group": partition.broker_group,
        "state": partition.state,
        "parents": partition.parents,
        "address": partition.address,
        "first_offset": first,
        "next_offset": following,
        "problem": status if isinstance(status, str) else None,
    }


def _by_range(view: SubjectView) -> list[Partition]:
    return sorted(view.route.partitions, key=lambda one: (one.range_start, one.partition_id))


def _title(view: SubjectView) -> str:
    kept = "" if view.retention is Retention.ACKED else f", retention {view.retention}"
    static = ", static" if view.static else ""
    return (
        f"{view.subject}: {view.order_strategy}{static}{kept}, route version {view.route.version}"
    )
