"""Plans which partitions move to other broker groups, so that these are balanced. Pure.

    1  subjects    A broker group has at most one open partition of a subject more than another.
    2  partitions  It has at most one open partition more than another, of all subjects.
    3  rates       No broker group stores far more bytes a second than another. Partitions are
                   exchanged, or the one that a broker group has more moves, so 1 and 2 still hold.

Invariants
    A partition moves at most once, and only between the given broker groups.
    Steps 1 and 2 choose the partition with which the rates come closest. They prefer one that the
    plan moves anyway, so that the plan remains short.
    The same input always results in the same plan. A plan for the result of a plan is empty, unless
    the plan was cut at MOVES_MAX.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from ...protocol.ids import BrokerGroup
from ...protocol.operations import BalanceMove
from ...protocol.text import format_size

MOVES_MAX = 500
"""The number of moves after which planning ends. After them, there may be more."""
GAIN_PERCENT = 25
"""Rates are only balanced if this closes the gap between two broker groups by more than this part
of what a broker group stores on average.
"""
RATE_MIN = 1_000_000
"""Gaps between two broker groups of up to this number of bytes a second are left as they are."""
COMPARED_MAX = 50
"""How many partitions of a broker group are considered for exchanges: those with the highest rates
there, and those with the lowest rates on the other one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPartition:
    """An open partition that may move."""

    partition_id: int
    subject: str
    broker_group: BrokerGroup
    bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """A change that improves the balance: some partitions, each with its new broker group."""

    targets: tuple[tuple[PlacedPartition, BrokerGroup], ...]
    gap_after: int
    """The difference of the two broker groups' rates after the change."""


def plan_balance(
    partitions: Iterable[PlacedPartition],
    broker_groups: Collection[BrokerGroup],
    *,
    fixed: Mapping[BrokerGroup, int] | None = None,
) -> list[BalanceMove]:
    """
    Plan the moves that balance the broker groups.

    Args:
        partitions: those that may move, each on one of `broker_groups`.
        broker_groups: those that can get partitions.
        fixed: maps broker groups to the number of their other open partitions, which stay.
    """
    if len(broker_groups) < 2:
        return []
    layout = _Layout(partitions, broker_groups, fixed or {})
    _balance_subjects(layout)
    _balance_totals(layout)
    _balance_rates(layout)
    return layout.moves()


class _Layout:
    """Where the partitions are during planning."""

    def __init__(
        self,
        partitions: Iterable[PlacedPartition],
        broker_groups: Collection[BrokerGroup],
        fixed: Mapping[BrokerGroup, int],
    ) -> None:
        self.groups = sorted(broker_groups)
        self.members: dict[BrokerGroup, dict[str, dict[int, PlacedPartition]]] = {
            group: defaultdict(dict) for group in self.groups
        }
        """Maps each broker group and subject to the partitions there, by id."""
        self.totals = Counter({group: fixed.get(group, 0) for group in self.groups})
        self.rates = Counter(dict.fromkeys(self.groups, 0))
        self.places: dict[int, BrokerGroup] = {}
        """Maps each partition id to its present broker group."""
        self._reasons: dict[int, str] = {}
        """Maps the ids of the moved partitions to the reason, in the order of the moves."""
        self._origins: dict[int, PlacedPartition] = {}
        for partition in sorted(partitions, key=lambda each: each.partition_id):
            self._origins[partition.partition_id] = partition
            self._add(partition, partition.broker_group)

    @property
    def is_long(self) -> bool:
        """True if the plan is as long as it may be."""
        return len(self._reasons) >= MOVES_MAX

    def count(self, group: BrokerGroup, subject: str) -> int:
        """Return how many partitions of a subject a broker group has."""
        return len(self.members[group].get(subject, ()))

    def subjects(self) -> list[str]:
        """Return all subjects, sorted."""
        return sorted({partition.subject for partition in self._origins.values()})

    def move(self, partition: PlacedPartition, target: BrokerGroup, reason: str) -> None:
        """Move a partition."""
        source = self.places[partition.partition_id]
        del self.members[source][partition.subject][partition.partition_id]
        self.totals[source] -= 1
        self.rates[source] -= partition.bytes_per_s
        self._add(partition, target)
        if target == partition.broker_group:
            del self._reasons[partition.partition_id]
        else:
            self._reasons[partition.partition_id] = reason

    def added_moves(self, partition: PlacedPartition, target: BrokerGroup) -> int:
        """Return by how many moves the plan becomes longer if the partition moves."""
        is_moved = partition.partition_id in self._reasons
        return (target != partition.broker_group) - is_moved

    def gap(self, source: BrokerGroup, target: BrokerGroup) -> int:
        """Return how many bytes a second `source` stores more than `target`."""
        return self.rates[source] - self.rates[target]

    def moves(self) -> list[BalanceMove]:
        """Return the moves, in the order in which they were planned."""
        return [
            BalanceMove(
                partition_id=partition_id,
                subject=self._origins[partition_id].subject,
                source=self._origins[partition_id].broker_group,
                target=self.places[partition_id],
                reason=reason,
            )
            for partition_id, reason in self._reasons.items()
        ]

    def _add(self, partition: PlacedPartition, group: BrokerGroup) -> None:
        self.members[group][partition.subject][partition.partition_id] = partition
        self.totals[group] += 1
        self.rates[group] += partition.bytes_per_s
        self.places[partition.partition_id] = group


def _balance_subjects(layout: _Layout) -> None:
    for subject in layout.subjects():
        while not layout.is_long:
            loads = {
                group: (layout.count(group, subject), layout.totals[group], layout.rates[group])
                for group in layout.groups
            }
            source = max(loads, key=lambda group: loads[group])
            target = min(loads, key=lambda group: loads[group])
            most, fewest = loads[source][0], loads[target][0]
            if most - fewest <= 1:
                break
            reason = f"{source} has {most} of the subject's partitions, {target} has {fewest}"
            _move_one(layout, [subject], source, target, reason)


def _balance_totals(layout: _Layout) -> None:
    while not layout.is_long and any(
        _balance_two(layout, *pair) for pair in _pairs(layout, layout.totals)
    ):
        pass


def _balance_two(layout: _Layout, source: BrokerGroup, target: BrokerGroup) -> bool:
    """Move a partition of a subject of which `source` has more than `target`, if it has at least
    two partitions more. Return False if there is none.
    """
    totals = layout.totals
    if totals[source] - totals[target] <= 1:
        return False
    subjects = [
        subject
        for subject, members in layout.members[source].items()
        if len(members) > layout.count(target, subject)
    ]
    if not subjects:
        return False
    reason = f"{source} has {totals[source]} partitions, {target} has {totals[target]}"
    _move_one(layout, subjects, source, target, reason)
    return True


def _move_one(
    layout: _Layout, subjects: Sequence[str], source: BrokerGroup, target: BrokerGroup, reason: str
) -> None:
    """Move the partition of one of these subjects with which the rates come closest."""
    gap = layout.gap(source, target)
    partition = min(
        (each for subject in subjects for each in layout.members[source][subject].values()),
        key=lambda each: (
            layout.added_moves(each, target),
            abs(gap - 2 * each.bytes_per_s),
            each.partition_id,
        ),
    )
    layout.move(partition, target, reason)


def _balance_rates(layout: _Layout) -> None:
    """Exchange partitions until no exchange closes a gap by enough. Each one reduces the sum of the
    squares of the rates, so this ends.
    """
    mean = sum(layout.rates.values()) // len(layout.groups)
    gain_min = max(mean * GAIN_PERCENT // 100, RATE_MIN)
    while not layout.is_long:
        for source, target in _pairs(layout, layout.rates):
            gap = layout.gap(source, target)
            step = _find_exchange(layout, source, target, gap_max=gap - gain_min)
            if step is not None:
                break
        else:
            return
        reason = f"{source} stores {format_size(layout.rates[source])}/s, {target} "
        reason += f"{format_size(layout.rates[target])}/s"
        for partition, group in step.targets:
            layout.move(partition, group, reason)


def _find_exchange(
    layout: _Layout, source: BrokerGroup, target: BrokerGroup, *, gap_max: int
) -> _Step | None:
    """Return the change after which the gap between the rates is smallest, if it is less than
    `gap_max`; None if there is none.
    """
    gap = layout.gap(source, target)
    if gap_max <= 0:
        return None
    hot = sorted(_members(layout, source), key=lambda each: (-each.bytes_per_s, each.partition_id))
    cold = sorted(_members(layout, target), key=lambda each: (each.bytes_per_s, each.partition_id))
    steps = []
    for leaving in hot[:COMPARED_MAX]:
        has_more = layout.count(source, leaving.subject) > layout.count(target, leaving.subject)
        if has_more and layout.totals[source] > layout.totals[target]:
            after = abs(gap - 2 * leaving.bytes_per_s)
            steps.append(_Step(((leaving, target),), after))
        for coming in cold[:COMPARED_MAX]:
            has_less = layout.count(source, coming.subject) < layout.count(target, coming.subject)
            if leaving.subject == coming.subject or (has_more and has_less):
                after = abs(gap - 2 * (leaving.bytes_per_s - coming.bytes_per_s))
                steps.append(_Step(((leaving, target), (coming, source)), after))
    return min(
        (step for step in steps if step.gap_after < gap_max),
        key=lambda step: (
            sum(layout.added_moves(partition, group) for partition, group in step.targets),
            step.gap_after,
            [partition.partition_id for partition, _ in step.targets],
        ),
        default=None,
    )


def _members(layout: _Layout, group: BrokerGroup) -> list[PlacedPartition]:
    return [each for members in layout.members[group].values() for each in members.values()]


def _pairs(
    layout: _Layout, load: Mapping[BrokerGroup, int]
) -> list[tuple[BrokerGroup, BrokerGroup]]:
    """Return all (source, target) pairs, those with the largest difference in load first."""
    pairs = [(a, b) for a, b in permutations(layout.groups, 2) if load[a] > load[b]]
    return sorted(pairs, key=lambda pair: load[pair[1]] - load[pair[0]])
