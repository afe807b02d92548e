"""`keylane parked` list, redrive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ....admin import Admin, ParkedKeyView, ParkState
from ....protocol.errors import ConfigError
from ....protocol.scheduled.deliver_at import shown
from ....protocol.text import counted
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import make_table, show_json, show_line, show_table
from .selection import Redriving, Selection, confirm, failure_text, key_facts, key_text

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    *("partition#", "key", "state", "messages#", "parked since", "first", "tries#"),
    *("failed at", "last failure", "consumer", "next try"),
)
ERRORS_SHOWN = 20
"""Different errors of the messages of one partition that have no order."""
BY_ERROR_MAX = 100_000
"""Of more messages without an order only their number and their last failure is asked for."""


async def list_parked(
    meta: str, output: OutputFormat, subject: str, group: str, selection: Selection
) -> None:
    """Show the parked keys that are asked for."""
    async with open_admin(meta) as admin:
        views = await selected(admin, subject, group, selection, retrying=True)
        loose = sum(view.messages for view in views if view.is_loose)
        if 0 < loose <= BY_ERROR_MAX:
            asked = selection.asked | {"retrying": True, "by_error": True}
            views = [view async for view in admin.parked(subject, group, **asked)]
    if output is OutputFormat.JSON:
        show_json([key_facts(view) for view in views])
    elif views:
        show_table(parked_table(f"{group} on {subject}", views))
    else:
        what = "no dead letters" if selection.among_dead else "nothing is parked"
        show_line(f"{group} on {subject}: {what}")


async def redrive_parked(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    selection: Selection,
    redriving: Redriving,
) -> None:
    """Redrive the parked keys that are asked for; without a key only after a yes."""
    key = selection.wanted_key()
    whole = selection.key is None and selection.among_dead is True
    if redriving.all_keys and selection.said:
        raise ConfigError("--all is every key: leave the others out, or --all")
    if not (redriving.all_keys or selection.said or whole):
        raise ConfigError("say which keys: --key, --older-than, --error, …, or --all")
    async with open_admin(meta) as admin:
        if key is ...:
            views = await selected(admin, subject, group, selection)
            parked = [view for view in views if view.state is not ParkState.REDRIVING]
            if parked:
                confirm(f"Redrive {_sum(parked)} of {group} on {subject}?", yes=redriving.yes)
        redriven = await admin.redrive(
            subject,
            group,
            all=redriving.all_keys,
            **selection.asked,
        )
    if output is OutputFormat.JSON:
        show_json({"redriven": [key_facts(view) for view in redriven]})
    elif not redriven:
        show_line("nothing to redrive: no such key is parked, or all are being redriven already")
    else:
        for view in redriven:
            what = counted(view.messages, "message")
            show_line(f"partition {view.partition_id}: {key_text(view.key)}: {what} redriven")
        show_line(f"{_sum(redriven)} redriven")


async def selected(
    admin: Admin, subject: str, group: str, selection: Selection, *, retrying: bool = False
) -> list[ParkedKeyView]:
    """The parked keys that are asked for."""
    views = admin.parked(subject, group, retrying=retrying, **selection.asked)
    return [view async for view in views]


def parked_table(whose: str, views: Sequence[ParkedKeyView]) -> Table:
    """Parked keys, one in each row."""
    parked = any(view.key is not None or view.tries for view in views)
    title = f"{whose}: {_sum(views)}{' parked' if parked else ''}"
    rows: list[tuple[object, ...]] = []
    for _, group in groupby(views, key=_which):
        of_one = list(group)
        rows += map(_row, of_one[:ERRORS_SHOWN])
        if rest := of_one[ERRORS_SHOWN:]:
            more = f"({counted(len(rest), 'more error')})"
            count = sum(view.messages for view in rest)
            rows.append((rest[0].partition_id, None, None, count, *(None,) * 4, more, None, None))
    return make_table(title, COLUMNS, rows)


def _which(view: ParkedKeyView) -> tuple[int, bytes | None, int | None, ParkState]:
    """What the views of one key, or of one kind of messages without an order, have in common."""
    return view.partition_id, view.key, view.tries, view.state


def _state(view: ParkedKeyView) -> str:
    """The state as a table names it: of messages without an order, why they are set aside."""
    if view.state is not ParkState.PARKED:
        return view.state
    if view.tries:
        return "waits for retry"
    return "dead" if view.key is None else view.state


def _row(view: ParkedKeyView) -> tuple[object, ...]:
    failure = view.failure
    return (
        view.partition_id,
        key_text(view.key) if view.tries is None else "(dead letters)" if not view.tries else None,
        _state(view),
        view.messages,
        shown(view.since_ms),
        None if view.first_offset < 0 else f"{view.first_source}:{view.first_offset}",
        view.tries or (None if failure is None else failure.attempts),
        None if failure is None else shown(failure.at_ms),
        None if failure is None else failure_text(failure),
        None if failure is None else failure.client,
        None if view.next_ms is None else shown(view.next_ms),
    )


def _sum(views: Sequence[ParkedKeyView]) -> str:
    """Messages of order keys, and those that have no order, each kind by its name."""
    keyed = [view for view in views if view.key]
    dead = [view for view in views if view.key is None and not view.tries]
    keyless = [view for view in views if view.key == b""]
    waiting = [view for view in views if view.tries]
    keys = counted(len({(view.partition_id, view.key) for view in keyed}), "key")
    kinds = (
        (keyed, f"message of {keys}", f"messages of {keys}"),
        (dead, "dead letter", "dead letters"),
        (keyless, "message without a key", "messages without a key"),
        (waiting, "message that waits for retry", "messages that wait for retry"),
    )
    return ", ".join(
        counted(sum(view.messages for view in some), name, names)
        for some, name, names in kinds
        if some
    )
