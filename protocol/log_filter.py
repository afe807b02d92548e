"""Rate-limits log lines about repeated failures. Pure.

    failure ─▶ first line at once ─▶ lines after 10, 20, 40 … s, with a count ─▶ success: last line

`LogFilter` keeps one lasting failure from flooding a log; `LineLimit` does the same for many
different failures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

from .text import counted, format_seconds

FIRST_GAP_MS: Final = 10_000
GAP_MS_MAX: Final = 3_600_000
TEXTS_MAX: Final = 100
"""The maximum number of failures that a filter distinguishes. All further failures with the same
key share one line.
"""
KEYS_MAX: Final = 10_000
"""The maximum number of keys that are remembered at each level of a `LineLimit`."""


@dataclass(slots=True)
class Repeats:
    """A repeated failure. Times are in milliseconds since boot."""

    since_ms: int
    """The time of the first occurrence."""
    count: int = 0
    """The number of occurrences."""
    due_ms: int = 0
    """Earliest time of the next line; 0 before the first line."""
    gap_ms: int = 0
    """The minimum time between the last line and the next; 0 before the first line."""
    open: bool = False
    """True if the failure has been logged but its end has not."""

    def logged(self, now_ms: int) -> None:
        """Record that a line was logged. The time until the next line doubles with each line."""
        self.gap_ms = min(2 * self.gap_ms, GAP_MS_MAX) or FIRST_GAP_MS
        self.due_ms = now_ms + self.gap_ms
        self.open = True


class LogFilter:
    """
    Decides which failures of one task are logged, based on their key and text.

    A task that alternates between failure and success does not log more lines than one that always
    fails.
    """

    __slots__ = ("_failures", "_open_keys")

    def __init__(self) -> None:
        self._failures: dict[tuple[Hashable, str | None], Repeats] = {}
        """The failures by key and text. The text None stands for all texts of a key beyond
        TEXTS_MAX.
        """
        self._open_keys: set[Hashable] = set()
        """The keys of failures that have been logged and have not ended."""

    def count_failure(self, text: str, now_ms: int, key: Hashable = None) -> str:
        """Record a failure, and return the line to log: its text, with a count if it is a repeat.
        Return "" if nothing should be logged.
        """
        for expired_key in [
            each
            for each, known_failure in self._failures.items()
            if _is_expired(known_failure, now_ms)
        ]:
            del self._failures[expired_key]
        identity: tuple[Hashable, str | None] = (key, text)
        if identity not in self._failures and len(self._failures) >= TEXTS_MAX:
            identity = (key, None)
        failure = self._failures.setdefault(identity, Repeats(now_ms))
        failure.count += 1
        if now_ms < failure.due_ms:
            return ""
        failure.logged(now_ms)
        self._open_keys.add(key)
        if failure.count == 1:
            return text
        return f"{text} ({_failure_summary(failure.count, failure.since_ms, now_ms)})"

    def end_failures(self, now_ms: int, *keys: Hashable) -> str:
        """Record a success, and return a summary of the failures before it, such as "3 failures in
        40 s", or "" if none was logged.
        """
        ended_keys = self._open_keys.intersection(keys or (None,))
        if not ended_keys:
            return ""
        self._open_keys -= ended_keys
        ended_failures = [
            known_failure
            for (key, _), known_failure in self._failures.items()
            if key in ended_keys and known_failure.open
        ]
        for known_failure in ended_failures:
            known_failure.open = False
        count = sum(known_failure.count for known_failure in ended_failures)
        return _failure_summary(
            count, min(known_failure.since_ms for known_failure in ended_failures), now_ms
        )


def _is_expired(known: Repeats, now_ms: int) -> bool:
    """Return True if a failure ended so long ago that its next occurrence counts as new."""
    return not known.open and now_ms > known.due_ms + known.gap_ms


def _failure_summary(count: int, since_ms: int, now_ms: int) -> str:
    return f"{counted(count, 'failure')} in {format_seconds(now_ms - since_ms)}"


class Allowance(NamedTuple):
    """A token-bucket limit on lines: `burst` lines at once, then `per_s` lines per second."""

    burst: int
    per_s: float


class _LineBucket:
    """The token bucket of one key at one level."""

    __slots__ = ("_allowance", "_refilled_ms", "_tokens", "suppressed")

    def __init__(self, allowance: Allowance, now_ms: int) -> None:
        self._allowance = allowance
        self._tokens = float(allowance.burst)
        self._refilled_ms = now_ms
        self.suppressed = 0
        """The number of lines that have been suppressed since the last logged one."""

    def has_token(self, now_ms: int) -> bool:
        """Refill the bucket, and return True if a line may be logged."""
        elapsed_s = max(0, now_ms - self._refilled_ms) / 1000
        self._tokens = min(self._allowance.burst, self._tokens + elapsed_s * self._allowance.per_s)
        self._refilled_ms = now_ms
        return self._tokens >= 1

    def take_token(self) -> None:
        """Count a logged line."""
        self._tokens -= 1


class LineLimit:
    """
    Limits log lines of many kinds at several levels, with a token bucket for each key at each
    level.

    A line is logged only if its bucket at each level has a token. A flood of lines of one kind uses
    up its own bucket before the bucket for all kinds.

    Args:
        allowances: one for each level, narrowest first.

    Attributes:
        left_out: the number of lines that have been suppressed.
    """

    def __init__(self, *allowances: Allowance) -> None:
        self._allowances = allowances
        self._levels: list[OrderedDict[Hashable, _LineBucket]] = [OrderedDict() for _ in allowances]
        self.left_out = 0

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def admit(self, now_ms: int, *keys: Hashable) -> int | None:
        """
        Count a line against its limits.

        Args:
            now_ms: the current time, in milliseconds since boot.
            keys: the key of the line at each level.

        Returns:
            The number of lines with the first key that have been suppressed since the last logged
            one, or None if this line is suppressed, too.
        """
        buckets = [
            _bucket_of(level, key, allowance, now_ms)
            for level, key, allowance in zip(self._levels, keys, self._allowances, strict=True)
        ]
        narrowest = buckets[0]
        if not all(bucket.has_token(now_ms) for bucket in buckets):
            narrowest.suppressed += 1
            self.left_out += 1
            return None
        for bucket in buckets:
            bucket.take_token()
        suppressed, narrowest.suppressed = narrowest.suppressed, 0
        return suppressed


def _bucket_of(
    level: OrderedDict[Hashable, _LineBucket], key: Hashable, allowance: Allowance, now_ms: int
) -> _LineBucket:
    bucket = level.get(key)
    if bucket is None:
        bucket = level[key] = _LineBucket(allowance, now_ms)
        if len(level) > KEYS_MAX:
            level.popitem(last=False)
    level.move_to_end(key)
    return bucket
