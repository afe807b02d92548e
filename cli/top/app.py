"""Draws the screen and takes its keys. All it shows comes from a board; it asks nobody itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import DescendantBlur, DescendantFocus, Resize
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from .asker import Asker
from .board import GroupDetail, Problem, age_text, to_problem
from .tables import (
    ALL_IS_WELL,
    BROKERS,
    GROUPS,
    LOOKING,
    PARTITIONS,
    SUBJECTS,
    TableView,
    arrange,
    problem_lines,
)

Row = TypeVar("Row")
REDRAW_S = 1.0
FIRST_S = 0.3
CSS = """
Screen { layout: vertical; }
#head { height: 1; text-style: bold; }
#problems { height: auto; max-height: 50%; }
#filter { height: 1; border: none; padding: 0; display: none; }
Section { height: 1fr; }
#brokers { height: auto; max-height: 30%; }
Section > .caption { height: 1; }
Section > DataTable { height: auto; max-height: 100%; }
DataTable { overflow-x: hidden; }
#groups > DataTable, #subjects > DataTable, #partitions > DataTable { height: 1fr; }
DataTable > .datatable--header { text-style: underline; }
DataTable > .datatable--cursor { text-style: none; }
DataTable:focus > .datatable--cursor { text-style: reverse; }
"""


class GroupTable(DataTable[Text]):
    """A table whose rows can be opened."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "open")]


class Section(Vertical, Generic[Row]):
    """A table with a caption, which says how it is filtered and whether it has the keys."""

    def __init__(
        self,
        view: TableView[Row],
        rows: Callable[[], Sequence[Row]],
        *,
        name: str,
        kind: type[DataTable[Text]] = DataTable,
    ) -> None:
        super().__init__(id=name)
        self.view = view
        self._rows = rows
        self._caption = Static(classes="caption", markup=False)
        self._shown: tuple[object, ...] = ()
        self._row = 0
        """The row of the cursor after the table was last drawn."""
        self._follows = False
        """True if the user has moved the cursor to a row, which it then stays on."""
        self.table = kind(cursor_type="row")

    def compose(self) -> ComposeResult:
        """Return the parts, from top to bottom."""
        yield self._caption
        yield self.table

    def show(self) -> None:
        """Draw the present rows."""
        arranged = arrange(self.view, self._rows(), max(20, self.app.size.width - 2))
        marker = "▶" if self.table.has_focus else " "
        self._caption.update(f"{marker} {arranged.caption}")
        if self._shown == (arranged.titles, arranged.rows):
            return
        self._shown = (arranged.titles, arranged.rows)
        chosen, top = self.chosen, self.table.scroll_y
        if self.table.cursor_row != self._row:
            self._follows = self.table.cursor_row > 0
        with self.app.batch_update():
            self.table.clear(columns=True)
            for title, width in zip(arranged.titles, arranged.widths, strict=True):
                self.table.add_column(Text(title), width=width)
            for key, cells in arranged.rows:
                self.table.add_row(*map(Text, cells), key=key)
            keys = [key for key, _ in arranged.rows]
            self._follows = self._follows and chosen in keys
            self._row = keys.index(chosen) if self._follows and chosen is not None else 0
            self.table.move_cursor(row=self._row, scroll=False)
            self.table.scroll_to(y=top, animate=False)

    @property
    def chosen(self) -> str | None:
        """The key of the row at the cursor."""
        if not self.table.row_count:
            return None
        return self.table.coordinate_to_cell_key(self.table.cursor_coordinate).row_key.value


class TableScreen(Screen[None]):
    """A screen with tables that can be sorted and filtered."""

    AUTO_FOCUS = ""  # the screen chooses

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        # It comes before all others, so that the next key belongs to the filter.
        Binding("slash", "filter", "filter", key_display="/", priority=True),
        Binding("tab", "app.focus_next", "next table", key_display="tab"),
    ]

    def __init__(
        self,
        asker: Asker,
        *,
        head: Callable[[], str],
        problems: Callable[[], Sequence[Problem]],
        otherwise: Callable[[], str],
    ) -> None:
        """
        Args:
            head: returns the first line.
            problems: returns what is wrong.
            otherwise: returns the line that is shown if nothing is.
        """
        super().__init__()
        self.asker = asker
        self.sections: list[Section[Any]] = []
        self._head_text, self._find_problems, self._otherwise = head, problems, otherwise
        self._head = Static(id="head", markup=False)
        self._problems = Static(id="problems", markup=False)
        self._filter = Input(
            id="filter", placeholder="part of a name; enter, or escape", compact=True
        )

    def compose(self) -> ComposeResult:
        """Return the parts, from top to bottom."""
        yield self._head
        yield self._problems
        yield from self.sections
        yield self._filter
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Draw now, and then each second."""
        self._section.table.focus()
        self.show()
        self.set_timer(FIRST_S, self.show)
        self.set_interval(REDRAW_S, self.show)

    def show(self) -> None:
        """Draw everything again."""
        if not self.is_current:
            return
        self._head.update(self._head_text())
        lines = problem_lines(self._find_problems(), self.size.width, self.problem_lines_max)
        self._problems.update("\n".join(lines or [self._otherwise()]))
        for section in self.sections:
            section.show()

    @property
    def problem_lines_max(self) -> int:
        """The largest number of lines for what is wrong."""
        return self.size.height // 2

    @property
    def _section(self) -> Section[Any]:
        """The section that has the keys; the one that is opened first if none has."""
        return next((each for each in self.sections if each.table.has_focus), self.first_section)

    @property
    def first_section(self) -> Section[Any]:
        """The section that has the keys at the start."""
        return self.sections[0]

    def on_resize(self, _event: Resize) -> None:
        """Fit the columns into the new width."""
        self.call_after_refresh(self.show)

    def on_descendant_focus(self, _event: DescendantFocus) -> None:
        """Mark the section that has the keys."""
        self.call_after_refresh(self.show)

    def on_descendant_blur(self, _event: DescendantBlur) -> None:
        """Mark the section that has the keys."""
        self.call_after_refresh(self.show)

    def action_sort(self) -> None:
        """Sort by the next column."""
        self._section.view = self._section.view.by_next_column()
        self.show()

    def action_reverse(self) -> None:
        """Sort in the opposite order."""
        self._section.view = self._section.view.reversed()
        self.show()

    def action_filter(self) -> None:
        """Let the user type a filter for the section."""
        if self._filter.display:
            return
        self._filtered = self._section
        self._filter.value = self._filtered.view.filter
        self._filter.display = True
        self.set_focus(self._filter)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        if self._filter.display:
            self._filtered.view = self._filtered.view.filtered(event.value.strip())
            self.show()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Keep the filter."""
        self._end_filter()

    def _end_filter(self) -> None:
        self._filter.display = False
        self.set_focus(self._filtered.table)
        self.show()

    def clear_filter(self) -> bool:
        """Take the filter away that is typed or in use. Return False if there is none."""
        section = self._filtered if self._filter.display else self._section
        if not (section.view.filter or self._filter.display):
            return False
        section.view = section.view.filtered("")
        if self._filter.display:
            self._end_filter()
        self.show()
        return True


class Overview(TableScreen):
    """What is wrong, brokers, groups and subjects."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "clear", "all rows", show=False),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, asker: Asker) -> None:
        board = asker.board
        super().__init__(
            asker,
            head=partial(_cluster_head, asker),
            problems=lambda: board.problems(asker.now_s()),
            otherwise=lambda: LOOKING if board.is_looking(asker.now_s()) else ALL_IS_WELL,
        )
        self._groups = Section(
            GROUPS, lambda: board.groups(asker.now_s()), name="groups", kind=GroupTable
        )
        self.sections = [
            Section(BROKERS, lambda: board.brokers(asker.now_s()), name="brokers"),
            self._groups,
            Section(SUBJECTS, lambda: board.subjects(asker.now_s()), name="subjects"),
        ]

    @property
    def first_section(self) -> Section[Any]:
        """The groups."""
        return self._groups

    @property
    def problem_lines_max(self) -> int:
        """The largest number of lines for what is wrong, beside three tables."""
        return self.size.height * 3 // 10

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the group at the cursor."""
        if event.data_table is self._groups.table and event.row_key.value is not None:
            subject, _, group = event.row_key.value.partition(" ")
            detail = self.asker.open_group(subject, group)
            self.app.push_screen(GroupScreen(self.asker, detail), lambda _: self.show())

    def action_clear(self) -> None:
        """Show all rows again."""
        self.clear_filter()


class GroupScreen(TableScreen):
    """One group: why its messages do not arrive, and its partitions."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "back", key_display="esc"),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, asker: Asker, detail: GroupDetail) -> None:
        super().__init__(
            asker,
            head=partial(_group_head, asker, detail),
            problems=partial(_group_problems, detail),
            otherwise=lambda: "Asking the brokers.",
        )

        def partitions() -> Sequence[Any]:
            return [] if detail.description is None else detail.description.partitions

        self.sections = [Section(PARTITIONS, partitions, name="partitions")]

    def action_back(self) -> None:
        """Take the filter away, or go back to the overview."""
        if not self.clear_filter():
            self.asker.close_group()
            self.dismiss()


def _cluster_head(asker: Asker) -> str:
    """Return the cluster's address, the time, and since when the metaserver is silent."""
    stale_s = asker.board.stale_for_s(asker.now_s())
    stale = ""
    if stale_s is not None:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - stale_s))
        stale = f"  STALE since {since}"
    return f"keylane top  {asker.board.meta}  {time.strftime('%H:%M:%S')}{stale}"


def _group_head(asker: Asker, detail: GroupDetail) -> str:
    """Return the group with its lag, consumers and age."""
    described = detail.description
    name = f"keylane top  {detail.group} on {detail.subject}"
    if described is None or detail.heard_s is None:
        return name
    lag = "unknown" if described.lag is None else f"{described.lag:,}"
    age_s = asker.now_s() - detail.heard_s
    stale = f"  STALE for {age_text(age_s)}" if detail.problem else ""
    return f"{name}  lag {lag}  consumers {described.sessions}{stale}"


def _group_problems(detail: GroupDetail) -> Sequence[Problem]:
    """Return why messages do not arrive, and what is not known."""
    problems = [Problem(f"it cannot be asked: {detail.problem}")] if detail.problem else []
    if detail.explanation is not None:
        problems += map(to_problem, detail.explanation.causes)
        problems += [Problem(f"not known: {each}") for each in detail.explanation.unknown]
    return problems


class TopApp(App[None]):
    """The screen of `keylane top`."""

    CSS = CSS
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, asker: Asker) -> None:
        super().__init__(ansi_color=True)  # the terminal's own colours, and none with NO_COLOR
        self.theme = "ansi-dark"
        self._asker = asker

    def on_mount(self) -> None:
        """Begin to ask, and show the overview."""
        self.run_worker(self._asker.run())
        self.push_screen(Overview(self._asker))
