"""From when on a partition that continues others has its times: no earlier than they end, however slow its broker's calendar is.

    parent, on a broker whose calendar is right     … 10:00:00  10:00:07 │ sealed at 10:00:09
    child, on a broker that is a minute behind                             10:00:09  10:00:09 … 10:00:10
                                                                           ╰ held, until its broker's calendar is there

A read up to a time that had passed by the parent's calendar so has every earlier message, also of children that open later.

Invariants
    A parent that ends over AHEAD_MS_MAX ahead counts for nothing: a calendar that was wrong by years is not handed on.
"""

from __future__ import annotations

from collections.abc import Iterable

from .partition import HostedPartition

AHEAD_MS_MAX = 24 * 3_600_000
"""How far times may be ahead of the calendar; a wrong zone is less, and what is held by it is right again within a day."""


def counts(ended_ms: int, now_ms: int) -> bool:
    """Whether a partition that continues one that ended then begins no earlier; `now_ms` is its broker's calendar."""
    return ended_ms <= now_ms + AHEAD_MS_MAX


def first_time_ms(parents: Iterable[HostedPartition | None], now_ms: int) -> int:
    """The time of a partition's first message, for the parents that the same broker has; None: it has it no more."""
    ended = (0 if parent is None else parent.appended_at_ms for parent in parents)
    return max([now_ms, *(ended_ms for ended_ms in ended if counts(ended_ms, now_ms))])
