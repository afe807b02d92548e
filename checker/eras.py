"""Tracks a group's progress on a partition, divided into eras by the resets of its cursor. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

Range = tuple[int, int]
NoteAnomaly = Callable[[str, str], None]


class Era:
    """
    The progress of owners whose tokens are above `token` and below that of the next reset.

    Args:
        token: the token of the reset that began the era; 0 for the era before the first reset.
        start: the cursor that the reset set. The group does not have to handle messages below it.
        confirmed: True if the broker has confirmed the reset. Until then, its outcome is unknown.
        without_children: True if the reset excluded the children, which keep the parked messages
            that they adopted earlier.
    """

    __slots__ = (
        "_acked",
        "_cursors",
        "_finished_below",
        "confirmed",
        "cursor",
        "finished",
        "parked",
        "start",
        "token",
        "without_children",
    )

    def __init__(
        self,
        token: int = 0,
        start: int = 0,
        *,
        confirmed: bool = True,
        without_children: bool = False,
    ) -> None:
        self.token = token
        self.without_children = without_children
        self.start = start
        self.confirmed = confirmed
        self.finished: set[int] = set()
        """The offsets that any owner has handled, or an operator gave up."""
        self.parked: set[int] = set()
        """The offsets that a broker was asked to park."""
        self.cursor = start
        """The highest cursor that the broker has reported."""
        self._cursors: list[tuple[int, int]] = []
        """The instant and the cursor of each report with a higher cursor than before."""
        self._acked: dict[int, int] = {}
        """Maps each offset above the cursor to the instant at which its ack was answered."""
        self._finished_below = start
        """The offset below which every message is known to be finished."""

    def is_finished(self, offset: int) -> bool:
        """Return True if the group has handled the message, or does not have to."""
        return offset in self.finished or offset < self.start

    def check_report(  # noqa: PLR0917 - the fields of an event
        self,
        kind: str,
        began: int,
        instant: int,
        cursor: int,
        ranges: tuple[Range, ...],
        note: NoteAnomaly,
        floor: int,
    ) -> None:
        """Check a cursor and acked ranges that the broker reported. For an ack, `ranges` are those
        in its request; for an acquire, those above the cursor.
        """
        for offset in range(max(self._finished_below, floor), cursor):
            if offset not in self.finished and offset not in self.parked:
                note("skip", f"the cursor passed {offset}, which was not handled")
        self._finished_below = max(self._finished_below, cursor)
        index = bisect_left(self._cursors, (began, -1)) - 1
        previous = self._cursors[index][1] if index >= 0 else self.start
        if cursor < previous:
            note("nonmonotonic", f"cursor {cursor} after {previous}")
        if cursor > self.cursor:
            self.cursor = cursor
            self._cursors.append((instant, cursor))
        if kind == "acquire":
            self._check_acks_survive(began, cursor, ranges, note)
        for start, end in ranges:
            for offset in range(start, end):
                if offset not in self.finished and offset not in self.parked:
                    note("skip", f"{offset} was acked, but not handled")
                if kind == "ack":
                    self._acked.setdefault(offset, instant)

    def _check_acks_survive(
        self, began: int, cursor: int, ranges: tuple[Range, ...], note: NoteAnomaly
    ) -> None:
        """Check that the broker has not lost any acks above the cursor that it has answered."""
        reported = {offset for start, end in ranges for offset in range(start, end)}
        for offset, acked_at in list(self._acked.items()):
            if offset < cursor:
                del self._acked[offset]
            elif acked_at < began and offset not in reported:
                note("nonmonotonic", f"the ack of {offset} was lost")


class Eras:
    """The eras of a group on a partition, ordered by token."""

    __slots__ = ("_note", "all", "floor")

    def __init__(self, note: NoteAnomaly) -> None:
        self.all = [Era()]
        self.floor = 0
        """The offset below which messages have expired."""
        self._note = note

    def era_of(self, token: int) -> Era:
        """Return the era that an owner's token belongs to."""
        index = len(self.all) - 1
        while index and self.all[index].token >= token:
            index -= 1
        return self.all[index]

    def candidate_eras(self, token: int | None = None) -> list[Era]:
        """Return the eras that a token may belong to, newest first. There are several while resets
        are unconfirmed. Without a token, start at the newest era.
        """
        eras: list[Era] = []
        for era in reversed(self.all):
            if token is None or era.token < token or not era.token:
                eras.append(era)
                if era.confirmed:
                    break
        return eras

    def request_reset(self, token: int, start: int, *, without_children: bool = False) -> None:
        """Begin an unconfirmed era: a broker was asked for a reset, which may take effect at any
        time.
        """
        if token > self.all[-1].token:
            self.all.append(Era(token, start, confirmed=False, without_children=without_children))

    def is_kept_by_children(self, offset: int) -> bool:
        """Return True if children may still have a parked message, because every later reset
        excluded them.
        """
        for era in reversed(self.all):
            if offset in era.parked:
                return True
            if not era.without_children:
                return False
        return False

    def confirm_reset(self, token: int) -> None:
        """Mark a reset as done, because the broker has answered it."""
        for era in self.all:
            if era.token == token:
                era.confirmed = True
                return
        self._note(
            "nonmonotonic",
            f"the reset of token {token} was confirmed, but an owner began without it",
        )

    def resolve_resets(self, token: int, cursor: int, ranges: tuple[Range, ...]) -> None:
        """
        Decide from an owner's first cursor which earlier unconfirmed resets took effect; the others
        never will.

        A reset clears the ranges above the cursor. Any `ranges` therefore prove that no reset took
        effect, even one to the cursor that the group already had.
        """
        for era in self.candidate_eras(token):
            if era.confirmed:
                return
            if not ranges and cursor in {era.start, max(era.start, self.floor)}:
                era.confirmed = True
                return
            self.all.remove(era)
