"""Values of a broker's health are shown in words, as in other tables."""

from __future__ import annotations

import pytest

from keylane.cli.commands.broker.groups import format_value, health_rows


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, None),
        (True, "yes"),
        (False, "no"),
        (0, "0"),
        ("ok", "ok"),
        ([], "none"),
        (["one", "two"], "one; two"),
        ({}, "none"),
        ({"next_ms": 1_795_807_466_000}, "next at: 2026-11-27T19:24:26.000+00:00"),
        ({"next_ms": None}, "next at: -"),
        ({"next_at_ms": None, "kept": 3, "late": False}, "next at ms: -, kept: 3, late: no"),
    ],
)
def test_value_is_shown_in_words_when_it_is_of_json(value, words):
    """A table shows None as a dash."""
    assert format_value(value) == words


def test_table_has_a_row_for_each_value_when_some_are_together():
    """Off a terminal, where nothing is folded, one long cell made each line of the table 300
    columns wide.
    """
    scheduled = {"count": 2, "next_ms": 1_795_807_466_000, "problem": "", "late": {"orders": "why"}}
    assert health_rows({"writable": True, "scheduled": scheduled, "damage": ["one", "two"]}) == [
        ("damage", "one"),
        ("damage", "two"),
        ("scheduled: count", "2"),
        ("scheduled: next at", "2026-11-27T19:24:26.000+00:00"),
        ("scheduled: problem", None),
        ("scheduled: late", "orders: why"),
        ("writable", "yes"),
    ]
