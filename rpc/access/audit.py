"""The audit log: the logger `keylane.audit` writes a line for each act and each refusal.

    {…, "logger": "keylane.audit", "program": "metaserver",
     "message": "shop: POST /v1/subjects/{subject}/delete: refused", …,
     "at": "2026-11-24T02:40:00.123Z", "who": "shop", "from": "127.0.0.1",
     "did": "POST /v1/subjects/{subject}/delete", "subject": "orders", "group": "",
     "outcome": "refused", "error": "AccessDeniedError", "code": 1351}

In a text log, the fields from `at` on are a JSON object after the logger's name.

Lines contain names and numbers, never values, keys, tokens or capabilities.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from ...protocol.errors import KeylaneError
from ...protocol.http.access import TEXT_CHARS_MAX, AuditEvent
from ...protocol.http.endpoint import Endpoint, Rights
from ...protocol.text import printable
from .caller import AccessTarget

audit_log = logging.getLogger("keylane.audit")
FIELDS = "fields"
"""Attribute of a log record with the additional fields of its line; in text they follow the message
as JSON.
"""
audit_log.setLevel(logging.INFO)  # also where a server logs only warnings
_SELDOM = frozenset({Rights.ADMINISTER, Rights.JOIN})


def is_audited(endpoint: Endpoint[object]) -> bool:
    """Return True for calls that change subjects, groups and grants, or that show or change
    messages.
    """
    changes = endpoint.rights in _SELDOM and not endpoint.is_get
    return changes or (endpoint.rights is Rights.READ)


def note(
    *,
    at_ms: int,
    who: str,
    remote: str,
    did: str,
    target: AccessTarget,
    error: KeylaneError | None = None,
    detail: str = "",
) -> AuditEvent:
    """
    Write a line, and return its event.

    Args:
        at_ms: time of the calendar in milliseconds since 1970.
        who: principal; "" if it is not known.
        remote: address of the caller's host.
        did: name of the call, with the names of its parameters but not their values.
        detail: an additional number or name, such as a partition.
    """
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    event = AuditEvent(
        at_ms=max(0, at_ms),
        who=_shown(who),
        remote=_shown(remote),
        did=_shown(did),
        subject=_shown(target.subject),
        group=_shown(target.group),
        outcome="done" if error is None else "refused",
        code=0 if error is None else error.code,
        detail=_shown(detail),
    )
    line: dict[str, object] = {
        "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "who": event.who,
        "from": event.remote,
        "did": event.did,
        "subject": event.subject,
        "group": event.group,
        "outcome": event.outcome,
    }
    if detail:
        line["detail"] = event.detail
    if error is not None:
        line |= {"error": type(error).__name__, "code": error.code}
    audit_log.info("%s: %s: %s", event.who or "?", event.did, event.outcome, extra={FIELDS: line})
    return event


def _shown(text: str) -> str:
    """Return the part of a text that a line and the database can hold: the text of a refused caller
    may contain U+0000, which no database accepts.
    """
    return printable(text[:TEXT_CHARS_MAX])[:TEXT_CHARS_MAX]
