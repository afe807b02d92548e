"""Tracks the messages in flight of a shared group: each is handed to a session, which must ack it
before a deadline. Pure.

    free ──hand out──▶ in flight, until a deadline ──ack──▶ acked
     ▲                          │ deadline, release, or session silent for its ttl
     └──────────────────────────┘

A message that is neither acked nor in flight is free. This state is in memory only: after a restart
every unacked message is free. Each acquire, pull and ack renews the session. An ack also extends
the deadlines of the messages that it lists as held, because their handlers are still running.

Invariants
    A message is in flight to one session at a time. An acked message is not in flight. A message
    that is neither acked nor held becomes free at its deadline, by the broker's boot clock. So do
    all messages of a session that was silent for its ttl. Such a session may still be handling
    them, so they may be handled twice. The messages of a silent session may have crashed its
    process: `pop_unreleased` returns them once. No order is kept: the lowest free messages go to
    the first session that pulls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...protocol.errors import FencedError
from ...protocol.limits import ACK_RANGES_MAX, IN_FLIGHT_PER_SESSION_MAX, IN_FLIGHT_RANGES_MAX
from ...protocol.offsets import AckedOffsets, Range, subtract_range

RANGES_PER_HAND_OUT_MAX = 1_000
SESSIONS_MAX = 1_000
"""The number of sessions above which each acquire removes the expired ones."""
RELEASED_SESSIONS_MAX = 1_000
"""The maximum number of released sessions that are remembered: far more than can have a waiting
pull.
"""
NEVER_MS = 1 << 62


@dataclass(slots=True, order=True)
class InFlightRange:
    """The messages `[start, end)`, which are in flight to `session` until `until_ms`."""

    start: int
    end: int
    session: str
    until_ms: int


@dataclass(slots=True)
class SessionLease:
    """The lease of a session. It expires at `until_ms` unless the session makes another call."""

    ttl_ms: int
    until_ms: int


class InFlight:
    """The messages of a partition that are in flight for a shared group, under one token."""

    __slots__ = (
        "_next_deadline_ms",
        "_unreleased_ranges",
        "_sessions",
        "_ranges",
        "_late_ranges",
        "_released_sessions",
        "_search_start",
        "_redriving_session",
        "token",
    )

    def __init__(self, token: int) -> None:
        self.token = token
        self._ranges: list[InFlightRange] = []
        """The ranges in flight, sorted, without overlaps and without acked messages."""
        self._search_start = 0
        """The lowest offset that may be free."""
        self._next_deadline_ms = NEVER_MS
        """A lower bound of the deadlines of messages and of their sessions, in milliseconds since
        boot.
        """
        self._sessions: dict[str, SessionLease] = {}
        self._released_sessions: dict[str, None] = {}
        """The sessions that have released all their messages, in the order of their releases."""
        self._late_ranges: dict[str, list[Range]] = {}
        """Maps each session to its messages whose deadline has passed, until it makes another call
        or expires.
        """
        self._unreleased_ranges: list[Range] = []
        """The messages that sessions had in flight when they expired, until `pop_unreleased` is
        called.
        """
        self._redriving_session = ""
        """The session that redrives the parked messages."""

    @property
    def ranges(self) -> list[InFlightRange]:
        """The ranges in flight, by offset."""
        return list(self._ranges)

    @property
    def next_deadline_ms(self) -> int:
        """The earliest time at which a deadline can pass, in milliseconds since boot, or
        NEVER_MS.
        """
        return self._next_deadline_ms if self._ranges else NEVER_MS

    def is_empty(self, now_ms: int) -> bool:
        """Return True if no message is in flight at `now_ms`."""
        self.free_expired(now_ms)
        return not self._ranges

    def count(self, session: str) -> int:
        """Return the number of messages that a session has in flight."""
        return sum(entry.end - entry.start for entry in self._ranges if entry.session == session)

    # ── handing out ───────────────────────────────────────────────────────────────────────────────
    def hand_out(
        self,
        acked: AckedOffsets,
        session: str,
        *,
        count_max: int,
        readable_offset: int,
        now_ms: int,
        in_flight_ms: int,
        isolated_offsets: Sequence[int] = (),
    ) -> list[Range]:
        """
        Hand the lowest free messages to a session: at most `count_max`, and without gaps of more
        than `count_max`.

        Args:
            acked: the group's progress.
            readable_offset: the offset that follows the last readable message.
            in_flight_ms: the time until the deadline, in milliseconds.
            isolated_offsets: the sorted offsets of messages that a session may have in flight only
                on their own.

        Returns:
            The ranges that were handed out; empty if no message is free, or a limit is reached.
        """
        self.free_expired(now_ms)
        if isolated_offsets and self._has_isolated(session, isolated_offsets):
            return []
        remaining_count = min(count_max, IN_FLIGHT_PER_SESSION_MAX - self.count(session))
        ranges_max = min(IN_FLIGHT_RANGES_MAX - len(self._ranges), RANGES_PER_HAND_OUT_MAX)
        if acked.range_count >= ACK_RANGES_MAX:
            # Hand out only messages whose acks raise the cursor.
            readable_offset = min(readable_offset, acked.next_acked(acked.cursor))
        ranges: list[Range] = []
        offset = self._search_start
        while remaining_count > 0 and len(ranges) < ranges_max:
            start, end = self._next_free_range(acked, offset, readable_offset)
            offset = start
            if start >= end or (ranges and start - ranges[-1][1] > count_max):
                break
            end = min(end, start + remaining_count)
            index = bisect_left(isolated_offsets, start)
            if index < len(isolated_offsets) and isolated_offsets[index] < end:
                end = max(isolated_offsets[index], start + 1)
                if isolated_offsets[index] == start and (ranges or self.count(session)):
                    break
                remaining_count = end - start
            offset = end
            ranges.append((start, end))
            remaining_count -= end - start
        self._search_start = offset
        self._insert(ranges, session, now_ms + in_flight_ms)
        return ranges

    def _insert(self, ranges: list[Range], session: str, until_ms: int) -> None:
        """Put free messages in flight to a session."""
        for start, end in ranges:
            insort(self._ranges, InFlightRange(start, end, session, until_ms))
        if ranges:
            self._next_deadline_ms = min(
                self._next_deadline_ms, until_ms, self._session_until_ms(session)
            )

    def extend_deadlines(
        self,
        acked: AckedOffsets,
        session: str,
        ranges: Iterable[Range],
        *,
        now_ms: int,
        in_flight_ms: int,
    ) -> None:
        """
        Extend the deadline of messages that a session is still handling.

        Messages that have become free, for example because the broker was restarted, are put in
        flight to the session again, unless they are acked or another session has them.
        """
        self.free_expired(now_ms)
        for start, end in ranges if session not in self._released_sessions else ():
            self._remove(start, end, session)
            offset = start
            while offset < end and len(self._ranges) < IN_FLIGHT_RANGES_MAX:
                low, high = self._next_free_range(acked, offset, end)
                if low >= high:
                    break
                self._insert([(low, high)], session, now_ms + in_flight_ms)
                offset = high
            if offset < end:
                self._search_start = min(self._search_start, offset)

    def _has_isolated(self, session: str, alone: Sequence[int]) -> bool:
        """Return True if one of these messages is in flight to the session on its own."""
        return any(
            entry.session == session and entry.end - entry.start == 1 and entry.start in alone
            for entry in self._ranges
        )

    def _next_free_range(self, acked: AckedOffsets, offset: int, readable_offset: int) -> Range:
        """Return the first free range that begins at or above `offset`, or an empty range."""
        while True:
            start = acked.next_unacked(offset)
            index = bisect_right(self._ranges, start, key=lambda entry: entry.start)
            if not index or self._ranges[index - 1].end <= start:
                break
            offset = self._ranges[index - 1].end
        end = min(readable_offset, acked.next_acked(start))
        if index < len(self._ranges):
            end = min(end, self._ranges[index].start)
        return start, end

    # ── becoming free ─────────────────────────────────────────────────────────────────────────────
    def free_expired(self, now_ms: int) -> bool:
        """Free the messages whose deadline has passed or whose session has expired. Return True if
        there were any.
        """
        if now_ms < self.next_deadline_ms:
            return False
        expired_sessions = self._remove_expired_sessions(now_ms)
        for entry in self._ranges:
            if entry.session in expired_sessions:
                self._unreleased_ranges.append((entry.start, entry.end))
            elif entry.until_ms <= now_ms:
                self._late_ranges.setdefault(entry.session, []).append((entry.start, entry.end))
        freed_ranges = [
            entry
            for entry in self._ranges
            if entry.until_ms <= now_ms or entry.session in expired_sessions
        ]
        if freed_ranges:
            self._ranges = [
                entry
                for entry in self._ranges
                if entry.until_ms > now_ms and entry.session not in expired_sessions
            ]
            self._search_start = min(self._search_start, *(entry.start for entry in freed_ranges))
        self._next_deadline_ms = min(
            (
                *(entry.until_ms for entry in self._ranges),
                *(
                    self._session_until_ms(session)
                    for session in {entry.session for entry in self._ranges}
                ),
            ),
            default=NEVER_MS,
        )
        return bool(freed_ranges)

    def _session_until_ms(self, session: str) -> int:
        lease = self._sessions.get(session)
        return NEVER_MS if lease is None else lease.until_ms

    def _remove_expired_sessions(self, now_ms: int) -> set[str]:
        expired_sessions = {
            session for session, lease in self._sessions.items() if lease.until_ms <= now_ms
        }
        for session in expired_sessions:
            del self._sessions[session]
            self._unreleased_ranges += self._late_ranges.pop(session, ())
        return expired_sessions

    def pop_unreleased(self) -> list[Range]:
        """Return the messages that sessions had in flight when they expired. Each is returned
        once.
        """
        unreleased, self._unreleased_ranges = self._unreleased_ranges, []
        return unreleased

    def add_session(self, session: str, *, ttl_ms: int, now_ms: int) -> None:
        """Add a session that acquires the partition. It may pull again even if it has released its
        messages.
        """
        if len(self._sessions) >= SESSIONS_MAX:
            self.free_expired(now_ms)
            self._remove_expired_sessions(now_ms)
        self._released_sessions.pop(session, None)
        self._add_session(session, ttl_ms, now_ms)

    def renew_session(self, session: str, *, ttl_ms: int, now_ms: int) -> None:
        """
        Renew a session that pulls or acks.

        A session that makes a call after its ttl has passed keeps its messages, unless another
        session has pulled since then.

        Args:
            ttl_ms: the ttl for a session that has expired and not acquired since.
        """
        if self._late_ranges:
            self._late_ranges.pop(session, None)
        lease = self._sessions.get(session)
        if lease is None:
            self._add_session(session, ttl_ms, now_ms)
        else:
            lease.until_ms = now_ms + lease.ttl_ms

    def _add_session(self, session: str, ttl_ms: int, now_ms: int) -> None:
        self._sessions[session] = SessionLease(ttl_ms, now_ms + ttl_ms)
        self._next_deadline_ms = min(self._next_deadline_ms, now_ms + ttl_ms)

    def is_redriver(self, session: str, now_ms: int) -> bool:
        """Return True if a session redrives the parked messages. The first session that calls
        this does, until it releases or expires.
        """
        lease = self._sessions.get(self._redriving_session)
        if lease is None or lease.until_ms <= now_ms:
            self._redriving_session = session
        return self._redriving_session == session

    def check_not_released(self, session: str) -> None:
        """Raise FencedError if the session has released its messages, because its waiting pull must
        not receive any more.
        """
        if session in self._released_sessions:
            raise FencedError("the session has released its messages", token=self.token)

    def release_session(self, session: str) -> bool:
        """Free all messages of a session, and refuse its pulls. Return True if it had any."""
        self._sessions.pop(session, None)
        self._late_ranges.pop(session, None)
        self._released_sessions[session] = None
        if len(self._released_sessions) > RELEASED_SESSIONS_MAX:
            del self._released_sessions[next(iter(self._released_sessions))]
        freed_ranges = [entry.start for entry in self._ranges if entry.session == session]
        self._ranges = [entry for entry in self._ranges if entry.session != session]
        self._search_start = min([self._search_start, *freed_ranges])
        return bool(freed_ranges)

    def free_from(self, session: str, ranges: Iterable[Range], *, end_offset: int) -> list[Range]:
        """
        Free the messages of `ranges` at or above `end_offset`, which were handed out but could not
        be read.

        Returns:
            The parts of `ranges` below `end_offset`.
        """
        kept_ranges = []
        for start, end in ranges:
            if end > end_offset:
                freed_from = max(start, end_offset)
                self._remove(freed_from, end, session)
                self._search_start = min(self._search_start, freed_from)
            if start < end_offset:
                kept_ranges.append((start, min(end, end_offset)))
        return kept_ranges

    def remove(self, ranges: Iterable[Range]) -> None:
        """Remove messages that were acked by any session."""
        for start, end in ranges:
            self._remove(start, end)

    def remove_acked(self, acked: AckedOffsets) -> bool:
        """Remove messages that were acked without an ack request, because they were parked. Return
        True if there were any.
        """
        has_removed = [
            (offset, offset + 1)
            for entry in self._ranges
            if acked.count_unacked(entry.start, entry.end) < entry.end - entry.start
            for offset in range(entry.start, entry.end)
            if offset in acked
        ]
        self.remove(has_removed)
        return bool(has_removed)

    def _remove(self, start: int, end: int, session: str | None = None) -> None:
        """Remove `[start, end)` from the messages in flight. If `session` is given, remove only the
        messages of that session.
        """
        ranges = self._ranges
        first = bisect_right(ranges, start, key=lambda entry: entry.start)
        first -= bool(first and ranges[first - 1].end > start)
        remaining_ranges: list[InFlightRange] = []
        last = first
        while last < len(ranges) and ranges[last].start < end:
            entry = ranges[last]
            last += 1
            if session not in {None, entry.session}:
                remaining_ranges.append(entry)
                continue
            remaining_ranges += [
                InFlightRange(*remaining_range, entry.session, entry.until_ms)
                for remaining_range in subtract_range(entry.start, entry.end, start, end)
            ]
        ranges[first:last] = remaining_ranges
