"""Plans the rows of a lost database from the data of the brokers: routes, lineage, groups, tokens
and operations. Pure.

    every broker's partitions ──▶ subjects, states, unfinished operations ──▶ rows, or problems

Invariants
    Nothing that affects the order of messages is guessed. The rebuild is refused if a parent is
    missing, a route has a gap, or a broker group has two data folders.
    A group counts as having drained a partition only if it has drained the partition's parents.
    Every future token is higher than every fence, and higher than every granted token that has not
    reached a broker.
    An operation without any sealed parent is canceled, and its children are sealed by their
    brokers. An operation with a sealed parent continues.
    A subject is not restored if a broker has dropped some of its partitions; its deletion
    continues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from ...protocol.control import HostPartition, PartitionStatus, Retention
from ...protocol.errors import InvalidRequestError
from ...protocol.ids import check_name, partition_name, partition_number
from ...protocol.limits import MESSAGE_BYTES_MAX, TTL_MS_DEFAULT
from ...protocol.queues import start_behind_loss
from ...protocol.reading.bounds import nearest_ancestors
from ...protocol.routing import (
    OrderStrategy,
    Partition,
    PartitionState,
    Route,
    route_table,
    split_ranges,
)
from ..groups.leases import drained_after_parents
from .gone import add_gone_partitions
from .operations import cancel_operation, expire_canceled, infer_unfinished_operations, is_used
from .replaced import (
    build_replaced_rows,
    exclude_partitions,
    is_dropped,
    remaining_lineage,
    status_parents,
    unpublished_partitions,
    was_replaced,
)
from .rows import (
    BrokerSource,
    RebuildOptions,
    RebuiltCluster,
    RebuiltGroup,
    RebuiltPartition,
    RebuiltSubject,
)

NO_OPTIONS = RebuildOptions()
TOKENS_BETWEEN = 1_000_000
"""Difference between the next token and the highest one at a broker. It exceeds the number of
tokens that can have been granted without reaching a broker.
"""
PROBLEMS_LISTED_MAX = 20


def plan_rebuild(
    sources: Sequence[BrokerSource], options: RebuildOptions = NO_OPTIONS
) -> RebuiltCluster:
    """
    Plan the rows of a database that matches the given brokers.

    Raises:
        InvalidRequestError: the name of a gone broker group is invalid; or the brokers contradict
            each other or some are missing, in which case the message lists the problems.
    """
    for name in options.gone:
        check_name("broker group", name)
    problems = list(_find_contradictions(sources))
    problems += [
        f"{source.address} is broker group {source.hosted.broker_group!r}, which "
        f"--gone names as gone"
        for source in sources
        if source.hosted.broker_group in options.gone
    ]
    statuses: dict[int, PartitionStatus] = {
        status.partition_id: status for source in sources for status in source.hosted.partitions
    }
    dropped_ids = _collect_dropped_ids(sources)
    by_subject: dict[str, list[PartitionStatus]] = defaultdict(list)
    for _, status in sorted(statuses.items()):
        by_subject[status.subject].append(status)
        if not options.gone:
            last_id = dropped_ids.get(status.subject, 0)
            problems += [
                _describe_missing_parent(status, parent)
                for parent in status_parents(status)
                if parent not in statuses
                and parent > last_id
                and not is_dropped(parent, status, statuses)
            ]
    subjects = []
    if not problems:
        for name, subject_statuses in sorted(by_subject.items()):
            try:
                last_id = dropped_ids.get(name, 0)
                if subject_statuses[0].partition_id <= last_id and not was_replaced(
                    subject_statuses, last_id
                ):
                    subjects.append(_plan_deleted_subject(name, subject_statuses, last_id))
                else:
                    subjects.append(_plan_subject(name, subject_statuses, options, last_id))
            except InvalidRequestError as error:
                problems.append(f"subject {name!r}: {error.message}")
    if problems:
        problems_text = "; ".join(problems[:PROBLEMS_LISTED_MAX])
        raise InvalidRequestError(
            f"the database cannot be rebuilt: {problems_text}", problems=len(problems)
        )
    dropped_id = max((source.hosted.dropped_id for source in sources), default=0)
    return RebuiltCluster(
        sources=sources,
        subjects=subjects,
        dropped_id=dropped_id,
        cluster_id=min(_cluster_ids(sources), default=""),
    )


def _collect_dropped_ids(sources: Sequence[BrokerSource]) -> dict[str, int]:
    """Return a dict that maps each subject to the highest partition id up to which brokers have
    dropped its partitions.
    """
    dropped_ids: dict[str, int] = {}
    for source in sources:
        for name, last_id in source.hosted.dropped.items():
            dropped_ids[name] = max(last_id, dropped_ids.get(name, 0))
    return dropped_ids


def _plan_deleted_subject(
    name: str, statuses: Sequence[PartitionStatus], last_id: int
) -> RebuiltSubject:
    """Plan what is left of a deleted subject, which its brokers must still drop. Raises
    InvalidRequestError.
    """
    later_ids = [status.partition_id for status in statuses if status.partition_id > last_id]
    if later_ids:
        raise InvalidRequestError(
            f"it was deleted, and some of its partitions up to {last_id} still exist, but "
            f"partition {later_ids[0]} belongs to a later subject of this name: leave out the "
            "broker that has the old ones"
        )
    facts_list = [_require_facts(status) for status in statuses]
    rows = [
        RebuiltPartition(
            partition=msgspec.structs.replace(
                each.partition, state=PartitionState.EXPIRED, parents=()
            )
        )
        for each in facts_list
    ]
    return RebuiltSubject(
        name=name,
        order_strategy=facts_list[0].order_strategy or OrderStrategy.STRICT,
        partitions_wanted=max(len(rows), facts_list[0].partitions_wanted),
        partitions_named=len(rows),
        partitions=rows,
        groups=[],
        static=facts_list[0].static,
        deleting=True,
    )


def _describe_missing_parent(status: PartitionStatus, parent: int) -> str:
    return (
        f"partition {status.partition_id} continues partition {parent}, which none of these "
        "brokers has: name every broker, and name with --gone the broker groups that no longer "
        "exist"
    )


def _find_contradictions(sources: Sequence[BrokerSource]) -> Iterable[str]:
    """Yield a description of each contradiction between the brokers' replies."""
    group_hosts: dict[str, str] = {}
    folders: dict[str, str] = {}
    partition_hosts: dict[int, str] = {}
    for source in sources:
        hosted = source.hosted
        if hosted.broker_group in group_hosts:
            yield (
                f"{group_hosts[hosted.broker_group]} and {source.address} are both broker group "
                f"{hosted.broker_group!r}: one data folder is a copy of the other"
            )
        elif hosted.broker_id and hosted.broker_id in folders:
            yield f"{folders[hosted.broker_id]} and {source.address} have the same data folder"
        group_hosts[hosted.broker_group] = folders[hosted.broker_id] = source.address
        for status in hosted.partitions:
            if status.facts is None:
                yield f"{source.address} does not describe partition {status.partition_id}"
            elif status.facts.partition.broker_group != hosted.broker_group:
                yield (
                    f"{source.address} has partition {status.partition_id} of another broker group"
                )
            elif status.partition_id in partition_hosts:
                yield (
                    f"{partition_hosts[status.partition_id]} and {source.address} both have "
                    f"partition {status.partition_id}"
                )
            partition_hosts[status.partition_id] = source.address
    if len(_cluster_ids(sources)) > 1:
        yield "the brokers belong to different clusters: name those of one cluster"


def _cluster_ids(sources: Sequence[BrokerSource]) -> set[str]:
    """Return the identities of the clusters that created the partitions."""
    return {
        status.facts.cluster_id
        for source in sources
        for status in source.hosted.partitions
        if status.facts is not None and status.facts.cluster_id
    }


def _plan_subject(
    name: str, hosted_statuses: Sequence[PartitionStatus], options: RebuildOptions, last_id: int
) -> RebuiltSubject:
    """Plan a live subject. A publication has replaced its partitions up to `last_id`. Raises
    InvalidRequestError.
    """
    replaced_partitions = build_replaced_rows(hosted_statuses, last_id)
    lineage = remaining_lineage(hosted_statuses, last_id)
    unpublished_ids = unpublished_partitions(lineage)
    statuses = exclude_partitions(lineage, unpublished_ids)
    facts = {status.partition_id: _require_facts(status) for status in statuses}
    if len({each.static for each in facts.values()}) != 1:
        raise InvalidRequestError("its partitions do not agree on whether it is static")
    wanted_counts = {each.partitions_wanted for each in facts.values()} - {0}
    numbers = [
        number
        for status in hosted_statuses
        if (number := partition_number(status.name)) is not None
    ]
    subject = RebuiltSubject(
        name=name,
        order_strategy=OrderStrategy.STRICT,
        partitions_wanted=min(wanted_counts, default=len(statuses)),
        partitions_named=max([number + 1 for number in numbers] + [len(hosted_statuses)]),
        partitions=[],
        groups=_build_groups(statuses),
        static=facts[statuses[0].partition_id].static,
        tokens_above=max(status.forgotten_token for status in statuses),
    )
    rows = {
        status.partition_id: RebuiltPartition(
            partition=msgspec.structs.replace(
                facts[status.partition_id].partition, state=status.state
            ),
            end_offset=status.next_offset if status.state is PartitionState.SEALED else None,
        )
        for status in statuses
    }
    subject.partitions = list(rows.values())
    expire_canceled(statuses, rows)
    subject.fences, subject.operation = infer_unfinished_operations(statuses, rows)
    for status in lineage:
        if status.partition_id in unpublished_ids:
            expired_partition = msgspec.structs.replace(
                _require_facts(status).partition, state=PartitionState.EXPIRED, parents=()
            )
            rows[status.partition_id] = RebuiltPartition(partition=expired_partition)
            subject.partitions.append(rows[status.partition_id])
    subject.canceled_operation = cancel_operation(rows)
    _set_settings(subject, {key: row for key, row in rows.items() if key in facts}, facts)
    problems = list(add_gone_partitions(subject, statuses, rows, options))
    if problems:
        raise InvalidRequestError("; ".join(problems))
    subject.partitions += replaced_partitions
    parents = _blocking_parents(subject)
    for group in subject.groups:
        # Frozen partitions remain drained even if an ancestor was reset later, because an owner
        # could no longer take over anything there.
        blocking_parents = parents | dict.fromkeys(group.frozen_ids, frozenset[int]())
        group.drained_ids = set(drained_after_parents(group.drained_ids, blocking_parents))
    if subject.static:
        _set_logic_starts(rows, subject.partitions)
    if not _covers_every_range(subject) and not (
        options.complete and _continue_creation(subject, statuses)
    ):
        raise InvalidRequestError(
            "its open partitions do not cover every logical partition once: name every broker"
        )
    return subject


def _set_settings(
    subject: RebuiltSubject, rows: dict[int, RebuiltPartition], facts: dict[int, HostPartition]
) -> None:
    """
    Give the subject the settings of its newest partitions. Older partitions may have earlier
    settings.

    An unfinished change of settings is ignored: the settings are taken from the partitions that it
    has not replaced yet.

    Raises:
        InvalidRequestError: the partitions have conflicting settings.
    """

    def differs_from_parents(partition: Partition) -> bool:
        own_facts = facts[partition.partition_id]
        parents = [facts[parent] for parent in partition.parents if parent in facts]
        return any(
            (own_facts.order_strategy, own_facts.retention, own_facts.message_bytes_max)
            != (parent.order_strategy, parent.retention, parent.message_bytes_max)
            for parent in parents
        )

    existing_partitions = [
        row.partition for row in rows.values() if row.partition.state != PartitionState.EXPIRED
    ]
    continued_ids = {parent for partition in existing_partitions for parent in partition.parents}
    leaves = [
        partition
        for partition in existing_partitions
        if partition.partition_id not in continued_ids
    ]
    unchanged_leaves = [partition for partition in leaves if not differs_from_parents(partition)]
    newest_facts = [facts[partition.partition_id] for partition in unchanged_leaves or leaves]
    newest_facts = newest_facts or list(facts.values())
    strategies = {each.order_strategy for each in newest_facts} - {None}
    if len(strategies) != 1:
        raise InvalidRequestError("its partitions do not agree on an order strategy")
    (strategy,) = strategies
    assert strategy is not None
    retentions = {each.retention for each in newest_facts} - {None}
    if len(retentions) > 1:
        raise InvalidRequestError("its partitions do not agree on a retention")
    limits = {each.message_bytes_max or MESSAGE_BYTES_MAX for each in newest_facts}
    if len(limits) > 1:
        raise InvalidRequestError("its partitions do not agree on a message size limit")
    subject.message_bytes_max = limits.pop()
    subject.order_strategy = strategy
    subject.retention = next(iter(retentions), None) or Retention.ACKED


def _require_facts(status: PartitionStatus) -> HostPartition:
    assert status.facts is not None
    return status.facts


def _build_groups(statuses: Sequence[PartitionStatus]) -> list[RebuiltGroup]:
    """
    Return the consumer groups with their tokens and drained partitions.

    A sealed partition counts as drained if the cursor is at its end; it is up to the caller to
    check its parents.
    """
    groups: dict[str, RebuiltGroup] = {}
    for status in statuses:
        for group_status in status.groups:
            group = groups.setdefault(group_status.group, RebuiltGroup(name=group_status.group))
            if group_status.token > max(group.tokens.values(), default=0):
                group.strategy = group_status.strategy
            group.tokens[status.partition_id] = group_status.token
            group.ttl_ms = max(group.ttl_ms, group_status.ttl_ms)
            group.last_token = max(group.last_token, group_status.token + TOKENS_BETWEEN)
            is_sealed = status.state is PartitionState.SEALED
            if group_status.token and is_sealed and group_status.cursor >= status.next_offset:
                group.drained_ids.add(status.partition_id)
                if group_status.parked or group_status.left_to_children:
                    group.parked_ids.add(status.partition_id)
                if group_status.frozen:
                    group.frozen_ids.add(status.partition_id)
    for group in groups.values():
        group.ttl_ms = group.ttl_ms or TTL_MS_DEFAULT
    return [group for _, group in sorted(groups.items())]


def _blocking_parents(subject: RebuiltSubject) -> dict[int, frozenset[int]]:
    """Return a dict that maps each partition id to the ids of its parents, in which a lost parent
    is replaced by its own parents.
    """
    rows = {int(row.partition.partition_id): row for row in subject.partitions}
    parents = {number: row.partition.parents for number, row in rows.items()}
    lost_ids = {number for number, row in rows.items() if row.lost}
    all_ids = parents.keys() | set().union(*parents.values())
    return nearest_ancestors(parents, all_ids - lost_ids)


def _set_logic_starts(
    rows: dict[int, RebuiltPartition], all_rows: Sequence[RebuiltPartition]
) -> None:
    """
    Set the logic starts of a static subject's partitions. Each is the end of the parent, or an
    offset above the loss of the parent.

    A child whose queue differs from that of its parent begins a new queue, at 0. A parent has a
    lower id than its children, so its own logic start is set first.

    Args:
        rows: maps the id of each partition that brokers have to its row.
        all_rows: these rows and those of gone partitions.

    Raises:
        InvalidRequestError: there are no logic offsets left above a loss.
    """
    rows_by_id = {row.partition.partition_id: row for row in all_rows}
    for _, row in sorted(rows.items()):
        for parent_id in row.partition.parents:
            parent = rows_by_id[parent_id]
            if parent.partition.queue != row.partition.queue:
                continue
            if parent.abandoned:
                logic_start = start_behind_loss(row.partition.name)
            elif parent.end_offset is not None:
                logic_start = parent.partition.logic_start + parent.end_offset
            else:
                continue
            row.partition = msgspec.structs.replace(row.partition, logic_start=logic_start)


def _covers_every_range(subject: RebuiltSubject) -> bool:
    """Return True if the open partitions cover every logical partition exactly once."""
    route = Route(
        subject=subject.name,  # type: ignore[arg-type]
        version=1,  # type: ignore[arg-type]
        order_strategy=subject.order_strategy,
        partitions=tuple(row.partition for row in subject.partitions),
    )
    try:
        route_table(route)
    except InvalidRequestError:
        return False
    return True


def _continue_creation(subject: RebuiltSubject, statuses: Sequence[PartitionStatus]) -> bool:
    """
    Plan the missing partitions of an unfinished creation.

    Returns:
        False if there is no unfinished creation, because the subject has been used or no partition
        is missing.
    """
    ranges = split_ranges(subject.partitions_wanted)
    hosted_ranges = {
        (row.partition.range_start, row.partition.range_end) for row in subject.partitions
    }
    was_used = any(is_used(status) for status in statuses)
    if was_used or len(hosted_ranges) != len(statuses) or not hosted_ranges < set(ranges):
        return False
    subject.opened = False
    subject.partitions_named = subject.partitions_wanted
    for row in subject.partitions:
        row.partition = msgspec.structs.replace(row.partition, state=PartitionState.PLANNED)
    template = subject.partitions[0].partition
    for queue, (start, end) in enumerate(ranges):
        if (start, end) not in hosted_ranges:
            missing_partition = msgspec.structs.replace(
                template,
                partition_id=0,
                name=partition_name(subject.name, queue),
                queue=queue,
                range_start=start,
                range_end=end,
            )
            subject.partitions.append(RebuiltPartition(partition=missing_partition))
    return True
