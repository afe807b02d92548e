"""Finds the partitions whose rows have replaced messages, and the partitions that a backfill makes
redundant. Pure.

    P open ─▶ cut: P sealed, C open after P ─▶ rows in H made from P ─▶ published: P expired,
                                                                         H between P and C

    backfill of P up to its end      ─▶ all rows of H are made from messages that it contains:
                                        live reading continues after them
    backfill of P up to the middle   ─▶ H has rows of both kinds, in any order: no offset
                                        separates them
    backfill without a message of P  ─▶ H is read from its first row
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..errors import JobError, Reason

AGAIN = (
    "Run `keylane spark reprocess` again into another folder, and start after that one; or start "
    "at earliest, to get the rows of all messages."
)


def replaced_by_rows(parents: Mapping[int, Collection[int]]) -> dict[int, frozenset[int]]:
    """
    Return a dict that maps each partition of rows to the partitions whose messages it replaces.

    A partition of rows is recognised as a parent that continues another parent of the same child:
    no other operation seals a partition twice.

    Args:
        parents: maps partition ids to parents.
    """
    replaced_ids: dict[int, frozenset[int]] = {}
    for siblings in parents.values():
        for parent in siblings if len(siblings) > 1 else ():
            sources = frozenset(map(int, siblings)) & frozenset(map(int, parents.get(parent, ())))
            if sources:
                replaced_ids[int(parent)] = replaced_ids.get(int(parent), frozenset()) | sources
    return replaced_ids


def ends_behind_rows(
    replaced_ids: Mapping[int, Collection[int]],
    parents: Mapping[int, Collection[int]],
    ends: Mapping[int, int | None],
    cursors: Mapping[int, int],
) -> dict[int, int]:
    """
    Return a dict that maps the partitions whose rows all come from messages of a backfill to their
    end offsets.

    Args:
        replaced_ids: the result of `replaced_by_rows`.
        parents: maps partition ids to parents.
        ends: maps partition ids to end offsets, or to None if the partition is open or its end is
            unknown.
        cursors: maps each partition that had data at the end of the backfill to the offset at which
            the backfill ended.

    Raises:
        JobError: a partition has both rows from messages of the backfill and rows from other
            messages.
    """
    older_partitions = {
        each for partition_id in cursors for each in _find_ancestors(partition_id, parents)
    }
    """The ancestors of the backfill's partitions, which precede it."""
    row_ends: dict[int, int] = {}
    for rows in sorted(replaced_ids.keys() - cursors.keys()):
        later_partitions, has_earlier = [], False
        for partition_id in sorted(_find_ancestors(rows, parents)):
            end = ends.get(partition_id)
            if partition_id in cursors:
                has_earlier = has_earlier or cursors[partition_id] > 0
                if end is None or cursors[partition_id] < end:
                    later_partitions.append(partition_id)
            elif partition_id in row_ends or partition_id in older_partitions:
                has_earlier = True
            elif end != 0:
                later_partitions.append(partition_id)
        if not later_partitions:
            row_ends[rows] = ends.get(rows) or 0
        elif has_earlier:
            raise _mixed_rows_error(rows, later_partitions[0], cursors, ends)
    return row_ends


def _mixed_rows_error(
    rows: int, number: int, cursors: Mapping[int, int], ends: Mapping[int, int | None]
) -> JobError:
    error = JobError(
        Reason.MANIFEST,
        f"messages [{cursors.get(number, 0)}, {ends.get(number)}) of partition {number}, after "
        f"the backfill, were replaced: partition {rows} has their rows mixed with rows of messages "
        f"in the backfill",
        partition_id=rows,
    )
    error.hint = AGAIN
    return error


def _find_ancestors(partition_id: int, parents: Mapping[int, Collection[int]]) -> set[int]:
    ancestors: set[int] = set()
    pending = [partition_id]
    while pending:
        new_parents = set(map(int, parents.get(pending.pop(), ()))) - ancestors
        ancestors |= new_parents
        pending.extend(new_parents)
    return ancestors
