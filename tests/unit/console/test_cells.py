"""Cells of sums that are known in part, and of messages that fail."""

from msgspec.structs import replace

from keylane.console.page import Cell
from keylane.console.views.cells import failing_cell, kept_cell, sum_cell
from support.why_facts import FAILING


def test_sum_is_no_good_news_while_parts_of_it_are_not_known():
    assert sum_cell(0, is_partial=False, good="good") == Cell("0", tone="good")
    assert sum_cell(0, is_partial=True, good="good") == Cell("?")
    assert sum_cell(5, is_partial=True) == Cell("5 or more", tone="warn")
    assert kept_cell(5, is_partial=True) == Cell("5 or more", tone="muted")


def test_failing_cell_counts_the_others_and_names_the_newest_error():
    assert failing_cell(None) == Cell("–", tone="muted")
    failing = replace(FAILING, text="no such town")
    assert failing_cell(failing).text == "offset 3: ValueError: no such town"
    older = replace(FAILING, offset=7, at_ms=1_000)
    newer = replace(FAILING, offset=9, at_ms=9_000, kind="KeyError")
    told = failing_cell(replace(failing, others=(older,), others_count=1)).text
    assert told == "offset 3: ValueError: no such town; 1 more"
    told = failing_cell(replace(failing, others=(newer, older), others_count=4_000)).text
    assert told == (
        "offset 3: ValueError: no such town; 4,000 more, the newest at offset 9: KeyError"
    )
