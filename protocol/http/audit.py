"""Bodies of the control calls about the audit log. Pure."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

TEXT_CHARS_MAX: Final = 200
EVENTS_MAX: Final = 500
"""Largest number of events in a call, and in a page."""
_Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
_Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class AuditEvent(Struct, frozen=True, kw_only=True):
    """An act of a caller, or its refusal; it never contains keys, values, tokens or
    capabilities.
    """

    at_ms: _Number
    """Time of the server's calendar, in milliseconds since 1970."""
    who: _Text
    """Principal that acted; "" if it is not known."""
    remote: _Text
    """Address of the caller's host."""
    did: _Text
    """Name of the call, with the names of its parameters but not their values."""
    subject: _Text
    group: _Text
    outcome: _Text
    """Outcome of the call: done or refused."""
    code: _Number = 0
    """Code of the error; 0: none."""
    detail: _Text = ""
    times: _Number = 1
    """Number of times: equal refusals at one server within about a second are one event."""
    server: _Text = ""
    """Server that noted it: its broker group, or `metaserver` and its address."""


class NoteAudit(Struct, frozen=True, kw_only=True):
    """Events that a broker reports."""

    events: Annotated[list[AuditEvent], Meta(max_length=EVENTS_MAX)]


class AuditRow(Struct, frozen=True, kw_only=True):
    """An event with the id under which it is stored."""

    audit_id: int
    event: AuditEvent


class AuditPage(Struct, frozen=True, kw_only=True):
    """Events, the newest first."""

    rows: list[AuditRow]
    before: int | None = None
    """Value of `before` in a call for older events; None: there are none."""
