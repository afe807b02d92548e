"""Histories of subjects, as the metaserver tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from keylane.admin import PartitionDescription, SubjectDescription, SubjectHistory
from keylane.console.lineage.facts import LineageFacts
from keylane.protocol.control import Retention
from keylane.protocol.operations import OperationView, PartitionHistory
from keylane.protocol.progress import GroupStatus
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState

NOON_MS = 1_764_504_000_000
"""30 November 2025, 12:00 UTC."""
MINUTE_MS = 60_000


@dataclass
class SubjectStory:
    """A subject, changed as a metaserver would: children continue the ranges of sealed parents."""

    subject: str = "orders"
    at_ms: int = NOON_MS
    entries: dict[int, PartitionHistory] = field(default_factory=dict)

    def open(
        self, bounds: Sequence[tuple[int, int]], broker_groups: Callable[[int], str], *, timed: bool
    ) -> None:
        """Open partitions with these ranges; they continue the open ones that they overlap."""
        parents: set[int] = set()
        opened = []
        for low, high in bounds:
            continued = [
                number
                for number, entry in self.entries.items()
                if entry.partition.state is PartitionState.OPEN
                and max(low, entry.partition.range_start) < min(high, entry.partition.range_end)
            ]
            parents |= set(continued)
            number = len(self.entries) + len(opened) + 1
            partition = Partition(
                partition_id=number,
                name=f"{self.subject}.p{number - 1}",
                queue=number - 1,
                range_start=low,
                range_end=high,
                broker_group=broker_groups(number),
                state=PartitionState.OPEN,
                parents=tuple(continued),
            )
            opened_ms = self.at_ms if timed else None
            opened.append(PartitionHistory(partition=partition, opened_ms=opened_ms))
        for number in parents:
            self.set_state(number, PartitionState.SEALED, end_offset=100 * number)
        self.entries |= {int(each.partition.partition_id): each for each in opened}

    def set_state(self, number: int, state: PartitionState, **fields: Any) -> None:
        """Change the state of a partition, and fields of its entry."""
        entry = self.entries[number]
        partition = replace(entry.partition, state=state)
        self.entries[number] = replace(entry, partition=partition, **fields)

    def resize(self, count: int, *, groups: int = 3, timed: bool = True) -> None:
        """Change the number of partitions; those whose range stays are kept."""
        kept = {
            (entry.partition.range_start, entry.partition.range_end)
            for entry in self.entries.values()
            if entry.partition.state is PartitionState.OPEN
        }
        bounds = [(i * 1024 // count, (i + 1) * 1024 // count) for i in range(count)]
        new = [each for each in bounds if each not in kept]
        self.open(new, lambda number: f"g{number % groups + 1}", timed=timed)

    def move(self, number: int, broker_group: str, *, timed: bool = True) -> None:
        """Continue an open partition on another broker group."""
        partition = self.entries[number].partition
        bounds = [(partition.range_start, partition.range_end)]
        self.open(bounds, lambda _: broker_group, timed=timed)

    @property
    def open_ids(self) -> list[int]:
        """The open partitions."""
        return [
            number
            for number, entry in self.entries.items()
            if entry.partition.state is PartitionState.OPEN
        ]

    def facts(
        self,
        lags: dict[str, dict[int, int]] | None = None,
        *,
        first_offsets: dict[int, int] | None = None,
        silent: Sequence[int] = (),
        operations: Sequence[OperationView] = (),
    ) -> LineageFacts:
        """
        What is known now.

        Args:
            lags: maps each group to its lag by partition; 0 where it says nothing.
            first_offsets: the first stored message by partition; 0 where it says nothing.
            silent: partitions whose brokers do not answer.
        """
        lags = lags or {}
        descriptions = []
        for number, entry in self.entries.items():
            partition = entry.partition
            if partition.state not in {PartitionState.OPEN, PartitionState.SEALED}:
                continue
            is_silent = number in silent
            descriptions.append(
                PartitionDescription(
                    partition_id=number,
                    name=partition.name,
                    queue=partition.queue,
                    logic_start=0,
                    range_start=partition.range_start,
                    range_end=partition.range_end,
                    broker_group=partition.broker_group,
                    state=partition.state,
                    parents=partition.parents,
                    address=None,
                    first_offset=None if is_silent else (first_offsets or {}).get(number, 0),
                    next_offset=None if is_silent else 100 * number,
                    problem="broker group g1 is silent" if is_silent else None,
                    groups=()
                    if is_silent
                    else tuple(
                        GroupStatus(
                            group=group,
                            token=1,
                            cursor=100 * number - lag.get(number, 0),
                            acked_above=0,
                            lag=lag.get(number, 0),
                        )
                        for group, lag in lags.items()
                    ),
                )
            )
        return LineageFacts(
            history=SubjectHistory(
                subject=self.subject, route_version=1, partitions=list(self.entries.values())
            ),
            description=SubjectDescription(
                subject=self.subject,
                order_strategy=OrderStrategy.STRICT,
                static=False,
                retention=Retention.ACKED,
                route_version=1,
                partitions=tuple(descriptions),
                message_bytes_max=1 << 20,
            ),
            groups=tuple(lags),
            operations=tuple(operations),
            now_ms=self.at_ms,
        )
