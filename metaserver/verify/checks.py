"""Defines the checks that compare the database with the brokers, each with a code and a name. Pure.

A check is a function that yields a sentence for each violation of its claim. Its input consists of
snapshots of the database and the replies of the brokers. A broker that does not respond violates
only V03; all other checks skip its partitions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from ...protocol.control import HostPartition, PartitionStatus, PartitionStatusList, Retention
from ...protocol.ids import PartitionId
from ...protocol.limits import LOGICAL_PARTITIONS, MESSAGE_BYTES_MAX
from ...protocol.operations import OperationState, StepAction
from ...protocol.queues import is_behind_loss
from ...protocol.routing import Partition, PartitionState
from ...protocol.text import counted
from ...protocol.verification import CheckView, Verification
from ..cluster.rows import SubjectRow
from ..operations.states import RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionView:
    """The row of a partition."""

    subject_id: int
    partition: Partition
    end_offset: int | None = None
    abandoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """The row of a consumer group, with the tokens of its leases by partition id."""

    group_id: int
    subject_id: int
    name: str
    last_token: int
    route_version: int
    tokens: Mapping[int, int] = field(default_factory=dict)
    drained_ids: Collection[int] = ()
    announced_ids: Collection[int] = ()
    """Ids of the partitions whose brokers have stored the group."""
    deleting: bool = False
    """True while brokers are forgetting the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """An unfinished operation."""

    operation_id: int
    subject_id: int
    state: OperationState
    running: bool
    """True if it blocks other operations on the subject."""
    idle_ms: int
    """For how many milliseconds it has had no driver; 0 or less while it has one."""
    problem: str = ""
    steps: Mapping[int, StepAction] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRow:
    """The row of a broker group, or of a broker that was refused under the group's name."""

    broker_group: str
    broker_id: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlView:
    """A snapshot of the database."""

    subjects: Mapping[int, SubjectRow] = field(default_factory=dict)
    partitions: Mapping[int, PartitionView] = field(default_factory=dict)
    groups: Sequence[GroupRow] = ()
    operations: Sequence[OperationRow] = ()
    brokers: Sequence[BrokerRow] = ()
    refused: Sequence[BrokerRow] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAnswer:
    """The partitions that a broker hosts. If it did not respond, `hosted` is None and `problem` is
    the reason.
    """

    broker_group: str
    address: str
    hosted: PartitionStatusList | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """
    A snapshot of the database, the brokers' replies, and a later snapshot of the database.

    A broker must have everything in the first snapshot, and the second snapshot must have
    everything that the broker has. So changes between the snapshots do not count as violations.
    """

    before: SqlView
    answers: Sequence[BrokerAnswer]
    after: SqlView


OPEN, SEALED, PLANNED = PartitionState.OPEN, PartitionState.SEALED, PartitionState.PLANNED
VIOLATIONS_MAX = 100
IDLE_MS_MAX = 30_000
"""Time, in milliseconds, after which an operation without a driver counts as stuck."""


class Difference(NamedTuple):
    """A partition, seal or removal that a broker group has and the database lacks."""

    broker_group: str
    partition_id: int
    text: str
    """A sentence for operators."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check. `find` yields a sentence for each violation of its claim."""

    code: str
    name: str
    claim: str
    find: Callable[[Index], Iterator[str]]


class Index:
    """The views, indexed for the checks."""

    def __init__(self, views: Views) -> None:
        self.before = views.before
        self.answers = views.answers
        self.after = views.after
        self.at_broker: dict[tuple[str, int], PartitionStatus] = {}
        self.silent: dict[str, str] = {}
        self._answered = {each.broker_group for each in views.answers if each.hosted is not None}
        for answer in views.answers:
            if answer.hosted is None:
                self.silent[answer.broker_group] = answer.problem
                continue
            for status in answer.hosted.partitions:
                self.at_broker[answer.broker_group, status.partition_id] = status

    def status(self, view: PartitionView) -> PartitionStatus | None:
        """Return a partition's status at its broker group. Return None if the broker does not host
        it or did not respond.
        """
        partition = view.partition
        return self.at_broker.get((partition.broker_group, partition.partition_id))

    def answered(self, broker_group: str) -> bool:
        """Return True if a broker group has replied."""
        return broker_group in self._answered

    def was_known(self, subject_id: int, name: str) -> bool:
        """Return True if the first snapshot has a consumer group, even if it has been deleted
        since.
        """
        return any((row.subject_id, row.name) == (subject_id, name) for row in self.before.groups)

    def group(self, subject_id: int, name: str) -> GroupRow | None:
        """Return a consumer group's row in the second snapshot, or None."""
        for group in self.after.groups:
            if (group.subject_id, group.name) == (subject_id, name):
                return group
        return None


def verify(views: Views) -> Verification:
    """Run all checks and return their results in order."""
    index = Index(views)
    results = []
    for check in CHECKS:
        violations = list(check.find(index))
        results.append(
            CheckView(
                code=check.code,
                name=check.name,
                claim=check.claim,
                violations=violations[:VIOLATIONS_MAX],
                violations_total=len(violations),
            )
        )
    return Verification(ok=not any(result.violations_total for result in results), checks=results)


def _check_route_coverage(index: Index) -> Iterator[str]:
    for subject in index.after.subjects.values():
        if subject.route_version == 0 or subject.deleting:
            continue
        covered_end = 0
        for partition in _open_partitions(index.after, subject):
            start, end = partition.range_start, partition.range_end
            if start > covered_end:
                yield f"subject {subject.name!r}: [{covered_end}, {start}) has no open partition"
            if start < covered_end:
                overlap = f"[{start}, {min(covered_end, end)})"
                yield f"subject {subject.name!r}: {overlap} has two open partitions"
            covered_end = max(covered_end, end)
        if covered_end != LOGICAL_PARTITIONS:
            yield (
                f"subject {subject.name!r}: its ranges end at {covered_end}, "
                f"not {LOGICAL_PARTITIONS}"
            )


def _open_partitions(view: SqlView, subject: SubjectRow) -> list[Partition]:
    found = [
        row.partition
        for row in view.partitions.values()
        if row.subject_id == subject.subject_id and row.partition.state is OPEN
    ]
    return sorted(found, key=lambda partition: (partition.range_start, partition.partition_id))


def _check_parent_coverage(index: Index) -> Iterator[str]:
    by_id = index.after.partitions
    for child in by_id.values():
        partition = child.partition
        covered_count = 0
        for parent_id in partition.parents:
            parent = by_id.get(parent_id)
            if parent is None or not _same_subject(index.after, parent, child):
                yield (
                    f"partition {partition.partition_id}: parent {parent_id} does not belong to "
                    "its subject"
                )
                continue
            start = max(partition.range_start, parent.partition.range_start)
            end = min(partition.range_end, parent.partition.range_end)
            if end <= start:
                yield (
                    f"partition {partition.partition_id}: parent {parent_id} has none of its range"
                )
            covered_count += max(0, end - start)
        if partition.parents and covered_count < partition.range_end - partition.range_start:
            yield f"partition {partition.partition_id}: its parents do not cover its range"
        subject = index.after.subjects.get(child.subject_id)
        if subject is not None and subject.static and partition.state in {OPEN, SEALED}:
            yield from find_broken_chain(by_id, keep_visible_parents(by_id, child))


def keep_visible_parents(
    partitions: Mapping[int, PartitionView], child: PartitionView
) -> Partition:
    """
    Return a partition with only those parents that readers can see.

    A partition with two parents of the same range was created by a cut: one parent belongs to the
    hidden subject, and replaces the other when it is published.
    """
    parents = child.partition.parents
    hidden_ids = {
        parent
        for parent in parents
        if parent in partitions
        and (
            partitions[parent].subject_id != child.subject_id
            or partitions[parent].partition.state is PLANNED
        )
    }
    replaced_ids = {
        older
        for parent in parents
        if parent in partitions and parent not in hidden_ids
        for older in partitions[parent].partition.parents
        if older in parents and partitions[older].partition.state is PartitionState.EXPIRED
    }
    visible_ids = tuple(parent for parent in parents if parent not in hidden_ids | replaced_ids)
    return replace(child.partition, parents=visible_ids)


def _same_subject(view: SqlView, parent: PartitionView, child: PartitionView) -> bool:
    """Return True if parent and child belong to the same subject, or if one of them belongs to a
    hidden subject that was created for the subject of the other.
    """
    if parent.subject_id == child.subject_id:
        return True
    parent_subject = view.subjects.get(parent.subject_id)
    child_subject = view.subjects.get(child.subject_id)
    if parent_subject is None or child_subject is None:
        return False
    return (
        child_subject.hidden_for == parent_subject.name
        or parent_subject.hidden_for == child_subject.name
    )


def _check_hosted_facts(index: Index) -> Iterator[str]:
    reported_groups = set()
    for row in index.before.partitions.values():
        partition = row.partition
        if partition.state not in {OPEN, SEALED}:
            continue
        group = partition.broker_group
        if group in index.silent:
            if group not in reported_groups:
                reported_groups.add(group)
                yield f"broker group {group!r} does not respond: {index.silent[group]}"
            continue
        status = index.status(row)
        if status is None:
            yield f"partition {partition.partition_id} is not hosted by {group!r}"
            continue
        subject = index.before.subjects[row.subject_id]
        gone_parents = _gone_parents(index, status, partition)
        for name, expected_value, hosted_value in _compare_facts(
            subject, partition, status, gone_parents
        ):
            if partition.state is SEALED and name in _SETTINGS:
                continue  # the settings were changed after the partition was sealed
            yield (
                f"partition {partition.partition_id}: {name} is {expected_value!r} in SQL, "
                f"{hosted_value!r} at {group!r}"
            )


_SETTINGS = {"order strategy", "retention", "bytes of a message"}


def _gone_parents(
    index: Index, status: PartitionStatus, partition: Partition
) -> frozenset[PartitionId]:
    """
    Return the parents that the broker still has even though there are no longer any rows for them.

    These belonged to a deleted hidden subject, or were replaced before the database was rebuilt.
    """
    facts = () if status.facts is None else status.facts.partition.parents
    known_ids = index.before.partitions.keys() | index.after.partitions.keys()
    return frozenset(facts) - known_ids - set(partition.parents)


def _compare_facts(
    subject: SubjectRow,
    partition: Partition,
    status: PartitionStatus,
    gone_parents: Collection[PartitionId],
) -> Iterator[tuple[str, object, object]]:
    """Yield (name, value in SQL, value at the broker) for each fact that differs. `gone_parents`
    are the ids of parents that no longer exist.
    """
    if status.facts is None:
        expected_facts: dict[str, object] = {"subject": subject.hosted_name, "name": partition.name}
        hosted_facts: dict[str, object] = {"subject": status.subject, "name": status.name}
    else:
        expected_facts, hosted_facts = (
            _expected_facts(subject, partition),
            _reported_facts(status.facts, subject, gone_parents),
        )
    for name, value in expected_facts.items():
        if hosted_facts[name] != value:
            yield name, value, hosted_facts[name]


def _expected_facts(subject: SubjectRow, partition: Partition) -> dict[str, object]:
    return {
        "subject": subject.hosted_name,
        "name": partition.name,
        "queue": partition.queue,
        "range": (partition.range_start, partition.range_end),
        "broker group": partition.broker_group,
        "parents": tuple(partition.parents),
        "order strategy": str(subject.order_strategy),
        "partitions wanted": subject.partitions_wanted,
        "retention": subject.retention.value,
        "static": subject.static,
        "bytes of a message": subject.message_bytes_max,
    }


def _reported_facts(
    facts: HostPartition, subject: SubjectRow, gone_parents: Collection[PartitionId]
) -> dict[str, object]:
    partition = facts.partition
    return {
        "subject": facts.subject,
        "name": partition.name,
        "queue": partition.queue,
        "range": (partition.range_start, partition.range_end),
        "broker group": partition.broker_group,
        "parents": tuple(parent for parent in partition.parents if parent not in gone_parents),
        "order strategy": str(facts.order_strategy or subject.order_strategy),
        "partitions wanted": facts.partitions_wanted or subject.partitions_wanted,
        "retention": (facts.retention or subject.retention).value,
        "static": facts.static,
        "bytes of a message": facts.message_bytes_max or MESSAGE_BYTES_MAX,
    }


def _check_unknown_partitions(index: Index) -> Iterator[str]:
    for each in _find_missing_partitions(index):
        yield each.text


def _find_missing_partitions(index: Index) -> Iterator[Difference]:
    """Yield the partitions that brokers host but that SQL does not know or assigns to other
    brokers.
    """
    for (group, partition_id), status in index.at_broker.items():
        # A partition that is only in the first snapshot was dropped after its broker had replied.
        row = index.after.partitions.get(partition_id) or index.before.partitions.get(partition_id)
        if row is None:
            text = (
                f"{group!r} hosts partition {partition_id} of {status.subject!r}, "
                f"which SQL does not know"
            )
        elif row.partition.broker_group != group:
            text = (
                f"{group!r} hosts partition {partition_id}, which belongs to "
                f"{row.partition.broker_group!r}"
            )
        else:
            continue
        yield Difference(group, partition_id, text)


def _find_missing_seals(index: Index) -> Iterator[Difference]:
    """Yield the partitions that are open in SQL but sealed at their brokers, even though no
    operation is sealing them.
    """
    sealing_ids = {
        partition_id
        for view in (index.before, index.after)
        for operation in view.operations
        for partition_id, action in operation.steps.items()
        if action is StepAction.SEAL
    }
    for row in index.after.partitions.values():
        status = index.status(row)
        partition_id = row.partition.partition_id
        is_sealed = status is not None and status.state is SEALED
        if row.partition.state is OPEN and is_sealed and partition_id not in sealing_ids:
            text = f"partition {partition_id} is open in SQL and sealed at its broker"
            yield Difference(row.partition.broker_group, partition_id, text)


def _find_missing_removals(index: Index) -> Iterator[Difference]:
    """Yield the partitions that are in both snapshots but that their brokers do not host."""
    for row in index.before.partitions.values():
        partition = row.partition
        later_row = index.after.partitions.get(partition.partition_id)
        if partition.state not in {OPEN, SEALED} or later_row is None:
            continue
        if later_row.partition.state not in {OPEN, SEALED} or not index.answered(
            partition.broker_group
        ):
            continue
        if index.status(row) is None:
            text = f"partition {partition.partition_id} is not hosted by {partition.broker_group!r}"
            yield Difference(partition.broker_group, partition.partition_id, text)


def find_differences(index: Index) -> Iterator[Difference]:
    """
    Yield the partitions, seals and removals that brokers have and the database lacks.

    Only a database that has lost commits lacks any of these, because a change is committed before a
    broker is asked to apply it.
    """
    known_ids = index.before.partitions.keys() | index.after.partitions.keys()
    highest_id = max(known_ids, default=0)
    for each in _find_missing_partitions(index):
        # An unknown id that is not higher belongs to a deleted partition in an older copy of a data
        # folder.
        if each.partition_id in known_ids or each.partition_id > highest_id:
            yield each
    yield from _find_missing_seals(index)
    yield from _find_missing_removals(index)


def _check_seals(index: Index) -> Iterator[str]:
    for row in index.before.partitions.values():
        status = index.status(row)
        partition_id = row.partition.partition_id
        if row.partition.state is not SEALED or (row.abandoned and row.end_offset is None):
            continue
        if row.end_offset is None:
            yield f"partition {partition_id} is sealed and its end offset is not known"
        if status is None:
            continue
        if status.state is not SEALED:
            yield f"partition {partition_id} is sealed in SQL and open at its broker"
        elif row.end_offset is not None and status.next_offset != row.end_offset:
            yield (
                f"partition {partition_id} ends at {row.end_offset} in SQL, "
                f"at {status.next_offset} at its broker"
            )
    for each in _find_missing_seals(index):
        yield each.text


def _check_folders(index: Index) -> Iterator[str]:
    for broker in index.after.refused:
        yield f"a second broker of {broker.broker_group!r} at {broker.address} is refused"
    # A lost folder may be replaced while the brokers are asked.
    stored = {
        (broker.broker_group, broker.broker_id)
        for broker in (*index.before.brokers, *index.after.brokers)
    }
    for answer in index.answers:
        hosted = answer.hosted
        if hosted is None:
            continue
        if hosted.broker_group != answer.broker_group:
            yield f"at {answer.address} is {hosted.broker_group!r}, not {answer.broker_group!r}"
        elif hosted.broker_id and (answer.broker_group, hosted.broker_id) not in stored:
            yield f"the data folder at {answer.address} is not that of {answer.broker_group!r}"
    groups_by_id: dict[str, list[str]] = defaultdict(list)
    for broker in index.after.brokers:
        groups_by_id[broker.broker_id].append(broker.broker_group)
    for broker_id, names in groups_by_id.items():
        if len(names) > 1:
            yield (
                f"data folder {broker_id!r} belongs to several broker groups: "
                f"{', '.join(sorted(names))}"
            )


def _check_tokens(index: Index) -> Iterator[str]:
    for group in index.after.groups:
        highest_token = max(group.tokens.values(), default=0)
        if highest_token > group.last_token:
            yield (
                f"group {group.name!r}: token {highest_token} is above its last token, "
                f"{group.last_token}"
            )
    for row in index.after.partitions.values():
        status = index.status(row)
        for group_status in () if status is None else status.groups:
            partition_id = row.partition.partition_id
            group_row = index.group(row.subject_id, group_status.group)
            if group_row is None and not index.was_known(row.subject_id, group_status.group):
                yield f"partition {partition_id}: group {group_status.group!r} is not known in SQL"
            elif (
                group_row is not None
                and group_row.tokens.get(partition_id, group_row.last_token) < group_status.token
            ):
                yield (
                    f"partition {partition_id}, group {group_status.group!r}: the fence is "
                    f"{group_status.token}, above every token in SQL"
                )


def _check_cursors(index: Index) -> Iterator[str]:
    for (_, partition_id), status in index.at_broker.items():
        if not 0 <= status.first_offset <= status.next_offset:
            yield f"partition {partition_id} has [{status.first_offset}, {status.next_offset})"
        for group in status.groups:
            if not 0 <= group.cursor <= group.cursor + group.acked_above <= status.next_offset:
                yield (
                    f"partition {partition_id}, group {group.group!r}: cursor {group.cursor}, "
                    f"{group.acked_above} acked above, of {counted(status.next_offset, 'message')}"
                )


def _check_drained(index: Index) -> Iterator[str]:
    for group in index.before.groups:
        for partition_id in sorted(group.drained_ids):
            row = index.before.partitions.get(partition_id)
            subject_text = f"partition {partition_id}, group {group.name!r}"
            if row is None or row.partition.state in {OPEN, PLANNED}:
                yield f"{subject_text}: drained, and not sealed"
                continue
            status = index.status(row)
            if status is None:
                continue
            end = status.next_offset if row.end_offset is None else row.end_offset
            cursors = [each.cursor for each in status.groups if each.group == group.name]
            cursor = max([status.first_offset, *cursors])
            if cursor < end and not _has_changed(index, group, partition_id):
                yield f"{subject_text}: drained, with its cursor at {cursor} of {end}"
        yield from find_early_drains(index.before, group)


def _has_changed(index: Index, group: GroupRow, partition_id: int) -> bool:
    """
    Return True if a row of `drained` has changed since the first snapshot.

    A reset deletes such rows and grants new tokens; expiry deletes those of removed partitions.
    """
    current_row = index.group(group.subject_id, group.name)
    if current_row is None or partition_id not in current_row.drained_ids:
        return True
    return current_row.tokens.get(partition_id) != group.tokens.get(partition_id)


def _check_versions(index: Index) -> Iterator[str]:
    subjects = index.after.subjects
    for group in index.after.groups:
        subject = subjects.get(group.subject_id)
        if subject is None or group.route_version > subject.route_version:
            yield f"group {group.name!r} was settled with a route newer than its subject's"
    partition_counts = Counter(row.subject_id for row in index.after.partitions.values())
    open_subject_ids = {
        row.subject_id for row in index.after.partitions.values() if row.partition.state is OPEN
    }
    for subject in subjects.values():
        if subject.route_version == 0 and subject.subject_id in open_subject_ids:
            yield f"subject {subject.name!r} has open partitions and no route"
        if partition_counts[subject.subject_id] > subject.partitions_named:
            yield f"subject {subject.name!r} has more partitions than names given"


def _check_operations(index: Index) -> Iterator[str]:
    view = index.after
    stepping_ids: set[int] = set()
    for operation in view.operations:
        stepping_ids |= operation.steps.keys()
        operation_text = f"operation {operation.operation_id} ({operation.state})"
        if operation.idle_ms > IDLE_MS_MAX:
            yield f"{operation_text}: no driver for {operation.idle_ms / 1000:.0f} s"
        if operation.problem:
            yield f"{operation_text} waits: {operation.problem}"
        if operation.running != RULES[operation.state].runs:
            blocks_text = "blocks" if operation.running else "does not block"
            yield f"{operation_text}: its row {blocks_text} other operations"
    for row in view.partitions.values():
        subject = view.subjects[row.subject_id]
        is_planned = row.partition.state is PLANNED
        if (
            is_planned
            and subject.route_version > 0
            and row.partition.partition_id not in stepping_ids
        ):
            yield f"partition {row.partition.partition_id} is planned, and no operation opens it"
    for subject in view.subjects.values():
        earlier_subject = index.before.subjects.get(subject.subject_id)
        is_unopened = not subject.problem and subject.route_version == 0
        if is_unopened and earlier_subject is not None and earlier_subject.route_version == 0:
            yield f"subject {subject.name!r}: its creation is not finished"
        if subject.deleting and earlier_subject is not None and earlier_subject.deleting:
            yield f"subject {subject.name!r}: its deletion is not finished"
    deleting_ids = {group.group_id for group in index.before.groups if group.deleting}
    for group in view.groups:
        is_subject_deleted = view.subjects[group.subject_id].deleting
        if group.deleting and group.group_id in deleting_ids and not is_subject_deleted:
            yield f"group {group.name!r}: its deletion is not finished"


def _check_child_states(index: Index) -> Iterator[str]:
    by_id = index.after.partitions
    for child in by_id.values():
        if child.partition.state not in {OPEN, SEALED}:
            continue
        for parent_id in keep_visible_parents(by_id, child).parents:
            parent = by_id.get(parent_id)
            if parent is not None and parent.partition.state in {OPEN, PLANNED}:
                yield (
                    f"partition {child.partition.partition_id} is {child.partition.state}, "
                    f"and its parent {parent_id} is {parent.partition.state}"
                )


def _check_announced_groups(index: Index) -> Iterator[str]:
    by_subject: dict[int, list[GroupRow]] = defaultdict(list)
    for group in index.before.groups:
        if not group.deleting:
            by_subject[group.subject_id].append(group)
    for row in index.before.partitions.values():
        status = index.status(row)
        if status is not None:
            subject = index.before.subjects[row.subject_id]
            yield from find_unknown_groups(subject, row, status, by_subject[row.subject_id])


CHECKS = (
    Check(
        "V01",
        "route-covers-once",
        "each logical partition has one open partition",
        _check_route_coverage,
    ),
    Check(
        "V02",
        "parents-overlap",
        "parents cover their child's range; static queues have no gap except above a loss",
        _check_parent_coverage,
    ),
    Check(
        "V03",
        "hosted-as-known",
        "brokers host the partitions of SQL, as in SQL",
        _check_hosted_facts,
    ),
    Check(
        "V04",
        "nothing-foreign",
        "brokers host no partition unknown to SQL",
        _check_unknown_partitions,
    ),
    Check("V05", "seals-agree", "SQL and brokers agree on seals and end offsets", _check_seals),
    Check(
        "V06",
        "one-broker-a-group",
        "a broker group has one data folder and address",
        _check_folders,
    ),
    Check("V07", "tokens-above-fences", "no fence is above SQL's token", _check_tokens),
    Check("V08", "cursors-in-range", "no cursor is beyond the last message", _check_cursors),
    Check("V09", "drained-to-the-end", "a group acked all of what it drained", _check_drained),
    Check("V10", "versions-rise", "no group is ahead of its subject's route", _check_versions),
    Check(
        "V11",
        "operations-move",
        "no operation, no creation and no deletion is stuck",
        _check_operations,
    ),
    Check(
        "V12",
        "children-after-parents",
        "parents are sealed before children open",
        _check_child_states,
    ),
    Check(
        "V13",
        "groups-heard",
        "brokers have the groups that SQL says they have",
        _check_announced_groups,
    ),
)
"""All checks. The meaning of a code never changes."""


def find_early_drains(view: SqlView, group: GroupRow) -> Iterator[str]:
    """
    Yield a sentence for each partition that a group has drained before one of its parents, so that
    children could be read before that parent.

    A parent that has expired or was abandoned does not block children, nor does one that was
    published after the child was drained. A parent with a higher token was granted later, or was
    reset without the child.
    """
    for partition_id in sorted(group.drained_ids):
        row = view.partitions.get(partition_id)
        token = group.tokens.get(partition_id, 0)
        for parent_id in () if row is None else keep_visible_parents(view.partitions, row).parents:
            parent = view.partitions.get(parent_id)
            if parent is None or parent_id in group.drained_ids:
                continue
            if row is not None and len(row.partition.parents) > 1:
                common_parents = set(parent.partition.parents) & set(row.partition.parents)
                if common_parents and not group.tokens.get(parent_id, 0):
                    continue
            if parent.abandoned or parent.partition.state is PartitionState.EXPIRED:
                continue
            if not group.tokens.get(parent_id, 0) > token > 0:
                yield (
                    f"partition {partition_id}, group {group.name!r}: drained before partition "
                    f"{parent_id}, which it continues"
                )


def find_unknown_groups(
    subject: SubjectRow, row: PartitionView, status: PartitionStatus, groups: list[GroupRow]
) -> Iterator[str]:
    """
    Yield a sentence for each group that the partition's broker does not know, because the broker
    may then remove messages that the group has not read.

    With purely time-based retention, a grant does not wait until the broker knows the group.

    Args:
        groups: the subject's groups in the first snapshot.
    """
    is_timed = subject.retention is Retention.TIME
    partition_id = row.partition.partition_id
    known_groups = {each.group for each in status.groups}
    is_served = row.partition.state in {PartitionState.OPEN, PartitionState.SEALED}
    reading_groups = [group for group in groups if partition_id not in group.drained_ids]
    for group in reading_groups:
        if not is_served or group.name in known_groups:
            continue
        if partition_id in group.announced_ids:
            yield f"partition {partition_id}: its broker has lost group {group.name!r}"
        elif not is_timed and group.tokens.get(partition_id, 0):
            yield (
                f"partition {partition_id}, group {group.name!r}: granted, and its broker does not "
                "know the group"
            )
    if is_served and reading_groups and not status.groups_told and not is_timed:
        yield (
            f"partition {partition_id}: its broker does not know all groups, and removes nothing"
        )


def find_broken_chain(
    partitions: Mapping[int, PartitionView], partition: Partition
) -> Iterator[str]:
    """Yield a sentence for each gap between a static subject's partition and its parent.
    `partitions` maps each id to its partition.
    """
    if len(partition.parents) > 1:
        parent_count = len(partition.parents)
        yield f"partition {partition.partition_id} continues {parent_count} partitions at once"
        return
    expected_start: int | None = 0
    for parent in (partitions[key] for key in partition.parents if key in partitions):
        parent_partition = parent.partition
        continues = parent_partition.queue == partition.queue
        if continues != (parent_partition.range_start == partition.range_start):
            yield (
                f"partition {partition.partition_id} has queue {partition.queue} and begins at "
                f"logical partition {partition.range_start}; it continues partition "
                f"{parent_partition.partition_id}, which has queue {parent_partition.queue} and "
                f"begins at {parent_partition.range_start}"
            )
        if not continues:
            continue
        is_lost = parent.abandoned or (
            parent_partition.state is PartitionState.EXPIRED and parent.end_offset is None
        )
        if is_lost and is_behind_loss(partition):
            return
        expected_start = (
            None if parent.end_offset is None else parent_partition.logic_start + parent.end_offset
        )
    if partition.logic_start != expected_start:
        yield (
            f"partition {partition.partition_id} begins at logic offset "
            f"{partition.logic_start} of queue "
            f"{partition.queue}, and its parent ends at {expected_start}"
        )
