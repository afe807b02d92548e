"""Decides where a stream begins, where its next batch ends, and which ranges a batch has. Pure.

    parents  [0, 40) read in batch 4 ─▶ sealed end reached
    child                               [0, 10) offered in batch 5 ─▶ …

Invariants
    A partition is offered only after the batch that read the last message of all its ancestors.
    The ranges of a batch follow from its two offsets, so a batch that is replayed has the same.
    Rows that replaced messages are not offered to a stream that has read all of these messages.
    Without new messages the next offset equals the start; only the end of batch 0 also says where
    it began.

Source: Spark runs the batches of a query one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...protocol.limits import PARTITION_MESSAGES_MAX
from .lineage import Branch, View
from .offset import StreamOffset

PARTS_MAX = 16
"""A batch that ends at a seal has at least all messages divided by this number."""


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
    """The end; None if it is not known where the partition ended."""


def first_offset(
    view: View, begins: Mapping[int, int], subjects: Mapping[str, int]
) -> StreamOffset:
    """
    Return the offset at which batch 0 begins.

    Args:
        begins: the first offset to read of each partition that is not gone, by partition id.
        subjects: the ids of the subjects, by name.
    """
    lineage = view.lineage
    starts = {
        number: begins.get(number, 0) if not branch.gone else _end_of_gone(branch)
        for number, branch in lineage.branches.items()
    }
    done = finished(view, StreamOffset(subjects=subjects, waiting=starts))
    read = {number: at for number, at in starts.items() if lineage.before(number) <= done}
    waiting = {number: at for number, at in starts.items() if number not in read and at}
    offsets = _without_passed(view, read, done)
    return StreamOffset(subjects=subjects, offsets=offsets, waiting=waiting, initial=True)


def next_offset(
    view: View,
    start: StreamOffset,
    *,
    ends: Mapping[int, int] | None = None,
    rows_max: int | None = None,
) -> StreamOffset:
    """
    Return the end of the batch that begins at `start`.

    Args:
        ends: the end of the stream by partition id; other partitions are not read. None: the
            stream does not end.
        rows_max: the limit for the messages of the batch; None: no limit. `_limit_to_a_seal` may
            lower it.
    """
    origin = replace(start, initial=False) if start.initial else None
    done = finished(view, start)
    begins: dict[int, int] = {}
    counts: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for number, stored in view.stored.items():
        if number in done:
            continue
        begin = max(start.at(number), stored.first)
        stop = stored.end if ends is None else min(stored.end, ends.get(number, 0))
        if stop > begin and _may_begin(view, start, number, done):
            begins[number], counts[number] = begin, stop - begin
        elif stop > begin:
            waiting[number] = stop - begin
    if not counts:
        return start if origin is None else replace(origin, origin=origin)
    offsets = dict(start.offsets)
    behind = _waiting_behind(view, waiting, counts.keys(), done)
    limits = [rows_max, _limit_to_a_seal(counts, behind)]
    rows_max = min((limit for limit in limits if limit is not None), default=None)
    turn = sum(start.offsets.values())
    for number, count in shares(counts, rows_max, turn=turn, behind=behind).items():
        if number not in offsets:
            for passed_by in view.lineage.passed_by(number) - done - offsets.keys():
                offsets[passed_by] = start.at(passed_by)
        offsets[number] = begins[number] + count
    return StreamOffset(
        subjects=start.subjects,
        offsets=_without_passed(view, offsets, done),
        waiting={number: at for number, at in start.waiting.items() if number not in offsets},
        origin=origin,
    )


def everything(
    view: View, subjects: Mapping[str, int], origin: StreamOffset | None
) -> StreamOffset:
    """
    Return the end of a batch of everything that is stored, for versions of Spark that do not pass
    the start of the batch.

    The batch may contain children together with their parents; `lineage_groups` puts them into one
    task.

    Args:
        subjects: the ids of the subjects, by name.
        origin: where the stream begins if it has no checkpoint; None if messages there were
            removed.
    """
    return StreamOffset(
        subjects=subjects,
        offsets={number: stored.end for number, stored in view.stored.items()},
        origin=None if origin is None else replace(origin, initial=False),
    )


def passed(view: View, offset: StreamOffset) -> set[int]:
    """Return the partitions that were read to their end and are no longer in the offset, because
    their children are.
    """
    read: set[int] = set()
    for number in reversed(view.lineage.branches):
        children = view.lineage.children[number]
        if number not in offset.offsets and (children & offset.offsets.keys() or children & read):
            read.add(number)
    return read


def finished(view: View, offset: StreamOffset) -> set[int]:
    """Return the partitions that have nothing left to read; partitions without messages only if
    their ancestors have nothing left either.
    """
    done = passed(view, offset)
    for number, branch in view.lineage.branches.items():
        if number in done or not _may_begin(view, offset, number, done):
            continue
        end, stored = view.end_of(number), view.stored.get(number)
        at = max(offset.at(number), 0 if stored is None else stored.first)
        if branch.gone or (end is not None and at >= end) or _was_read(view, offset, number):
            done.add(number)
    return done


def _was_read(view: View, offset: StreamOffset, partition_id: int) -> bool:
    """Return True if the rows of this partition replace messages that the stream has read
    completely, before it continued after them.
    """
    replaced = view.lineage.replaced.get(partition_id, frozenset())
    if not replaced or partition_id in offset.offsets or partition_id in offset.waiting:
        return False
    read = passed(view, offset)

    def had_all(number: int) -> bool:
        """Return True if a partition was read completely; one without messages is never in an
        offset, but its parents are.
        """
        end = view.end_of(number)
        if end == 0:
            before = view.lineage.parents[number]
            is_known = bool(before) or not view.lineage.branches[number].partition.parents
            return is_known and all(map(had_all, before))
        return number in read or (end is not None and offset.offsets.get(number, -1) >= end)

    return all(map(had_all, replaced))


def batch_ranges(view: View, start: StreamOffset, end: StreamOffset) -> list[BatchRange]:
    """Return the ranges of a batch, parents before their children; a repeated batch 0 has those of
    its first run.
    """
    if start.initial and end.origin is not None:
        start = end.origin
    done = passed(view, start)
    order = {number: place for place, number in enumerate(view.lineage.branches)}
    return [
        BatchRange(number, start.at(number), end.offsets[number])
        for number in sorted(end.offsets, key=lambda number: (order.get(number, -1), number))
        if number not in done and end.offsets[number] > start.at(number)
    ]


def lost_ranges(view: View, offset: StreamOffset) -> Iterator[LostRange]:
    """Yield the ranges that were removed before the stream has read them."""
    done = passed(view, offset)
    for number, branch in view.lineage.branches.items():
        at, stored = offset.at(number), view.stored.get(number)
        if number in done:
            continue
        if branch.gone and at < _end_of_gone(branch):
            yield LostRange(number, at, branch.end)
        if not branch.gone and stored is not None and at < stored.first:
            yield LostRange(number, at, stored.first)


def lineage_groups(view: View, ranges: Sequence[BatchRange]) -> list[list[BatchRange]]:
    """Return the ranges of each group of connected parents and children, parents first: one task
    reads a group in order.
    """
    group_of: dict[int, list[BatchRange]] = {}
    for each in ranges:
        group = [each]
        for ancestor in sorted(view.lineage.ancestors(each.partition_id) & group_of.keys()):
            joined = group_of[ancestor]
            if joined is not group:
                group[:0] = joined
                group_of |= {member.partition_id: group for member in joined}
        group_of[each.partition_id] = group
    return list({id(group): group for group in group_of.values()}.values())


def task_ranges(
    view: View, ranges: Sequence[BatchRange], *, rows_max: int
) -> list[list[BatchRange]]:
    """
    Return the ranges of each task: groups of parents and children stay together, and small groups
    share a task of up to `rows_max` rows.

    A sink recognizes rows by the number of their task. So tasks are made of all ranges that the
    batch had at first: rows that retention has removed since do not move others into another task.
    """
    tasks: list[list[BatchRange]] = []
    rows_of_last = 0
    for group in lineage_groups(view, ranges):
        rows = sum(each.end - each.start for each in group)
        if tasks and rows + rows_of_last <= rows_max:
            tasks[-1] += group
            rows_of_last += rows
        else:
            tasks.append(group)
            rows_of_last = rows
    return tasks


def shares(
    counts: Mapping[int, int],
    rows_max: int | None,
    *,
    turn: int,
    behind: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """
    Return the number of messages that a batch takes of each partition: in proportion to their
    number, at least one, and together at most `rows_max`.

    If there are more partitions than rows, `turn` rotates which partitions are read.

    Args:
        behind: the number of messages that wait until a partition is read, by its id. They count
            for its share: otherwise partitions without descendants would be read to the end while
            others lag days behind, and a watermark would then drop the rows of those.
    """
    weights = {number: count + behind.get(number, 0) for number, count in counts.items()}
    total = sum(weights.values())
    if rows_max is None or total <= rows_max:
        return dict(counts)
    numbers = sorted(counts)
    if rows_max < len(numbers):
        first = turn % len(numbers)
        return dict.fromkeys((numbers[first:] + numbers[:first])[:rows_max], 1)
    # After one message of each, the others are divided in proportion; the largest remainders get
    # what rounding leaves.
    spare, rest = rows_max - len(numbers), total - len(numbers)
    parts = {number: divmod(spare * (weights[number] - 1), rest) for number in numbers}
    taken = {number: 1 + whole for number, (whole, _) in parts.items()}
    left = rows_max - sum(taken.values())
    for number in sorted(numbers, key=lambda number: -parts[number][1])[:left]:
        taken[number] += 1
    return {number: min(count, counts[number]) for number, count in taken.items()}


def _limit_to_a_seal(counts: Mapping[int, int], behind: Mapping[int, int]) -> int | None:
    """
    Return the limit for the messages of a batch in which some partitions have messages waiting
    behind them; None: no limit.

    A watermark drops rows that are older than those of the batch before the last one. So the batch
    ends, in all partitions in proportion, where the first of them is read completely. It has at
    least a sixteenth of all messages, so that a long lineage does not need many batches.
    """
    weights = {number: count + behind.get(number, 0) for number, count in counts.items()}
    total = sum(weights.values())
    parts = [
        -(-total * counts[number] // weight)
        for number, weight in weights.items()
        if weight > counts[number]
    ]
    return max(min(parts), total // PARTS_MAX, len(counts)) if parts else None


def _waiting_behind(
    view: View, waiting: Mapping[int, int], read: Collection[int], done: Collection[int]
) -> dict[int, int]:
    """
    Return the number of messages that wait behind each partition, directly or indirectly; messages
    behind several partitions are divided among them.

    Args:
        waiting: the number of messages of partitions that may not begin yet, by partition id.
        read: the partitions that this batch reads; they wait for none.
        done: the partitions with nothing left to read; none waits for them.
    """
    behind: dict[int, int] = {}
    if not waiting:
        return behind
    for number in reversed(view.lineage.branches):
        count = waiting.get(number, 0) + behind.get(number, 0)
        if number in read or not count:
            continue
        before = [parent for parent in view.lineage.before(number) if parent not in done]
        for parent in before:
            behind[parent] = behind.get(parent, 0) + count // len(before)
    return behind


def _may_begin(view: View, offset: StreamOffset, partition_id: int, done: set[int]) -> bool:
    """Return True if a partition is already being read, or all its ancestors were read."""
    return partition_id in offset.offsets or view.lineage.before(partition_id) <= done


def _without_passed(view: View, offsets: Mapping[int, int], done: set[int]) -> dict[int, int]:
    """Return the offsets without finished partitions that have a child among them."""
    return {
        number: at
        for number, at in offsets.items()
        if number not in done or not view.lineage.children[number] & offsets.keys()
    }


def _end_of_gone(branch: Branch) -> int:
    """Return where a partition whose data is gone ended; an offset beyond all others if it is lost
    and its end is not known.
    """
    if branch.end is None:
        return PARTITION_MESSAGES_MAX if branch.lost else 0
    return branch.end
