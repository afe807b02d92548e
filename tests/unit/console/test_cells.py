"""Cells of sums that are known in part."""

from keylane.console.page import Cell
from keylane.console.views.cells import kept_cell, sum_cell


def test_sum_is_no_good_news_while_parts_of_it_are_not_known():
    assert sum_cell(0, is_partial=False, good="good") == Cell("0", tone="good")
    assert sum_cell(0, is_partial=True, good="good") == Cell("?")
    assert sum_cell(5, is_partial=True) == Cell("5 or more", tone="warn")
    assert kept_cell(5, is_partial=True) == Cell("5 or more", tone="muted")
