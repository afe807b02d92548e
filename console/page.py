"""What a page shows: sentences, facts and tables, and which of their cells change. Pure.

servers' answers ─▶ a view of `views/` ─▶ Page ─▶ HTML, once
                                           ╰────▶ cells, every second ─▶ those that changed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from ..protocol.text import printable
from .shown import count

T = TypeVar("T")
ROWS_MAX = 50
"""How many rows of a table are on a page."""

LiveValue = tuple[str, str] | float
"""What a browser needs to renew a cell: its text and its tone, or the newest point of its chart."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text that may change."""

    text: str
    href: str = ""
    tone: str = ""
    """ "good", "warn", "bad" or "muted"; the text says it too."""
    series: tuple[float, ...] | None = None
    """The points of a small chart, oldest first; `text` then describes it."""

    @property
    def live(self) -> LiveValue:
        """The value that a browser needs to renew it."""
        if self.series is not None:
            return self.series[-1] if self.series else 0.0
        return printable(self.text), self.tone


Shown = Cell | str | int | None
"""What a column shows of an item: a number is written with its thousands apart, None as "?"."""


@dataclass(frozen=True, slots=True)
class PageColumn:
    """A column of a table."""

    title: str
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table. `key` names it as long as it is the same row."""

    key: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pager:
    """Which rows of a table a page shows, and the addresses of those before and after."""

    text: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of one kind. The first column names a row."""

    name: str
    caption: str
    columns: tuple[PageColumn, ...]
    rows: tuple[TableRow, ...]
    empty: str
    """What to do if there are no rows."""
    empty_command: str = ""
    pager: Pager | None = None


@dataclass(frozen=True, slots=True)
class Sentence:
    """Something that is wrong, or not known, and the next step."""

    text: str
    step: str = ""
    href: str = ""
    about: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A link to another page, or to an act."""

    text: str
    href: str
    is_destructive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page with its live cells."""

    title: str
    trail: tuple[Link, ...] = ()
    """The pages above it."""
    section: str = ""
    """The part of the console to which it belongs."""
    lead: str = ""
    wrong: tuple[Sentence, ...] | None = None
    """What is wrong now, the most urgent first; None: the page does not say."""
    pending: str = ""
    """What is still being looked into."""
    unknown: tuple[Sentence, ...] = ()
    """What could not be asked."""
    facts: tuple[tuple[str, Cell], ...] = ()
    tables: tuple[Table, ...] = ()
    acts: tuple[Link, ...] = ()
    tabs: tuple[Link, ...] = ()
    template: str = "page.html"
    is_live: bool = True
    drawn: str = ""
    """A digest of what only its own template draws: if it changes, the page is drawn again."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """What only its own template knows."""

    def cells(self) -> Iterator[tuple[str, Cell]]:
        """Yield the cells that may change, each with its id."""
        for index, (_, cell) in enumerate(self.facts):
            yield f"fact.{index}", cell
        for index, sentence in enumerate(self.wrong or ()):
            yield f"wrong.{index}", Cell(sentence.text)
        for table in self.tables:
            for row in table.rows:
                for index, cell in enumerate(row.cells):
                    yield f"{table.name}.{row.key}.{index}", cell

    def live(self) -> dict[str, LiveValue]:
        """Return a dict that maps the id of each cell to its value."""
        return {name: cell.live for name, cell in self.cells()}

    def structure(self) -> str:
        """Return a digest of everything else: if it changes, the page is drawn again."""
        parts = [
            [[each.step, each.href, each.about] for each in self.wrong or ()],
            [[each.text, each.step] for each in self.unknown],
            [self.wrong is None, self.pending, self.lead],
            [label for label, _ in self.facts],
            [
                [
                    table.name,
                    table.caption,
                    [[row.key, *(cell.href for cell in row.cells)] for row in table.rows],
                    str(table.pager),
                ]
                for table in self.tables
            ],
            [[link.text, link.href] for link in self.acts],
            self.drawn,
        ]
        return blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()


def changed(
    before: Mapping[str, LiveValue], after: Mapping[str, LiveValue]
) -> dict[str, LiveValue]:
    """Return the cells that a browser has to renew. Each chart gets a point, also an equal one."""
    return {
        name: value
        for name, value in after.items()
        if isinstance(value, float | int) or before.get(name) != value
    }


def href(*parts: object, **query: object) -> str:
    """Return the address of a page, with its names percent-encoded; a None of `query` is left
    out.
    """
    path = "".join(f"/{quote(str(part), safe='')}" for part in parts)
    given = {name: str(value) for name, value in query.items() if value is not None and value != ""}
    return f"/console{path}" + (f"?{urlencode(given)}" if given else "")


def table(
    name: str,
    caption: str,
    items: Sequence[T],
    key: Callable[[T], str],
    columns: Sequence[tuple[str, Callable[[T], Shown]]],
    *,
    empty: str,
    empty_command: str = "",
    query: Mapping[str, str] | None = None,
    path: str = "",
    number: str = "page",
) -> Table:
    """
    Return a table with a row for each item.

    Args:
        key: names the row of an item as long as it is there.
        columns: for each column its title, with a "#" before that of numbers, and what it shows of
            an item.
        query: of the page's address, if the table shows one page of items; None: all of them.
        path: the page's address without it.
        number: the parameter of `query` that has the number of the page.
    """
    shown, pager = (items, None) if query is None else window(items, query, path, name=number)
    return Table(
        name=name,
        caption=caption,
        columns=tuple(
            PageColumn(title.removeprefix("#"), is_number=title.startswith("#"))
            for title, _ in columns
        ),
        rows=tuple(
            TableRow(key(item), tuple(_cell(show(item)) for _, show in columns)) for item in shown
        ),
        empty=empty,
        empty_command=empty_command,
        pager=pager,
    )


def _cell(shown: Shown) -> Cell:
    if isinstance(shown, Cell):
        return shown
    return Cell(shown if isinstance(shown, str) else count(shown))


def window(
    rows: Sequence[T], query: Mapping[str, str], path: str, *, name: str = "page"
) -> tuple[Sequence[T], Pager | None]:
    """Return the rows of one page, and the pager if there are more."""
    if len(rows) <= ROWS_MAX:
        return rows, None
    number = int(query[name]) if query.get(name, "").isdecimal() and len(query[name]) < 8 else 1
    last = -(-len(rows) // ROWS_MAX)
    number = min(max(number, 1), last)
    start = (number - 1) * ROWS_MAX
    shown = rows[start : start + ROWS_MAX]

    def address(at: int) -> str:
        return f"{path}?{urlencode({**query, name: str(at)})}"

    pager = Pager(
        text=f"{start + 1}–{start + len(shown)} of {len(rows):,}",
        before=address(number - 1) if number > 1 else "",
        after=address(number + 1) if number < last else "",
    )
    return shown, pager
