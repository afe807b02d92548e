"""The condition that passes over waiting rows which nothing takes now, of any number of subjects and partitions.

A subject whose rows all wait is an element of one list, which a database looks up once a row.  Subjects of which some
partitions wait are the cases of one CASE: a chain of ANDs over all of them is as deep as it is long, and SQLite refuses
expressions that are deeper than 1,000.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import sqlalchemy as sa

from ..protocol.limits import LOGICAL_PARTITIONS
from .assignment import SubjectRange
from .batches import OutboxRow
from .tables import OutboxTables

SUBJECTS_MAX = 10_000
"""Subjects of a statement, each a parameter: SQLite and PostgreSQL take some 32,000."""
RANGES_MAX = 5_000
"""Ranges of a statement, each 50 to 70 bytes of text: SQLite takes a million."""


class ClosedRows:
    """Ranges whose rows wait: those that a statement passes over, and those that it has no room for."""

    def __init__(self, closed: Iterable[SubjectRange]) -> None:
        self._whole: list[str] = []
        """Subjects that a statement passes over."""
        self._parts: dict[str, list[SubjectRange]] = {}
        """Ranges that a statement passes over."""
        self._left: dict[str, list[SubjectRange]] = {}
        """Ranges that no statement passes over."""
        ranges_left = RANGES_MAX
        for subject, group in groupby(closed, key=lambda each: each.subject):
            ranges = list(group)
            if len(self._whole) + len(self._parts) >= SUBJECTS_MAX:
                self._left[subject] = ranges
            elif _is_whole(ranges):
                self._whole.append(subject)
            elif len(ranges) <= ranges_left:
                self._parts[subject] = ranges
                ranges_left -= len(ranges)
            else:
                self._left[subject] = ranges

    @property
    def all_passed(self) -> bool:
        """True if a statement with `condition` selects no row that waits."""
        return not self._left

    def condition(self, tables: OutboxTables) -> sa.ColumnElement[bool]:
        """True of rows that are to be read."""
        rows = tables.rows.c
        conditions = []
        if self._whole:
            conditions.append(rows.subject.not_in(self._whole))
        if self._parts:
            cases = {
                subject: sa.case(
                    (sa.or_(*(_in(rows.logical, each) for each in ranges)), 0), else_=1
                )
                for subject, ranges in self._parts.items()
            }
            conditions.append(sa.case(cases, value=rows.subject, else_=1) == 1)
        return sa.and_(sa.true(), *conditions)

    def has_open(self, selected: Iterable[OutboxRow]) -> bool:
        """True if one of the rows that a statement selected does not wait."""
        return any(
            not any(
                each.start <= row.logical < each.end for each in self._left.get(row.subject, ())
            )
            for row in selected
        )


def _is_whole(ranges: Sequence[SubjectRange]) -> bool:
    return ranges[0].start == 0 and ranges[0].end == LOGICAL_PARTITIONS


def _in(logical: sa.ColumnElement[int], closed: SubjectRange) -> sa.ColumnElement[bool]:
    return logical.between(_number(closed.start), _number(closed.end - 1))


def _number(value: int) -> sa.BindParameter[int]:
    """Written into the statement: its parameters are counted."""
    return sa.bindparam(None, value, sa.Integer, literal_execute=True)
