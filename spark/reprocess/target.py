"""The subject that gets the rows of a job: a hidden one is made for it, filled by the tasks,
counted and published.  Network only.

    made ─▶ rows of the tasks ─▶ check: as many messages as rows ─▶ manifest ─▶ publish, or left
        hidden for a cut-over

Invariants
    The hidden subject of a job has one name for ever; its id tells whether it has the rows of the
    pieces that are done. A repeat publishes nothing twice: the metaserver knows what was published.
    What a manifest says to be complete is counted again before it is published later.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import replace as changed

from ...protocol.errors import (
    PublishError,
    Reason,
    RowsError,
    SubjectDeletedError,
    SubjectUnknownError,
)
from ...protocol.operations import hidden_name
from ...protocol.reprocess.manifest import Manifest, SubjectOutput
from ...rpc.network import Network
from ..writing.hidden import HiddenSubject
from ..writing.job import WriteOptions, check_unused
from ..writing.running import run_with_network
from .rows_stored import HiddenRows

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTarget:
    """Where the rows of a job go."""

    options: WriteOptions
    """`subject` is the target; `publish` False leaves the rows hidden."""
    filled_by: str = ""
    """The job and its folder, for people: the hidden subject of another folder is refused."""

    def output(self) -> SubjectOutput:
        """What a new plan says of it: a hidden subject with a name of its own."""
        target = self.options.subject
        name = self.options.hidden or hidden_name(target, secrets.token_hex(8))
        return SubjectOutput(target=target, hidden=name, published=self.options.publish)

    def made(self, manifest: Manifest) -> Manifest:
        """
        The manifest with the hidden subject's id; it is made if it is not there.

        Raises:
            PublishError: it is published already, by hand before the job was complete.
            SubjectUnknownError: the target does not exist, and the options do not say to create it.
            ConfigError, PublishError: another job has filled it, or fills it.
            KeylaneError: what the metaserver answers, or that it does not answer.
        """
        output = _output(manifest)
        view = self._call(output, lambda subject: subject.make())
        return changed(manifest, output=self._unused(output, view.route.subject_id))

    def cuts(self, source: str) -> bool:
        """Whether the rows are to take the place of what they are made of."""
        return self.options.subject == source and not self.options.publish

    def cut(self, output: SubjectOutput) -> tuple[SubjectOutput, frozenset[int]]:
        """
        Seal the source, and have it continued behind the hidden subject, which is made if it is not
        there.

        Returns:
            The output with the hidden subject's id, and the partitions of the source that the rows
            are made of.

        Raises:
            PublishError: the hidden subject is published already.
            PublishError: it has rows, and the source was resized or moved since it was made
                without a cut.
            ConfigError, PublishError: another job has filled it, or fills it.
            KeylaneError: what the metaserver answers, or that it does not answer.
        """
        view, older = self._call(output, lambda subject: subject.cut())
        return self._unused(output, view.route.subject_id), older

    def rows(self, manifest: Manifest) -> HiddenRows:
        """What the tasks have to know."""
        return HiddenRows(
            options=replace(self.options, order="none"),
            subject=_output(manifest).hidden,
            subject_id=_output(manifest).subject_id,
            mark=manifest.mark,
            sent_at_ns=manifest.planned_at_ms * 1_000_000,
        )

    def checked(self, manifest: Manifest) -> Manifest:
        """
        The manifest of the complete job, which says where its rows are.

        Raises:
            RowsError: the hidden subject has other rows than those of the pieces.
            RowsError: retention has removed some of them.
        """
        stored = self._call(_output(manifest), lambda subject: subject.kept())
        if sum(stored.values()) != manifest.rows_out:
            output = _output(manifest)
            raise RowsError(
                Reason.ROWS_DIFFER,
                f"{output.hidden} has {sum(stored.values())} messages, and the job has written "
                f"{manifest.rows_out}: delete it "
                "with `keylane subject delete`, and run the same command again",
            )
        return changed(manifest, output=changed(_output(manifest), messages=stored))

    def publish(self, manifest: Manifest) -> None:
        """Publish the rows unless the job leaves that to others; a repeat changes nothing.  Raises
        what `publish` raises.
        """
        if self.options.publish:
            output = _output(manifest)
            self._call(output, lambda subject: subject.publish(), subject_id=output.subject_id)

    def is_there(self, done: Manifest) -> bool:
        """
        Whether the rows of a complete job are there, published if that is wanted; False: they have
        to be written again.

        Raises:
            RowsError: the hidden subject has got messages of another hand since the job was
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
            self._call(output, lambda subject: subject.make())
        except PublishError as error:
            if error.reason is not Reason.PUBLISH_TARGET:
                raise
            known = output.subject_id and error.published_id
            return not known or error.published_id == output.subject_id
        return False

    def _has_rows(self, done: Manifest) -> bool:
        """
        Whether the hidden subject is the one that the job filled; one that was made since under its
        name has other partitions.

        Raises:
            SubjectUnknownError: there is none.
            RowsError: it has not the rows that it had.
        """
        output = _output(done)
        before = output.messages or {}
        stored = self._call(output, lambda subject: subject.stored())
        if stored.keys() != before.keys():
            return False
        self.checked(done)
        return True

    def _unused(self, output: SubjectOutput, subject_id: int) -> SubjectOutput:
        """The output with the id of its hidden subject; one with an id that is new to the job has
        to be empty.
        """
        if output.subject_id != subject_id:
            stored = self._call(output, lambda subject: subject.stored())
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
    """The output with the id of its hidden subject; another subject of its name lacks the rows."""
    if output.subject_id == subject_id:
        return output
    return changed(output, subject_id=subject_id, messages=UNSET)


def _output(manifest: Manifest) -> SubjectOutput:
    assert manifest.output
    return manifest.output
