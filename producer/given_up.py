"""Messages that were given up, counted until somebody is told.  Pure.

GivenUp   why some messages were given up together: the outcome that their futures raise
Untold    how many messages were given up since the last `flush` whose futures nobody awaited
"""

from __future__ import annotations

from ..protocol.errors import Fate, GivenUpError, KeylaneError
from ..protocol.text import counted

CAUSES_KEPT = 16
"""Only the first cause is told; a later one steps in where all messages of the first were told by their futures."""


class Untold:
    """Messages given up and not told; counts are exact, however many there are."""

    __slots__ = ("causes", "messages", "unknown")

    def __init__(self) -> None:
        self.messages = 0
        self.unknown = 0
        """Of these, messages that may be stored."""
        self.causes: list[GivenUp] = []

    def error(self) -> GivenUpError | None:
        """What `flush` raises; None if every caller was told."""
        if not self.messages:
            return None
        cause = next((one.cause for one in self.causes if one.untold), None)
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
    """Messages given up for one cause.  `doubtful`: the last try of each may have stored it."""

    __slots__ = ("_summary", "cause", "doubtful", "untold")

    def __init__(self, cause: KeylaneError, summary: Untold, *, doubtful: bool = False) -> None:
        self.cause = cause
        self.doubtful = doubtful
        self.untold = 0
        self._summary = summary

    def count(self, messages: int, unknown: int) -> None:
        """So many messages got this outcome; `unknown` of them may be stored."""
        summary = self._summary
        self.untold += messages
        summary.messages += messages
        summary.unknown += unknown
        if messages and len(summary.causes) < CAUSES_KEPT:
            summary.causes.append(self)

    def told(self, *, unknown: bool) -> None:
        """The future of one more message raises this."""
        self.untold -= 1
        self._summary.messages -= 1
        self._summary.unknown -= unknown

    def error(self, *, unknown: bool) -> KeylaneError:
        """A new error object for one caller."""
        return self.cause.copy(Fate.UNKNOWN if unknown else Fate.NOT_DONE)
