"""The consumer's side of a session that holds nothing, and does not lose it."""

from __future__ import annotations


class QuietHolder:
    """What a membership asks its holder, but for the grants; an error fails the test."""

    def on_session_lost(self) -> None:
        raise AssertionError("the session is never lost here")

    def drained(self) -> tuple[int, ...]:
        return ()

    def parked(self) -> tuple[int, ...]:
        return ()

    def holding(self, _session: str) -> tuple[tuple[int, int], ...]:
        return ()

    def unreached(self) -> tuple[str, ...]:
        return ()

    def fail(self, error: BaseException) -> None:
        raise error
