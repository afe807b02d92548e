"""The pages of what a consumer group has parked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...admin import ParkedKeyView
from ...protocol.parked import Failure
from ...protocol.text import counted, key_text, parse_number
from ..acts.parked import naming_replaced
from ..feed import Feed
from ..page import ROWS_MAX, Cell, Link, Page, Pager, href, table
from ..shown import count, moment, parse_hex
from .cells import or_none_cell
from .messages import shown_message
from .subjects import ROOT, problems

PARKED_SHOWN = 100
"""How many parked messages of a key are on its page."""
FAILURE_CHARS_MAX = 300


async def _read_page(
    feed: Feed, subject: str, group: str, numbers: list[int], after: str
) -> tuple[list[ParkedKeyView], str]:
    """
    Read the keys of one page, and no others.

    Args:
        numbers: the partitions with parked keys, in order.
        after: where the page begins: the partition, and how many keys of it came before.

    Returns:
        The keys, and where the next page begins; "" if this is the last one.
    """
    place = after.partition(".")
    first_id, first = parse_number(place[0]) or 0, parse_number(place[2]) or 0
    found: list[ParkedKeyView] = []
    for number in (each for each in numbers if each >= first_id):
        start = first if number == first_id else 0
        if len(found) == ROWS_MAX:
            return found, f"{number}.0"
        page = await feed.admin.parked_page(
            subject, group, number, first=start, count=ROWS_MAX - len(found)
        )
        found += page.keys
        if page.following is not None:
            return found, f"{number}.{page.following}"
    return found, ""


async def parked(feed: Feed, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return a page of parked keys. `after` is where it begins: see `_read_page`."""
    subject, name = names["subject"], names["group"]
    path = ("subjects", subject, "groups", name, "parked")
    described = await feed.group(subject, name)
    numbers = sorted(int(each.partition_id) for each in described.partitions if each.parked)
    after = query.get("after", "")
    views, next_start = await _read_page(feed, subject, name, numbers, after)

    def given(view: ParkedKeyView) -> dict[str, object]:
        return {"partition": view.partition_id, **_selector(view.key)}

    def key_cell(view: ParkedKeyView) -> Cell:
        if view.tries is not None:
            return Cell(f"waiting for a retry, after {view.tries} tries")
        text = "dead letters of any key" if view.key is None else key_text(view.key)
        dead = " (dead)" if view.is_dead and view.key else ""
        return Cell(f"{text}{dead}", href(*path, "messages", **given(view)))

    def act_cell(act: str, view: ParkedKeyView) -> Cell:
        if view.tries is not None:
            return Cell("")
        return Cell(act, href("act", act, subject=subject, group=name, **given(view)))

    listed = table(
        "parked",
        "Parked keys",
        views,
        lambda view: f"{view.partition_id}.{view.key and view.key.hex()}.{view.tries}",
        (
            ("Key", key_cell),
            ("#Partition", lambda view: str(view.partition_id)),
            ("#Messages", lambda view: view.messages),
            ("State", lambda view: "being taken over" if view.being_adopted else view.state.value),
            ("Since (UTC)", lambda view: moment(view.since_ms)),
            ("Last error", lambda view: or_none_cell(_failure_text(view.failure), "bad")),
            ("Redrive", lambda view: act_cell("redrive", view)),
            ("Skip", lambda view: act_cell("skip", view)),
        ),
        empty="Nothing is parked. A message is parked after it has failed so many times:",
        empty_command=f"keylane group set {subject} {name} --on-failure park --tries-max 5",
    )
    if next_start or after:
        pager = Pager(
            text=f"{counted(len(views), 'key')} on this page",
            before=href(*path) if after else "",
            after=href(*path, after=next_start) if next_start else "",
        )
        listed = replace(listed, pager=pager)
    total = sum(each.parked or 0 for each in described.partitions)
    redrive_all = href("act", "redrive", subject=subject, group=name, all="on")
    return Page(
        title="Parked keys",
        trail=_trail(subject, name),
        section="subjects",
        lead=f"{count(total)} parked messages of group {name}. A key that is parked holds back its "
        "own later messages, and no others.",
        unknown=problems(described.partitions),
        acts=(Link("Redrive all", redrive_all),) if total else (),
        tables=(listed,),
        is_live=False,
    )


def _trail(subject: str, group: str) -> tuple[Link, ...]:
    page = Link(group, href("subjects", subject, "groups", group))
    return ROOT, Link(subject, href("subjects", subject)), page


def _failure_text(failure: Failure | None) -> str:
    return "" if failure is None else f"{failure.kind}: {failure.text}"[:FAILURE_CHARS_MAX]


def _selector(key: bytes | None) -> dict[str, str]:
    """Return the field that selects a parked key in the form of an act."""
    if key is None:
        return {"dead": "on"}
    return {"key_hex": key.hex()} if key else {"no_key": "on"}


async def parked_messages(feed: Feed, names: Mapping[str, str], query: Mapping[str, str]) -> Page:
    """Return the first parked messages of a key."""
    subject, name = names["subject"], names["group"]
    number = parse_number(query.get("partition", ""))
    key: bytes | None = None
    if "key_hex" in query:
        key = parse_hex(query["key_hex"])
    elif "no_key" in query:
        key = b""
    views = feed.admin.parked(subject, name, key=key, partition_id=number)
    async with naming_replaced(feed.admin, subject, number):
        failures = [view.failure async for view in views if view.failure is not None]
    newest = max(failures, key=lambda each: each.at_ms, default=None)
    found = []
    messages = feed.admin.parked_messages(
        subject, name, key, partition_id=number, first=PARKED_SHOWN
    )
    read = []
    async with naming_replaced(feed.admin, subject, number):
        async for each in messages:
            read.append(each)
            if len(read) == PARKED_SHOWN:  # `first` is of each partition
                break
    for each in read:
        place = {"partition": each.partition_id, "offset": each.offset}
        found.append(
            {
                "message": None if each.message is None else shown_message(each.message, "auto"),
                "place": f"partition {each.partition_id}, offset {each.offset}",
                "problem": each.problem,
                "edited": each.edited,
                "failure": _failure_text(each.failure),
                "edit": href("act", "edit", subject=subject, group=name, **place),
            }
        )
    given = {"subject": subject, "group": name, "partition": number, **_selector(key)}
    return Page(
        title=key_text(key) if key is not None else "Dead letters",
        trail=(
            *_trail(subject, name),
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
        facts=(("Last error", Cell(_failure_text(newest), tone="bad")),) if newest else (),
        template="parked_messages.html",
        extra={"found": found},
        is_live=False,
    )
