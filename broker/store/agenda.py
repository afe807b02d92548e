"""What the store asks of the scheduled messages: their records are in its log, but it does not know
what they mean.

    start:      load ─▶ on_record, on_hole for what is in the log after that
    snapshot:   images ─▶ save
    retention:  rewrite_below ─▶ the segments are removed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...protocol.record import Header
from ..storage.log.commit_log import CommitLog
from ..storage.log.holes import Hole
from .group_commit import GroupCommit, RunBlocking


class Agenda(Protocol):
    """The scheduled messages of a broker, as far as its store takes care of them."""

    def load(self, *, is_expected: bool, position: int, first_position: int) -> int:
        """
        Forget everything, and read the copy that was saved with a snapshot. Blocks.

        Args:
            is_expected: True if a snapshot says that there is a copy. Otherwise there was no
                scheduled message below `position`.
            position: the log position of the snapshot.
            first_position: where the log begins.

        Returns:
            The position from which the records of the log must follow.
        """
        ...

    def on_record(self, header: Header, body: memoryview) -> None:
        """Apply a SCHEDULED record of the log; those before the loaded position are skipped."""
        ...

    def on_hole(self, hole: Hole) -> None:
        """Note that records of the log are lost."""
        ...

    async def images(self) -> list[bytes]:
        """Return a copy of all there is, in pieces; an empty list if there is nothing."""
        ...

    def save(self, images: Sequence[bytes], *, position: int) -> None:
        """Store a copy durably, to which the records from `position` on have to be applied.
        Blocks.
        """
        ...

    async def rewrite_below(
        self, position: int, log: CommitLog, commit: GroupCommit, run_read: RunBlocking
    ) -> None:
        """
        Durably write again what is needed of the records below `position`.

        Raises:
            KeylaneError: the log must not be removed up to there.
        """
        ...

    async def kept_bytes(self, bases: Sequence[int]) -> list[int]:
        """For each segment of the log, given by its first position, return the approximate bytes
        that would be written again if it were removed.
        """
        ...


class EmptyAgenda:
    """An `Agenda` of a store that has no scheduled messages."""

    def load(self, *, is_expected: bool, position: int, first_position: int) -> int:
        """See `Agenda`."""
        return position

    def on_record(self, header: Header, body: memoryview) -> None:
        """See `Agenda`."""

    def on_hole(self, hole: Hole) -> None:
        """See `Agenda`."""

    async def images(self) -> list[bytes]:
        """See `Agenda`."""
        return []

    def save(self, images: Sequence[bytes], *, position: int) -> None:
        """See `Agenda`."""

    async def rewrite_below(
        self, position: int, log: CommitLog, commit: GroupCommit, run_read: RunBlocking
    ) -> None:
        """See `Agenda`."""

    async def kept_bytes(self, bases: Sequence[int]) -> list[int]:
        """See `Agenda`."""
        return [0] * len(bases)
