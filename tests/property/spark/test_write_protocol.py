"""The protocol of a write, with the broker's own decider: whatever is tried again, a job is
published with each row once.

Attempts of tasks send batches in windows and die; a partition is sealed; the driver commits, dies,
and commits again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.broker.partition.appends import Duplicate
from keylane.broker.partition.partition import HostedPartition
from keylane.protocol.batch import check_batch, encode_body, join_columns
from keylane.protocol.control import HostPartition
from keylane.protocol.errors import RefusedError, RowsError, SequenceReusedError
from keylane.protocol.record import FLAG_NUMBERED, Header
from keylane.protocol.routing import Partition, PartitionState
from keylane.spark.writing.job import TaskReport, check_job, producer_id

BATCH = 3
TASKS = 3


def header(task: int, rows: tuple[int, ...], start: int) -> Header:
    """A batch of a task: of each row its number; the digest is of all rows up to the end."""
    count = len(rows[start : start + BATCH])
    body = join_columns(bytes(8 * count), bytes(4 * count), bytes(4 * count), (), (), count=count)
    data = encode_body(
        body,
        count=count,
        partition_id=1,
        producer_id=producer_id("job", task, 1),
        producer_epoch=hash(rows[: start + count]) & 0xFFFF_FFFF,
        sequence=start,
        flags=FLAG_NUMBERED,
    )
    return check_batch(data)


def new_partition() -> HostedPartition:
    return HostedPartition(
        HostPartition(
            subject="s",
            partition=Partition(
                partition_id=1,  # type: ignore[arg-type]
                name="s.p0",  # type: ignore[arg-type]
                queue=0,  # type: ignore[arg-type]
                range_start=0,
                range_end=1024,
                broker_group="g",  # type: ignore[arg-type]
                state=PartitionState.OPEN,
            ),
        )
    )


@dataclass
class Attempt:
    """One attempt: what it still has to send, and what it knows to be stored."""

    task: int
    rows: tuple[int, ...]
    at: int = 0
    failed: bool = False


@dataclass
class Written:
    """A hidden subject of one partition, and the rows that it has, by their offsets."""

    partition: HostedPartition = field(default_factory=new_partition)
    log: list[tuple[int, int]] = field(default_factory=list)
    published: list[tuple[int, int]] = field(default_factory=list)

    def send(self, attempt: Attempt, *, ack_lost: bool) -> None:
        """The next batch of an attempt; if the ack is lost the attempt sends the batch again."""
        batch = header(attempt.task, attempt.rows, attempt.at)
        try:
            answer = self.partition.decide_append(batch)
        except SequenceReusedError:
            attempt.failed = True
            return
        if not isinstance(answer, Duplicate):
            base = self.partition.next_offset
            self.partition.apply_append(batch, base_offset=base, appended_at_ms=0)
            stored = attempt.rows[attempt.at : attempt.at + BATCH]
            self.log += [(attempt.task, row) for row in stored]
        if not ack_lost:
            attempt.at += batch.count

    def commit(self, reports: list[TaskReport]) -> None:
        """Publish once: a repeated commit finds the publication."""
        check_job(reports, {1: len(self.log)})
        if not self.published:
            self.published = list(self.log)


STEPS = st.lists(st.tuples(st.integers(0, 2 * TASKS - 1), st.booleans()), min_size=0, max_size=120)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, counts=st.tuples(*[st.integers(0, 40)] * TASKS), commits=st.integers(1, 3))
def test_published_job_has_each_row_once_and_in_order(steps, counts, commits):
    """Two attempts of each task at once, acks lost, the driver's commit repeated."""
    work = Written()
    tasks = [tuple(range(count)) for count in counts]
    attempts = [Attempt(number % TASKS, tasks[number % TASKS]) for number in range(2 * TASKS)]
    for number, ack_lost in steps:
        if attempts[number].at < len(attempts[number].rows):
            work.send(attempts[number], ack_lost=ack_lost)
    last = [Attempt(task, tasks[task]) for task in range(TASKS)]  # from the first row on
    for attempt in last:
        while attempt.at < len(attempt.rows):
            work.send(attempt, ack_lost=False)
        assert not attempt.failed
    reports = [TaskReport(task=task, rows={1: counts[task]}) for task in range(TASKS)]
    for _ in range(commits):
        work.commit(reports)
    for task, rows in enumerate(tasks):
        assert [row for owner, row in work.published if owner == task] == list(rows)


@settings(max_examples=150, deadline=None)
@given(
    stored=st.integers(0, 15),
    rows=st.permutations(range(45)),
    again=st.permutations(range(45)),
)
def test_job_of_a_task_with_other_rows_is_never_published(stored, rows, again):
    """A first attempt dies after some batches; the second has the rows in another order. It fails,
    or it is the same.
    """
    work = Written()
    first, second = Attempt(0, tuple(rows)), Attempt(0, tuple(again))
    for _ in range(stored):
        if first.at < len(first.rows):
            work.send(first, ack_lost=False)
    while second.at < len(second.rows) and not second.failed:
        work.send(second, ack_lost=False)
    same = tuple(rows[: stored * BATCH]) == tuple(again[: stored * BATCH])
    assert second.failed is not same
    if same:
        work.commit([TaskReport(task=0, rows={1: 45})])
        assert [row for _, row in work.published] == list(again)
        return
    try:
        work.commit([TaskReport(task=0, rows={1: second.at})])
    except (RowsError, RefusedError):
        assert not work.published
    else:
        assert len(work.log) == second.at
