"""Decides which refusals and reads the audit log has a line about, so that a flood of them fills no disk.  Pure.

    refusal ─▶ of its kind ─▶ of its host ─▶ of the server ─▶ a line, with how many of its kind were left out before it
    read    ─▶ of its kind ─▶ a line, likewise

An allowance fills again over time; a host that floods uses up its own before that of the server.

Invariants
    Reads of one subject use up no line of reads of another one, which they would hide.
    A server writes at most REFUSALS.burst lines about refusals at once, and REFUSALS.per_s a second after it.
    What is left out is counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

KNOWN_MAX: Final = 10_000


class Allowance(NamedTuple):
    """Lines at once, and lines a second after them."""

    burst: int
    per_s: float


OF_KIND: Final = Allowance(100, 1.0)
OF_HOST: Final = Allowance(500, 1.0)
REFUSALS: Final = Allowance(2_000, 2.0)
READS_OF_KIND: Final = Allowance(20, 1 / 60)


class _Level:
    """What is left of an allowance."""

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


class RefusalNotes:
    """
    The lines of one server; times are passed in, in milliseconds.

    Attributes:
        left_out: refusals without a line.
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, _Level] = OrderedDict()
        self._hosts: OrderedDict[Hashable, _Level] = OrderedDict()
        self._all = _Level(REFUSALS, 0)
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._kinds) + len(self._hosts)

    def admit(self, host: str, kind: tuple[Hashable, ...], now_ms: int) -> int | None:
        """
        Take a refusal.

        Args:
            host: where the caller is.
            kind: who was refused what, and why.

        Returns:
            How many of its kind were left out since the last line; None: this one is left out.
        """
        of_kind = _known(self._kinds, (host, *kind), OF_KIND, now_ms)
        levels = (of_kind, _known(self._hosts, host, OF_HOST, now_ms), self._all)
        if not all(level.has(now_ms) for level in levels):
            of_kind.left_out += 1
            self.left_out += 1
            return None
        for level in levels:
            level.take()
        left_out, of_kind.left_out = of_kind.left_out, 0
        return left_out


class ReadNotes:
    """
    The lines of one server about reads that are allowed; times are passed in, in milliseconds.

    Attributes:
        left_out: reads without a line.
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, _Level] = OrderedDict()
        self.left_out = 0

    def admit(self, kind: tuple[Hashable, ...], now_ms: int) -> int | None:
        """
        Take a read.

        Args:
            kind: who reads what, from where.

        Returns:
            As `RefusalNotes.admit`.
        """
        level = _known(self._kinds, kind, READS_OF_KIND, now_ms)
        if not level.has(now_ms):
            level.left_out += 1
            self.left_out += 1
            return None
        level.take()
        left_out, level.left_out = level.left_out, 0
        return left_out


def _known(
    levels: OrderedDict[Hashable, _Level], key: Hashable, allowance: Allowance, now_ms: int
) -> _Level:
    level = levels.get(key)
    if level is None:
        level = levels[key] = _Level(allowance, now_ms)
        if len(levels) > KNOWN_MAX:
            levels.popitem(last=False)
    levels.move_to_end(key)
    return level
