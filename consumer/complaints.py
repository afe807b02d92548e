"""Which of many failing messages are told of, and how: one whole story per kind and minute, else a count.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_EVERY_MS = 60_000
COUNT_EVERY_MS = 10_000
KINDS_MAX = 100
"""Kinds of errors kept apart; the one not told of for longest is forgotten."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """What to tell."""

    whole: bool
    """True: with the traceback.  False: the count is enough."""
    untold: int
    """Failures of the kind that nothing was said of before, without the present one."""


@dataclass(slots=True)
class _Kind:
    whole_at_ms: int
    told_at_ms: int
    untold: int = 0


class Complaints:
    """The failures of one consumer by kind."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def failed(self, kind: str, now_ms: int) -> Complaint | None:
        """One more failure of `kind`; None: say nothing now, it is counted."""
        known = self._kinds.pop(kind, None)
        if known is None and len(self._kinds) >= KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        if known is None or now_ms - known.whole_at_ms >= WHOLE_EVERY_MS:
            self._kinds[kind] = _Kind(now_ms, now_ms)
            return Complaint(True, known.untold if known is not None else 0)
        self._kinds[kind] = known
        if now_ms - known.told_at_ms < COUNT_EVERY_MS:
            known.untold += 1
            return None
        told = Complaint(False, known.untold)
        known.told_at_ms = now_ms
        known.untold = 0
        return told

    def close(self) -> dict[str, int]:
        """Kind → failures that nothing was said of; at the end."""
        left = {kind: one.untold for kind, one in self._kinds.items() if one.untold}
        self._kinds = {}
        return left
