"""A consumer group's progress on a partition: handled messages, served fences, the cursor.
Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise

from .eras import Eras, Range
from .events import Looked
from .findings import Findings


class Progress:
    """Judges the acts of owners and of the broker on one partition, in the order of time."""

    __slots__ = (
        "_aside",
        "_fences",
        "_findings",
        "_instants",
        "_late",
        "_sessions",
        "alone",
        "done",
        "eras",
        "looks",
        "newest",
        "partition_id",
        "reached",
    )

    def __init__(self, partition_id: int, findings: Findings) -> None:
        self.partition_id = partition_id
        self.eras = Eras(self._note)
        """Progress between the resets."""
        self.done: defaultdict[int, set[int]] = defaultdict(set)
        """Offsets handled under each token."""
        self._aside: defaultdict[int, set[int]] = defaultdict(set)
        """Offsets parked under each token."""
        self.alone: set[int] = set()
        """Offsets set aside without their key: nothing waits for them, and they keep no order."""
        self.reached: dict[tuple[int, bytes], int] = {}
        """Highest offset begun, by (token, key)."""
        self.newest = 0
        """Highest token under which a handler began."""
        self.looks: list[Looked] = []
        self._findings = findings
        self._late: list[tuple[int, int]] = []
        """(token, offset) of messages that were first handled after a newer owner had begun, and
        that no operator has given up since.
        """
        self._sessions: dict[int, str] = {}
        """Session that used each token."""
        self._instants: list[int] = []
        """Instant of each item of `_fences`."""
        self._fences: list[int] = []
        """Acquired tokens, ascending."""

    # ── owners ────────────────────────────────────────────────────────────────────────────────────
    def begun(
        self,
        offset: int,
        key: bytes,
        token: int,
        session: str,
        *,
        foreign: bool = False,
        fenced: bool = False,
    ) -> None:
        """
        Note that a handler began.

        Args:
            foreign: True under the token of a descendant, which has taken over parked messages of
                this partition.
            fenced: True if its process may not know yet that another one has replaced it.
        """
        if self._sessions.setdefault(token, session) != session:
            self._findings.note(
                "duplicate token", f"token {token} of partition {self.partition_id} used twice"
            )
        if foreign:
            if not any(offset in era.aside for era in self.eras.all):
                self._note(
                    "stale effect", f"{offset} begun under token {token} of another partition"
                )
        else:
            self.newest = max(self.newest, token)
        if not (foreign and self.eras.is_kept(offset)):
            self._check_reset(offset, token, fenced=fenced)
        if key and offset not in self.alone:
            reached = self.reached.get((token, key), -1)
            if offset < reached or (offset == reached and offset in self.done[token]):
                self._findings.note(
                    "nonmonotonic",
                    f"token {token} of partition {self.partition_id} went back from {reached} "
                    f"to {offset} of {key!r}",
                )
            else:
                self.reached[token, key] = offset

    def _check_reset(self, offset: int, token: int, *, fenced: bool) -> None:
        """Check that after a reset no earlier owner begins a handler, and no later owner begins one
        below the cursor of the reset.
        """
        newest = self.eras.all[-1]
        if token < newest.token and newest.sure and not fenced:
            self._note(
                "stale effect",
                f"{offset} begun under token {token} after the reset of {newest.token}",
            )
        if all(offset < era.start for era in self.eras.possible(token)):
            self._note(
                "nonmonotonic", f"{offset} begun under token {token}, below the cursor of its reset"
            )

    def set_aside(self, token: int, offset: int, *, skipped: bool, alone: bool = False) -> None:
        """Note that a broker is asked to park a message, or that an operator gives up a parked
        one.
        """
        era = self.eras.of(token) if token else self.eras.all[-1]
        (era.ended if skipped else era.aside).add(offset)
        if alone:
            self.alone.add(offset)
        if skipped:  # it was still parked, so no ack of an earlier owner had counted
            self._late = [late for late in self._late if late[1] != offset]
        self._aside[token].add(offset)

    def handled(self, offset: int, token: int, *, foreign: bool = False) -> None:
        """Note that a handler returned."""
        ended = self.eras.of(token).ended
        if token < self.newest and offset not in ended and not foreign:
            self._late.append((token, offset))
        ended.add(offset)
        self.done[token].add(offset)

    def through(self, offset: int, token: int) -> bool:
        """Return whether nothing waits for a message: it is handled or not owed, as far as an owner
        with this token can know, or set aside alone.
        """
        eras = self.eras.all
        if (
            offset in self.alone
            or offset < self.eras.floor
            or (len(eras) == 1 and offset in eras[0].ended)
        ):
            return True
        return any(era.through(offset) for era in self.eras.possible(token))

    # ── the broker ────────────────────────────────────────────────────────────────────────────────
    def served(self, kind: str, token: int, began: int, instant: int) -> None:
        """Note that the broker accepted a call that was made at `began` and answered at
        `instant`.
        """
        index = bisect_left(self._instants, began) - 1
        if index >= 0 and token < self._fences[index]:
            self._findings.note(
                "stale effect",
                f"{kind} of token {token} on partition {self.partition_id} "
                f"after {self._fences[index]}",
            )
        if kind in {"acquire", "reset"} and token > (self._fences[-1] if self._fences else 0):
            self._instants.append(instant)
            self._fences.append(token)

    def reported(
        self,
        kind: str,
        token: int,
        began: int,
        instant: int,
        cursor: int,
        ranges: tuple[Range, ...],
    ) -> None:
        """Note the cursor and acked ranges that the broker reported, or that a reset has set the
        cursor.
        """
        if kind == "reset":
            self.eras.done(token)
            return
        if kind == "acquire":
            self.eras.acquired(token, cursor, ranges)
        self.eras.of(token).reported(
            kind, began, instant, cursor, ranges, self._note, self.eras.floor
        )

    def resetting(self, token: int, cursor: int, *, alone: bool) -> None:
        """Note that the broker is asked to set the cursor."""
        if not self._fences or token > self._fences[-1]:
            self.eras.asked(token, cursor, alone=alone)

    def check_expired(self, first_offset: int) -> None:
        """Check that the group has handled the messages below `first_offset`, which are removed."""
        eras = self.eras.possible()
        for offset in range(self.eras.floor, first_offset):
            if not any(era.through(offset) for era in eras):
                self._note("lost", f"{offset} was removed before it was handled")

    def recovered(self, token: int, cursor: int) -> None:
        """Check after a restart of the broker that neither the fence nor a reported cursor has
        fallen.
        """
        if self._fences and token < self._fences[-1]:
            self._note(
                "nonmonotonic", f"the fence is {token} after a restart, {self._fences[-1]} before"
            )
        before = min(era.cursor for era in self.eras.possible())
        if cursor < before:
            self._note("nonmonotonic", f"the cursor is {cursor} after a restart, {before} before")

    def _note(self, anomaly: str, example: str) -> None:
        self._findings.note(anomaly, f"partition {self.partition_id}: {example}")

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    def close(self, *, drained: bool) -> None:
        """Find the acks of fenced owners that counted, after the last event."""
        self._check_looks()
        if not drained:
            return
        for token, offset in self._late:
            if any(offset < era.start for era in self.eras.all if era.token > token):
                continue  # a reset passed it
            if not any(offset in done for later, done in self.done.items() if later > token):
                self._note(
                    "stale effect",
                    f"{offset} handled under token {token} after a higher one had begun, "
                    "and never again: its ack came after the fence and was taken",
                )

    def _check_looks(self) -> None:
        """Check that token and cursor never fall, and that messages below a cursor were handled
        under its token.
        """
        for before, look in pairwise(self.looks):
            fell = look.cursor < before.cursor and look.run == before.run
            if look.token < before.token or fell:
                self._note("nonmonotonic", f"{look} seen after {before}")
            elif look.token == before.token and look.cursor > before.cursor:
                passed = set(range(before.cursor, look.cursor))
                own = self.done[look.token] | self._aside[look.token]
                foreign = len(passed - own) - before.acked_above
                if foreign > 0:
                    self._findings.note(
                        "stale effect",
                        f"partition {self.partition_id}: cursor went from {before.cursor} to "
                        f"{look.cursor} under token {look.token}, which handled less",
                        count=foreign,
                    )
