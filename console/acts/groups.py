"""Changes of consumer groups, and the question why nothing arrives at one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ...admin import Admin, GroupReset
from ...protocol.errors import InvalidRequestError
from ...protocol.reading.instants import parse_ago_ms
from ...protocol.text import key_text, parse_number
from ..page import Sentence
from ..shown import count, parse_hex
from .act import PLAN_LINES_MAX, ActResult, Form, Values, option


async def why(admin: Admin, form: Form) -> ActResult:
    """Ask why messages do not arrive."""
    key = parse_hex(form["key"]) if form["hex"] else form["key"].encode()
    found = await admin.why(form["subject"], form["group"], key=key or None)
    about = f", key {key_text(key)}" if key else ""
    return ActResult(
        (f"{found.group} on {found.subject}{about}:",),
        wrong=tuple(Sentence(each.text, each.step) for each in found.causes),
        unknown=tuple(map(Sentence, found.unknown)),
    )


def why_words(values: Values) -> list[str]:
    """Return the option that names the key; in hexadecimal what cannot be typed."""
    key = values.get("key", "")
    if values.get("hex") or key.isprintable():
        return option("--key-hex" if values.get("hex") else "--key", key)
    return ["--key-hex", key.encode().hex()]


async def create_group(admin: Admin, form: Form) -> str:
    """Create a group."""
    await admin.create_group(
        form["subject"],
        form["group"],
        start=form["start"] or "earliest",
        consume_strategy=form["strategy"],
    )
    return f"Group {form['group']} is created."


def _who(form: Form) -> str:
    client = form["client"]
    return f"Consumers named {client}" if client else f"The consumers of {form['group']}"


async def suspend(admin: Admin, form: Form) -> str:
    """Suspend a group, or its consumers of a name."""
    await admin.suspend_group(form["subject"], form["group"], client=form.optional("client"))
    return f"{_who(form)} release their partitions, and get none."


async def resume(admin: Admin, form: Form) -> str:
    """Undo a suspension."""
    await admin.resume_group(form["subject"], form["group"], client=form.optional("client"))
    return f"{_who(form)} get partitions again."


def reset_lines(reset: GroupReset) -> tuple[str, ...]:
    """Return where a reset sets the cursors."""
    lines = [
        f"partition {each.partition_id}: "
        + (f"{count(each.before)} → " if each.before is not None else "")
        + count(each.cursor)
        for each in reset.cursors[:PLAN_LINES_MAX]
    ]
    if len(reset.cursors) > PLAN_LINES_MAX:
        lines.append(f"and {len(reset.cursors) - PLAN_LINES_MAX} more partitions")
    back = sum(max(0, (each.before or 0) - each.cursor) for each in reset.cursors)
    ahead = sum(max(0, each.cursor - (each.before or 0)) for each in reset.cursors)
    if reset.cursors and reset.cursors[0].before is not None:
        lines.insert(0, f"{count(back)} messages are handled again, {count(ahead)} are skipped")
    return tuple(lines)


def _reset_place(form: Form) -> dict[str, Any]:
    """Return the arguments of `Admin.reset_group` that say where. Raises InvalidRequestError."""
    text = form["to"].strip()
    if text in {"earliest", "latest"}:
        return {"to": text}
    offset = parse_number(text)
    if offset is not None:
        return {"to": "offset", "offset": offset}
    ago_ms = parse_ago_ms(text)
    if ago_ms is not None:
        return {"to": "time", "at_ms": form.now_ms - ago_ms}
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(
            "reset to earliest, latest, a time ago such as -1h, an ISO 8601 time, or an offset of "
            f"a partition, not to {text!r:.60}"
        ) from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return {"to": "time", "at_ms": int(at.timestamp() * 1000)}


async def reset(admin: Admin, form: Form) -> tuple[str, ...]:
    """Set where a group reads on."""
    found = await admin.reset_group(
        form["subject"],
        form["group"],
        partition_id=form.number("partition") if form["partition"].strip() else None,
        live=bool(form["live"]) and not form.dry_run,
        dry_run=form.dry_run,
        **_reset_place(form),
    )
    return reset_lines(found) if form.dry_run else ("The cursors are set.", *reset_lines(found))


async def cancel_reset(admin: Admin, form: Form) -> str:
    """Cancel a reset that waits."""
    await admin.cancel_reset(form["subject"], form["group"])
    return "The reset is canceled: consumers continue where they were."


async def set_group(admin: Admin, form: Form) -> str:
    """Store the failure policy of a group."""
    policy: dict[str, Any] = {name: form.optional(name) for name in ("on_failure", "on_full")}
    await admin.set_group(
        form["subject"],
        form["group"],
        **policy,
        tries_max=form.number("tries_max") if form["tries_max"].strip() else None,
        forget=bool(form["forget"]),
    )
    return "The policy is stored; consumers follow it within a heartbeat."


async def delete_group(admin: Admin, form: Form) -> str:
    """Delete a group."""
    deletion = await admin.delete_group(form["subject"], form["group"], force=bool(form["force"]))
    text = "is deleted" if not deletion.left else "is being deleted"
    return f"Group {form['group']} {text}."
