"""Creation, settings and deletion of subjects."""

from __future__ import annotations

from ...admin import Admin
from ...protocol.text import counted
from .act import Form, Values, option


async def create_subject(admin: Admin, form: Form) -> str:
    """Create a subject."""
    view = await admin.create_subject(
        form["subject"],
        partitions=form.number("partitions", 2),
        order_strategy=form["order_strategy"],
        retention=form["retention"],
        static=bool(form["static"]),
    )
    return f"Subject {form['subject']} has {counted(len(view.route.partitions), 'partition')}."


def size_words(values: Values) -> list[str]:
    """Return the option for the number of partitions, or of logic queues."""
    word = "--queues" if values.get("static") else "--partitions"
    return option(word, values.get("partitions", ""), "2")


async def set_subject(admin: Admin, form: Form) -> tuple[str, ...]:
    """Change the settings of a subject."""
    change = await admin.set_subject(
        form["subject"],
        order_strategy=form.optional("order_strategy"),
        retention=form.optional("retention"),
        dry_run=form.dry_run,
    )
    changes = [
        f"{name.replace('_', ' ')}: {change.before[name]} → {value}"
        for name, value in change.after.items()
        if change.before[name] != value
    ]
    return tuple(changes) or ("Nothing changes.",)


async def delete_subject(admin: Admin, form: Form) -> str:
    """Delete a subject."""
    deletion = await admin.delete_subject(form["subject"], force=bool(form["force"]))
    if not deletion.left:
        return f"{form['subject']} is deleted."
    left = counted(deletion.left, "partition")
    return f"{form['subject']} is being deleted: brokers have yet to drop {left}."
