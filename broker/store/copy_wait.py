"""The wait of a commit for copies of the log.

    synced here ─▶ begin ─┬─ all copies that count have it ─▶ it ends, and is durable
                          ╰─ given up ─▶ it fails: a copy may have it, and its fate is unknown

At most one commit waits, because a commit begins when the one before has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...rpc.operating.histogram import Histogram


class CopiesThatCount(Protocol):
    """The copies of the log that must have a commit before it is durable."""

    members: frozenset[str] | None
    """Their ids, as a metaserver has confirmed them; None until one has."""

    def covers(self, end: int) -> bool:
        """Return True if all of them have the log up to `end`."""
        ...


class _Waiting(NamedTuple):
    """A commit that is synced here, and that a copy lacks."""

    end: int
    """Where it ends in the log."""
    since_ns: int
    on_copied: Callable[[], None]
    on_given_up: Callable[[str], None]


class CopyWait:
    """
    Lets commits wait for copies.

    Args:
        boot_ns: returns the time since boot in nanoseconds.
    """

    def __init__(self, boot_ns: Callable[[], int]) -> None:
        self._boot_ns = boot_ns
        self.copies: CopiesThatCount | None = None
        """The copies of the log that must have a commit before it is durable; None: there are none.
        """
        self.on_write: Callable[[], None] = lambda: None
        """Called when a commit that copies must have is in the page cache."""
        self.waits = Histogram()
        """How long commits that were synced here have waited for copies."""
        self._waiting: _Waiting | None = None
        self._copied_end = 0
        """The end of the last commit that all copies had that counted then."""
        self.given_up = ""
        """Why no commit waits for copies any more; "" if they do."""

    @property
    def folders(self) -> int:
        """The number of data folders that have what is durable now."""
        return 1 if self.copies is None else 1 + len(self.copies.members or ())

    @property
    def waiting_ms(self) -> int:
        """For how many milliseconds a commit that is synced here has waited for copies."""
        if self._waiting is None:
            return 0
        return (self._boot_ns() - self._waiting.since_ns) // 1_000_000

    def decided_end(self, log_end: int) -> int:
        """Return the end of the log that is durable, or is about to be without a further copy."""
        return max(log_end, self._copied_end)

    def begin(
        self, end: int, *, on_copied: Callable[[], None], on_given_up: Callable[[str], None]
    ) -> None:
        """
        Begin the wait of a commit that is synced here.

        Args:
            end: where the commit ends in the log.
            on_copied: called when all copies that count have it, perhaps at once.
            on_given_up: called with the reason, if nothing waits for copies any more.
        """
        self._waiting = _Waiting(end, self._boot_ns(), on_copied, on_given_up)
        self.check()
        if self.given_up:
            self.give_up(self.given_up)

    def check(self) -> None:
        """End the wait if all copies that count have the commit. Call this when one has more of the
        log, and when others count than before.
        """
        waiting = self._waiting
        if waiting is None:
            return
        if self.copies is None or self.copies.covers(waiting.end):
            self._waiting = None
            self._copied_end = waiting.end
            if self.folders > 1:
                self.waits.observe(self._boot_ns() - waiting.since_ns)
            waiting.on_copied()

    def give_up(self, reason: str) -> None:
        """Let the commit that waits fail, or the first one that has to wait."""
        self.given_up = reason
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.on_given_up(reason)
