"""Where the new output of a range differs from the old: by key, from which offset on.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

IGNORED = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDifference:
    """A key whose rows of one partition differ."""

    partition_id: int
    key: object
    """None where the output has no column `key`."""
    first_offset: int | None
    """Of the first row that differs; None where the output has no column `offset`."""
    rows: int
    """Rows that are not the same, or are on one side only."""


def differences(partition_id: int, old: pa.Table, new: pa.Table) -> list[KeyDifference]:
    """The keys that differ, by their first offset; the rows of a key are compared in their
    order.
    """
    before, after = _by_key(old), _by_key(new)
    changes = []
    for key in dict.fromkeys([*before, *after]):
        unlike = list(_unlike(before.get(key, []), after.get(key, [])))
        if unlike:
            offsets = [offset for offset in unlike if offset is not None]
            changes.append(
                KeyDifference(
                    partition_id=partition_id,
                    key=key,
                    first_offset=min(offsets, default=None),
                    rows=len(unlike),
                )
            )
    return sorted(changes, key=lambda each: (each.first_offset is None, each.first_offset or 0))


def _by_key(table: pa.Table) -> dict[Any, list[dict[str, Any]]]:
    names = [name for name in table.column_names if name != IGNORED]
    rows: dict[Any, list[dict[str, Any]]] = {}
    for row in table.select(names).to_pylist():
        rows.setdefault(row.get("key"), []).append(row)
    return rows


def _unlike(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Iterator[int | None]:
    """The offset of each row that differs; rows are matched by offset, and those of one offset by
    their order.
    """
    left = _by_offset(old)
    for offset, rows in _by_offset(new).items():
        others = left.pop(offset, [])
        pairs = zip(rows, others, strict=False)
        same = sum(row == old_row for row, old_row in pairs)
        yield from [offset] * (max(len(rows), len(others)) - same)
    for offset, rows in left.items():
        yield from [offset] * len(rows)


def _by_offset(rows: Iterable[dict[str, Any]]) -> dict[int | None, list[dict[str, Any]]]:
    by_offset: dict[int | None, list[dict[str, Any]]] = {}
    for row in rows:
        by_offset.setdefault(row.get("offset"), []).append(row)
    return by_offset
