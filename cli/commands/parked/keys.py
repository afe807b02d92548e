"""`keylane parked` list and redrive: the parked keys of a consumer group."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, TypedDict, TypeVar

from ....admin import Admin, ParkedKeyView, ParkState
from ....protocol.errors import ConfigError, NotFoundError, UnreachableError
from ....protocol.text import counted, format_time
from ...confirmation import confirm
from ...connection import open_admin
from ...options import OutputFormat
from ...screen import end_without, make_table, show_data, show_line, show_table
from .selection import (
    SELECTORS,
    ParkedKeyFields,
    RedriveOptions,
    Selection,
    count_tries,
    failure_text,
    key_fields,
    key_text,
    state_text,
)

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")
COLUMNS = (
    *("partition#", "key", "state", "messages#", "parked since", "oldest", "tries#"),
    *("failed at", "last failure", "consumer", "next try"),
)
ERRORS_SHOWN = 20
"""Maximum number of errors shown per partition for unordered messages."""
BY_ERROR_MAX = 100_000
"""Maximum number of unordered messages that are grouped by error. If there are more, only their
number and last failure are shown.
"""


async def list_parked(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    selection: Selection,
    *,
    limit: int | None,
) -> None:
    """Show the selected parked keys, at most `limit`. The exit status is 1 if a partition could not
    be asked.
    """
    async with open_admin(meta) as admin:
        views, unread = await from_reachable(
            admin,
            subject,
            group,
            selection,
            lambda chosen: (
                _views_by_error(admin, subject, group, chosen)
                if limit is None
                else _first_views(admin, subject, group, chosen, limit + 1)
            ),
        )
    more = limit is not None and len(views) > limit
    views = views[:limit]
    if output is not OutputFormat.TABLE:
        show_data(output, [key_fields(view) for view in views])
    elif views:
        show_table(parked_table(f"{group} on {subject}", views))
    elif not unread:
        description = "no dead letters" if selection.among_dead else "nothing is parked"
        show_line(f"{group} on {subject}: {description}")
    if more:
        show_line(f"there are more than these {limit}: --limit shows more", errors=True)
    end_without(unread)


async def from_reachable(
    admin: Admin,
    subject: str,
    group: str,
    selection: Selection,
    ask: Callable[[Selection], Awaitable[list[T]]],
) -> tuple[list[T], dict[int, str]]:
    """
    Return what is asked for of all partitions, and the problem of each partition whose broker does
    not respond.

    Raises:
        UnreachableError: none responds.
        Any other error of `ask`; NotFoundError only if all respond.
    """
    try:
        return await ask(selection), {}
    except UnreachableError:
        partitions = (await admin.describe_group(subject, group)).partitions
        unread = {each.partition_id: each.problem for each in partitions if each.problem}
        reached = sorted({each.partition_id for each in partitions} - unread.keys())
        if selection.partition is not None or not reached or not unread:
            raise
    found: list[T] = []
    for partition_id in reached:
        with contextlib.suppress(NotFoundError):
            found += await ask(replace(selection, partition=partition_id))
    return found, unread


async def _first_views(
    admin: Admin, subject: str, group: str, selection: Selection, count: int
) -> list[ParkedKeyView]:
    """Return up to `count` of the selected parked keys, and read the keys of no further
    partition.
    """
    views: list[ParkedKeyView] = []
    async for view in admin.parked(subject, group, retrying=True, **selection.arguments):
        views.append(view)
        if len(views) == count:
            break
    return views


async def _views_by_error(
    admin: Admin, subject: str, group: str, selection: Selection
) -> list[ParkedKeyView]:
    """Return the selected parked keys, and unordered messages by their errors."""
    views = await list_views(admin, subject, group, selection, retrying=True)
    unordered = sum(view.messages for view in views if view.is_loose)
    if 0 < unordered <= BY_ERROR_MAX:
        arguments = selection.arguments | {"retrying": True, "by_error": True}
        views = [view async for view in admin.parked(subject, group, **arguments)]
    return views


class RedrivenKeys(TypedDict):
    """The keys that are handled again, as JSON."""

    redriven: list[ParkedKeyFields]


async def redrive_parked(
    meta: str,
    output: OutputFormat,
    subject: str,
    group: str,
    selection: Selection,
    options: RedriveOptions,
) -> None:
    """Redrive the selected parked keys. If no key is named, as for messages without one, ask for
    confirmation first.
    """
    key = selection.selected_key()
    all_dead = selection.key is None and selection.among_dead is True
    if options.all_keys and selection.is_limited:
        raise ConfigError("--all-keys means every key: remove it, or the other options")
    if not (options.all_keys or selection.is_limited or all_dead):
        raise ConfigError(f"select keys: {SELECTORS}, or --all-keys")
    async with open_admin(meta) as admin:
        if key is ... or not key:
            views = await list_views(admin, subject, group, selection)
            parked = [view for view in views if view.state is not ParkState.REDRIVING]
            if parked:
                question = f"Redrive {_count_text(parked)} of {group} on {subject}?"
                confirm(question, yes=options.yes, required=True)
        redriven = await admin.redrive(
            subject,
            group,
            all=options.all_keys,
            **selection.arguments,
        )
    if output is not OutputFormat.TABLE:
        show_data(output, RedrivenKeys(redriven=[key_fields(view) for view in redriven]))
    elif not redriven:
        show_line("nothing to redrive: no such key is parked, or all are already being redriven")
    else:
        for view in redriven:
            description = counted(view.messages, "message")
            show_line(
                f"partition {view.partition_id}: {key_text(view.key)}: {description} redriven"
            )
        show_line(f"{_count_text(redriven)} redriven")


async def list_views(
    admin: Admin, subject: str, group: str, selection: Selection, *, retrying: bool = False
) -> list[ParkedKeyView]:
    """Return the selected parked keys."""
    views = admin.parked(subject, group, retrying=retrying, **selection.arguments)
    return [view async for view in views]


def parked_table(title_prefix: str, views: Sequence[ParkedKeyView]) -> Table:
    """Build a table with one parked key per row."""
    parked = any(view.key is not None or view.tries for view in views)
    title = f"{title_prefix}: {_count_text(views)}{' parked' if parked else ''}"
    rows: list[tuple[object, ...]] = []
    for _, group in groupby(views, key=_group_key):
        grouped = list(group)
        rows += map(_row, grouped[:ERRORS_SHOWN])
        if hidden := grouped[ERRORS_SHOWN:]:
            more_text = f"({counted(len(hidden), 'more error')})"
            count = sum(view.messages for view in hidden)
            rows.append(
                (hidden[0].partition_id, None, None, count, *(None,) * 4, more_text, None, None)
            )
    return make_table(title, COLUMNS, rows)


def _group_key(view: ParkedKeyView) -> tuple[int, bytes | None, int | None, ParkState]:
    """Return the key by which views are grouped: the same order key, or the same kind of unordered
    messages.
    """
    return view.partition_id, view.key, view.tries, view.state


def _row(view: ParkedKeyView) -> tuple[object, ...]:
    failure = view.failure
    return (
        view.partition_id,
        key_text(view.key) if view.tries is None else "(dead letters)" if not view.tries else None,
        state_text(view),
        view.messages,
        format_time(view.since_ms),
        None
        if view.first_offset < 0
        else f"offset {view.first_offset} of partition {view.first_source}",
        count_tries(view),
        None if failure is None else format_time(failure.at_ms),
        None if failure is None else failure_text(failure),
        None if failure is None else failure.client,
        None if view.next_ms is None else format_time(view.next_ms),
    )


def _count_text(views: Sequence[ParkedKeyView]) -> str:
    """Format the number of messages with an order key, and the number of each kind of unordered
    messages.
    """
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
        counted(sum(view.messages for view in kind), name, names)
        for kind, name, names in kinds
        if kind
    )
