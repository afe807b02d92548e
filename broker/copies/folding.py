"""Applies the log of a copy to a broker's state and index while the copy follows, so that it can
answer reads, and take its broker's place without reading the log.

    more of the log is durable     ─▶ its records are applied, some MB at a time
    its first segments are removed ─▶ so are their batches in the index
    the copy begins again          ─▶ so does this
    the log is damaged             ─▶ the rest is read when a broker starts on the folder

Invariants
    Only what is durable at the broker and here is applied: it is never cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ...protocol.clock import Clock
from ...protocol.errors import KeylaneError
from ..storage.files import Files
from ..storage.index.interface import ConsumeQueues
from ..storage.index.kinds import mark_incomplete, open_index
from ..storage.log.commit_log import segment_bases
from ..store.agenda import Agenda
from ..store.group_commit import RunBlocking
from ..store.opening import Recovery

log = logging.getLogger("keylane.broker")

FOLD_MS = 200
"""How often what has become durable is applied, in milliseconds."""
FOLDED_BYTES = 4 << 20
"""How much of the log is applied without a pause, in bytes."""


class Folding:
    """
    The state of one copy.

    Args:
        make_agenda: returns scheduled messages of which none is known yet.
        run_blocking: runs calls that read the folder, one at a time, beside those of the follower.
    """

    def __init__(
        self,
        files: Files,
        index: str,
        *,
        make_agenda: Callable[[], Agenda],
        clock: Clock,
        run_blocking: RunBlocking,
    ) -> None:
        self._files = files
        self._index = index
        self._make_agenda = make_agenda
        self._clock = clock
        self._run_blocking = run_blocking
        self._queues: ConsumeQueues | None = None
        self._recovery: Recovery | None = None
        """Fills the index; None until there is something to apply."""
        self._first_position = 0
        """The index has no batches before it."""
        self._is_void = False
        self._has_failed = False

    @property
    def queues(self) -> ConsumeQueues | None:
        """The index, which other threads may read; None while there is none."""
        return self._queues

    async def run(self, durable: Callable[[], tuple[Sequence[int], int]]) -> None:
        """
        Apply what becomes durable, until cancelled.

        Args:
            durable: returns where the segments begin, and the end of what is durable here and at
                the broker.
        """
        while not self._has_failed:
            has_more = await self._run_blocking(self._fold, *durable())
            await asyncio.sleep(0 if has_more else FOLD_MS / 1000)

    def begin_anew(self) -> None:
        """Forget everything: the log of the copy starts over."""
        self._is_void = True

    def _fold(self, bases: Sequence[int], end: int) -> bool:
        """Apply a part of the log. Return True if there is more. Blocks."""
        try:
            first_position = bases[0] if bases else 0
            if self._must_begin_again(first_position):
                self._is_void, self._recovery = False, None
                if self._queues is not None:
                    self._queues.truncate(0)
            return end > first_position and self._apply(first_position, end)
        except KeylaneError as error:
            if not self._is_void:
                log.warning("the copy is not kept ready to serve: %s", error.message)
                self._has_failed, self._recovery = True, None
            return False

    def _must_begin_again(self, first_position: int) -> bool:
        """Return True if the log, which begins at `first_position`, lacks what comes next."""
        recovery = self._recovery
        return self._is_void or (recovery is not None and recovery.position < first_position)

    def _apply(self, first_position: int, end: int) -> bool:
        if self._queues is None:
            self._queues = open_index(self._files, self._index)
        if self._recovery is None:
            self._recovery = Recovery(
                self._files, self._queues, self._make_agenda(), clock=self._clock
            )
        if first_position != self._first_position:
            self._first_position = first_position
            for _ in self._queues.retain(first_position):
                pass
        recovery = self._recovery
        began = recovery.position
        upto = min(end, began + FOLDED_BYTES)
        if began < upto:
            self._has_failed = not recovery.read(upto)
        return began < recovery.position and upto < end

    async def finish(self) -> Recovery | None:
        """Return what was applied, for a broker on this folder, after `run` has been cancelled;
        None if nothing was.
        """
        recovery: Recovery | None = await self._run_blocking(self._give_away)
        return recovery

    def _give_away(self) -> Recovery | None:
        if self._must_begin_again(min(segment_bases(self._files), default=0)):
            self._recovery = None
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            self._queues = None
        self.close()
        return recovery

    def close(self) -> None:
        """Close the index, which is built again when it is opened next. Blocks."""
        queues, self._queues = self._queues, None
        if queues is not None:
            queues.close_unflushed()
            mark_incomplete(self._files, self._index)
