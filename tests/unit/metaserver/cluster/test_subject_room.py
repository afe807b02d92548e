"""Limits on the number of subjects: in the cluster, and with a common prefix."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from keylane.metaserver.cluster.subjects import plan_subject
from keylane.metaserver.sql.schema import name_limits, subjects
from keylane.protocol.control import CreateSubject
from keylane.protocol.errors import OverloadedError
from support.sql.rows import Rows


def plan(rows: Rows, name: str, *, most: int = 100, limited: bool = True) -> None:
    ask = CreateSubject(subject=name, partitions=1)
    rows.run(plan_subject, ask, subjects_max=most, limited=limited)


def limit(rows: Rows, **limits: int) -> None:
    values = [
        {"name": f"{name}*", "subjects": most, "scheduled_bytes": 0}
        for name, most in limits.items()
    ]
    rows.run(lambda connection: connection.execute(sa.insert(name_limits), values))


def names(rows: Rows) -> set[str]:
    return set(
        rows.run(lambda connection: connection.execute(sa.select(subjects.c.name)).scalars().all())
    )


def test_subjects_of_a_pattern_are_counted_when_it_has_a_limit(rows: Rows) -> None:
    """An underscore and a percent sign are letters, and upper case is not lower case."""
    limit(rows, a_=2)
    for name in ("a_1", "a_2", "ab1", "A_1", "A_2"):
        plan(rows, name)
    with pytest.raises(OverloadedError, match="has 2 subjects, and the limit is 2") as refused:
        plan(rows, "a_3")
    assert "--subjects N" in refused.value.hint
    assert "a_3" not in names(rows)
    plan(rows, "a_2")  # it is there
    plan(rows, "a_3", limited=False)


def test_refusal_says_what_to_do_when_the_cluster_has_all_subjects(rows: Rows) -> None:
    plan(rows, "a", most=1)
    with pytest.raises(OverloadedError, match="too many subjects") as refused:
        plan(rows, "b", most=1)
    assert "subjects_max" in refused.value.hint
    assert (refused.value.subjects, refused.value.limit) == (1, 1)


def test_subject_whose_creation_failed_is_planned_again_when_all_places_are_taken(
    rows: Rows,
) -> None:
    """It is one of them; it was refused."""
    limit(rows, a=1)
    plan(rows, "a", most=1)
    failed = sa.update(subjects).values(problem="a broker refused it")
    rows.run(lambda connection: connection.execute(failed))
    plan(rows, "a", most=1)
    assert names(rows) == {"a"}
