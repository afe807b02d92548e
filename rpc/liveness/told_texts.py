"""Which troubles of a task the log has told: one that lasts for hours has one line, and not one for each try."""

from __future__ import annotations

import logging

TOLD_MAX = 100
"""Texts that are told between two successes: of several servers each has one of its own."""


class ToldTexts:
    """The texts of troubles that were told since the last success."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told: set[str] = set()

    def level(self, text: str) -> int:
        """The level of a line with this text: INFO once, DEBUG for repeats."""
        if text in self._told or len(self._told) >= TOLD_MAX:
            return logging.DEBUG
        self._told.add(text)
        return logging.INFO

    def over(self) -> None:
        """A try has succeeded: what fails from here on is told anew."""
        if self._told:
            self._told.clear()
