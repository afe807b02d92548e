"""Events of the audit log on their way to the database: their number is limited, and equal refusals
are counted as one. Pure.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...protocol.http.access import EVENTS_MAX, TEXT_CHARS_MAX, AuditEvent

WAITING_MAX = 10_000


class AuditBuffer:
    """
    Waiting events.

    Attributes:
        server: server that notes the events; later events carry the new value.
        lost: number of events for which there was no room.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self._waiting: dict[object, AuditEvent] = {}
        self._number = 0
        self.lost = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: AuditEvent) -> None:
        """Add an event; a refusal that equals a waiting one only raises its count."""
        self._number += 1
        key: object = self._number
        if event.outcome != "done":
            key = replace(event, at_ms=0)
            before = self._waiting.get(key)
            if before is not None:
                self._waiting[key] = replace(before, times=before.times + 1)
                return
        if len(self._waiting) >= WAITING_MAX:
            self.lost += 1
            return
        self._waiting[key] = replace(event, server=self.server[:TEXT_CHARS_MAX])

    def take(self) -> list[AuditEvent]:
        """Remove the oldest events and return them."""
        keys = list(self._waiting)[:EVENTS_MAX]
        return [self._waiting.pop(key) for key in keys]

    def put_back(self, events: list[AuditEvent]) -> None:
        """Add events again that could not be stored."""
        room = max(0, WAITING_MAX - len(self._waiting))
        self.lost += max(0, len(events) - room)
        again: dict[object, AuditEvent] = {}
        for event in events[:room]:
            self._number += 1
            again[self._number] = event
        self._waiting = again | self._waiting
