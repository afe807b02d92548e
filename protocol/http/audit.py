"""Bodies of the control calls about the audit log.  Pure."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

TEXT_CHARS_MAX: Final = 200
EVENTS_MAX: Final = 500
"""In a call, and in a page."""
_Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
_Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class AuditEvent(Struct, frozen=True, kw_only=True):
    """Who did what, or was refused; never with keys, values, tokens or capabilities."""

    at_ms: _Number
    """The calendar of the server."""
    who: _Text
    """The principal; "" if it is not known."""
    remote: _Text
    """The address of the caller's host."""
    did: _Text
    """The call, with the names of its parameters and not their values."""
    subject: _Text
    group: _Text
    outcome: _Text
    """done or refused."""
    code: _Number = 0
    """Of the error; 0: none."""
    detail: _Text = ""
    times: _Number = 1
    """The same refusal at the same server within a second or so is one event."""
    server: _Text = ""
    """Which server: its broker group, or `metaserver` and its address."""


class NoteAudit(Struct, frozen=True, kw_only=True):
    """Events of a broker."""

    events: Annotated[list[AuditEvent], Meta(max_length=EVENTS_MAX)]


class AuditRow(Struct, frozen=True, kw_only=True):
    """An event as it is stored."""

    audit_id: int
    event: AuditEvent


class AuditPage(Struct, frozen=True, kw_only=True):
    """Events, the newest first."""

    rows: list[AuditRow]
    before: int | None = None
    """Ask with this for older ones; None: there are none."""
