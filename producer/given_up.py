"""Counts messages that were given up, until they are reported to the caller. Pure.

GivenUpOutcome       the outcome of messages that were given up together; their futures raise its
                     cause
UnreportedMessages   counts the messages given up since the last `flush` whose futures were not
                     awaited
"""

from __future__ import annotations

from ..protocol.errors import Fate, GivenUpError, KeylaneError
from ..protocol.text import counted

CAUSES_KEPT = 16
"""The maximum number of stored causes: `flush` names the first one with unreported messages."""


class UnreportedMessages:
    """Counts given-up messages that no future has reported."""

    __slots__ = ("_noun", "causes", "message_count", "unknown_count")

    def __init__(self, noun: str = "message") -> None:
        self._noun = noun
        self.message_count = 0
        self.unknown_count = 0
        """How many of the `message_count` messages may be stored."""
        self.causes: list[GivenUpOutcome] = []

    def build_error(self) -> GivenUpError | None:
        """Return the error for `flush`, or None if every message was reported."""
        if not self.message_count:
            return None
        cause = next(
            (given_up.cause for given_up in self.causes if given_up.unreported_count), None
        )
        subject = counted(self.message_count, f"{self._noun} was", f"{self._noun}s were")
        if self.message_count == 1:
            fate = "it may be stored" if self.unknown_count else "it is not stored"
        else:
            fate = f"{self.unknown_count} of them may be stored"
        text = f"{subject} given up, {fate}"
        if cause is not None:
            text += f"; the first: {cause.message}"
        error = GivenUpError(text, messages=self.message_count, unknown=self.unknown_count)
        error.fate = Fate.UNKNOWN if self.unknown_count else Fate.NOT_DONE
        error.__cause__ = cause
        return error


class GivenUpOutcome:
    """The outcome of messages given up for the same cause; `doubtful` is True if their last attempt
    may have stored them.
    """

    __slots__ = ("_summary", "cause", "doubtful", "unreported_count")

    def __init__(
        self, cause: KeylaneError, summary: UnreportedMessages, *, doubtful: bool = False
    ) -> None:
        self.cause = cause
        self.doubtful = doubtful
        self.unreported_count = 0
        self._summary = summary

    def add_messages(self, messages: int, unknown: int) -> None:
        """Add messages with this outcome; `unknown` of them may be stored."""
        summary = self._summary
        self.unreported_count += messages
        summary.message_count += messages
        summary.unknown_count += unknown
        if messages and len(summary.causes) < CAUSES_KEPT:
            summary.causes.append(self)

    def mark_reported(self, *, unknown: bool) -> None:
        """Subtract a message whose future has raised this outcome."""
        summary = self._summary
        self.unreported_count -= 1
        summary.message_count -= 1
        summary.unknown_count -= unknown
        if not self.unreported_count:  # all reported: another cause may take the slot
            summary.causes = [cause for cause in summary.causes if cause is not self]

    def copy_error(self, *, unknown: bool) -> KeylaneError:
        """Return a copy of the cause for one caller, with the fate of that caller's message."""
        return self.cause.copy(Fate.UNKNOWN if unknown else Fate.NOT_DONE)
