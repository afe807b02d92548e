"""The messages of a partition that sessions of a shared group are handling, each until a deadline.  Pure.

    free ──hand out──▶ in flight, until a deadline ──ack──▶ acked
     ▲                          │ deadline, given back, or its session silent for its ttl
     └──────────────────────────┘

A message that is neither acked nor in flight is free.  Nothing here is stored: after a restart every message that is
not acked is free.  Each acquire, pull and ack shows that a session is alive; a client with slow handlers sends empty acks.

Invariants
    No message is in flight twice at once, and no acked message is.
    A message that is not acked at its deadline, by the broker's boot clock, is free again.  So are all messages of a
    session that was silent for its ttl.  A session that is cut off may still handle them: they are then handled twice.
    There is no order: the lowest free messages go to the first session that pulls.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass

from ...protocol.errors import FencedError
from ...protocol.limits import ACK_RANGES_MAX, IN_FLIGHT_PER_SESSION_MAX, IN_FLIGHT_RANGES_MAX
from ...protocol.offsets import AckedOffsets, Range, outside

RANGES_PER_HANDING_MAX = 1_000
SILENT_MAX = 1_000
"""With more sessions than this, each acquire forgets those that were silent for their ttl."""
LEFT_MAX = 1_000
"""Sessions remembered as having left: far more than have a pull waiting."""
NEVER_MS = 1 << 62


@dataclass(slots=True, order=True)
class HandedOut:
    """`[start, end)` is with `session` until `until_ms`."""

    start: int
    end: int
    session: str
    until_ms: int


@dataclass(slots=True)
class LastHeard:
    """A session is alive; it counts as silent from `until_ms` on, unless it makes another call."""

    ttl_ms: int
    until_ms: int


class InFlight:
    """What is in flight of one partition for one shared group, under one token."""

    __slots__ = ("_due_ms", "_heard", "_held", "_left", "_look_from", "token")

    def __init__(self, token: int) -> None:
        self.token = token
        self._held: list[HandedOut] = []
        """By start, apart from each other, nothing of it acked."""
        self._look_from = 0
        """No message below is free."""
        self._due_ms = NEVER_MS
        """The earliest deadline, of messages in flight and of sessions that have some; it may be too early."""
        self._heard: dict[str, LastHeard] = {}
        self._left: dict[str, None] = {}
        """Sessions that gave back all their messages, the latest last."""

    @property
    def held(self) -> list[HandedOut]:
        """Everything in flight, by offset."""
        return list(self._held)

    @property
    def due_ms(self) -> int:
        """No message becomes free by itself before this; NEVER_MS while none is in flight."""
        return self._due_ms if self._held else NEVER_MS

    def empty(self, now_ms: int) -> bool:
        """Nothing is in flight now."""
        self.expire(now_ms)
        return not self._held

    def count(self, session: str) -> int:
        """How many messages a session has in flight."""
        return sum(one.end - one.start for one in self._held if one.session == session)

    # ── handing out ───────────────────────────────────────────────────────────────────────────────────
    def hand_out(
        self,
        acked: AckedOffsets,
        session: str,
        *,
        count_max: int,
        readable_offset: int,
        now_ms: int,
        hold_ms: int,
    ) -> list[Range]:
        """
        Give a session the lowest free messages, `count_max` at most, close enough together for one read.

        Args:
            acked: the group's progress.
            readable_offset: one past the last message that may be read.
            hold_ms: how long they are kept from other sessions.

        Returns:
            The ranges, in flight from now on; none if nothing is free, or limits are met.
        """
        self.expire(now_ms)
        left = min(count_max, IN_FLIGHT_PER_SESSION_MAX - self.count(session))
        room = min(IN_FLIGHT_RANGES_MAX - len(self._held), RANGES_PER_HANDING_MAX)
        if acked.range_count >= ACK_RANGES_MAX:  # only messages whose acks raise the cursor
            readable_offset = min(readable_offset, acked.next_acked(acked.cursor))
        found: list[Range] = []
        offset = self._look_from
        while left > 0 and len(found) < room:
            start, end = self._free(acked, offset, readable_offset)
            offset = start
            if start >= end or (found and start - found[-1][1] > count_max):
                break
            offset = end = min(end, start + left)
            found.append((start, end))
            left -= end - start
        self._look_from = offset
        until_ms = now_ms + hold_ms
        for start, end in found:
            insort(self._held, HandedOut(start, end, session, until_ms))
        if found:
            self._due_ms = min(self._due_ms, until_ms, self._silent_ms(session))
        return found

    def _free(self, acked: AckedOffsets, offset: int, readable_offset: int) -> Range:
        """The first free range at or above `offset`; an empty one if there is none."""
        while True:
            start = acked.next_unacked(offset)
            index = bisect_right(self._held, start, key=lambda one: one.start)
            if not index or self._held[index - 1].end <= start:
                break
            offset = self._held[index - 1].end
        end = min(readable_offset, acked.next_acked(start))
        if index < len(self._held):
            end = min(end, self._held[index].start)
        return start, end

    # ── coming back ───────────────────────────────────────────────────────────────────────────────────
    def expire(self, now_ms: int) -> bool:
        """Free messages past their deadline, and those of silent sessions; True if there were any."""
        if now_ms < self.due_ms:
            return False
        silent = self._forget_silent(now_ms)
        freed = [one for one in self._held if one.until_ms <= now_ms or one.session in silent]
        if freed:
            self._held = [
                one for one in self._held if one.until_ms > now_ms and one.session not in silent
            ]
            self._look_from = min(self._look_from, *(one.start for one in freed))
        self._due_ms = min(
            (
                *(one.until_ms for one in self._held),
                *(self._silent_ms(session) for session in {one.session for one in self._held}),
            ),
            default=NEVER_MS,
        )
        return bool(freed)

    def _silent_ms(self, session: str) -> int:
        heard = self._heard.get(session)
        return NEVER_MS if heard is None else heard.until_ms

    def _forget_silent(self, now_ms: int) -> set[str]:
        silent = {session for session, one in self._heard.items() if one.until_ms <= now_ms}
        for session in silent:
            del self._heard[session]
        return silent

    def enter(self, session: str, *, ttl_ms: int, now_ms: int) -> None:
        """A session acquires: it may pull, also after it has given everything back."""
        if len(self._heard) >= SILENT_MAX:
            self.expire(now_ms)
            self._forget_silent(now_ms)
        self._left.pop(session, None)
        self._know(session, ttl_ms, now_ms)

    def hear(self, session: str, *, ttl_ms: int, now_ms: int) -> None:
        """
        A session pulls or acks.

        A session that calls after its ttl keeps its messages, unless another session pulled meanwhile.

        Args:
            ttl_ms: the ttl of a session that has not acquired since it was last silent.
        """
        heard = self._heard.get(session)
        if heard is None:
            self._know(session, ttl_ms, now_ms)
        else:
            heard.until_ms = now_ms + heard.ttl_ms

    def _know(self, session: str, ttl_ms: int, now_ms: int) -> None:
        self._heard[session] = LastHeard(ttl_ms, now_ms + ttl_ms)
        self._due_ms = min(self._due_ms, now_ms + ttl_ms)

    def check_entered(self, session: str) -> None:
        """Raises FencedError if the session gave everything back: a pull that still waits must take no message."""
        if session in self._left:
            raise FencedError("the session gave back what it had", token=self.token)

    def give_back(self, session: str) -> bool:
        """Free all messages of a session, which stops pulling; True if there were any."""
        self._heard.pop(session, None)
        self._left[session] = None
        if len(self._left) > LEFT_MAX:
            del self._left[next(iter(self._left))]
        freed = [one.start for one in self._held if one.session == session]
        self._held = [one for one in self._held if one.session != session]
        self._look_from = min([self._look_from, *freed])
        return bool(freed)

    def trim(self, session: str, ranges: Iterable[Range], *, upto: int) -> list[Range]:
        """Free messages of `ranges` from `upto` on, which were handed to a session and not read; the ranges left."""
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
        """These messages are acked, whichever session had them."""
        for start, end in ranges:
            self._cut(start, end)

    def _cut(self, start: int, end: int, session: str | None = None) -> None:
        """Remove `[start, end)` from the messages in flight, of this session only if one is given."""
        held = self._held
        first = bisect_right(held, start, key=lambda one: one.start)
        first -= bool(first and held[first - 1].end > start)
        left: list[HandedOut] = []
        last = first
        while last < len(held) and held[last].start < end:
            one = held[last]
            last += 1
            if session not in {None, one.session}:
                left.append(one)
                continue
            left += [
                HandedOut(*part, one.session, one.until_ms)
                for part in outside(one.start, one.end, start, end)
            ]
        held[first:last] = left
