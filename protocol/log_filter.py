"""Decides which lines about failures are logged. Pure.

    failure ─▶ a line at once ─▶ one after 10, 20, 40 … s, with a count ─▶ success: a last line

`LogFilter` keeps one lasting failure from filling a log; `LineLimit` does the same for many
different ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

from .text import counted, seconds

FIRST_GAP_MS: Final = 10_000
GAP_MS_MAX: Final = 3_600_000
TEXTS_MAX: Final = 100
"""Failures of a filter that have lines of their own; all further ones with a key share one line."""
KEYS_MAX: Final = 10_000
"""Keys that each level of a `LineLimit` remembers."""


@dataclass(slots=True)
class Repeats:
    """A failure that happens again and again; times are in milliseconds of the boot clock."""

    since_ms: int
    """Time at which it first happened."""
    count: int = 0
    """Number of times that it happened."""
    due_ms: int = 0
    """Time from which the next line may be logged; 0 before the first line."""
    gap_ms: int = 0
    """Time between the last line and the next; 0 before the first line."""
    open: bool = False
    """True if a line was logged, and no line has said yet that it is over."""

    def logged(self, now_ms: int) -> None:
        """Note that a line was logged; the gap before the next line doubles each time."""
        self.gap_ms = min(2 * self.gap_ms, GAP_MS_MAX) or FIRST_GAP_MS
        self.due_ms = now_ms + self.gap_ms
        self.open = True


class LogFilter:
    """
    Filters the failures of one task, by key and text.

    A task that fails and succeeds in turn gets no more lines than a task that always fails.
    """

    __slots__ = ("_known", "_open")

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, str | None], Repeats] = {}
        """Failures by key and text; the text None stands for all further texts of the key."""
        self._open: set[Hashable] = set()
        """Keys of logged failures that are not over."""

    def met(self, text: str, now_ms: int, key: Hashable = None) -> str:
        """Note a failure, and return what to log: the text, with a count if it is a repeat, or ""
        for nothing.
        """
        for name in [name for name, known in self._known.items() if _is_past(known, now_ms)]:
            del self._known[name]
        name = (key, text)
        if name not in self._known and len(self._known) >= TEXTS_MAX:
            name = (key, None)
        known = self._known.setdefault(name, Repeats(now_ms))
        known.count += 1
        if now_ms < known.due_ms:
            return ""
        known.logged(now_ms)
        self._open.add(key)
        if known.count == 1:
            return text
        return f"{text} ({_failures(known.count, known.since_ms, now_ms)})"

    def over(self, now_ms: int, *keys: Hashable) -> str:
        """Note a success, and return what failed before, such as "3 failures in 40 s"; "" if
        nothing was logged.
        """
        ending = self._open.intersection(keys or (None,))
        if not ending:
            return ""
        self._open -= ending
        ended = [known for (key, _), known in self._known.items() if key in ending and known.open]
        for known in ended:
            known.open = False
        count = sum(known.count for known in ended)
        return _failures(count, min(known.since_ms for known in ended), now_ms)


def _is_past(known: Repeats, now_ms: int) -> bool:
    """Return whether a failure is over for so long that the same one would count as new."""
    return not known.open and now_ms > known.due_ms + known.gap_ms


def _failures(count: int, since_ms: int, now_ms: int) -> str:
    return f"{counted(count, 'failure')} in {seconds(now_ms - since_ms)}"


class Allowance(NamedTuple):
    """Number of lines that may be logged at once, and number a second after that."""

    burst: int
    per_s: float


class _Level:
    """The remaining part of an allowance."""

    __slots__ = ("_allowance", "_at_ms", "_left", "left_out")

    def __init__(self, allowance: Allowance, now_ms: int) -> None:
        self._allowance = allowance
        self._left = float(allowance.burst)
        self._at_ms = now_ms
        self.left_out = 0

    def has(self, now_ms: int) -> bool:
        passed_s = max(0, now_ms - self._at_ms) / 1000
        self._left = min(self._allowance.burst, self._left + passed_s * self._allowance.per_s)
        self._at_ms = now_ms
        return self._left >= 1

    def take(self) -> None:
        self._left -= 1


class LineLimit:
    """
    Limits lines of many kinds at several levels: a line must have something left at each level.

    An allowance refills over time. A flood of one kind uses up its own allowance before the common
    one.

    Args:
        allowances: one for each level, the narrowest first.

    Attributes:
        left_out: number of lines that were left out.
    """

    def __init__(self, *allowances: Allowance) -> None:
        self._allowances = allowances
        self._levels: list[OrderedDict[Hashable, _Level]] = [OrderedDict() for _ in allowances]
        self.left_out = 0

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def admit(self, now_ms: int, *keys: Hashable) -> int | None:
        """
        Count a line against its limits.

        Args:
            now_ms: milliseconds of the boot clock.
            keys: key of the line at each level.

        Returns:
            Number of lines with the first key that were left out since the last logged line; None:
            this line is left out too.
        """
        levels = [
            _level(known, key, allowance, now_ms)
            for known, key, allowance in zip(self._levels, keys, self._allowances, strict=True)
        ]
        kind = levels[0]
        if not all(level.has(now_ms) for level in levels):
            kind.left_out += 1
            self.left_out += 1
            return None
        for level in levels:
            level.take()
        left_out, kind.left_out = kind.left_out, 0
        return left_out


def _level(
    known: OrderedDict[Hashable, _Level], key: Hashable, allowance: Allowance, now_ms: int
) -> _Level:
    level = known.get(key)
    if level is None:
        level = known[key] = _Level(allowance, now_ms)
        if len(known) > KEYS_MAX:
            known.popitem(last=False)
    known.move_to_end(key)
    return level
