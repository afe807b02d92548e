"""Events of the audit log: the details of calls that they name, and their way to the database, on
which their number is limited.  Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...protocol.http.access import (
    EVENTS_MAX,
    TEXT_CHARS_MAX,
    AuditEvent,
    ChangeGrant,
    CreateToken,
    SetQuota,
    UnsetQuota,
)
from ...protocol.operations import Reshape
from ...protocol.parked.views import ChangeParkedKey
from ...protocol.progress import ResetGroup
from ...protocol.text import plain_number


def detail_of(body: Any, params: Mapping[str, str]) -> str:
    """Return the detail of a call, "" if there is none; it says so if the call changes nothing."""
    detail = _detail_of(body, params)
    if getattr(body, "dry_run", False) is not True:
        return detail
    return f"dry run: {detail}" if detail else "dry run"


def _detail_of(body: Any, params: Mapping[str, str]) -> str:
    number = params.get("id", "")
    if isinstance(body, ChangeGrant):
        given = body.grant
        return f"{body.principal}: {given.right.value} {given.subject}, group {given.group}"
    if isinstance(body, CreateToken):
        return body.principal
    if isinstance(body, SetQuota):
        limits = body.quota
        return (
            f"{body.kind} {body.name}: {limits.bytes_per_s} bytes/s, {limits.requests_per_s} "
            f"requests/s, {limits.connections} connections"
            + (f", {body.subjects} subjects" if body.subjects else "")
            + (f", {body.scheduled_bytes} scheduled bytes" if body.scheduled_bytes else "")
            + (f", {body.sessions} sessions" if body.sessions else "")
        )
    if isinstance(body, UnsetQuota):
        return f"{body.kind} {body.name}"
    if isinstance(body, Reshape):
        what = f"{body.kind.value} {body.broker_group}".strip()
        what += ", without its source" if body.without_source else ""
        return what + (", accepts the loss of what only it has" if body.accept_loss else "")
    if isinstance(body, ResetGroup):
        return f"reset to {body.to.value}"
    if isinstance(body, ChangeParkedKey):
        ranges = body.skip or body.retry or ()
        messages = sum(end - start for _source, start, end in ranges)
        what = "skip" if body.skip else "retry" if body.retry else "redrive"
        return f"{what} {messages or 'all'} messages, partition {number}"
    return f"id {number}" if plain_number(number) is not None else ""


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
