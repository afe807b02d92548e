"""Changes of tokens, rights and quotas."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ...admin import Admin
from ...protocol.errors import InvalidRequestError
from .act import ActResult, Form

LIMITS = (
    ("bytes_per_s", "--bytes", "Bytes per second"),
    ("requests_per_s", "--requests", "Requests per second"),
    ("connections", "--connections", "Connections to each broker"),
    ("sessions", "--sessions", "Consumers at a time"),
    ("subjects", "--subjects", "Number of subjects"),
    ("scheduled_bytes", "--scheduled-bytes", "Bytes of scheduled messages"),
)
"""The limits of a quota: name, option, label."""


async def create_token(admin: Admin, form: Form) -> ActResult:
    """Create a token, which is shown once."""
    text = form["ends"].strip()
    try:
        ends = datetime.fromisoformat(text) if text else None
    except ValueError:
        raise InvalidRequestError(f"the end is an ISO 8601 time, not {text!r:.60}") from None
    if ends is not None and ends.tzinfo is None:
        ends = ends.replace(tzinfo=UTC)
    made = await admin.create_token(form["principal"], label=form["label"], ends=ends)
    line = f"Token {made.view.token_id} of {made.view.principal}. It is never shown again:"
    return ActResult((line,), made.token)


async def revoke_token(admin: Admin, form: Form) -> str:
    """Revoke a token."""
    view = await admin.revoke_token(form.number("id"))
    return f"Token {view.token_id} of {view.principal} is revoked."


def _grant(form: Form) -> dict[str, Any]:
    return {
        "principal": form["principal"],
        "right": form["right"],
        "subject": form["subject"] or "*",
        "group": form["consumer_group"] or "*",
    }


async def grant(admin: Admin, form: Form) -> str:
    """Grant a right."""
    await admin.grant(**_grant(form))
    return f"{form['principal']} has the right."


async def revoke_grant(admin: Admin, form: Form) -> str:
    """Revoke a right."""
    await admin.revoke_grant(**_grant(form))
    return f"{form['principal']} no longer has this right."


def _quota(form: Form) -> dict[str, Any]:
    return {"name": form["name"], "kind": "subject" if form["for_subjects"] else "principal"}


async def set_quota(admin: Admin, form: Form) -> str:
    """Set the limits of a name."""
    limits: dict[str, Any] = {name: form.number(name, 0) for name, _, _ in LIMITS}
    await admin.set_quota(**_quota(form), **limits)
    return f"The limits of {form['name']} are set."


async def unset_quota(admin: Admin, form: Form) -> str:
    """Remove the limits of a name."""
    await admin.unset_quota(**_quota(form))
    return f"{form['name']} has no limits of its own."
