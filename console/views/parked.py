"""The pages of what a consumer group has parked."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from ...protocol.text import parse_number
from ..feed import Feed
from ..page import ROWS_MAX, Cell, Link, Page, PageColumn, Pager, Table, TableRow, href
from ..shown import count, key_text, moment, parse_hex
from .messages import shown_message
from .subjects import ROOT

PARKED_SHOWN = 100
"""How many parked messages of a key are on a page."""


async def parked(feed: Feed, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return a page of parked keys. `after` is where it begins: the partition, and how many keys of
    it came before.
    """
    subject, name = names["subject"], names["group"]
    address = href("subjects", subject, "groups", name, "parked")
    described = await feed.group(subject, name)
    after = query.get("after", "").partition(".")
    first_id, skipped = parse_number(after[0]) or 0, parse_number(after[2]) or 0
    rows: list[TableRow] = []
    next_start = ""
    partitions = sorted(
        (
            each
            for each in described.partitions
            if each.parked != 0 and each.partition_id >= first_id
        ),
        key=lambda each: each.partition_id,
    )
    for each in partitions:
        number = int(each.partition_id)
        start = skipped if number == first_id else 0
        views = [
            view
            async for view in feed.admin.parked(subject, name, partition_id=number, retrying=True)
        ]
        room = ROWS_MAX - len(rows)
        for index, view in enumerate(islice(views, start, start + room), start):
            selected = {"partition": number, **_selector(view.key, is_dead=view.is_dead)}
            acts = {"subject": subject, "group": name, **selected}
            failure = view.failure
            rows.append(
                TableRow(
                    f"{number}.{index}",
                    (
                        Cell(
                            _parked_name(view.key, view.tries, is_dead=view.is_dead),
                            ""
                            if view.tries is not None
                            else href(
                                "subjects",
                                subject,
                                "groups",
                                name,
                                "parked",
                                "messages",
                                **selected,
                            ),
                        ),
                        Cell(str(number)),
                        Cell(count(view.messages)),
                        Cell(
                            "being taken over" if view.being_adopted else view.state.value,
                        ),
                        Cell(moment(view.since_ms)),
                        Cell(
                            "–" if failure is None else f"{failure.kind}: {failure.text}"[:300],
                            tone="muted" if failure is None else "bad",
                        ),
                        Cell("redrive", href("act", "redrive", **acts))
                        if view.tries is None
                        else Cell("", tone="muted"),
                        Cell("skip", href("act", "skip", **acts))
                        if view.tries is None
                        else Cell("", tone="muted"),
                    ),
                )
            )
        if start + room < len(views):
            next_start = f"{number}.{start + room}"
            break
        if len(rows) >= ROWS_MAX and each is not partitions[-1]:
            next_start = f"{number}.{start + room}"
            break
    total = sum(each.parked or 0 for each in described.partitions)
    pager = None
    if next_start or after[0]:
        pager = Pager(
            text=f"{len(rows)} keys of this page",
            before=address if after[0] else "",
            after=f"{address}?after={next_start}" if next_start else "",
        )
    page_acts: tuple[Link, ...] = ()
    if total:
        page_acts = (
            Link("Redrive all", href("act", "redrive", subject=subject, group=name, all="on")),
        )
    return Page(
        title="Parked keys",
        trail=(
            ROOT,
            Link(subject, href("subjects", subject)),
            Link(name, href("subjects", subject, "groups", name)),
        ),
        section="subjects",
        lead=f"{count(total)} parked messages of group {name}. A key that is parked holds back its "
        "own later messages, and no others.",
        acts=page_acts,
        tables=(
            Table(
                name="parked",
                caption="Parked keys",
                columns=(
                    PageColumn("Key"),
                    PageColumn("Partition", is_number=True),
                    PageColumn("Messages", is_number=True),
                    PageColumn("State"),
                    PageColumn("Since (UTC)"),
                    PageColumn("Last error"),
                    PageColumn("Redrive"),
                    PageColumn("Skip"),
                ),
                rows=tuple(rows),
                empty="Nothing is parked. A message is parked after it has failed so many times:",
                empty_command=f"keylane group set {subject} {name} --on-failure park --tries-max 5",
                pager=pager,
            ),
        ),
        is_live=False,
    )


def _selector(key: bytes | None, *, is_dead: bool) -> dict[str, str]:
    """Return the fields that select a parked key in the form of an act."""
    if key is None:
        return {"dead": "on"}
    if not key:
        return {"no_key": "on"} | ({"dead": "on"} if is_dead else {})
    return {"key_hex": key.hex()}


def _parked_name(key: bytes | None, tries: int | None, *, is_dead: bool) -> str:
    if tries is not None:
        return f"waiting for a retry, after {tries} tries"
    if key is None:
        return "dead letters of any key"
    return f"{key_text(key)}{' (dead)' if is_dead and key else ''}"


async def parked_messages(feed: Feed, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the first parked messages of a key."""
    subject, name = names["subject"], names["group"]
    number = parse_number(query.get("partition", ""))
    key: bytes | None = None
    if "key_hex" in query:
        key = parse_hex(query["key_hex"])
    elif "no_key" in query:
        key = b""
    failures = [
        f"{view.failure.kind}: {view.failure.text}"
        async for view in feed.admin.parked(
            subject,
            name,
            key=... if key is None else key,
            dead=True if key is None else None,
            partition_id=number,
        )
        if view.failure is not None
    ]
    found = []
    messages = feed.admin.parked_messages(
        subject, name, key, partition_id=number, first=PARKED_SHOWN
    )
    async for each in messages:
        edit = href(
            "act",
            "edit",
            subject=subject,
            group=name,
            partition=each.partition_id,
            offset=each.offset,
        )
        failure = each.failure
        found.append(
            {
                "message": None if each.message is None else shown_message(each.message, "auto"),
                "place": f"partition {each.partition_id}, offset {each.offset}",
                "problem": each.problem,
                "edited": each.edited,
                "failure": "" if failure is None else f"{failure.kind}: {failure.text}",
                "edit": edit,
            }
        )
    given = {"subject": subject, "group": name, "partition": number} | {
        each: query[each] for each in ("key_hex", "no_key", "dead") if each in query
    }
    return Page(
        title=key_text(key) if key is not None else "Dead letters",
        trail=(
            ROOT,
            Link(subject, href("subjects", subject)),
            Link(name, href("subjects", subject, "groups", name)),
            Link("Parked keys", href("subjects", subject, "groups", name, "parked")),
        ),
        section="subjects",
        lead=f"The first {PARKED_SHOWN} parked messages, oldest first."
        if len(found) == PARKED_SHOWN
        else "",
        acts=(
            Link("Redrive", href("act", "redrive", **given)),
            Link("Skip", href("act", "skip", **given), is_destructive=True),
        ),
        facts=(("Last error", Cell(failures[0], tone="bad")),) if failures else (),
        template="parked_messages.html",
        extra={"found": found},
        is_live=False,
    )
