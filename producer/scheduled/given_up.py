"""Counts scheduled messages that were given up, until their futures or `flush` have told of them.  Pure."""

from __future__ import annotations

from collections.abc import Hashable

from ...protocol.errors import Fate, GivenUpError, KeylaneError
from ...protocol.text import counted
from ..given_up import CAUSES_KEPT


class UntoldMessages:
    """Exact counts; a program that never calls `flush` has any number of such messages, so of few the error is kept."""

    def __init__(self) -> None:
        self.messages = 0
        self.unknown = 0
        """How many of `messages` a broker may keep."""
        self._causes: dict[Hashable, BaseException] = {}

    def add(self, future: Hashable, error: BaseException) -> None:
        """Note a message that was given up, and of which nothing has told."""
        self.messages += 1
        self.unknown += _is_unknown(error)
        if len(self._causes) < CAUSES_KEPT:
            self._causes[future] = error

    def told(self, future: Hashable, error: BaseException) -> None:
        """Note that the future of such a message has told of it."""
        self.messages -= 1
        self.unknown -= _is_unknown(error)
        self._causes.pop(future, None)

    def error(self) -> GivenUpError | None:
        """The error for `flush`; None if all were told of."""
        if not self.messages:
            return None
        cause = next(iter(self._causes.values()), None)
        text = counted(self.messages, "scheduled message was", "scheduled messages were")
        text += " given up" if cause is None else f" given up: {cause}"
        error = GivenUpError(text, messages=self.messages, unknown=self.unknown)
        error.fate = Fate.UNKNOWN if self.unknown else Fate.NOT_DONE
        error.__cause__ = cause
        return error


def _is_unknown(error: BaseException) -> bool:
    return isinstance(error, KeylaneError) and error.fate is Fate.UNKNOWN
