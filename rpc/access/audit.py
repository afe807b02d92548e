"""The audit log. The logger `keylane.audit` writes a line for each audited call and each refusal.

    {…, "logger": "keylane.audit", "program": "metaserver",
     "message": "shop: POST /v1/subjects/{subject}/delete: refused", …,
     "at": "2026-11-24T02:40:00.123Z", "who": "shop", "from": "127.0.0.1",
     "did": "POST /v1/subjects/{subject}/delete", "subject": "orders", "group": "",
     "outcome": "refused", "error": "AccessDeniedError", "code": 1351}

In a text log, `at` and the fields after it form a JSON object at the end of the line.

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
"""The attribute of a log record that holds additional fields; a text log shows them as JSON after
the message.
"""
audit_log.setLevel(logging.INFO)  # even if the server only logs warnings
_AUDITED_RIGHTS = frozenset({Rights.ADMINISTER, Rights.JOIN})


def is_audited(endpoint: Endpoint[object]) -> bool:
    """Return True for calls that change subjects, groups or grants, and for calls that show or
    change messages.
    """
    changes = endpoint.rights in _AUDITED_RIGHTS and not endpoint.is_get
    return changes or (endpoint.rights is Rights.READ)


def record_event(
    *,
    at_ms: int,
    who: str,
    remote: str,
    action: str,
    target: AccessTarget,
    error: KeylaneError | None = None,
    detail: str = "",
) -> AuditEvent:
    """
    Write an event to the audit log, and return it.

    Args:
        at_ms: wall-clock time in milliseconds since 1970.
        who: the caller's principal; "" if unknown.
        remote: the address of the caller's host.
        action: the name of the call, with the names of its parameters but not their values.
        detail: an additional number or name, such as a partition.
    """
    timestamp = datetime.fromtimestamp(at_ms / 1000, UTC)
    event = AuditEvent(
        at_ms=max(0, at_ms),
        who=_printable_start(who),
        remote=_printable_start(remote),
        did=_printable_start(action),
        subject=_printable_start(target.subject),
        group=_printable_start(target.group),
        outcome="done" if error is None else "refused",
        code=0 if error is None else error.code,
        detail=_printable_start(detail),
    )
    line: dict[str, object] = {
        "at": timestamp.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
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


def _printable_start(text: str) -> str:
    """Return the start of a text, escaped for the log and the database: a refused caller may have
    sent U+0000, which no database accepts.
    """
    return printable(text[:TEXT_CHARS_MAX])[:TEXT_CHARS_MAX]
