"""Partitions of rows that replaced messages, and those that are needless after a backfill. Pure.

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
    "Run `keylane spark reprocess` again into another folder, and begin after that one; or begin "
    "at earliest, which gives the rows of everything."
)


def replaced_by_rows(parents: Mapping[int, Collection[int]]) -> dict[int, frozenset[int]]:
    """
    Return, for each partition of rows, the partitions whose messages these rows replaced.

    A partition of rows is the only kind of parent that continues another parent of the same child:
    no other operation seals a partition twice.

    Args:
        parents: by partition id, the partitions that it continues directly.
    """
    replaced: dict[int, frozenset[int]] = {}
    for before in parents.values():
        for parent in before if len(before) > 1 else ():
            both = frozenset(map(int, before)) & frozenset(map(int, parents.get(parent, ())))
            if both:
                replaced[int(parent)] = replaced.get(int(parent), frozenset()) | both
    return replaced


def behind_rows(
    replaced: Mapping[int, Collection[int]],
    parents: Mapping[int, Collection[int]],
    ends: Mapping[int, int | None],
    cursors: Mapping[int, int],
) -> dict[int, int]:
    """
    Return the end of each partition whose rows were all made from messages that a backfill
    contains.

    Args:
        replaced: result of `replaced_by_rows`.
        parents: by partition id, the partitions that it continues.
        ends: end offset by partition id; None: it is open, or its end is not known.
        cursors: by partition id, the offset where the backfill ended, for each partition that had
            data then.

    Raises:
        JobError: a partition has rows both of messages in the backfill and of others.
    """
    older = {each for number in cursors for each in _ancestors(number, parents)}
    """Ancestors of the backfill's partitions. They precede the backfill, which may have begun
    after them.
    """
    behind: dict[int, int] = {}
    for rows in sorted(replaced.keys() - cursors.keys()):
        made_of = _ancestors(rows, parents)
        new, had = [], False
        for number in sorted(made_of):
            end = ends.get(number)
            if number in cursors:
                had = had or cursors[number] > 0
                if end is None or cursors[number] < end:
                    new.append(number)
            elif number in behind or number in older:
                had = True
            elif end != 0:
                new.append(number)
        if not new:
            behind[rows] = ends.get(rows) or 0
        elif had:
            raise _of_both(rows, new[0], cursors, ends)
    return behind


def _of_both(
    rows: int, number: int, cursors: Mapping[int, int], ends: Mapping[int, int | None]
) -> JobError:
    error = JobError(
        Reason.MANIFEST,
        f"messages [{cursors.get(number, 0)}, {ends.get(number)}) of partition {number}, after "
        f"the backfill, were replaced: partition {rows} has their rows among rows of messages "
        f"that the backfill has",
        partition_id=rows,
    )
    error.hint = AGAIN
    return error


def _ancestors(number: int, parents: Mapping[int, Collection[int]]) -> set[int]:
    found: set[int] = set()
    left = [number]
    while left:
        new = set(map(int, parents.get(left.pop(), ()))) - found
        found |= new
        left.extend(new)
    return found
