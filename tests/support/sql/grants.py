"""What a transaction of a metaserver granted: its leases before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from keylane.checker.events import Granted

_LEASES = "SELECT group_id, partition_id, token, session FROM leases WHERE session IS NOT NULL"
_SESSIONS = "SELECT session, expires_at FROM sessions"
Ask = Callable[[str], Iterable[Sequence[Any]]]
"""Runs a query in the transaction."""


class Leases:
    """The leases before the transaction: sessions, and ends by the database's clock."""

    def __init__(self, held: dict[Any, tuple[int, str]], expiry: dict[str, int]) -> None:
        self._held = held
        self._expiry = expiry

    @classmethod
    def read(cls, ask: Ask) -> Leases:
        held = {(row[0], row[1]): (row[2], row[3]) for row in ask(_LEASES)}
        return cls(held, {row[0]: row[1] for row in ask(_SESSIONS)})

    def granted(self, ask: Ask, *, now_ms: int) -> Iterator[Granted]:
        """The leases that exist at the end of the transaction and did not before."""
        return self.given(Leases.read(ask), now_ms=now_ms)

    def given(self, after: Leases, *, now_ms: int) -> Iterator[Granted]:
        """The leases that exist after the transaction and did not before."""
        for (group, partition), (token, session) in after._held.items():
            held = self._held.get((group, partition))
            if held == (token, session):
                continue
            holder, left_ms = "", 0
            if held is not None:
                holder = held[1]
                left_ms = max(0, self._expiry.get(holder, 0) - now_ms)
            yield Granted(group, partition, token, session, holder, left_ms)
