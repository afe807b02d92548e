"""A group's progress on a partition from one reset to the next: what was handled, what its broker told.  Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

Range = tuple[int, int]
Note = Callable[[str, str], None]


class Era:
    """
    What owners with tokens above `token`, and below that of the next reset, do.

    Args:
        token: of the reset that began it; 0 for what was before any.
        start: where that set the cursor; what is below is owed to nobody.
        sure: its broker has said so; else it may have been done or not.
    """

    __slots__ = ("_acked", "_cursors", "_passed", "cursor", "ended", "start", "sure", "token")

    def __init__(self, token: int = 0, start: int = 0, *, sure: bool = True) -> None:
        self.token = token
        self.start = start
        self.sure = sure
        self.ended: set[int] = set()
        """Offsets handled, by whomever."""
        self.cursor = start
        """The highest told."""
        self._cursors: list[tuple[int, int]] = []
        """(instant, cursor), each higher than the one before."""
        self._acked: dict[int, int] = {}
        """Offset → instant at which its ack was answered, while above the cursor."""
        self._passed = start
        """Offsets below are known to be handled, or owed to nobody."""

    def through(self, offset: int) -> bool:
        """Is a message handled, or owed to nobody."""
        return offset in self.ended or offset < self.start

    def told(  # noqa: PLR0917 - the fields of an event
        self,
        kind: str,
        began: int,
        instant: int,
        cursor: int,
        ranges: tuple[Range, ...],
        note: Note,
        floor: int,
    ) -> None:
        """The broker told its cursor, and what is acked: in the request of an ack, above it in an acquire."""
        for offset in range(max(self._passed, floor), cursor):
            if offset not in self.ended:
                note("skip", f"the cursor passed {offset}, not handled")
        self._passed = max(self._passed, cursor)
        at = bisect_left(self._cursors, (began, -1)) - 1
        before = self._cursors[at][1] if at >= 0 else self.start
        if cursor < before:
            note("nonmonotonic", f"cursor {cursor} after {before}")
        if cursor > self.cursor:
            self.cursor = cursor
            self._cursors.append((instant, cursor))
        if kind == "acquire":
            self._check_kept(began, cursor, ranges, note)
        for start, end in ranges:
            for offset in range(start, end):
                if offset not in self.ended:
                    note("skip", f"{offset} acked, not handled")
                if kind == "ack":
                    self._acked.setdefault(offset, instant)

    def _check_kept(self, began: int, cursor: int, ranges: tuple[Range, ...], note: Note) -> None:
        """Durable acks above the cursor are never forgotten."""
        kept = {offset for start, end in ranges for offset in range(start, end)}
        for offset, acked_at in list(self._acked.items()):
            if offset < cursor:
                del self._acked[offset]
            elif acked_at < began and offset not in kept:
                note("nonmonotonic", f"the ack of {offset} is forgotten")


class Eras:
    """All of a partition's eras, by their tokens."""

    __slots__ = ("_note", "all", "floor")

    def __init__(self, note: Note) -> None:
        self.all = [Era()]
        self.floor = 0
        """What is below has expired."""
        self._note = note

    def of(self, token: int) -> Era:
        """The era that an owner works in."""
        found = self.all
        index = len(found) - 1
        while index and found[index].token >= token:
            index -= 1
        return found[index]

    def possible(self, token: int | None = None) -> list[Era]:
        """The era of a token (the last of all without one), behind it those that may be it instead."""
        found: list[Era] = []
        for era in reversed(self.all):
            if token is None or era.token < token or not era.token:
                found.append(era)
                if era.sure:
                    break
        return found

    def asked(self, token: int, start: int) -> None:
        """A broker was asked for a reset: from now on it may be done."""
        if token > self.all[-1].token:
            self.all.append(Era(token, start, sure=False))

    def done(self, token: int) -> None:
        """It said that it has done so."""
        for era in self.all:
            if era.token == token:
                era.sure = True
                return
        self._note("nonmonotonic", f"the reset of token {token} was done, and undone")

    def settle(self, token: int, cursor: int, ranges: tuple[Range, ...]) -> None:
        """
        An owner came and was told where to begin: so an unanswered reset before it was done, or never will be.

        A reset clears the acks above the cursor, so `ranges` that are still there say that none was done, even where it
        asked for the cursor that the group had.
        """
        for era in self.possible(token):
            if era.sure:
                return
            if not ranges and cursor in {era.start, max(era.start, self.floor)}:
                era.sure = True
                return
            self.all.remove(era)
