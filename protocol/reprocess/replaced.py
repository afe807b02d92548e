"""Finds the partitions whose rows replaced messages, and those that a backfill makes redundant.
Pure.

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
    Return the partitions whose messages were replaced, by the partition that has the rows.

    A partition of rows is recognised as a parent that continues another parent of the same child:
    no other operation seals a partition twice.

    Args:
        parents: parents by partition id.
    """
    replaced: dict[int, frozenset[int]] = {}
    for siblings in parents.values():
        for parent in siblings if len(siblings) > 1 else ():
            sources = frozenset(map(int, siblings)) & frozenset(map(int, parents.get(parent, ())))
            if sources:
                replaced[int(parent)] = replaced.get(int(parent), frozenset()) | sources
    return replaced


def ends_behind_rows(
    replaced: Mapping[int, Collection[int]],
    parents: Mapping[int, Collection[int]],
    ends: Mapping[int, int | None],
    cursors: Mapping[int, int],
) -> dict[int, int]:
    """
    Return the end offsets of the partitions whose rows all come from messages of a backfill, by
    partition id.

    Args:
        replaced: result of `replaced_by_rows`.
        parents: parents by partition id.
        ends: end offset by partition id; None: it is open, or its end is not known.
        cursors: offset at which the backfill ended, by partition id, for each partition that had
            data then.

    Raises:
        JobError: a partition has rows both from messages of the backfill and from others.
    """
    older = {each for number in cursors for each in _ancestors(number, parents)}
    """Ancestors of the backfill's partitions, which precede it."""
    behind: dict[int, int] = {}
    for rows in sorted(replaced.keys() - cursors.keys()):
        later, has_earlier = [], False
        for number in sorted(_ancestors(rows, parents)):
            end = ends.get(number)
            if number in cursors:
                has_earlier = has_earlier or cursors[number] > 0
                if end is None or cursors[number] < end:
                    later.append(number)
            elif number in behind or number in older:
                has_earlier = True
            elif end != 0:
                later.append(number)
        if not later:
            behind[rows] = ends.get(rows) or 0
        elif has_earlier:
            raise _mixed_rows_error(rows, later[0], cursors, ends)
    return behind


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


def _ancestors(number: int, parents: Mapping[int, Collection[int]]) -> set[int]:
    found: set[int] = set()
    pending = [number]
    while pending:
        new = set(map(int, parents.get(pending.pop(), ()))) - found
        found |= new
        pending.extend(new)
    return found
