"""Audit log events: the details of calls, and a bounded buffer of events that are not in the
database yet. Pure.
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
from ...protocol.text import parse_number


def call_detail(body: Any, params: Mapping[str, str]) -> str:
    """Return the detail of a call, or "" if it has none. A dry run is marked as such."""
    detail = _describe_body(body, params)
    if getattr(body, "dry_run", False) is not True:
        return detail
    return f"dry run: {detail}" if detail else "dry run"


def _describe_body(body: Any, params: Mapping[str, str]) -> str:
    number = params.get("id", "")
    if isinstance(body, ChangeGrant):
        grant = body.grant
        return f"{body.principal}: {grant.right.value} {grant.subject}, group {grant.group}"
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
        operation = f"{body.kind.value} {body.broker_group}".strip()
        operation += ", without its source" if body.without_source else ""
        return operation + (", accepts the loss of what only it has" if body.accept_loss else "")
    if isinstance(body, ResetGroup):
        return f"reset to {body.to.value}"
    if isinstance(body, ChangeParkedKey):
        ranges = body.skip or body.retry or ()
        messages = sum(end - start for _source, start, end in ranges)
        change = "skip" if body.skip else "retry" if body.retry else "redrive"
        return f"{change} {messages or 'all'} messages, partition {number}"
    return f"id {number}" if parse_number(number) is not None else ""


WAITING_MAX = 10_000


class AuditBuffer:
    """
    Holds a limited number of events until they are stored in the database.

    Attributes:
        server: the name of the server that records the events; a change applies to later events.
        lost: the number of events that were dropped because the buffer was full.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self._buffered: dict[object, AuditEvent] = {}
        self._last_number = 0
        self.dropped_count = 0

    def __len__(self) -> int:
        return len(self._buffered)

    def add(self, event: AuditEvent) -> None:
        """Add an event. A refusal equal to a buffered one only increments the count of that one."""
        self._last_number += 1
        key: object = self._last_number
        if event.outcome != "done":
            key = replace(event, at_ms=0)
            buffered_event = self._buffered.get(key)
            if buffered_event is not None:
                self._buffered[key] = replace(buffered_event, times=buffered_event.times + 1)
                return
        if len(self._buffered) >= WAITING_MAX:
            self.dropped_count += 1
            return
        self._buffered[key] = replace(event, server=self.server[:TEXT_CHARS_MAX])

    def pop_oldest(self) -> list[AuditEvent]:
        """Remove and return up to EVENTS_MAX of the oldest events."""
        keys = list(self._buffered)[:EVENTS_MAX]
        return [self._buffered.pop(key) for key in keys]

    def requeue(self, events: list[AuditEvent]) -> None:
        """Put events that could not be stored back in front of all others; those that do not fit
        are lost.
        """
        free_slots = max(0, WAITING_MAX - len(self._buffered))
        self.dropped_count += max(0, len(events) - free_slots)
        requeued: dict[object, AuditEvent] = {}
        for event in events[:free_slots]:
            self._last_number += 1
            requeued[self._last_number] = event
        self._buffered = requeued | self._buffered
