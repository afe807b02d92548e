"""What is over is forgotten after seconds, while subjects are cut over, deleted, created and
reshaped, and metaservers die.

A row of a deletion, a publication or a done operation stays for `history_retention_ms` at least;
what is under way, and what a hidden subject needs to be published, stays as long as it has to; and
in the end the rest is gone.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from sim.features.cut_overs import CutOvers
from sim.features.deletions import Deletions
from sim.features.feature import Feature

HISTORY_MS = 60_000
"""The least that metaservers take."""
SPEED = 15
SLACK = 0.88
"""Clocks drift by a twentieth, each way."""
LOOK_S = 0.1
KNOWN_S = SLACK * HISTORY_MS / SPEED / 1_000
"""For so long it is known, at least."""
KEPT = {
    "deletions": "SELECT subject_id || '/' || group_id, 1, 0, 0 FROM deletions",
    "publications": (
        "SELECT hidden, COALESCE((SELECT state = 'done' FROM operations"
        " WHERE operations.operation_id = publications.operation_id), 1), 0, 0 FROM publications"
    ),
    "operations": (
        "SELECT operation_id, state = 'done', EXISTS (SELECT 1 FROM subjects s JOIN subjects h"
        " ON h.hidden_for = s.name WHERE s.subject_id = operations.subject_id), "
        "subject_id FROM operations"
    ),
}
"""By table: of each row its key, whether it is over, whether it is needed all the same, and the
subject with which it goes.
"""


class _Row(NamedTuple):
    over_s: float
    """Since when it was over at each look; infinite while it is not."""
    needed: bool
    subject: int
    """It goes with this subject; 0: with none."""


class PastWatch:
    """Looks at the rows of a world's database from time to time."""

    def __init__(self, feature: Feature) -> None:
        self._world = feature.world
        self._feature = feature
        self._rows: dict[tuple[str, str], _Row] = {}
        """As the last look found them."""
        self.forgotten = 0

    async def work(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        raw, now = self._world.shelf._raw, self._world.loop.now
        subjects = {row[0]: row[1] for row in raw.execute("SELECT subject_id, name FROM subjects")}
        hidden = {row[0] for row in raw.execute("SELECT hidden_for FROM subjects")}
        here: dict[tuple[str, str], _Row] = {}
        for table, query in KEPT.items():
            for key, over, needed, subject in raw.execute(query):
                row = table, str(key)
                before_s = self._rows[row].over_s if row in self._rows else float("inf")
                over_s = min(before_s, now) if over else float("inf")
                here[row] = _Row(over_s, bool(needed), int(subject))
        for (table, key), before in self._rows.items():
            if (table, key) in here or (before.subject and before.subject not in subjects):
                continue
            self.forgotten += 1
            # One that was made and deleted between two looks does not show.
            needed = before.needed and subjects.get(before.subject) in hidden
            if needed or now - before.over_s < KNOWN_S - 2 * LOOK_S:
                over = before.over_s < float("inf")
                said = f"was over for {now - before.over_s:.1f} s" if over else "was not over"
                said += ", and is needed" if needed else ""
                self._feature.problems.append(f"{table} {key} is forgotten: it {said}")
        self._rows = here

    @property
    def left(self) -> bool:
        """Whether anything is known that is over, and that nothing needs."""
        return any(row.over_s < float("inf") and not row.needed for row in self._rows.values())


class _Forgetting(Feature):
    history_speed = SPEED
    known_s = KNOWN_S

    def build(self) -> None:
        super().build()
        self.watch = PastWatch(self)

    async def work(self) -> None:
        watching = asyncio.ensure_future(self.watch.work())
        try:
            await super().work()
            await asyncio.Future()
        finally:
            watching.cancel()

    @property
    def drained(self) -> bool:
        return super().drained and not self.watch.left


class ForgottenCutOvers(_Forgetting, CutOvers):
    """See the module."""


class ForgottenDeletions(_Forgetting, Deletions):
    """See the module."""
