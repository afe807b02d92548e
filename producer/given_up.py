"""Counts messages that were given up, until they are reported to the caller. Pure.

GivenUp      the outcome of messages that were given up together: their futures raise its cause
Unreported   the number of messages given up since the last `flush` whose futures were not awaited
"""

from __future__ import annotations

from ..protocol.errors import Fate, GivenUpError, KeylaneError
from ..protocol.text import counted

CAUSES_KEPT = 16
"""The number of causes that are kept: `flush` names the first one, and the others replace it once
all messages of the first are reported.
"""


class Unreported:
    """Exact counts of messages that were given up and that no future has reported."""

    __slots__ = ("_what", "causes", "messages", "unknown")

    def __init__(self, what: str = "message") -> None:
        self._what = what
        self.messages = 0
        self.unknown = 0
        """The number of `messages` that may be stored."""
        self.causes: list[GivenUp] = []

    def error(self) -> GivenUpError | None:
        """Return the error for `flush`; None if every message was reported."""
        if not self.messages:
            return None
        cause = next((given_up.cause for given_up in self.causes if given_up.unreported), None)
        gone = counted(self.messages, f"{self._what} was", f"{self._what}s were")
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
    """Messages given up for the same cause. `doubtful` means that the last try of each message may
    have stored it.
    """

    __slots__ = ("_summary", "cause", "doubtful", "unreported")

    def __init__(self, cause: KeylaneError, summary: Unreported, *, doubtful: bool = False) -> None:
        self.cause = cause
        self.doubtful = doubtful
        self.unreported = 0
        self._summary = summary

    def count(self, messages: int, unknown: int) -> None:
        """Count messages with this outcome, `unknown` of which may be stored."""
        summary = self._summary
        self.unreported += messages
        summary.messages += messages
        summary.unknown += unknown
        if messages and len(summary.causes) < CAUSES_KEPT:
            summary.causes.append(self)

    def reported(self, *, unknown: bool) -> None:
        """Note that the future of a message reports this outcome by raising it."""
        summary = self._summary
        self.unreported -= 1
        summary.messages -= 1
        summary.unknown -= unknown
        if not self.unreported:  # room for the cause of others
            summary.causes = [each for each in summary.causes if each is not self]

    def error(self, *, unknown: bool) -> KeylaneError:
        """Return a new error object for a caller."""
        return self.cause.copy(Fate.UNKNOWN if unknown else Fate.NOT_DONE)
