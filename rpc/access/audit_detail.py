"""Details of calls in the audit log besides subject and group: names and numbers from their bodies,
never keys or values. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...protocol.http.access import ChangeGrant, CreateToken, SetQuota, UnsetQuota
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
