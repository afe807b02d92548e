"""What a program of before misses in a schema: that which was taken away, renamed, or made
narrower.
"""

from __future__ import annotations

import sqlalchemy as sa


def narrowings(before: sa.MetaData, after: sa.MetaData) -> list[str]:
    """Each reason why statements for the first schema may fail with the second; both are
    reflected.
    """
    reasons = []
    for name, old in before.tables.items():
        new = after.tables.get(name)
        if new is None:
            reasons.append(f"table {name} is gone")
            continue
        for column in old.columns:
            now = new.columns.get(column.name)
            if now is None:
                reasons.append(f"column {name}.{column.name} is gone")
            elif str(now.type) != str(column.type):
                reasons.append(f"column {name}.{column.name} has another type")
            elif column.nullable and not now.nullable:
                reasons.append(f"column {name}.{column.name} has to be given")
        reasons += [
            f"new column {name}.{column.name} has to be given"
            for column in new.columns
            if column.name not in old.columns
            and not column.nullable
            and column.server_default is None
        ]
        reasons += [
            f"new constraint of {name}: {text}"
            for text in sorted(_constraints(new) - _constraints(old))
        ]
    return reasons


def _constraints(table: sa.Table) -> set[str]:
    """What rows must satisfy, beside the types of columns."""
    reasons = set()
    for constraint in table.constraints:
        if isinstance(constraint, sa.CheckConstraint):
            reasons.add(f"check {constraint.sqltext}")
        else:
            columns = ", ".join(sorted(constraint.columns.keys()))
            reasons.add(f"{type(constraint).__name__} ({columns})")
    for index in table.indexes:
        if index.unique:
            reasons.add(f"unique index ({', '.join(sorted(index.columns.keys()))})")
    return reasons
