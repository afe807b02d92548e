"""Decides where a stream starts, where its next batch ends, and which ranges a batch contains.
Pure.

    parents  [0, 40) read in batch 4 ─▶ sealed end reached
    child                               [0, 10) offered in batch 5 ─▶ …

Invariants
    A partition is offered only after the batch that read the last message of all its ancestors.
    The ranges of a batch depend only on its two offsets, so a replayed batch has the same ranges.
    Rows that replace messages are not offered to a stream that has already read all of those
    messages.
    Without new messages, the next offset equals the start, except that the end of batch 0 also
    records where the batch started.

Spark runs the batches of a query one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...protocol.limits import PARTITION_MESSAGES_MAX
from .lineage import Branch, View
from .offset import StreamOffset

PARTS_MAX = 16
"""A batch that is cut short at a seal has at least 1 / PARTS_MAX of all messages."""


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The offsets `[start, end)` of a partition in one batch."""

    partition_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LostRange:
    """The offsets `[start, end)` of a partition that were removed before they were read."""

    partition_id: int
    start: int
    end: int | None
    """The end offset; None if the end of the partition is unknown."""


def first_offset(
    view: View, start_offsets: Mapping[int, int], subjects: Mapping[str, int]
) -> StreamOffset:
    """
    Return the offset at which batch 0 starts.

    Args:
        start_offsets: the first offset to read in each readable partition, by partition id.
        subjects: the ids of the subjects, by name.
    """
    lineage = view.lineage
    starts = {
        partition_id: start_offsets.get(partition_id, 0)
        if not branch.is_gone
        else _end_of_gone(branch)
        for partition_id, branch in lineage.branches.items()
    }
    finished = finished_partitions(view, StreamOffset(subjects=subjects, waiting=starts))
    readable_starts = {
        partition_id: offset
        for partition_id, offset in starts.items()
        if lineage.required_parents(partition_id) <= finished
    }
    waiting_starts = {
        partition_id: offset
        for partition_id, offset in starts.items()
        if partition_id not in readable_starts and offset
    }
    offsets = _drop_finished_parents(view, readable_starts, finished)
    return StreamOffset(subjects=subjects, offsets=offsets, waiting=waiting_starts, initial=True)


def next_offset(
    view: View,
    start: StreamOffset,
    *,
    ends: Mapping[int, int] | None = None,
    rows_max: int | None = None,
) -> StreamOffset:
    """
    Return the end of the batch that starts at `start`.

    Args:
        ends: the end of the stream by partition id; other partitions are not read. None if the
            stream has no end.
        rows_max: the maximum number of messages in the batch, which `_seal_limit` may lower; None
            for no limit.
    """
    origin = replace(start, initial=False) if start.initial else None
    finished = finished_partitions(view, start)
    start_offsets: dict[int, int] = {}
    counts: dict[int, int] = {}
    waiting_counts: dict[int, int] = {}
    for partition_id, stored_offsets in view.stored.items():
        if partition_id in finished:
            continue
        first = max(start.at(partition_id), stored_offsets.first)
        end = (
            stored_offsets.end
            if ends is None
            else min(stored_offsets.end, ends.get(partition_id, 0))
        )
        if end > first and _can_be_read(view, start, partition_id, finished):
            start_offsets[partition_id], counts[partition_id] = first, end - first
        elif end > first:
            waiting_counts[partition_id] = end - first
    if not counts:
        return start if origin is None else replace(origin, origin=origin)
    offsets = dict(start.offsets)
    waiting_behind = _waiting_behind(view, waiting_counts, counts.keys(), finished)
    limits = [rows_max, _seal_limit(counts, waiting_behind)]
    rows_max = min((limit for limit in limits if limit is not None), default=None)
    rotation = sum(start.offsets.values())
    for partition_id, count in divide_batch(
        counts, rows_max, rotation=rotation, waiting_behind=waiting_behind
    ).items():
        if partition_id not in offsets:
            bypassed_parents = view.lineage.bypassed_parents(partition_id)
            for parent in bypassed_parents - finished - offsets.keys():
                offsets[parent] = start.at(parent)
        offsets[partition_id] = start_offsets[partition_id] + count
    return StreamOffset(
        subjects=start.subjects,
        offsets=_drop_finished_parents(view, offsets, finished),
        waiting={
            partition_id: offset
            for partition_id, offset in start.waiting.items()
            if partition_id not in offsets
        },
        origin=origin,
    )


def stored_end(
    view: View, subjects: Mapping[str, int], origin: StreamOffset | None
) -> StreamOffset:
    """
    Return the end of a batch that contains all stored messages, for Spark versions that do not pass
    the start of the batch.

    The batch may contain children together with their parents; `group_by_lineage` puts them in one
    task.

    Args:
        subjects: the ids of the subjects, by name.
        origin: where the stream starts if it has no checkpoint; None if messages there have been
            removed.
    """
    return StreamOffset(
        subjects=subjects,
        offsets={partition_id: stored.end for partition_id, stored in view.stored.items()},
        origin=None if origin is None else replace(origin, initial=False),
    )


def completed_partitions(view: View, offset: StreamOffset) -> set[int]:
    """Return the partitions that were read to their end, and are no longer in the offset because
    their children took their place.
    """
    completed: set[int] = set()
    for partition_id in reversed(view.lineage.branches):
        children = view.lineage.children[partition_id]
        if partition_id not in offset.offsets and (
            children & offset.offsets.keys() or children & completed
        ):
            completed.add(partition_id)
    return completed


def finished_partitions(view: View, offset: StreamOffset) -> set[int]:
    """Return the partitions that have nothing more to read. An empty partition only counts if its
    ancestors are finished too.
    """
    finished = completed_partitions(view, offset)
    for partition_id, branch in view.lineage.branches.items():
        if partition_id in finished or not _can_be_read(view, offset, partition_id, finished):
            continue
        end, stored_offsets = view.end_of(partition_id), view.stored.get(partition_id)
        reached = max(
            offset.at(partition_id), 0 if stored_offsets is None else stored_offsets.first
        )
        if (
            branch.is_gone
            or (end is not None and reached >= end)
            or _was_read(view, offset, partition_id)
        ):
            finished.add(partition_id)
    return finished


def _was_read(view: View, offset: StreamOffset, partition_id: int) -> bool:
    """Return True if the rows of this partition replace messages that the stream has already read
    completely.
    """
    replaced = view.lineage.replaced.get(partition_id, frozenset())
    if not replaced or partition_id in offset.offsets or partition_id in offset.waiting:
        return False
    completed = completed_partitions(view, offset)

    def was_completed(ancestor: int) -> bool:
        """Return True if a partition was read completely. An empty one is never in an offset, so
        its parents decide.
        """
        end = view.end_of(ancestor)
        if end == 0:
            parents = view.lineage.parents[ancestor]
            is_known = bool(parents) or not view.lineage.branches[ancestor].partition.parents
            return is_known and all(map(was_completed, parents))
        return ancestor in completed or (
            end is not None and offset.offsets.get(ancestor, -1) >= end
        )

    return all(map(was_completed, replaced))


def batch_ranges(view: View, start: StreamOffset, end: StreamOffset) -> list[BatchRange]:
    """Return the ranges of a batch, parents before their children. A replayed batch 0 has the same
    ranges as before.
    """
    if start.initial and end.origin is not None:
        start = end.origin
    completed = completed_partitions(view, start)
    order = {partition_id: position for position, partition_id in enumerate(view.lineage.branches)}
    return [
        BatchRange(partition_id, start.at(partition_id), end.offsets[partition_id])
        for partition_id in sorted(
            end.offsets, key=lambda partition_id: (order.get(partition_id, -1), partition_id)
        )
        if partition_id not in completed and end.offsets[partition_id] > start.at(partition_id)
    ]


def lost_ranges(view: View, offset: StreamOffset) -> Iterator[LostRange]:
    """Yield the ranges that were removed before the stream read them."""
    completed = completed_partitions(view, offset)
    for partition_id, branch in view.lineage.branches.items():
        reached, stored_offsets = offset.at(partition_id), view.stored.get(partition_id)
        if partition_id in completed:
            continue
        if branch.is_gone and reached < _end_of_gone(branch):
            yield LostRange(partition_id, reached, branch.end)
        if not branch.is_gone and stored_offsets is not None and reached < stored_offsets.first:
            yield LostRange(partition_id, reached, stored_offsets.first)


def group_by_lineage(view: View, ranges: Sequence[BatchRange]) -> list[list[BatchRange]]:
    """Group ranges that are connected as parents and children, parents first. One task reads each
    group in order.
    """
    group_of: dict[int, list[BatchRange]] = {}
    for each in ranges:
        group = [each]
        for ancestor in sorted(view.lineage.ancestors(each.partition_id) & group_of.keys()):
            ancestor_group = group_of[ancestor]
            if ancestor_group is not group:
                group[:0] = ancestor_group
                group_of |= {member.partition_id: group for member in ancestor_group}
        group_of[each.partition_id] = group
    return list({id(group): group for group in group_of.values()}.values())


def task_ranges(
    view: View, ranges: Sequence[BatchRange], *, rows_max: int
) -> list[list[BatchRange]]:
    """
    Return the ranges of each task. Groups of parents and children stay together, and small groups
    share a task of up to `rows_max` rows.

    A sink may recognize rows by their task number. So `ranges` must include rows that retention has
    removed since; otherwise rows would move to another task when a batch is replayed.
    """
    tasks: list[list[BatchRange]] = []
    rows_of_last = 0
    for group in group_by_lineage(view, ranges):
        rows = sum(each.end - each.start for each in group)
        if tasks and rows + rows_of_last <= rows_max:
            tasks[-1] += group
            rows_of_last += rows
        else:
            tasks.append(group)
            rows_of_last = rows
    return tasks


def divide_batch(
    counts: Mapping[int, int],
    rows_max: int | None,
    *,
    rotation: int,
    waiting_behind: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """
    Return the number of messages that a batch takes from each partition. It is proportional to the
    partition's number of messages and at least one, and the total is at most `rows_max`.

    If there are more partitions than rows, `rotation` selects which partitions are read.

    Args:
        waiting_behind: the number of messages that wait until a partition is read, by partition id.
            They increase the partition's share. Otherwise, partitions without descendants would be
            read to the end while others lag by days, and a watermark would then drop the rows of
            the latter.
    """
    weights = {
        partition_id: count + waiting_behind.get(partition_id, 0)
        for partition_id, count in counts.items()
    }
    total = sum(weights.values())
    if rows_max is None or total <= rows_max:
        return dict(counts)
    partition_ids = sorted(counts)
    if rows_max < len(partition_ids):
        first = rotation % len(partition_ids)
        return dict.fromkeys((partition_ids[first:] + partition_ids[:first])[:rows_max], 1)
    # After one message from each partition, the rest is divided in proportion. The largest
    # remainders are rounded up.
    extra_rows, extra_weight = rows_max - len(partition_ids), total - len(partition_ids)
    quotients = {
        partition_id: divmod(extra_rows * (weights[partition_id] - 1), extra_weight)
        for partition_id in partition_ids
    }
    result = {partition_id: 1 + quotient for partition_id, (quotient, _) in quotients.items()}
    remainder = rows_max - sum(result.values())
    for partition_id in sorted(partition_ids, key=lambda partition_id: -quotients[partition_id][1])[
        :remainder
    ]:
        result[partition_id] += 1
    return {
        partition_id: min(count, counts[partition_id]) for partition_id, count in result.items()
    }


def _seal_limit(counts: Mapping[int, int], waiting_behind: Mapping[int, int]) -> int | None:
    """
    Return the maximum number of messages in a batch if messages wait behind some partitions, or
    None for no limit.

    A watermark drops rows that are older than those of the batch before the last one. So the batch
    ends where the first partition is finished, and takes a proportional part of the others. It has
    at least 1/16 of all messages, so that a long lineage does not need many batches.
    """
    weights = {
        partition_id: count + waiting_behind.get(partition_id, 0)
        for partition_id, count in counts.items()
    }
    total = sum(weights.values())
    limits = [
        -(-total * counts[partition_id] // weight)
        for partition_id, weight in weights.items()
        if weight > counts[partition_id]
    ]
    return max(min(limits), total // PARTS_MAX, len(counts)) if limits else None


def _waiting_behind(
    view: View,
    waiting_counts: Mapping[int, int],
    readable_ids: Collection[int],
    finished: Collection[int],
) -> dict[int, int]:
    """
    Return the number of messages that wait behind each partition, directly or indirectly. Messages
    that wait behind several partitions are divided among them.

    Args:
        waiting_counts: the number of messages in partitions that cannot be read yet, by partition
            id.
        readable_ids: the partitions that this batch reads, which do not wait.
        finished: the finished partitions, for which no partition waits.
    """
    counts: dict[int, int] = {}
    if not waiting_counts:
        return counts
    for partition_id in reversed(view.lineage.branches):
        count = waiting_counts.get(partition_id, 0) + counts.get(partition_id, 0)
        if partition_id in readable_ids or not count:
            continue
        unfinished = [
            parent
            for parent in view.lineage.required_parents(partition_id)
            if parent not in finished
        ]
        for parent in unfinished:
            counts[parent] = counts.get(parent, 0) + count // len(unfinished)
    return counts


def _can_be_read(view: View, offset: StreamOffset, partition_id: int, finished: set[int]) -> bool:
    """Return True if a partition is already being read, or all its ancestors are finished."""
    return partition_id in offset.offsets or view.lineage.required_parents(partition_id) <= finished


def _drop_finished_parents(
    view: View, offsets: Mapping[int, int], finished: set[int]
) -> dict[int, int]:
    """Return the offsets without those finished partitions that have a child among them."""
    return {
        partition_id: offset
        for partition_id, offset in offsets.items()
        if partition_id not in finished or not view.lineage.children[partition_id] & offsets.keys()
    }


def _end_of_gone(branch: Branch) -> int:
    """Return the end of a partition without data. If the partition was lost and its end is unknown,
    return an offset beyond all others.
    """
    if branch.end is None:
        return PARTITION_MESSAGES_MAX if branch.lost else 0
    return branch.end
