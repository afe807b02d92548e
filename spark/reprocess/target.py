"""Creates the hidden subject that gets the rows of a job, counts its rows, and publishes it.
Performs network I/O.

    create ─▶ tasks store rows ─▶ check: as many messages as rows ─▶ manifest
           ─▶ publish, or leave hidden for a cut-over

Invariants
    The hidden subject of a job always has the same name. Its id shows whether it still has the rows
    of the finished pieces.
    Repeated runs publish nothing twice, because the metaserver knows which subjects were published.
    The rows of a complete job are counted again before they are published later.
    The rows of a piece are numbered under a producer id derived from (hidden subject, partition,
    start), so brokers recognize the rows of a repeated piece, and store each row once.
    The metadata of a piece is only written after all its rows are stored.
    The rows of a piece are stored before those of the next piece of its task.
    A row without a key is stored in the range of the partition that its piece is a part of. So if
    rows replace messages, each partition of rows only has rows of messages of its ancestors.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
from msgspec import UNSET
from msgspec.structs import replace as replace_fields

from ...arrow.opening import run_with_network
from ...protocol.clock import SystemClock
from ...protocol.errors import (
    PublishError,
    Reason,
    RowsError,
    SubjectDeletedError,
    SubjectUnknownError,
)
from ...protocol.operations import hidden_name
from ...protocol.reprocess.manifest import JobPiece, Manifest, SubjectOutput
from ...rpc.network import Network
from ..writing.hidden import HiddenSubject
from ..writing.job import WriteOptions, check_unused
from ..writing.task import write_task


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenRows:
    """What a task needs to know about the hidden subject that its rows go to."""

    options: WriteOptions
    subject: str
    subject_id: int
    mark: str
    """See `Manifest.mark`."""
    sent_at_ns: int
    """The time for rows that have none, in nanoseconds since 1970."""


def store_rows(
    hidden: HiddenRows, messages: pa.Table, piece: JobPiece, *, keyless_bounds: tuple[int, int]
) -> None:
    """
    Store the rows of a piece, and wait until all of them are stored. This blocks.

    Args:
        keyless_bounds: the range of the partition that the piece is a part of.

    Raises:
        RowsError: a row is not a valid message, or an earlier attempt had other rows.
        KeylaneError: a broker or the metaserver refuses, or does not respond in time.
    """
    run_with_network(
        partial(
            write_task,
            options=hidden.options,
            subject=hidden.subject,
            batches=iter(messages.to_batches()),
            identity=("reprocess", hidden.subject, piece.partition_id, piece.start),
            task=piece.partition_id,
            sent_at_ns=hidden.sent_at_ns,
            clock=SystemClock(),
            rng=random.Random(),
            subject_id=hidden.subject_id,
            allow_reserved=True,
            keyless_bounds=keyless_bounds,
        )
    )


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTarget:
    """The subject that gets the rows of a job. Each method blocks."""

    options: WriteOptions
    """The options of the write. If `publish` is False, the rows stay hidden."""
    filled_by: str = ""
    """Identifies the job and its folder. A hidden subject that was filled by another job is
    refused.
    """

    def output(self) -> SubjectOutput:
        """Return the output for a new plan, with a new name for the hidden subject unless one is
        given.
        """
        target = self.options.subject
        name = self.options.hidden or hidden_name(target, secrets.token_hex(8))
        return SubjectOutput(target=target, hidden=name, published=self.options.publish)

    def create(self, manifest: Manifest) -> Manifest:
        """
        Create the hidden subject unless it exists, and return the manifest with its id.

        Raises:
            SubjectUnknownError: the target does not exist, and the options do not ask to create it.
            PublishError: an operator published the hidden subject before the job was complete, or
                another job is filling it.
            ConfigError: another job has filled it.
            KeylaneError: the metaserver refuses, or does not answer.
        """
        output = _output(manifest)
        view = self._call(output, lambda subject: subject.create())
        return replace_fields(manifest, output=self._adopt(output, view.route.subject_id))

    def needs_cut(self, source: str) -> bool:
        """Return True if the rows will replace the messages that they are made from."""
        return self.options.subject == source and not self.options.publish

    def cut(self, output: SubjectOutput) -> tuple[SubjectOutput, frozenset[int]]:
        """
        Create the hidden subject unless it exists, and seal the source's partitions, so that its
        new partitions follow the hidden subject.

        Returns:
            The output with the hidden subject's id, and the source partitions that the rows are
            made from.

        Raises:
            PublishError: the hidden subject is already published, or another job is filling it, or
                it has rows and was created without a cut, and the source has been resized or moved
                since.
            ConfigError: another job has filled it.
            KeylaneError: the metaserver refuses, or does not answer.
        """
        view, older = self._call(output, lambda subject: subject.cut())
        return self._adopt(output, view.route.subject_id), older

    def hidden_rows(self, manifest: Manifest) -> HiddenRows:
        """Return what the tasks need to know about the hidden subject."""
        return HiddenRows(
            options=replace(self.options, order="none"),
            subject=_output(manifest).hidden,
            subject_id=_output(manifest).subject_id,
            mark=manifest.mark,
            sent_at_ns=manifest.planned_at_ms * 1_000_000,
        )

    def check_rows(self, manifest: Manifest) -> Manifest:
        """
        Count the rows of a complete job, and return its manifest with the number of rows per
        partition.

        Raises:
            RowsError: the hidden subject does not have exactly the rows of the pieces, or retention
                has removed some of them.
        """
        stored_counts = self._call(_output(manifest), lambda subject: subject.count_complete())
        if sum(stored_counts.values()) != manifest.rows_out:
            output = _output(manifest)
            raise RowsError(
                Reason.ROWS_DIFFER,
                f"{output.hidden} has {sum(stored_counts.values())} messages, and the job has "
                f"written {manifest.rows_out}: delete it "
                "with `keylane subject delete`, and run the same command again",
            )
        return replace_fields(
            manifest, output=replace_fields(_output(manifest), messages=stored_counts)
        )

    def publish(self, manifest: Manifest) -> None:
        """Publish the rows if the options ask for it. Idempotent. Raises the same errors as
        `HiddenSubject.publish`.
        """
        if self.options.publish:
            output = _output(manifest)
            self._call(output, lambda subject: subject.publish(), subject_id=output.subject_id)

    def ensure_published(self, manifest: Manifest) -> bool:
        """
        Publish the rows of a complete job if the options ask for it. Return False if the rows were
        deleted and must be written again, otherwise True.

        Raises:
            RowsError: since the job was completed, others have stored messages in the hidden
                subject, or retention has removed rows from it.
        """
        try:
            if not self._has_rows(manifest):
                return False
        except SubjectUnknownError:  # it was published or deleted, or it has expired
            return self._is_published(manifest)
        try:
            self.publish(manifest)
        except (SubjectUnknownError, SubjectDeletedError):
            return False
        return True

    def _is_published(self, manifest: Manifest) -> bool:
        output = _output(manifest)
        if self.options.publish:
            try:
                self.publish(manifest)
            except (SubjectUnknownError, SubjectDeletedError):
                return False
            return True
        try:
            self._call(output, lambda subject: subject.create())
        except PublishError as error:
            if error.reason is not Reason.PUBLISH_TARGET:
                raise
            are_ids_known = output.subject_id and error.published_id
            return not are_ids_known or error.published_id == output.subject_id
        return False

    def _has_rows(self, manifest: Manifest) -> bool:
        """
        Return True if the hidden subject is the one that the job filled. A later subject with the
        same name has other partitions.

        Raises:
            SubjectUnknownError: the hidden subject does not exist.
            RowsError: the hidden subject no longer has exactly the job's rows.
        """
        output = _output(manifest)
        expected_counts = output.messages or {}
        stored_counts = self._call(output, lambda subject: subject.count_messages())
        if stored_counts.keys() != expected_counts.keys():
            return False
        self.check_rows(manifest)
        return True

    def _adopt(self, output: SubjectOutput, subject_id: int) -> SubjectOutput:
        """Return the output with the id of its hidden subject. A subject with a new id must be
        empty.
        """
        if output.subject_id != subject_id:
            stored_counts = self._call(output, lambda subject: subject.count_messages())
            check_unused(output.hidden, self.options.subject, stored_counts)
        return _with_id(output, subject_id)

    def _call(
        self,
        output: SubjectOutput,
        work: Callable[[HiddenSubject], Awaitable[T]],
        *,
        subject_id: int = 0,
    ) -> T:
        async def run(network: Network) -> T:
            hidden = HiddenSubject(
                network,
                self.options,
                output.hidden,
                subject_id=subject_id,
                filled_by=self.filled_by,
            )
            return await work(hidden)

        return run_with_network(run)


def _with_id(output: SubjectOutput, subject_id: int) -> SubjectOutput:
    """Return the output with the id of its hidden subject. A new id resets the row counts."""
    if output.subject_id == subject_id:
        return output
    return replace_fields(output, subject_id=subject_id, messages=UNSET)


def _output(manifest: Manifest) -> SubjectOutput:
    assert manifest.output
    return manifest.output
