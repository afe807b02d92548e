"""`df.write.format("keylane")`: tasks fill a hidden subject, and the driver publishes it when it
commits. Requires pyspark.

    writer()   driver   creates the hidden subject
    write()    tasks    store numbered rows; a repeated attempt stores nothing twice
    commit()   driver   checks that there are as many messages as rows, and publishes once
    abort()    driver   deletes the hidden subject

A named job (option `once`) is published once, however often it runs. If it has already been
published, a run stores nothing.

    created      ─▶ fill the hidden subject, publish it
    taken        ─▶ a driver was killed before it published: delete its hidden subject, and create
                    another
    published    ─▶ there is nothing to write

The hidden subject is named after the job, and the metaserver remembers for `history_retention_ms`
which hidden subjects were published.

Invariants
    A hidden subject is only deleted if it was not published. A driver that is still filling it is
    then refused.
    A job only counts as published when its publication is complete. After a canceled publication,
    it gets another hidden subject.

Spark repeats a batch of `foreachBatch`, with the same number, if it has not recorded the end of the
batch.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from ...arrow.opening import run_with_network
from ...protocol.clock import Clock, SystemClock
from ...protocol.errors import ConfigError, KeylaneError, PublishError, Reason, SubjectDeletedError
from ...protocol.operations import hidden_name
from ...rpc.network import Network
from ..failure import readable_errors
from ..schema import key_was_read
from .guard import guarded_columns
from .hidden import POLL_S, HiddenSubject
from .job import TaskReport, WriteOptions, check_job, check_unused, parse_write_options
from .schema import check_columns
from .task import write_task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql.types import StructType


async def create_once(
    hidden_subject: str,
    subject_of: Callable[[str, int], HiddenSubject],
    *,
    timeout_ms: int,
    clock: Clock,
) -> tuple[str, int]:
    """
    Create the hidden subject of a named job.

    Args:
        hidden_subject: its name; after a canceled publication a number is appended.
        subject_of: returns the HiddenSubject of a name and an id; 0: whatever its id.
        timeout_ms: milliseconds to wait for the deletion of an earlier run's rows.

    Returns:
        The name of the hidden subject and its id; the id is 0 if the job is already published.

    Raises:
        PublishError: other drivers write the same job, and recreate the subject repeatedly.
        SubjectDeletedError: a broker with rows of an earlier run is unreachable.
        KeylaneError: the metaserver refuses, or does not answer.
    """
    name, canceled = hidden_subject, 0
    deadline_ms = clock.boot_ms() + timeout_ms
    while True:
        try:
            return name, (await subject_of(name, 0).create()).route.subject_id
        except SubjectDeletedError:
            if clock.boot_ms() >= deadline_ms:
                raise
            await asyncio.sleep(POLL_S)
        except PublishError as error:
            if error.reason is Reason.HIDDEN_TAKEN and clock.boot_ms() < deadline_ms:
                # If it is being published, the deletion waits, and then finds no subject.
                await subject_of(name, 0).delete()
                continue
            if error.published_id is None:
                raise
            try:
                await subject_of(name, error.published_id).publish()
            except PublishError as refusal:
                if refusal.reason is not Reason.PUBLISH_OUTDATED:
                    raise
                canceled += 1
                name = f"{hidden_subject}.{canceled}"
            else:
                return name, 0


log = logging.getLogger("keylane.spark")


@dataclass
class TaskDone(WriterCommitMessage):
    """The commit message that a successful attempt of a task sends to the driver."""

    report: TaskReport


class KeylaneBatchWriter(DataSourceArrowWriter):
    """Writes one job. Spark pickles it for the tasks and for the commit."""

    def __init__(self, options: WriteOptions, *, job: str, started_at_ns: int) -> None:
        self.options = options
        self.job = job
        self.hidden = options.hidden or hidden_name(options.subject, options.once or job)
        self._started_at_ns = started_at_ns
        self._subject_id = 0
        self._is_published = False
        """True if an earlier run of the job has published its rows."""

    @classmethod
    def begin(
        cls, given_options: Mapping[str, str], schema: StructType, *, overwrite: bool
    ) -> KeylaneBatchWriter:
        """
        Check the options and columns, and create the hidden subject. This blocks.

        Raises:
            ConfigError, RowsError: the options or columns are invalid.
            PublishError: another job is filling the hidden subject that the options name.
            KeylaneError: the metaserver refuses, or does not answer.
        """
        options = parse_write_options(given_options)
        if overwrite:
            raise ConfigError(
                'mode "overwrite" would delete the stored messages, and the progress of '
                'consumers: use mode("append"); to replace a subject, write with '
                'option("publish", "false") and option("hidden", NAME), check the rows, then run '
                "keylane subject publish NAME SUBJECT --replace"
            )
        check_columns(schema)
        guarded_columns(schema.names, options.order, key_was_read=key_was_read(schema))
        writer = cls(options, job=secrets.token_hex(8), started_at_ns=SystemClock.wall_ns())
        run_with_network(writer._create, options.security)
        return writer

    async def _create(self, network: Network) -> None:
        started_at = datetime.fromtimestamp(self._started_at_ns // 1_000_000_000, UTC).isoformat()
        filled_by = f"a write of Spark that began at {started_at}, job {self.job}"
        if self.options.once:
            await self._create_once(network, filled_by)
            return
        subject = HiddenSubject(network, self.options, self.hidden, filled_by=filled_by)
        try:
            self._subject_id = (await subject.create()).route.subject_id
        except KeylaneError:
            if not self.options.hidden:  # no other job knows this name
                await subject.abandon()
            raise
        if self.options.hidden:
            check_unused(self.hidden, self.options.subject, await subject.count_messages())

    async def _create_once(self, network: Network, filled_by: str) -> None:
        def subject_of(name: str, subject_id: int) -> HiddenSubject:
            return HiddenSubject(
                network, self.options, name, subject_id=subject_id, filled_by=filled_by
            )

        self.hidden, self._subject_id = await create_once(
            self.hidden, subject_of, timeout_ms=self.options.timeout_ms, clock=SystemClock()
        )
        self._is_published = not self._subject_id
        if self._is_published:
            log.info("job %s of %s was already published", self.options.once, self.options.subject)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Write the rows of one task, and return its commit message."""
        if self._is_published:
            for _ in iterator:  # Spark sends the rows anyway
                pass
            return TaskDone(TaskReport(task=0))
        context = TaskContext.get()
        task = context.partitionId() if context is not None else 0
        work = partial(
            write_task,
            options=self.options,
            subject=self.hidden,
            batches=iter(iterator),
            identity=("job", self.job, task),
            task=task,
            sent_at_ns=self._started_at_ns,
            clock=SystemClock(),
            rng=random.Random(),
            subject_id=self._subject_id,
        )
        with readable_errors():
            return TaskDone(run_with_network(work, self.options.security))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Check and publish the rows that the tasks have written. Idempotent."""
        if self._is_published:
            return
        reports = [each.report for each in messages if isinstance(each, TaskDone)]

        async def work(network: Network) -> None:
            subject = self._hidden_subject(network)
            rows = check_job(reports, await subject.count_complete())
            if not self.options.publish:
                return
            if not rows and await subject.continues_target():
                # Without rows, the target's partitions need not change.
                await subject.delete()
                return
            await subject.publish()

        with readable_errors():
            run_with_network(work, self.options.security)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the rows that the tasks have written."""
        if self._is_published:
            return
        with readable_errors():
            run_with_network(
                lambda network: self._hidden_subject(network).delete(), self.options.security
            )

    def _hidden_subject(self, network: Network) -> HiddenSubject:
        """Return the hidden subject that this job created, identified by its id."""
        return HiddenSubject(network, self.options, self.hidden, subject_id=self._subject_id)
