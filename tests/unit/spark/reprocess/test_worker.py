"""A function that fails for some messages of a piece: each of them is parked alone, and the others
make their rows.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from keylane.arrow.planner import PlannedRange
from keylane.protocol.errors import NotSentError, Reason
from keylane.spark.reprocess import worker
from keylane.spark.reprocess.job import Job
from keylane.spark.reprocess.worker import call_isolating_failures
from support.raising import raises

PLANNED = PlannedRange(
    subject="orders",
    partition_id=3,
    range_start=0,
    range_end=1024,
    queue=0,
    epoch=0,
    broker_group="g1",
    address="g1:1",
    start=0,
    end=100,
    logic_start=0,
)


def messages(count: int = 100) -> pa.Table:
    return pa.table({"offset": pa.array(range(count), pa.int64()), "value": [b"v"] * count})


def job(bad: set[int], calls: list[int] | None = None) -> Job:
    """Doubles offsets, and fails for a table that has a bad one."""

    def run(rows: pa.Table) -> pa.Table:
        if calls is not None:
            calls.append(rows.num_rows)
        for offset in rows["offset"].to_pylist():
            if offset in bad:
                raise ValueError(f"offset {offset}")
        return rows.set_column(0, "offset", pc.multiply(rows["offset"], 2))

    return Job("clean", run, "jobs:clean@1")


@pytest.mark.parametrize("bad", [set(), {0}, {99}, {17, 18, 50}, set(range(100))], ids=len)
def test_messages_that_fail_are_parked_and_the_others_keep_their_order(bad):
    """With the error of each; a score of calls for one, and none more without."""
    calls: list[int] = []
    rows, parked = call_isolating_failures(job(bad, calls), messages(), PLANNED)
    assert rows["offset"].to_pylist() == [2 * each for each in range(100) if each not in bad]
    assert parked["offset"].to_pylist() == sorted(bad)
    if bad:
        assert parked["error"].to_pylist() == [f"ValueError: offset {each}" for each in sorted(bad)]
    assert len(calls) <= 1 + 16 * len(bad)


def test_function_that_fails_for_too_many_ends_the_job(monkeypatch):
    """It is broken itself; so is one that gives no table, or raises an error of keylane, as of a
    broker that is away.
    """
    monkeypatch.setattr(worker, "PARKED_MAX", 5)
    with raises(Reason.JOB_FAILED, match="for over 5 messages of this piece"):
        call_isolating_failures(job(set(range(20, 26))), messages(), PLANNED)
    assert call_isolating_failures(job(set(range(20, 25))), messages(), PLANNED)[1].num_rows == 5
    with raises(Reason.JOB_FAILED, match="not a pyarrow"):
        call_isolating_failures(Job("clean", lambda _: None, "c"), messages(), PLANNED)  # type: ignore[arg-type, return-value]

    def away(_: pa.Table) -> pa.Table:
        raise NotSentError("a broker is away")

    with pytest.raises(NotSentError):
        call_isolating_failures(Job("clean", away, "c"), messages(), PLANNED)


def test_tables_of_several_schemas_are_refused():
    """Whether a column is there may not depend on what the table has."""

    def run(rows: pa.Table) -> pa.Table:
        if rows.num_rows > 90:
            raise ValueError
        first = rows["offset"][0].as_py()
        return pa.table({"value": [b"v"] if first else ["v"]})

    with raises(Reason.JOB_FAILED, match="different schemas"):
        call_isolating_failures(Job("clean", run, "c"), messages(), PLANNED)
