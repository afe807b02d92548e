"""Checks a consumer group's progress on a partition: its messages, fences and cursor. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise

from .eras import Eras, Range
from .events import Looked
from .findings import Findings


class Progress:
    """Checks the handlers of owners and the answers of the broker, in chronological order."""

    __slots__ = (
        "_parked_by_token",
        "_fences",
        "_findings",
        "_instants",
        "_stale_ends",
        "_sessions",
        "unordered",
        "handled_by_token",
        "eras",
        "observations",
        "newest_token",
        "partition_id",
        "newest_begun",
    )

    def __init__(self, partition_id: int, findings: Findings) -> None:
        self.partition_id = partition_id
        self.eras = Eras(self._note)
        """The group's progress, divided into eras."""
        self.handled_by_token: defaultdict[int, set[int]] = defaultdict(set)
        """Maps each token to the offsets that were handled under it."""
        self._parked_by_token: defaultdict[int, set[int]] = defaultdict(set)
        """Maps each token to the offsets that were parked under it."""
        self.unordered: set[int] = set()
        """The offsets that were parked without their key. They have no order, and no message waits
        for them.
        """
        self.newest_begun: dict[tuple[int, bytes], int] = {}
        """Maps (token, key) to the highest offset whose handler was started."""
        self.newest_token = 0
        """The highest token under which a handler was started."""
        self.observations: list[Looked] = []
        self._findings = findings
        self._stale_ends: list[tuple[int, int]] = []
        """The (token, offset) of messages that were handled first by an older owner, after a newer
        owner had begun, and that no operator has skipped since.
        """
        self._sessions: dict[int, str] = {}
        """Maps each token to the session that used it."""
        self._instants: list[int] = []
        """The instant of each item of `_fences`."""
        self._fences: list[int] = []
        """The acquired tokens, in ascending order."""

    # ── owners ────────────────────────────────────────────────────────────────────────────────────
    def on_started(
        self,
        offset: int,
        key: bytes,
        token: int,
        session: str,
        *,
        adopted: bool = False,
        replaced: bool = False,
    ) -> None:
        """
        Check that a handler may begin.

        Args:
            adopted: True if a descendant has adopted the message while it was parked, and the token
                is one of the descendant's.
            replaced: True if the session's process may not know yet that a newer one has replaced
                it.
        """
        if self._sessions.setdefault(token, session) != session:
            self._findings.note(
                "duplicate token", f"token {token} of partition {self.partition_id} used twice"
            )
        if adopted:
            if not any(offset in era.parked for era in self.eras.all):
                self._note(
                    "stale effect", f"{offset} begun under token {token} of another partition"
                )
        else:
            self.newest_token = max(self.newest_token, token)
        if not (adopted and self.eras.is_kept_by_children(offset)):
            self._check_reset(offset, token, replaced=replaced)
        if key and offset not in self.unordered:
            newest_offset = self.newest_begun.get((token, key), -1)
            if offset < newest_offset or (
                offset == newest_offset and offset in self.handled_by_token[token]
            ):
                self._findings.note(
                    "nonmonotonic",
                    f"token {token} of partition {self.partition_id} went back from "
                    f"{newest_offset} to {offset} of {key!r}",
                )
            else:
                self.newest_begun[token, key] = offset

    def _check_reset(self, offset: int, token: int, *, replaced: bool) -> None:
        """Check the start of a handler against resets: owners before a reset may not start a
        handler after it, and later owners may not start one below its cursor.
        """
        newest = self.eras.all[-1]
        if token < newest.token and newest.confirmed and not replaced:
            self._note(
                "stale effect",
                f"{offset} begun under token {token} after the reset of {newest.token}",
            )
        if all(offset < era.start for era in self.eras.candidate_eras(token)):
            self._note(
                "nonmonotonic", f"{offset} begun under token {token}, below the cursor of its reset"
            )

    def on_parked(self, token: int, offset: int, *, skipped: bool, alone: bool = False) -> None:
        """Record that a broker is asked to park a message, or that an operator skips a parked
        one.
        """
        era = self.eras.era_of(token) if token else self.eras.all[-1]
        (era.finished if skipped else era.parked).add(offset)
        if alone:
            self.unordered.add(offset)
        if skipped:  # it was still parked, so no ack of an earlier owner had counted
            self._stale_ends = [each for each in self._stale_ends if each[1] != offset]
        self._parked_by_token[token].add(offset)

    def on_ended(self, offset: int, token: int, *, adopted: bool = False) -> None:
        """Record that a handler returned."""
        finished = self.eras.era_of(token).finished
        if token < self.newest_token and offset not in finished and not adopted:
            self._stale_ends.append((token, offset))
        finished.add(offset)
        self.handled_by_token[token].add(offset)

    def is_finished(self, offset: int, token: int) -> bool:
        """Return True if later messages of its key do not have to wait for a message: as far as an
        owner with this token can know, it is handled or not owed; or it is parked without its key.
        """
        eras = self.eras.all
        if (
            offset in self.unordered
            or offset < self.eras.floor
            or (len(eras) == 1 and offset in eras[0].finished)
        ):
            return True
        return any(era.is_finished(offset) for era in self.eras.candidate_eras(token))

    # ── the broker ────────────────────────────────────────────────────────────────────────────────
    def on_served(self, kind: str, token: int, began: int, instant: int) -> None:
        """Check a call that the broker accepted. Its request was sent at the instant `began`, and
        its answer at `instant`.
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

    def on_reported(
        self,
        kind: str,
        token: int,
        began: int,
        instant: int,
        cursor: int,
        ranges: tuple[Range, ...],
    ) -> None:
        """Check the cursor and the acked ranges that the broker reported, or record that a reset is
        done.
        """
        if kind == "reset":
            self.eras.confirm_reset(token)
            return
        if kind == "acquire":
            self.eras.resolve_resets(token, cursor, ranges)
        self.eras.era_of(token).check_report(
            kind, began, instant, cursor, ranges, self._note, self.eras.floor
        )

    def on_resetting(self, token: int, cursor: int, *, without_children: bool) -> None:
        """Record that the broker is asked to reset the cursor."""
        if not self._fences or token > self._fences[-1]:
            self.eras.request_reset(token, cursor, without_children=without_children)

    def check_expired(self, first_offset: int) -> None:
        """Check that the group has handled the messages below `first_offset`, which retention
        removes.
        """
        eras = self.eras.candidate_eras()
        for offset in range(self.eras.floor, first_offset):
            if not any(era.is_finished(offset) for era in eras):
                self._note("lost", f"{offset} was removed before it was handled")

    def on_recovered(self, token: int, cursor: int) -> None:
        """Check that a restart of the broker lowered neither the fence nor a reported cursor."""
        if self._fences and token < self._fences[-1]:
            self._note(
                "nonmonotonic", f"the fence is {token} after a restart, {self._fences[-1]} before"
            )
        previous = min(era.cursor for era in self.eras.candidate_eras())
        if cursor < previous:
            self._note("nonmonotonic", f"the cursor is {cursor} after a restart, {previous} before")

    def _note(self, anomaly: str, example: str) -> None:
        self._findings.note(anomaly, f"partition {self.partition_id}: {example}")

    # ── the end ───────────────────────────────────────────────────────────────────────────────────
    def close(self, *, drained: bool) -> None:
        """Find acks of fenced owners that took effect. Must be called after the last event."""
        self._check_observations()
        if not drained:
            return
        for token, offset in self._stale_ends:
            if any(offset < era.start for era in self.eras.all if era.token > token):
                continue  # a reset has passed it
            if not any(
                offset in handled_offsets
                for later_token, handled_offsets in self.handled_by_token.items()
                if later_token > token
            ):
                self._note(
                    "stale effect",
                    f"{offset} handled under token {token} after a higher one had begun, "
                    "and never again: its ack was accepted after the fence",
                )

    def _check_observations(self) -> None:
        """Check that the token and the cursor never fall, and that the cursor has passed only
        messages that were handled under its token.
        """
        for previous, current in pairwise(self.observations):
            has_fallen = current.cursor < previous.cursor and current.run == previous.run
            if current.token < previous.token or has_fallen:
                self._note("nonmonotonic", f"{current} observed after {previous}")
            elif current.token == previous.token and current.cursor > previous.cursor:
                passed_offsets = set(range(previous.cursor, current.cursor))
                token = current.token
                finished_offsets = self.handled_by_token[token] | self._parked_by_token[token]
                by_others = len(passed_offsets - finished_offsets) - previous.acked_above
                if by_others > 0:
                    self._findings.note(
                        "stale effect",
                        f"partition {self.partition_id}: cursor went from {previous.cursor} to "
                        f"{current.cursor} under token {token}, which handled less",
                        count=by_others,
                    )
