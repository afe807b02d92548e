"""Applies the log of a copy to a broker's state and index while the copy follows, so that it can
take its broker's place without reading the log.

    more of the log is durable ─▶ its records are applied, some MB at a time
    the copy begins anew       ─▶ so does this
    the log is damaged         ─▶ the rest is read when a broker starts on the folder

Invariants
    Only what is durable at the broker and here is applied: it is never cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...protocol.clock import Clock
from ...protocol.errors import KeylaneError
from ..storage.files import Files
from ..storage.index.kinds import mark_incomplete, open_index
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
        self._recovery: Recovery | None = None
        self._is_void = False
        self._has_failed = False

    async def run(self, durable_end: Callable[[], int]) -> None:
        """
        Apply what becomes durable, until cancelled.

        Args:
            durable_end: returns the end of what is durable here and at the broker.
        """
        while not self._has_failed:
            has_more = await self._run_blocking(self._fold, durable_end())
            await asyncio.sleep(0 if has_more else FOLD_MS / 1000)

    def begin_anew(self) -> None:
        """Forget everything: the log of the copy begins anew."""
        self._is_void = True

    def _fold(self, end: int) -> bool:
        """Apply a part of the log. Return True if there is more. Blocks."""
        try:
            if self._is_void:
                self._is_void = False
                self.close()
            if self._recovery is None:
                if end <= 0:
                    return False
                queues = open_index(self._files, self._index)
                self._recovery = Recovery(
                    self._files, queues, self._make_agenda(), clock=self._clock
                )
            recovery = self._recovery
            upto = min(end, recovery.position + FOLDED_BYTES)
            if recovery.position >= upto:
                return False
            began = recovery.position
            self._has_failed = not recovery.read(upto)
            return began < recovery.position and upto < end
        except KeylaneError as error:
            if not self._is_void:
                log.warning("the copy is not kept ready to serve: %s", error.message)
                self._has_failed = True
                self.close()
            return False

    async def finish(self) -> Recovery | None:
        """Return what was applied, for a broker on this folder, after `run` has been cancelled;
        None if nothing was.
        """
        recovery: Recovery | None = await self._run_blocking(self._give_away)
        return recovery

    def _give_away(self) -> Recovery | None:
        if self._is_void:
            self.close()
        recovery, self._recovery = self._recovery, None
        return recovery

    def close(self) -> None:
        """Close the index, which is begun anew when it is opened next. Blocks."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.queues.close_unflushed()
            mark_incomplete(self._files, self._index)
