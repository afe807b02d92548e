"""A job that writes to a subject by the tasks and the commit of Spark's writer, without Spark."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa

from keylane.protocol.clock import SystemClock
from keylane.rpc.http_network import HttpNetwork
from keylane.spark.writing.hidden import HiddenSubject
from keylane.spark.writing.job import TaskReport, WriteOptions
from keylane.spark.writing.task import write_task


class WrittenJob:
    """A job that writes to `subject`: attempts of its tasks, and its commit."""

    def __init__(self, meta: str, subject: str, job: str, **options: object) -> None:
        self.options = WriteOptions(
            meta=(meta,),
            subject=subject,
            timeout_ms=20_000,
            **options,  # type: ignore[arg-type]
        )
        self.hidden = f"{subject}.hidden-{job}"
        self.network = HttpNetwork()
        self.subject = HiddenSubject(self.network, self.options, self.hidden)
        self.started_at_ns = SystemClock.wall_ns()

    async def attempt(
        self, task: int, batches: Iterator[pa.RecordBatch], *, to: str | None = None
    ) -> TaskReport:
        network = HttpNetwork()
        try:
            return await write_task(
                network,
                self.options,
                to or self.hidden,
                batches,
                identity=("job", self.hidden, task),
                task=task,
                sent_at_ns=SystemClock.wall_ns() if to else self.started_at_ns,
                clock=SystemClock(),
                rng=random.Random(task),
            )
        finally:
            await network.close()
