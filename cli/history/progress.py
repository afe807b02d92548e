"""One consumer group on one partition: what was handled, which fences stand, how far the cursor came.  Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise

from .events import Looked
from .findings import Findings

Range = tuple[int, int]


class Progress:
    """Judges what owners and the broker do with one partition, in the order of time."""

    __slots__ = (
        "_acked", "_cursors", "_fences", "_found", "_instants", "_late", "_passed", "_sessions",
        "cursor", "done", "ended", "looks", "newest", "partition_id", "reached",
    )  # fmt: skip

    def __init__(self, partition_id: int, found: Findings) -> None:
        self.partition_id = partition_id
        self.ended: set[int] = set()
        """Offsets handled, by whomever."""
        self.done: defaultdict[int, set[int]] = defaultdict(set)
        """Token → offsets handled under it."""
        self.reached: dict[tuple[int, bytes], int] = {}
        """(token, key) → the highest offset begun."""
        self.newest = 0
        """The highest token under which a handler began."""
        self.cursor = 0
        self.looks: list[Looked] = []
        self._found = found
        self._late: list[tuple[int, int]] = []
        """(token, offset) handled when a newer owner had begun, and by nobody before."""
        self._sessions: dict[int, str] = {}
        """Token → session that used it."""
        self._instants: list[int] = []
        """When each of `_fences` was served."""
        self._fences: list[int] = []
        """Tokens acquired, rising."""
        self._cursors: list[tuple[int, int]] = []
        """(instant, cursor), each higher than the one before."""
        self._acked: dict[int, int] = {}
        """Offset → instant at which its ack was answered, while above the cursor."""
        self._passed = 0
        """Offsets below are known to be handled."""

    # ── owners ───────────────────────────────────────────────────────────────────────────────────────
    def begun(self, offset: int, key: bytes, token: int, session: str) -> None:
        """A handler began."""
        if self._sessions.setdefault(token, session) != session:
            self._found.note(
                "duplicate token", f"token {token} of partition {self.partition_id} used twice"
            )
        self.newest = max(self.newest, token)
        if key:
            reached = self.reached.get((token, key), -1)
            if offset < reached or (offset == reached and offset in self.done[token]):
                self._found.note(
                    "nonmonotonic",
                    f"token {token} of partition {self.partition_id} went back from {reached} "
                    f"to {offset} of {key!r}",
                )
            else:
                self.reached[token, key] = offset

    def handled(self, offset: int, token: int) -> None:
        """A handler returned."""
        if token < self.newest and offset not in self.ended:
            self._late.append((token, offset))
        self.ended.add(offset)
        self.done[token].add(offset)

    # ── the broker ───────────────────────────────────────────────────────────────────────────────────
    def served(self, kind: str, token: int, began: int, instant: int) -> None:
        """The broker accepted a call, asked at `began`, answered at `instant`."""
        index = bisect_left(self._instants, began) - 1
        if index >= 0 and token < self._fences[index]:
            self._found.note(
                "stale effect",
                f"{kind} of token {token} on partition {self.partition_id} "
                f"after {self._fences[index]}",
            )
        if kind == "acquire" and token > (self._fences[-1] if self._fences else 0):
            self._instants.append(instant)
            self._fences.append(token)

    def told(
        self, kind: str, began: int, instant: int, cursor: int, ranges: tuple[Range, ...]
    ) -> None:
        """The broker told its cursor, and what is acked: in the request of an ack, above it in an acquire."""
        for offset in range(self._passed, cursor):
            if offset not in self.ended:
                self._note("skip", f"the cursor passed {offset}, not handled")
        self._passed = max(self._passed, cursor)
        at = bisect_left(self._cursors, (began, -1)) - 1
        if at >= 0 and cursor < self._cursors[at][1]:
            self._note("nonmonotonic", f"cursor {cursor} after {self._cursors[at][1]}")
        if cursor > self.cursor:
            self.cursor = cursor
            self._cursors.append((instant, cursor))
        if kind == "acquire":
            self._check_kept(began, cursor, ranges)
        for start, end in ranges:
            for offset in range(start, end):
                if offset not in self.ended:
                    self._note("skip", f"{offset} acked, not handled")
                if kind == "ack":
                    self._acked.setdefault(offset, instant)

    def recovered(self, token: int, cursor: int) -> None:
        """The broker came up again: no fence and no cursor that was told may have fallen."""
        if self._fences and token < self._fences[-1]:
            self._note(
                "nonmonotonic", f"the fence is {token} after a restart, {self._fences[-1]} before"
            )
        if cursor < self.cursor:
            self._note(
                "nonmonotonic", f"the cursor is {cursor} after a restart, {self.cursor} before"
            )

    def _check_kept(self, began: int, cursor: int, ranges: tuple[Range, ...]) -> None:
        """Durable acks above the cursor are never forgotten."""
        kept = {offset for start, end in ranges for offset in range(start, end)}
        for offset, acked_at in list(self._acked.items()):
            if offset < cursor:
                del self._acked[offset]
            elif acked_at < began and offset not in kept:
                self._note("nonmonotonic", f"the ack of {offset} is forgotten")

    def _note(self, anomaly: str, example: str) -> None:
        self._found.note(anomaly, f"partition {self.partition_id}: {example}")

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────
    def close(self, *, drained: bool) -> None:
        """Nothing more will come: find the acks of owners that had been fenced."""
        self._check_looks()
        if not drained:
            return
        for token, offset in self._late:
            if not any(offset in done for later, done in self.done.items() if later > token):
                self._note(
                    "stale effect",
                    f"{offset} handled under token {token} after a higher one had begun, "
                    "and never again: its ack came after the fence and was taken",
                )

    def _check_looks(self) -> None:
        """Neither token nor cursor falls, and what a cursor passes was handled under its token."""
        for before, look in pairwise(self.looks):
            fell = look.cursor < before.cursor and look.run == before.run
            if look.token < before.token or fell:
                self._note("nonmonotonic", f"{look} seen after {before}")
            elif look.token == before.token and look.cursor > before.cursor:
                passed = set(range(before.cursor, look.cursor))
                foreign = len(passed - self.done[look.token]) - before.acked_above
                if foreign > 0:
                    self._found.note(
                        "stale effect",
                        f"partition {self.partition_id}: cursor went from {before.cursor} to "
                        f"{look.cursor} under token {look.token}, which handled less",
                        count=foreign,
                    )
