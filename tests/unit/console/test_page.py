from dataclasses import replace

from keylane.console.page import (
    ROWS_MAX,
    Cell,
    Page,
    PageColumn,
    Sentence,
    Table,
    TableRow,
    changed,
    href,
    window,
)


def page(*texts: str, wrong: tuple[Sentence, ...] | None = None) -> Page:
    rows = tuple(TableRow(f"r{index}", (Cell(text),)) for index, text in enumerate(texts))
    table = Table(name="t", caption="c", columns=(PageColumn("x"),), rows=rows, empty="none")
    return Page(title="p", tables=(table,), wrong=wrong, facts=(("Lag", Cell("1", tone="warn")),))


def test_page_has_a_live_cell_for_each_text_that_may_change():
    assert page("a", "b").live() == {
        "fact.0": ("1", "warn"),
        "t.r0.0": ("a", ""),
        "t.r1.0": ("b", ""),
    }


def test_live_cell_has_control_characters_escaped():
    assert page("a\x1b\u202eb").live()["t.r0.0"] == ("a\\x1b\\u202eb", "")


def test_structure_is_the_same_when_only_texts_change():
    assert page("a").structure() == page("b").structure()
    assert page("a").structure() != page("a", "b").structure()


def test_structure_changes_when_something_else_is_wrong():
    some = page("a", wrong=(Sentence("silent for 1 s", "start it"),))
    assert (
        some.structure() == page("a", wrong=(Sentence("silent for 2 s", "start it"),)).structure()
    )
    assert some.structure() != page("a", wrong=()).structure()
    assert some.structure() != page("a", wrong=(Sentence("silent for 1 s", "look"),)).structure()


def test_structure_changes_with_what_a_page_says_of_the_rows_that_it_leaves_out():
    some = page("a")
    (table,) = some.tables
    assert replace(some, lead="Of the first 20 groups.").structure() != some.structure()
    shorter = replace(some, tables=(replace(table, caption="the 15 with the most, of 16"),))
    assert shorter.structure() != some.structure()


def test_changed_leaves_out_what_is_as_before():
    before = {"a": ("1", ""), "b": ("2", "")}
    assert changed(before, {"a": ("1", ""), "b": ("3", ""), "c": ("4", "")}) == {
        "b": ("3", ""),
        "c": ("4", ""),
    }


def test_changed_has_a_point_of_each_chart_also_an_equal_one():
    assert changed({"a": 1.0}, {"a": 1.0}) == {"a": 1.0}


def test_href_encodes_every_sign_of_a_name():
    assert href("subjects", "a/b?c#d") == "/console/subjects/a%2Fb%3Fc%23d"
    assert href("act", "x", key="<&>", none=None, empty="") == "/console/act/x?key=%3C%26%3E"


def test_window_shows_one_page_of_many_rows():
    rows = [TableRow(str(number), (Cell("x"),)) for number in range(1_000)]
    shown, pager = window(rows, {"page": "2", "sort": "lag"}, "/console/x")
    assert [shown[0].key, len(shown)] == [str(ROWS_MAX), ROWS_MAX]
    assert pager is not None
    assert pager.before == "/console/x?page=1&sort=lag"
    assert pager.after == "/console/x?page=3&sort=lag"
    assert "1,000" in pager.text


def test_window_takes_any_page_number():
    rows = [TableRow(str(number), (Cell("x"),)) for number in range(120)]
    for given in ("0", "-1", "x", "99999999999999999999", "²", "999"):
        shown, _ = window(rows, {"page": given}, "/console/x")
        assert shown
    assert window(rows[:3], {}, "/console/x")[1] is None
