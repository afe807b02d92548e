"""Eras, each of which is a group's progress on a partition from one reset to the next. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

Range = tuple[int, int]
Note = Callable[[str, str], None]


class Era:
    """
    The acts of owners whose tokens are above `token` and below that of the next reset.

    Args:
        token: token of the reset that began the era; 0 for the era before the first reset.
        start: cursor that the reset set; messages below it are not owed to the group.
        sure: True if the broker has confirmed the reset; until then its outcome is unknown.
        alone: True if the reset left out children, which keep what they took over earlier.
    """

    __slots__ = (
        "_acked",
        "_cursors",
        "_passed",
        "alone",
        "aside",
        "cursor",
        "ended",
        "start",
        "sure",
        "token",
    )

    def __init__(
        self, token: int = 0, start: int = 0, *, sure: bool = True, alone: bool = False
    ) -> None:
        self.token = token
        self.alone = alone
        self.start = start
        self.sure = sure
        self.ended: set[int] = set()
        """Offsets that any owner handled, or an operator gave up."""
        self.aside: set[int] = set()
        """Offsets that a broker was asked to park."""
        self.cursor = start
        """Highest cursor that the broker reported."""
        self._cursors: list[tuple[int, int]] = []
        """(instant, cursor) of each report with a higher cursor than before."""
        self._acked: dict[int, int] = {}
        """Instant of the answer to its ack, by offset, for offsets above the cursor."""
        self._passed = start
        """Offset below which all are known to be handled or not owed."""

    def through(self, offset: int) -> bool:
        """Return whether a message is handled or not owed."""
        return offset in self.ended or offset < self.start

    def reported(  # noqa: PLR0917 - the fields of an event
        self,
        kind: str,
        began: int,
        instant: int,
        cursor: int,
        ranges: tuple[Range, ...],
        note: Note,
        floor: int,
    ) -> None:
        """Note that the broker reported its cursor, and acked ranges: those in an ack's request, or
        those above the cursor.
        """
        for offset in range(max(self._passed, floor), cursor):
            if offset not in self.ended and offset not in self.aside:
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
                if offset not in self.ended and offset not in self.aside:
                    note("skip", f"{offset} acked, not handled")
                if kind == "ack":
                    self._acked.setdefault(offset, instant)

    def _check_kept(self, began: int, cursor: int, ranges: tuple[Range, ...], note: Note) -> None:
        """Check that durable acks above the cursor are never forgotten."""
        kept = {offset for start, end in ranges for offset in range(start, end)}
        for offset, acked_at in list(self._acked.items()):
            if offset < cursor:
                del self._acked[offset]
            elif acked_at < began and offset not in kept:
                note("nonmonotonic", f"the ack of {offset} is forgotten")


class Eras:
    """The eras of a group on a partition, ordered by token."""

    __slots__ = ("_note", "all", "floor")

    def __init__(self, note: Note) -> None:
        self.all = [Era()]
        self.floor = 0
        """Offset below which messages have expired."""
        self._note = note

    def of(self, token: int) -> Era:
        """Return the era of an owner's token."""
        index = len(self.all) - 1
        while index and self.all[index].token >= token:
            index -= 1
        return self.all[index]

    def possible(self, token: int | None = None) -> list[Era]:
        """Return the eras to which a token may belong, or without a token the newest ones, because
        resets may be unconfirmed; the newest first.
        """
        eras: list[Era] = []
        for era in reversed(self.all):
            if token is None or era.token < token or not era.token:
                eras.append(era)
                if era.sure:
                    break
        return eras

    def asked(self, token: int, start: int, *, alone: bool = False) -> None:
        """Note that a broker was asked for a reset, which may be done from now on."""
        if token > self.all[-1].token:
            self.all.append(Era(token, start, sure=False, alone=alone))

    def is_kept(self, offset: int) -> bool:
        """Return whether children may still have a parked message, because each reset since has
        left them out.
        """
        for era in reversed(self.all):
            if offset in era.aside:
                return True
            if not era.alone:
                return False
        return False

    def done(self, token: int) -> None:
        """Note that the broker has confirmed a reset."""
        for era in self.all:
            if era.token == token:
                era.sure = True
                return
        self._note("nonmonotonic", f"the reset of token {token} was done, and undone")

    def acquired(self, token: int, cursor: int, ranges: tuple[Range, ...]) -> None:
        """
        Decide from an owner's first cursor which earlier unconfirmed resets were done; the others
        never will be.

        A reset clears the ranges above the cursor, so any `ranges` show that none was done, even
        one to the cursor that the group already had.
        """
        for era in self.possible(token):
            if era.sure:
                return
            if not ranges and cursor in {era.start, max(era.start, self.floor)}:
                era.sure = True
                return
            self.all.remove(era)
