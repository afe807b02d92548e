"""The tables of the screen as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len

from keylane.cli.top.board import Problem
from keylane.cli.top.tables import (
    BROKERS,
    GROUPS,
    ROWS_MAX,
    SUBJECTS,
    arrange,
    problem_lines,
)
from support.boards import board

(GROUP,) = board(seconds=2, lag=10).groups(2.0)
(SUBJECT,) = board(seconds=2).subjects(2.0)


def keys(arranged) -> list[str]:
    return [key for key, _ in arranged.rows]


def test_groups_are_sorted_by_lag_and_then_by_the_next_column():
    rows = [replace(GROUP, group=name, lag=lag) for name, lag in (("a", 1), ("b", 3), ("c", 2))]
    assert keys(arrange(GROUPS, rows, 80)) == ["orders b", "orders c", "orders a"]
    assert keys(arrange(GROUPS.reversed(), rows, 80)) == ["orders a", "orders c", "orders b"]
    by_name = GROUPS
    while by_name.columns[by_name.sorted_by].title != "group":
        by_name = by_name.by_next_column()
    assert keys(arrange(by_name, rows, 80)) == ["orders a", "orders b", "orders c"]
    assert "group↑" in arrange(by_name, rows, 80).titles[0]


def test_rows_with_unknown_values_come_last():
    rows = [
        replace(SUBJECT, subject=name, stored_per_s=rate)
        for name, rate in (("a", None), ("b", 0.0))
    ]
    assert keys(arrange(SUBJECTS, rows, 80)) == ["b", "a"]


def test_lag_that_is_known_in_part_says_so():
    rows = [replace(GROUP, lag=lag, lag_s=0, parked=0, is_partial=True) for lag in (0, 1_234)]
    texts = [[cell.strip() for cell in cells] for _, cells in arrange(GROUPS, rows, 120).rows]
    assert [(cells[2], cells[3], cells[7]) for cells in texts] == [
        ("1,234 or more", "?", "?"),
        ("?", "?", "?"),
    ]
    (_, cells) = arrange(SUBJECTS, [replace(SUBJECT, lag=0, is_partial=True)], 120).rows[0]
    assert cells[6].strip() == "?"


def test_sentence_begins_with_a_capital_letter_and_the_name_of_a_group_is_kept():
    assert problem_lines(
        [Problem("its lag grows"), Problem("its lag grows", about="b")], 80, 9
    ) == [
        "! Its lag grows",
        "! b: Its lag grows",
    ]


def test_problem_has_no_exclamation_mark_when_nothing_is_wrong():
    scheduled = Problem("1 message waits for its delivery time", is_wrong=False)
    assert problem_lines([scheduled], 80, 9) == ["· 1 message waits for its delivery time"]


def test_filter_finds_a_part_of_any_name_in_any_case():
    rows = [replace(GROUP, group="Billing"), replace(GROUP, subject="events")]
    assert keys(arrange(GROUPS.filtered("BILL"), rows, 80)) == ["events billing", "orders Billing"]
    arranged = arrange(GROUPS.filtered("event"), rows, 80)
    assert keys(arranged) == ["events billing"]
    assert arranged.caption == 'Groups (1 of 2, filter "event")'


@pytest.mark.parametrize("width", [40, 78, 198])
@pytest.mark.parametrize("name", ["a" * 200, "名" * 50, "x"])
def test_table_fits_into_its_width(width, name):
    rows = [replace(GROUP, group=name, subject=name)]
    arranged = arrange(GROUPS, rows, width)
    assert sum(arranged.widths) + 2 * len(arranged.widths) <= width
    for cells in (arranged.titles, *(cells for _, cells in arranged.rows)):
        assert [*map(cell_len, cells)] == [*arranged.widths]


def test_narrow_screen_leaves_out_the_last_columns():
    (row, _) = board(seconds=2).brokers(2.0)
    narrow, wide = (arrange(BROKERS, [row], width) for width in (78, 198))
    assert len(wide.titles) == len(BROKERS.columns) > len(narrow.titles)
    assert narrow.titles[1].startswith("state")


def test_long_table_has_a_limit_and_says_so():
    rows = [replace(GROUP, group=f"g{number}") for number in range(ROWS_MAX + 5)]
    arranged = arrange(GROUPS, rows, 80)
    assert len(arranged.rows) == ROWS_MAX
    assert arranged.caption == "Groups (200 of 205)"


def test_control_characters_of_names_are_escaped():
    (row,) = arrange(GROUPS, [replace(GROUP, group="a\x1b[2J")], 80).rows
    assert "a\\x1b[2J" in row[1][0]


def test_problems_are_lines_with_the_next_step():
    assert problem_lines([], 80, 5) == []
    assert problem_lines([Problem("it hangs", "start it")], 80, 5) == ["! It hangs", "  → start it"]


def test_problems_for_which_there_is_no_room_are_counted():
    problems = [Problem("word " * 100, "start it")] * 5
    lines = problem_lines(problems, 80, 8)
    assert lines[-1] == "  … and 3 more"
    assert len(lines) == 8
    assert max(map(len, lines)) <= 80
    assert lines[2].endswith(" …"), "the first text has more lines than the others"
    assert not any("more" in line for line in problem_lines(problems[:1], 80, 30))
