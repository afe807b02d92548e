"""Checks the limits on the number of subjects: in the cluster, and of those with a common prefix.
SQL, synchronous.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol.access.quota import limits_of
from ...protocol.errors import OverloadedError
from ...protocol.text import counted
from ..sql.name_limits import name_limits
from ..sql.schema import subjects

CLUSTER_HINT = (
    "Delete subjects that no program uses (keylane subject list), or raise subjects_max of the "
    "metaservers. A limit for "
    "the names of one tenant: keylane access quota set 'shop.*' --subject --subjects N"
)
NAMES_HINT = (
    "Delete subjects of these names that no program uses, or have the limit raised: "
    "keylane access quota set {!r} --subject --subjects N"
)


def check_subject_room(
    connection: Connection, name: str, *, subjects_max: int, limited: bool
) -> None:
    """
    Check that a subject of this name may be created; an unfinished creation of it does not count.

    Args:
        limited: apply the limits of names, too. They need access control, without which they cannot
            be changed.

    Raises:
        OverloadedError: there are `subjects_max` other subjects, or a pattern has reached its
            limit.
    """
    others = sa.select(sa.func.count()).select_from(subjects).where(subjects.c.name != name)
    count = connection.execute(others).scalar_one()
    if count >= subjects_max:
        raise _no_room("too many subjects", CLUSTER_HINT, count, subjects_max)
    if not limited:
        return
    chosen = sa.select(name_limits.c.name, name_limits.c.subjects).where(name_limits.c.subjects > 0)
    # On PostgreSQL plans share the locks of brokers, and two would count the same subjects. All
    # rows are locked, in one order, because a hidden subject counts under two names.
    locked = chosen.order_by(name_limits.c.name).with_for_update()
    limits = {row.name: row.subjects for row in connection.execute(locked)}
    for pattern, limit in limits_of(name, limits):
        prefix = pattern.removesuffix("*")
        # LIKE ignores case on SQLite.
        alike = sa.func.substr(subjects.c.name, 1, len(prefix)) == prefix
        count = connection.execute(others.where(alike)).scalar_one()
        if count >= limit:
            text = f"{pattern!r} has {counted(count, 'subject')}, and the limit is {limit}"
            raise _no_room(text, NAMES_HINT.format(pattern), count, limit)


def _no_room(text: str, hint: str, count: int, limit: int) -> OverloadedError:
    error = OverloadedError(text, subjects=count, limit=limit)
    error.hint = hint
    return error
