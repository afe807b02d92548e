"""Finds the keys whose rows differ between the old and the new output of a piece. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

IGNORED_COLUMN = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDifference:
    """A key whose rows differ, in one source partition."""

    partition_id: int
    key: object
    """The key; None if the output has no column `key`."""
    first_offset: int | None
    """The offset of the first row that differs; None if the output has no column `offset`."""
    rows: int
    """The number of rows that differ, or that exist in only one output."""


def find_differences(partition_id: int, old: pa.Table, new: pa.Table) -> list[KeyDifference]:
    """Return the keys whose rows differ, sorted by first offset. The rows of a key are compared in
    order.
    """
    old_rows, new_rows = _group_by_key(old), _group_by_key(new)
    changes = []
    for key in dict.fromkeys([*old_rows, *new_rows]):
        differing = list(_differing_offsets(old_rows.get(key, []), new_rows.get(key, [])))
        if differing:
            offsets = [offset for offset in differing if offset is not None]
            changes.append(
                KeyDifference(
                    partition_id=partition_id,
                    key=key,
                    first_offset=min(offsets, default=None),
                    rows=len(differing),
                )
            )
    return sorted(changes, key=lambda each: (each.first_offset is None, each.first_offset or 0))


def _group_by_key(table: pa.Table) -> dict[Any, list[dict[str, Any]]]:
    names = [name for name in table.column_names if name != IGNORED_COLUMN]
    rows: dict[Any, list[dict[str, Any]]] = {}
    for row in table.select(names).to_pylist():
        rows.setdefault(row.get("key"), []).append(row)
    return rows


def _differing_offsets(
    old: list[dict[str, Any]], new: list[dict[str, Any]]
) -> Iterator[int | None]:
    """Yield the offset of each row that differs. Rows are matched by offset, and rows with the same
    offset by their order.
    """
    unmatched_rows = _group_by_offset(old)
    for offset, rows in _group_by_offset(new).items():
        candidate_rows = unmatched_rows.pop(offset, [])
        pairs = zip(rows, candidate_rows, strict=False)
        equal_rows = sum(row == old_row for row, old_row in pairs)
        yield from [offset] * (max(len(rows), len(candidate_rows)) - equal_rows)
    for offset, rows in unmatched_rows.items():
        yield from [offset] * len(rows)


def _group_by_offset(rows: Iterable[dict[str, Any]]) -> dict[int | None, list[dict[str, Any]]]:
    by_offset: dict[int | None, list[dict[str, Any]]] = {}
    for row in rows:
        by_offset.setdefault(row.get("offset"), []).append(row)
    return by_offset
