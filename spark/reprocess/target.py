"""Creates the hidden subject that gets the rows of a job, counts its rows, and publishes it.
Network only.

    create ─▶ tasks store rows ─▶ check: as many messages as rows ─▶ manifest
           ─▶ publish, or leave hidden for a cut-over

Invariants
    The hidden subject of a job always has the same name; its id shows whether it is the one that
    has the rows of the pieces that are done.
    A repeat publishes nothing twice, because the metaserver knows which subjects were published.
    Rows that a manifest calls complete are counted again before a later publication.

Stores the rows of pieces in a hidden subject, each once, however often a piece is repeated.

    piece ─▶ numbered rows under an id of (hidden subject, partition, start)
          ─▶ brokers recognize a repeated row

Invariants
    If the facts of a piece are written, all its rows are stored.
    The rows of a piece are stored before those of the next piece of its task.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import pyarrow as pa
from msgspec import UNSET
from msgspec.structs import replace as replace_fields

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
            allow_reserved=True,
        )

    run_with_network(work)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTarget:
    """The subject to which the rows of a job go."""

    options: WriteOptions
    """Options of which `subject` is the target; `publish` False leaves the rows hidden."""
    filled_by: str = ""
    """The name of the job and its folder; a hidden subject of another folder is refused."""

    def output(self) -> SubjectOutput:
        """Return the output for a new plan, with a new name for the hidden subject."""
        target = self.options.subject
        name = self.options.hidden or hidden_name(target, secrets.token_hex(8))
        return SubjectOutput(target=target, hidden=name, published=self.options.publish)

    def create(self, manifest: Manifest) -> Manifest:
        """
        Create the hidden subject unless it exists, and return the manifest with its id.

        Raises:
            PublishError: it was published by hand before the job was complete.
            SubjectUnknownError: the target does not exist, and the options do not create it.
            ConfigError, PublishError: another job has filled it, or fills it.
            KeylaneError: the metaserver refuses, or does not answer.
        """
        output = _output(manifest)
        view = self._call(output, lambda subject: subject.create())
        return replace_fields(manifest, output=self._adopt(output, view.route.subject_id))

    def needs_cut(self, source: str) -> bool:
        """Return True if the rows will replace the messages of which they are made."""
        return self.options.subject == source and not self.options.publish

    def cut(self, output: SubjectOutput) -> tuple[SubjectOutput, frozenset[int]]:
        """
        Seal the source, so that its new partitions follow the hidden subject, which is created
        unless it exists.

        Returns:
            The output with the hidden subject's id, and the partitions of the source of which the
            rows are made.

        Raises:
            PublishError: the hidden subject is already published.
            PublishError: it has rows, was created without a cut, and the source was resized
                or moved since.
            ConfigError, PublishError: another job has filled it, or fills it.
            KeylaneError: the metaserver refuses, or does not answer.
        """
        view, older = self._call(output, lambda subject: subject.cut())
        return self._adopt(output, view.route.subject_id), older

    def hidden_rows(self, manifest: Manifest) -> HiddenRows:
        """Return what the tasks need to know of the hidden subject."""
        return HiddenRows(
            options=replace(self.options, order="none"),
            subject=_output(manifest).hidden,
            subject_id=_output(manifest).subject_id,
            mark=manifest.mark,
            sent_at_ns=manifest.planned_at_ms * 1_000_000,
        )

    def check_rows(self, manifest: Manifest) -> Manifest:
        """
        Count the rows of a complete job, and return its manifest with the places of the rows.

        Raises:
            RowsError: the hidden subject does not have exactly the rows of the pieces.
            RowsError: retention has removed some of them.
        """
        stored = self._call(_output(manifest), lambda subject: subject.count_complete())
        if sum(stored.values()) != manifest.rows_out:
            output = _output(manifest)
            raise RowsError(
                Reason.ROWS_DIFFER,
                f"{output.hidden} has {sum(stored.values())} messages, and the job has written "
                f"{manifest.rows_out}: delete it "
                "with `keylane subject delete`, and run the same command again",
            )
        return replace_fields(manifest, output=replace_fields(_output(manifest), messages=stored))

    def publish(self, manifest: Manifest) -> None:
        """Publish the rows if the options say so; a repeat changes nothing. Raises the errors of
        `HiddenSubject.publish`.
        """
        if self.options.publish:
            output = _output(manifest)
            self._call(output, lambda subject: subject.publish(), subject_id=output.subject_id)

    def ensure_published(self, done: Manifest) -> bool:
        """
        Publish the rows of a complete job if the options say so, and return True; return False if
        they are gone and must be written again.

        Raises:
            RowsError: others have stored messages in the hidden subject since the job was
                complete.
            RowsError: retention has removed some of its rows since.
        """
        try:
            if not self._has_rows(done):
                return False
        except SubjectUnknownError:  # it is published, was deleted, or has expired
            return self._is_published(done)
        try:
            self.publish(done)
        except (SubjectUnknownError, SubjectDeletedError):
            return False
        return True

    def _is_published(self, done: Manifest) -> bool:
        output = _output(done)
        if self.options.publish:
            try:
                self.publish(done)
            except (SubjectUnknownError, SubjectDeletedError):
                return False
            return True
        try:
            self._call(output, lambda subject: subject.create())
        except PublishError as error:
            if error.reason is not Reason.PUBLISH_TARGET:
                raise
            known = output.subject_id and error.published_id
            return not known or error.published_id == output.subject_id
        return False

    def _has_rows(self, done: Manifest) -> bool:
        """
        Return True if the hidden subject is the one that the job filled; a later subject of its
        name has other partitions.

        Raises:
            SubjectUnknownError: there is none.
            RowsError: it does not have the rows that it had.
        """
        output = _output(done)
        before = output.messages or {}
        stored = self._call(output, lambda subject: subject.count_messages())
        if stored.keys() != before.keys():
            return False
        self.check_rows(done)
        return True

    def _adopt(self, output: SubjectOutput, subject_id: int) -> SubjectOutput:
        """Return the output with the id of its hidden subject; a subject that is new to the job
        must be empty.
        """
        if output.subject_id != subject_id:
            stored = self._call(output, lambda subject: subject.count_messages())
            check_unused(output.hidden, self.options.subject, stored)
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
    """Return the output with the id of its hidden subject; a later subject of its name has no
    rows.
    """
    if output.subject_id == subject_id:
        return output
    return replace_fields(output, subject_id=subject_id, messages=UNSET)


def _output(manifest: Manifest) -> SubjectOutput:
    assert manifest.output
    return manifest.output
