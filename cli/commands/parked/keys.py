"""`keylane parked` list and redrive: the parked keys of a consumer group."""

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
"""Number of different errors that are shown for messages without an order, per partition."""
BY_ERROR_MAX = 100_000
"""Number of messages without an order up to which they are grouped by error; for more, only their
number and last failure are shown.
"""


async def list_parked(
    meta: str, output: OutputFormat, subject: str, group: str, selection: Selection
) -> None:
    """Show the selected parked keys."""
    async with open_admin(meta) as admin:
        views = await selected(admin, subject, group, selection, retrying=True)
        loose = sum(view.messages for view in views if view.is_loose)
        if 0 < loose <= BY_ERROR_MAX:
            arguments = selection.arguments | {"retrying": True, "by_error": True}
            views = [view async for view in admin.parked(subject, group, **arguments)]
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
    """Redrive the selected parked keys; if none is named, ask first."""
    key = selection.wanted_key()
    whole = selection.key is None and selection.among_dead is True
    if redriving.all_keys and selection.is_limited:
        raise ConfigError("--all means every key: remove --all, or the other options")
    if not (redriving.all_keys or selection.is_limited or whole):
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
            **selection.arguments,
        )
    if output is OutputFormat.JSON:
        show_json({"redriven": [key_facts(view) for view in redriven]})
    elif not redriven:
        show_line("nothing to redrive: no such key is parked, or all are already being redriven")
    else:
        for view in redriven:
            what = counted(view.messages, "message")
            show_line(f"partition {view.partition_id}: {key_text(view.key)}: {what} redriven")
        show_line(f"{_sum(redriven)} redriven")


async def selected(
    admin: Admin, subject: str, group: str, selection: Selection, *, retrying: bool = False
) -> list[ParkedKeyView]:
    """Return the selected parked keys."""
    views = admin.parked(subject, group, retrying=retrying, **selection.arguments)
    return [view async for view in views]


def parked_table(whose: str, views: Sequence[ParkedKeyView]) -> Table:
    """Return a table with a parked key in each row."""
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
    """Return what the views of one key, or of one kind of messages without an order, have in
    common.
    """
    return view.partition_id, view.key, view.tries, view.state


def _state(view: ParkedKeyView) -> str:
    """Return the text of the state column; for unordered messages, why they are parked."""
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
    """Return the numbers of messages with an order key and of each kind without an order."""
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
