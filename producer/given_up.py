"""Counts messages that were given up, until the caller is told of them.  Pure.

GivenUp   the outcome of messages that were given up together: their futures raise its cause
Untold    the number of messages given up since the last `flush` whose futures were not awaited
"""

from __future__ import annotations

from ..protocol.errors import Fate, GivenUpError, KeylaneError
from ..protocol.text import counted

CAUSES_KEPT = 16
"""`flush` names the first cause of which a message is untold; the others are kept for when all of the first are told."""


class Untold:
    """Counts of messages that were given up and of which no future told; the counts are exact."""

    __slots__ = ("causes", "messages", "unknown")

    def __init__(self) -> None:
        self.messages = 0
        self.unknown = 0
        """How many of `messages` may be stored."""
        self.causes: list[GivenUp] = []

    def error(self) -> GivenUpError | None:
        """The error for `flush`; None if every message was told."""
        if not self.messages:
            return None
        cause = next((given_up.cause for given_up in self.causes if given_up.untold), None)
        gone = counted(self.messages, "message was", "messages were")
        if self.messages == 1:
            fate = "it may be stored" if self.unknown else "it is not stored"
        else:
            fate = f"{self.unknown} of them may be stored"
        text = f"{gone} given up, {fate}"
        if cause is not None:
            text += f"; the first: {cause.message}"
        error = GivenUpError(text, messages=self.messages, unknown=self.unknown)
        error.fate = Fate.UNKNOWN if self.unknown else Fate.NOT_DONE
        error.__cause__ = cause
        return error


class GivenUp:
    """Messages given up for the same cause.  `doubtful`: the last try of each may have stored it."""

    __slots__ = ("_summary", "cause", "doubtful", "untold")

    def __init__(self, cause: KeylaneError, summary: Untold, *, doubtful: bool = False) -> None:
        self.cause = cause
        self.doubtful = doubtful
        self.untold = 0
        self._summary = summary

    def count(self, messages: int, unknown: int) -> None:
        """Count messages with this outcome, `unknown` of which may be stored."""
        summary = self._summary
        self.untold += messages
        summary.messages += messages
        summary.unknown += unknown
        if messages and len(summary.causes) < CAUSES_KEPT:
            summary.causes.append(self)

    def told(self, *, unknown: bool) -> None:
        """Note that the future of a message raises this."""
        self.untold -= 1
        self._summary.messages -= 1
        self._summary.unknown -= unknown

    def error(self, *, unknown: bool) -> KeylaneError:
        """A new error object for a caller."""
        return self.cause.copy(Fate.UNKNOWN if unknown else Fate.NOT_DONE)
