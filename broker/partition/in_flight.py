"""The messages in flight of a shared group: they are handed to a session, which has to ack them
before a deadline. Pure.

    free ──hand out──▶ in flight, until a deadline ──ack──▶ acked
     ▲                          │ deadline, release, or session silent for its ttl
     └──────────────────────────┘

A message that is neither acked nor in flight is free. Messages in flight are not stored: after a
restart every message that is not acked is free. Each acquire, pull and ack renews a session. An ack
also renews the deadlines of the messages that it names as held: those whose handlers run.

Invariants
    A message is in flight at one session at a time. An acked message is not in flight. A message
    that is neither acked nor held at its deadline, by the broker's boot clock, is free again. So
    are all messages of a session that was silent for its ttl. Such a session may still handle them;
    they are then handled twice. Messages that a silent session had in flight may have ended its
    process: `take_ended` returns them once. There is no order: the lowest free messages go to the
    first session that pulls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...protocol.errors import FencedError
from ...protocol.limits import ACK_RANGES_MAX, IN_FLIGHT_PER_SESSION_MAX, IN_FLIGHT_RANGES_MAX
from ...protocol.offsets import AckedOffsets, Range, outside

RANGES_PER_HANDING_MAX = 1_000
SILENT_MAX = 1_000
"""The number of sessions at which each acquire forgets the sessions that were silent for their ttl.
"""
LEFT_MAX = 1_000
"""The number of released sessions that are remembered: far more than have a pull waiting."""
NEVER_MS = 1 << 62


@dataclass(slots=True, order=True)
class HandedOut:
    """Messages `[start, end)` are in flight at `session` until `until_ms`."""

    start: int
    end: int
    session: str
    until_ms: int


@dataclass(slots=True)
class LastHeard:
    """A live session. It counts as silent from `until_ms` on unless it makes another call."""

    ttl_ms: int
    until_ms: int


class InFlight:
    """The messages of a partition that are in flight for a shared group, under one token."""

    __slots__ = (
        "_due_ms",
        "_ended",
        "_heard",
        "_handed",
        "_late",
        "_left",
        "_look_from",
        "_redriver",
        "token",
    )

    def __init__(self, token: int) -> None:
        self.token = token
        self._handed: list[HandedOut] = []
        """The ranges in flight, by start. They do not overlap, and none of their messages is acked.
        """
        self._look_from = 0
        """The lowest offset that may be free."""
        self._due_ms = NEVER_MS
        """A lower bound of all deadlines, in milliseconds of the boot clock: those of messages in
        flight, and of sessions that have some.
        """
        self._heard: dict[str, LastHeard] = {}
        self._left: dict[str, None] = {}
        """The sessions that have released all their messages, the latest last."""
        self._late: dict[str, list[Range]] = {}
        """Session → the messages that it had in flight at a deadline, until it makes a call again
        or is silent for its ttl.
        """
        self._ended: list[Range] = []
        """The messages that sessions had in flight when they fell silent, until `take_ended` is
        called.
        """
        self._redriver = ""
        """The session that redrives parked messages."""

    @property
    def handed_out(self) -> list[HandedOut]:
        """All ranges in flight, by offset."""
        return list(self._handed)

    @property
    def due_ms(self) -> int:
        """The earliest time, in milliseconds, at which a deadline can pass; NEVER_MS while no
        message is in flight.
        """
        return self._due_ms if self._handed else NEVER_MS

    def empty(self, now_ms: int) -> bool:
        """Return True if no message is in flight at `now_ms`."""
        self.expire(now_ms)
        return not self._handed

    def count(self, session: str) -> int:
        """Return the number of messages that a session has in flight."""
        return sum(
            handed.end - handed.start for handed in self._handed if handed.session == session
        )

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
        alone: Sequence[int] = (),
    ) -> list[Range]:
        """
        Put the lowest free messages in flight at a session: at most `count_max`, with gaps of at
        most `count_max`.

        Args:
            acked: the group's progress.
            readable_offset: the offset after the last message that may be read.
            in_flight_ms: the milliseconds until their deadline.
            alone: the offsets of messages that must be the only ones a session has in flight;
                messages above them wait.

        Returns:
            The ranges that are now in flight; empty if no message is free, or a limit is reached.
        """
        self.expire(now_ms)
        if alone and self._is_alone(session, alone):
            return []
        left = min(count_max, IN_FLIGHT_PER_SESSION_MAX - self.count(session))
        room = min(IN_FLIGHT_RANGES_MAX - len(self._handed), RANGES_PER_HANDING_MAX)
        if (
            acked.range_count >= ACK_RANGES_MAX
        ):  # hand out only messages whose acks raise the cursor
            readable_offset = min(readable_offset, acked.next_acked(acked.cursor))
        ranges: list[Range] = []
        offset = self._look_from
        while left > 0 and len(ranges) < room:
            start, end = self._free(acked, offset, readable_offset)
            offset = start
            if start >= end or (ranges and start - ranges[-1][1] > count_max):
                break
            end = min(end, start + left)
            at = bisect_left(alone, start)
            if at < len(alone) and alone[at] < end:
                end = max(alone[at], start + 1)
                if alone[at] == start and (ranges or self.count(session)):
                    break
                left = end - start
            offset = end
            ranges.append((start, end))
            left -= end - start
        self._look_from = offset
        self._put(ranges, session, now_ms + in_flight_ms)
        return ranges

    def _put(self, ranges: list[Range], session: str, until_ms: int) -> None:
        """Put free messages in flight at a session."""
        for start, end in ranges:
            insort(self._handed, HandedOut(start, end, session, until_ms))
        if ranges:
            self._due_ms = min(self._due_ms, until_ms, self._silent_ms(session))

    def hold(
        self,
        acked: AckedOffsets,
        session: str,
        ranges: Iterable[Range],
        *,
        now_ms: int,
        in_flight_ms: int,
    ) -> None:
        """
        Restart the time in flight of messages whose handlers run at a session.

        A message that was freed meanwhile, for example by a restart of the broker, is put in flight
        there again, unless another session has it or it is acked.
        """
        self.expire(now_ms)
        for start, end in ranges if session not in self._left else ():
            self._cut(start, end, session)
            offset = start
            while offset < end and len(self._handed) < IN_FLIGHT_RANGES_MAX:
                low, high = self._free(acked, offset, end)
                if low >= high:
                    break
                self._put([(low, high)], session, now_ms + in_flight_ms)
                offset = high
            if offset < end:
                self._look_from = min(self._look_from, offset)

    def _is_alone(self, session: str, alone: Sequence[int]) -> bool:
        """Return True if a session has one of these messages in flight."""
        return any(
            handed.session == session and handed.end - handed.start == 1 and handed.start in alone
            for handed in self._handed
        )

    def _free(self, acked: AckedOffsets, offset: int, readable_offset: int) -> Range:
        """Return the first free range at or above `offset`, or an empty range if no message is
        free.
        """
        while True:
            start = acked.next_unacked(offset)
            index = bisect_right(self._handed, start, key=lambda handed: handed.start)
            if not index or self._handed[index - 1].end <= start:
                break
            offset = self._handed[index - 1].end
        end = min(readable_offset, acked.next_acked(start))
        if index < len(self._handed):
            end = min(end, self._handed[index].start)
        return start, end

    # ── becoming free ─────────────────────────────────────────────────────────────────────────────
    def expire(self, now_ms: int) -> bool:
        """Free messages past their deadline and messages of silent sessions. Return True if there
        were any.
        """
        if now_ms < self.due_ms:
            return False
        silent = self._forget_silent(now_ms)
        for handed in self._handed:
            if handed.session in silent:
                self._ended.append((handed.start, handed.end))
            elif handed.until_ms <= now_ms:
                self._late.setdefault(handed.session, []).append((handed.start, handed.end))
        freed = [
            handed
            for handed in self._handed
            if handed.until_ms <= now_ms or handed.session in silent
        ]
        if freed:
            self._handed = [
                handed
                for handed in self._handed
                if handed.until_ms > now_ms and handed.session not in silent
            ]
            self._look_from = min(self._look_from, *(handed.start for handed in freed))
        self._due_ms = min(
            (
                *(handed.until_ms for handed in self._handed),
                *(
                    self._silent_ms(session)
                    for session in {handed.session for handed in self._handed}
                ),
            ),
            default=NEVER_MS,
        )
        return bool(freed)

    def _silent_ms(self, session: str) -> int:
        heard = self._heard.get(session)
        return NEVER_MS if heard is None else heard.until_ms

    def _forget_silent(self, now_ms: int) -> set[str]:
        silent = {
            session for session, last_heard in self._heard.items() if last_heard.until_ms <= now_ms
        }
        for session in silent:
            del self._heard[session]
            self._ended += self._late.pop(session, ())
        return silent

    def take_ended(self) -> list[Range]:
        """Return the messages that sessions had in flight when they ended without a release, each
        only once.
        """
        ended, self._ended = self._ended, []
        return ended

    def enter(self, session: str, *, ttl_ms: int, now_ms: int) -> None:
        """Note that a session acquires: from now on it may pull, even if it has released its
        messages earlier.
        """
        if len(self._heard) >= SILENT_MAX:
            self.expire(now_ms)
            self._forget_silent(now_ms)
        self._left.pop(session, None)
        self._know(session, ttl_ms, now_ms)

    def hear(self, session: str, *, ttl_ms: int, now_ms: int) -> None:
        """
        Note that a session pulls or acks.

        A session that makes a call after its ttl keeps its messages unless another session has
        pulled meanwhile.

        Args:
            ttl_ms: the ttl for a session that is not known, because it was silent and has not
                acquired since.
        """
        if self._late:
            self._late.pop(session, None)
        heard = self._heard.get(session)
        if heard is None:
            self._know(session, ttl_ms, now_ms)
        else:
            heard.until_ms = now_ms + heard.ttl_ms

    def _know(self, session: str, ttl_ms: int, now_ms: int) -> None:
        self._heard[session] = LastHeard(ttl_ms, now_ms + ttl_ms)
        self._due_ms = min(self._due_ms, now_ms + ttl_ms)

    def redrives(self, session: str, now_ms: int) -> bool:
        """Return True if a session redrives parked messages. This is the first session that asks,
        until it leaves or is silent for its ttl.
        """
        heard = self._heard.get(self._redriver)
        if heard is None or heard.until_ms <= now_ms:
            self._redriver = session
        return self._redriver == session

    def check_entered(self, session: str) -> None:
        """Raise FencedError if the session has released its messages, so that its waiting pull
        takes no more.
        """
        if session in self._left:
            raise FencedError("the session has released its messages", token=self.token)

    def give_back(self, session: str) -> bool:
        """Free all messages of a session, and let it pull no more. Return True if it had any."""
        self._heard.pop(session, None)
        self._late.pop(session, None)
        self._left[session] = None
        if len(self._left) > LEFT_MAX:
            del self._left[next(iter(self._left))]
        freed = [handed.start for handed in self._handed if handed.session == session]
        self._handed = [handed for handed in self._handed if handed.session != session]
        self._look_from = min([self._look_from, *freed])
        return bool(freed)

    def trim(self, session: str, ranges: Iterable[Range], *, upto: int) -> list[Range]:
        """
        Free the messages of `ranges` at or above `upto`, which were put in flight at a session but
        not read.

        Returns:
            The parts of `ranges` below `upto`.
        """
        kept = []
        for start, end in ranges:
            if end > upto:
                start_free = max(start, upto)
                self._cut(start_free, end, session)
                self._look_from = min(self._look_from, start_free)
            if start < upto:
                kept.append((start, min(end, upto)))
        return kept

    def acked(self, ranges: Iterable[Range]) -> None:
        """Remove acked messages from flight, at any session."""
        for start, end in ranges:
            self._cut(start, end)

    def acked_since(self, acked: AckedOffsets) -> bool:
        """Remove messages from flight that were acked in another way, as parked messages are.
        Return True if there were any.
        """
        gone = [
            (offset, offset + 1)
            for handed in self._handed
            if acked.unacked(handed.start, handed.end) < handed.end - handed.start
            for offset in range(handed.start, handed.end)
            if offset in acked
        ]
        self.acked(gone)
        return bool(gone)

    def _cut(self, start: int, end: int, session: str | None = None) -> None:
        """Remove `[start, end)` from the messages in flight; with `session`, only from those of
        that session.
        """
        flying = self._handed
        first = bisect_right(flying, start, key=lambda handed: handed.start)
        first -= bool(first and flying[first - 1].end > start)
        left: list[HandedOut] = []
        last = first
        while last < len(flying) and flying[last].start < end:
            handed = flying[last]
            last += 1
            if session not in {None, handed.session}:
                left.append(handed)
                continue
            left += [
                HandedOut(*part, handed.session, handed.until_ms)
                for part in outside(handed.start, handed.end, start, end)
            ]
        flying[first:last] = left
