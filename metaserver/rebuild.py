"""A lost database made anew from what the brokers keep: routes, lineage, groups, tokens, operations under way.  Pure.

    every broker's partitions ──▶ subjects, states, operations cut short ──▶ rows, or all that contradicts itself

Invariants
    Nothing is guessed that order rests on: a parent on no broker that was asked, a hole in a route, two folders of
    one broker group are refused.
    A group counts as through with a partition only where it is through with all that this one continues.
    Every token to come is above every fence, and above what was granted and never reached a broker.
    Where an operation was cut short before the first seal, it is canceled, so that its children are sealed at their
    brokers; after it, it goes on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ..protocol.control import HostPartition, PartitionStatus, PartitionStatusList, Retention
from ..protocol.errors import InvalidRequestError
from ..protocol.operations import OperationState, StepAction
from ..protocol.routing import (
    ConsumeStrategy,
    OrderStrategy,
    Partition,
    PartitionState,
    Route,
    route_table,
    split_ranges,
)
from .leases import drained_through

TOKENS_BETWEEN = 1_000_000
"""Tokens left out: more than a group is ever granted between two that reach a broker."""
PROBLEMS_SHOWN_MAX = 20
_NUMBER = re.compile(r"\.p([0-9]{1,9})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A broker that was asked."""

    address: str
    hosted: PartitionStatusList


@dataclass(slots=True, kw_only=True)
class RebuiltPartition:
    """A partition's row."""

    partition: Partition
    end_offset: int | None = None
    forsaken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltOperation:
    """An operation that goes on; steps by partition id, with whether they are done."""

    state: OperationState
    steps: dict[int, tuple[StepAction, bool]]


@dataclass(slots=True, kw_only=True)
class RebuiltGroup:
    """A consumer group's row; tokens by partition id."""

    name: str
    last_token: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)
    strategy: ConsumeStrategy = ConsumeStrategy.EXCLUSIVE
    """As which its highest token was brought to a broker."""


@dataclass(slots=True, kw_only=True)
class RebuiltSubject:
    """A subject's row and all that hangs on it."""

    name: str
    order_strategy: OrderStrategy
    partitions_wanted: int
    partitions_named: int
    partitions: list[RebuiltPartition]
    groups: list[RebuiltGroup]
    retention: Retention = Retention.ACKED
    operation: RebuiltOperation | None = None
    canceled: RebuiltOperation | None = None
    """All that is never opened, to be sealed where that has not been done."""
    static: bool = False
    opened: bool = True
    """False: its creation was cut short before anybody could send, and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltCluster:
    """Everything."""

    sources: Sequence[Source]
    subjects: Sequence[RebuiltSubject]


def plan_rebuild(sources: Sequence[Source], *, complete: bool = False) -> RebuiltCluster:
    """
    The rows of a database that fits these brokers.

    Args:
        complete: these are all brokers there are; so the creation of a subject that nobody has used, and that
            has partitions on no broker, was cut short, and goes on.

    Raises:
        InvalidRequestError: what they say contradicts itself, or brokers are missing; all problems at once.
    """
    problems = list(_contradictions(sources))
    statuses: dict[int, PartitionStatus] = {
        one.partition_id: one for source in sources for one in source.hosted.partitions
    }
    of_subject: dict[str, list[PartitionStatus]] = defaultdict(list)
    for _, one in sorted(statuses.items()):
        of_subject[one.subject].append(one)
        facts = one.facts
        parents = () if facts is None else facts.partition.parents
        problems += [_missing(one, parent) for parent in parents if parent not in statuses]
    subjects = []
    if not problems:
        for name, found in sorted(of_subject.items()):
            try:
                subjects.append(_subject(name, found, complete=complete))
            except InvalidRequestError as error:
                problems.append(f"subject {name!r}: {error.message}")
    if problems:
        shown = "; ".join(problems[:PROBLEMS_SHOWN_MAX])
        raise InvalidRequestError(
            f"the database cannot be rebuilt: {shown}", problems=len(problems)
        )
    return RebuiltCluster(sources=sources, subjects=subjects)


def _missing(one: PartitionStatus, parent: int) -> str:
    return (
        f"partition {one.partition_id} continues partition {parent}, which none of these brokers "
        "has: name every broker"
    )


def _contradictions(sources: Sequence[Source]) -> Iterable[str]:
    groups: dict[str, str] = {}
    ids: dict[str, str] = {}
    homes: dict[int, str] = {}
    for source in sources:
        hosted = source.hosted
        if hosted.broker_group in groups:
            yield (
                f"{groups[hosted.broker_group]} and {source.address} are both broker group "
                f"{hosted.broker_group!r}: one of them is a copy"
            )
        elif hosted.broker_id and hosted.broker_id in ids:
            yield f"{ids[hosted.broker_id]} and {source.address} have one data folder"
        groups[hosted.broker_group] = ids[hosted.broker_id] = source.address
        for one in hosted.partitions:
            if one.facts is None:
                yield f"{source.address} does not say what partition {one.partition_id} is"
            elif one.facts.partition.broker_group != hosted.broker_group:
                yield f"{source.address} has partition {one.partition_id} of another broker group"
            elif one.partition_id in homes:
                yield (
                    f"{homes[one.partition_id]} and {source.address} both have partition "
                    f"{one.partition_id}"
                )
            homes[one.partition_id] = source.address


def _subject(name: str, found: Sequence[PartitionStatus], *, complete: bool) -> RebuiltSubject:
    facts = {one.partition_id: _facts(one) for one in found}
    strategies = {one.order_strategy for one in facts.values()} - {None}
    if len(strategies) != 1:
        raise InvalidRequestError("its partitions do not agree on an order strategy")
    (strategy,) = strategies
    assert strategy is not None
    if len({one.static for one in facts.values()}) != 1:
        raise InvalidRequestError("its partitions do not agree whether it is static")
    counts = {one.partitions_wanted for one in facts.values()} - {0}
    kept = {one.retention for one in facts.values()} - {None}
    if len(kept) > 1:
        raise InvalidRequestError("its partitions do not agree on a retention")
    numbers = [int(match[1]) for one in found if (match := _NUMBER.search(one.name))]
    subject = RebuiltSubject(
        name=name,
        order_strategy=strategy,
        partitions_wanted=min(counts, default=len(found)),
        partitions_named=max([number + 1 for number in numbers] + [len(found)]),
        partitions=[],
        groups=_groups(found),
        retention=next(iter(kept), None) or Retention.ACKED,
        static=facts[found[0].partition_id].static,
    )
    rows = {
        one.partition_id: RebuiltPartition(
            partition=msgspec.structs.replace(facts[one.partition_id].partition, state=one.state),
            end_offset=one.next_offset if one.state is PartitionState.SEALED else None,
        )
        for one in found
    }
    subject.partitions = list(rows.values())
    _forget_canceled(found, rows)
    subject.operation = _operation(found, rows)
    subject.canceled = _canceled(rows)
    if subject.static:
        _chain(rows)
    if not _covered(subject) and not (complete and _creation_goes_on(subject, found)):
        raise InvalidRequestError(
            "its open partitions do not cover every logical partition once: name every broker"
        )
    return subject


def _facts(one: PartitionStatus) -> HostPartition:
    assert one.facts is not None
    return one.facts


def _groups(found: Sequence[PartitionStatus]) -> list[RebuiltGroup]:
    """A group is through with what it was granted and is at the end of, behind all that this continues."""
    parents = {one.partition_id: _facts(one).partition.parents for one in found}
    groups: dict[str, RebuiltGroup] = {}
    for one in found:
        for at_broker in one.groups:
            group = groups.setdefault(at_broker.group, RebuiltGroup(name=at_broker.group))
            if at_broker.token > max(group.tokens.values(), default=0):
                group.strategy = at_broker.strategy
            group.tokens[one.partition_id] = at_broker.token
            group.last_token = max(group.last_token, at_broker.token + TOKENS_BETWEEN)
            sealed = one.state is PartitionState.SEALED
            if at_broker.token and sealed and at_broker.cursor >= one.next_offset:
                group.drained.add(one.partition_id)
    for group in groups.values():
        group.drained = set(drained_through(group.drained, parents))
    return [group for _, group in sorted(groups.items())]


def _forget_canceled(found: Sequence[PartitionStatus], rows: dict[int, RebuiltPartition]) -> None:
    """
    Leave out the children of canceled operations: those that were never opened.

    Such a child is sealed, empty, and nothing continues it: for whatever is sealed to be continued has children,
    hosted before.  Or it is unused, and a younger one continues the same parent in its range: one operation runs at a
    time, and none begins on a parent whose children were opened.
    """
    continued = {one for row in rows.values() for one in row.partition.parents}
    used = {one.partition_id for one in found if one.next_offset or one.groups}
    by_parent: dict[int, list[Partition]] = defaultdict(list)
    for partition_id, row in sorted(rows.items(), reverse=True):
        one = row.partition
        younger = (other for parent in one.parents for other in by_parent[parent])
        replaced = any(
            other.range_start < one.range_end and one.range_start < other.range_end
            for other in younger
        )
        for parent in one.parents:
            by_parent[parent].append(one)
        if not one.parents or partition_id in continued or partition_id in used:
            continue
        if row.end_offset == 0 or replaced:
            _set(rows, partition_id, PartitionState.EXPIRED)


def _canceled(rows: dict[int, RebuiltPartition]) -> RebuiltOperation | None:
    """What is left out has to be sealed: a producer that knows it from a route of before could store messages there."""
    steps = {
        partition_id: (StepAction.SEAL, row.end_offset is not None)
        for partition_id, row in sorted(rows.items())
        if row.partition.state is PartitionState.EXPIRED
    }
    return RebuiltOperation(state=OperationState.CANCELED, steps=steps) if steps else None


def _operation(
    found: Sequence[PartitionStatus], rows: dict[int, RebuiltPartition]
) -> RebuiltOperation | None:
    """What was under way: its partitions are set to the states they had, and its steps answered."""
    statuses = {one.partition_id: one for one in found}
    steps: dict[int, tuple[StepAction, bool]] = {}
    state: OperationState | None = None
    for parents, children in _generations(rows):
        sealed = {one for one in parents if statuses[one].state is PartitionState.SEALED}
        if sealed == parents:
            continue
        if any(statuses[one].next_offset or statuses[one].groups for one in children):
            # The children were opened without the silent parents: these are still to be told.
            for one in parents - sealed:
                _set(rows, one, PartitionState.SEALED)
                rows[one].forsaken = True
            state = state or OperationState.FENCE
        elif sealed:
            for one in parents:
                _set(rows, one, PartitionState.OPEN)
            for one in children:
                _set(rows, one, PartitionState.PLANNED)
            state = OperationState.SEAL
        else:
            for one in children:
                _set(rows, one, PartitionState.EXPIRED)
            continue
        steps |= dict.fromkeys(children, (StepAction.HOST, True))
        steps |= {one: (StepAction.SEAL, one in sealed) for one in parents}
    return None if state is None else RebuiltOperation(state=state, steps=steps)


def _chain(rows: dict[int, RebuiltPartition]) -> None:
    """Let the partitions of a static subject begin where their parents end; a parent has a lower id."""
    for _, row in sorted(rows.items()):
        for one in row.partition.parents:
            parent = rows[one]
            if parent.end_offset is not None:
                start = parent.partition.logic_start + parent.end_offset
                row.partition = msgspec.structs.replace(row.partition, logic_start=start)


def _set(rows: dict[int, RebuiltPartition], partition_id: int, state: PartitionState) -> None:
    row = rows[partition_id]
    row.partition = msgspec.structs.replace(row.partition, state=state)


def _generations(rows: dict[int, RebuiltPartition]) -> list[tuple[set[int], set[int]]]:
    """Parents and children that hang together, so that they are sealed and opened together."""
    found: list[tuple[set[int], set[int]]] = []
    for child, row in sorted(rows.items()):
        if not row.partition.parents or row.partition.state is PartitionState.EXPIRED:
            continue
        parents: set[int] = set(row.partition.parents)
        children = {child}
        apart = []
        for other in found:
            if other[0] & parents:
                parents |= other[0]
                children |= other[1]
            else:
                apart.append(other)
        found = [*apart, (parents, children)]
    return found


def _covered(subject: RebuiltSubject) -> bool:
    route = Route(
        subject=subject.name,  # type: ignore[arg-type]
        version=1,  # type: ignore[arg-type]
        order_strategy=subject.order_strategy,
        partitions=tuple(one.partition for one in subject.partitions),
    )
    try:
        route_table(route)
    except InvalidRequestError:
        return False
    return True


def _creation_goes_on(subject: RebuiltSubject, found: Sequence[PartitionStatus]) -> bool:
    """Of a subject that nobody could use yet some partitions were never hosted: plan them again."""
    ranges = split_ranges(subject.partitions_wanted)
    here = {(one.partition.range_start, one.partition.range_end) for one in subject.partitions}
    used = any(one.next_offset or one.groups for one in found)
    if used or len(here) != len(found) or not here < set(ranges):
        return False
    subject.opened = False
    subject.partitions_named = subject.partitions_wanted
    for row in subject.partitions:
        row.partition = msgspec.structs.replace(row.partition, state=PartitionState.PLANNED)
    template = subject.partitions[0].partition
    for queue, (start, end) in enumerate(ranges):
        if (start, end) not in here:
            missing = msgspec.structs.replace(
                template,
                partition_id=0,
                name=f"{subject.name}.p{queue}",
                queue=queue,
                range_start=start,
                range_end=end,
            )
            subject.partitions.append(RebuiltPartition(partition=missing))
    return True
