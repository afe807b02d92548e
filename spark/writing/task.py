"""Runs one attempt of a task, which stores the rows of record batches. Performs network I/O."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import pyarrow as pa

from ...protocol.clock import Clock
from ...rpc.client import MetaClient
from ...rpc.network import Network
from .guard import OrderGuard, guarded_columns
from .job import TaskReport, WriteOptions
from .lanes import TaskSender
from .rows import ALL_LOGICAL_PARTITIONS, RowReader


async def write_task(
    network: Network,
    options: WriteOptions,
    subject: str,
    batches: Iterator[pa.RecordBatch],
    *,
    identity: Sequence[object],
    task: int,
    sent_at_ns: int,
    clock: Clock,
    rng: random.Random,
    subject_id: int = 0,
    allow_reserved: bool = False,
    keyless_bounds: tuple[int, int] = ALL_LOGICAL_PARTITIONS,
) -> TaskReport:
    """
    Write the rows of a task to a subject, wait until they are stored, and return a report.

    Args:
        identity: identifies the task; it is the same in each attempt, and different for each task.
        sent_at_ns: the time for rows without one, in nanoseconds since 1970.
        subject_id: the id of the subject; 0 for the subject that has the name when the task begins.
        allow_reserved: True for rows from `keylane spark reprocess`, which have properties whose
            names are reserved for keylane.
        keyless_bounds: the logical partitions `[start, end)` that rows without a key go to; they
            are the same in each attempt.

    Raises:
        RowsError: the rows cannot be written, or an earlier attempt had other rows.
        KeylaneError: a broker or the metaserver refuses or does not respond in time, or another
            subject has the name.
    """
    sender = TaskSender(
        network,
        MetaClient(network, options.meta),
        subject,
        identity=identity,
        task=task,
        sent_at_ns=sent_at_ns,
        timeout_ms=options.timeout_ms,
        clock=clock,
        rng=rng,
        subject_id=subject_id,
    )
    guard: OrderGuard | None = None
    try:
        reader: RowReader | None = None
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            if reader is None:
                limit = (await sender.open()).message_bytes_max
                salt = "\0".join(map(str, identity)).encode()
                reader = RowReader(
                    salt=salt,
                    message_bytes_max=limit,
                    task=task,
                    allow_reserved=allow_reserved,
                    keyless_bounds=keyless_bounds,
                )
                columns = guarded_columns(batch.schema.names, options.order)
                guard = None if columns is None else OrderGuard(columns, task=task)
            first = reader.row
            rows = reader.read(batch)
            if guard is not None:
                guard.check(batch, rows.logical_partitions, rows.keyed, first)
            await sender.put(rows)
        await sender.finish()
    finally:
        await sender.close()
    return TaskReport(
        task=task,
        rows=dict(sender.stored),
        sources={} if guard is None else guard.sources,
    )
