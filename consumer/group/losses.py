"""Builds log lines about lost leases and a blocked event loop. Pure."""

from __future__ import annotations

from collections import deque

PARTITIONS_NAMED_MAX = 5
STALLS_KEPT_MAX = 16
STALL_LINE_EVERY_MS = 60_000
"""The minimum interval between log lines about stalls, in milliseconds."""
STALL_MIN_MS = 500
"""The minimum delay, in milliseconds, that counts as a stall; with shorter delays the loop is busy,
not blocked.
"""


class Stalls:
    """Measures stalls of the event loop by how late a sleeping task wakes up. Times are in
    milliseconds on the boot clock.
    """

    def __init__(self) -> None:
        self._due_ms = 0
        self._stalls: deque[tuple[int, int]] = deque(maxlen=STALLS_KEPT_MAX)
        """The (end, length) of each stall, in milliseconds."""
        self._line_ms = -STALL_LINE_EVERY_MS

    def record_sleep(self, now_ms: int, sleep_ms: int) -> None:
        """Record that the task goes to sleep and should wake up in `sleep_ms`."""
        self._due_ms = now_ms + sleep_ms

    def record_wake(self, now_ms: int) -> int:
        """Record that the task woke up. Return its delay, or 0 if it is below STALL_MIN_MS."""
        late_ms = self._late_ms(now_ms)
        self._due_ms = 0
        if late_ms:
            self._stalls.append((now_ms, late_ms))
        return late_ms

    def line(self, late_ms: int, now_ms: int, *, ttl_ms: int, margin_ms: int) -> str:
        """
        Return the log line for a stall that has just ended, or "" if the stall is short or the last
        line is too recent.

        Args:
            late_ms: the length of the stall.
            margin_ms: how much earlier than its ttl a lease ends at the consumer.
        """
        if late_ms < ttl_ms // HEARTBEATS_PER_TTL or now_ms - self._line_ms < STALL_LINE_EVERY_MS:
            return ""
        self._line_ms = now_ms
        return (
            f"the event loop did not run for {_seconds(late_ms)}: {BLOCKED_REASON}; "
            f"leases end {_seconds(ttl_ms - margin_ms)} after the last answered heartbeat was sent"
        )

    def longest_ms(self, since_ms: int, now_ms: int) -> int:
        """Return the length of the longest stall, in milliseconds, that ended after `since_ms` or
        is still going on.
        """
        stalls = [stall_ms for ended_ms, stall_ms in self._stalls if ended_ms > since_ms]
        return max([self._late_ms(now_ms), *stalls])

    def _late_ms(self, now_ms: int) -> int:
        late_ms = now_ms - self._due_ms if self._due_ms else 0
        return late_ms if late_ms >= STALL_MIN_MS else 0


class Losses:
    """
    Collects lost leases by reason, so that leases lost together share a log line. Leases that a
    blocked event loop loses repeatedly share one line per minute.
    """

    def __init__(self) -> None:
        self._lost: dict[str, list[str]] = {}
        self._blocked: list[str] = []
        """Leases lost because of a blocked event loop since the last line about it."""
        self._blocked_reason = ""
        self._blocked_line_ms = -STALL_LINE_EVERY_MS

    def add(self, partition_id: int, token: int, reason: str, *, fence: int = 0) -> None:
        """Add a lost lease. `fence` is the newer token; 0 if it is unknown."""
        fenced = f", newer token {fence}" if fence else ""
        lease = f"{partition_id} (token {token}{fenced})"
        if BLOCKED_REASON in reason:
            self._blocked.append(lease)
            self._blocked_reason = reason
        else:
            self._lost.setdefault(reason, []).append(lease)

    def take_lines(self, now_ms: int, *, last: bool = False) -> list[str]:
        """Return the log lines that are due, or all of them if `last` is set, and forget their
        leases.
        """
        lost = self._lost
        self._lost = {}
        if self._blocked and (last or now_ms - self._blocked_line_ms >= STALL_LINE_EVERY_MS):
            lost[self._blocked_reason] = self._blocked
            self._blocked = []
            self._blocked_line_ms = now_ms
        return [
            f"lost the lease of {_name_partitions(partitions)}: {reason}"
            for reason, partitions in lost.items()
        ]


def lapse_reason(*, silent_ms: int, stalled_ms: int) -> str:
    """Return why a lease lapsed: the metaserver did not reply for `silent_ms`, and the event loop
    was blocked for `stalled_ms` of that time.
    """
    if 2 * stalled_ms >= silent_ms:
        return f"the event loop did not run for {_seconds(stalled_ms)}: {BLOCKED_REASON}"
    blocked = (
        f", of which the event loop did not run for {_seconds(stalled_ms)}" if stalled_ms else ""
    )
    return f"the metaserver answered no heartbeat for {_seconds(silent_ms)}{blocked}"


HEARTBEATS_PER_TTL = 3
BLOCKED_REASON = (
    "code in this program blocked it (a handler that blocks needs threads: "
    "settings=ConsumerSettings(threads=8)), "
    "or the program or its machine was stopped"
)
FENCED = (
    "its broker has seen a newer fencing token, so another consumer owns it or an operator set the "
    "group's progress"
)
SESSION_ENDED = (
    "the metaserver no longer knows this session: it expired, its instance name was taken over, or "
    "the group was switched or deleted"
)


def _name_partitions(partitions: list[str]) -> str:
    more_count = len(partitions) - PARTITIONS_NAMED_MAX
    word = "partition" if len(partitions) == 1 else "partitions"
    return f"{word} {', '.join(partitions[:PARTITIONS_NAMED_MAX])}" + (
        f" and {more_count} more" if more_count > 0 else ""
    )


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s" if ms < 10_000 else f"{ms // 1000} s"
