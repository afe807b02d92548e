"""Stores the rows of pieces in a hidden subject, each once, however often a piece is repeated.
Network only.

    piece ─▶ numbered rows under an id of (hidden subject, partition, start)
          ─▶ brokers recognize a repeated row

Invariants
    If the facts of a piece are written, all its rows are stored.
    The rows of a piece are stored before those of the next piece of its task.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pyarrow as pa

from ...protocol.clock import SystemClock
from ...protocol.reprocess.manifest import JobPiece
from ...rpc.network import Network
from ..writing.job import WriteOptions
from ..writing.running import run_with_network
from ..writing.task import write_task


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRows:
    """The hidden subject that gets the rows of a job."""

    options: WriteOptions
    subject: str
    subject_id: int
    mark: str
    """See `Manifest.mark`."""
    sent_at_ns: int
    """The time of rows that have none, in nanoseconds since 1970."""


def store_rows(hidden: HiddenRows, messages: pa.Table, piece: JobPiece) -> None:
    """
    Store the rows of a piece, and wait until all are stored; this blocks.

    Raises:
        RowsError: a row is no valid message.
        RowsError: an earlier attempt had other rows.
        KeylaneError: a broker or the metaserver refuses, or does not answer in time.
    """

    async def work(network: Network) -> None:
        await write_task(
            network,
            hidden.options,
            hidden.subject,
            iter(messages.to_batches()),
            identity=("reprocess", hidden.subject, piece.partition_id, piece.start),
            task=piece.partition_id,
            sent_at_ns=hidden.sent_at_ns,
            clock=SystemClock(),
            rng=random.Random(),
            subject_id=hidden.subject_id,
            of_a_job=True,
        )

    run_with_network(work)
