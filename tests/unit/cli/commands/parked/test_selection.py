"""Which parked keys the options name, and what a command shows of keys and messages."""

from __future__ import annotations

import pytest

from keylane.admin import Failure, ParkedKeyView, ParkedMessage, ParkState
from keylane.cli.commands.parked.keys import parked_table
from keylane.cli.commands.parked.messages import message_table
from keylane.cli.commands.parked.selection import (
    MessageOptions,
    Selection,
    SkipOptions,
    key_fields,
    key_text,
    state_text,
)
from keylane.cli.screen import json_text
from keylane.protocol.errors import ConfigError
from keylane.protocol.message import Message

FAILURE = Failure("ValueError", "no " + "x" * 200, "host-1:worker", 7, 5)


def view(key: bytes | None, **changes: object) -> ParkedKeyView:
    facts = {
        "partition_id": 7,
        "key": key,
        "state": ParkState.PARKED,
        "messages": 2,
        "since_ms": 0,
        "failure": FAILURE,
        "first_source": 3,
        "first_offset": 9,
    }
    return ParkedKeyView(**(facts | changes))


def cells(table) -> list[list[str]]:
    """The rows of a table."""
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.mark.parametrize(
    ("selection", "key"),
    [
        (Selection(), ...),
        (Selection(key="N1"), b"N1"),
        (Selection(key="é"), "é".encode()),
        (Selection(key_hex="FF 00"), b"\xff\x00"),
        (Selection(no_key=True), b""),
        (Selection(dead=True), None),
    ],
)
def test_options_name_a_key(selection: Selection, key: object):
    assert selection.selected_key() == key
    assert selection.by_key is (key is not ...)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (view(b"a"), "parked"),
        (view(None), "dead"),
        (view(None, tries=2), "waits for retry"),
        (view(b"a", state=ParkState.REDRIVING), "redriving"),
        (view(b"a", state=ParkState.REDRIVING, being_adopted=True), "being taken over"),
    ],
)
def test_state_says_where_messages_stand(seen: ParkedKeyView, text: str):
    assert state_text(seen) == text


@pytest.mark.parametrize(
    "selection",
    [
        Selection(key=""),
        Selection(key_hex=""),
        Selection(key_hex="xyz"),
        Selection(key_hex="f"),
        Selection(key="a", dead=True),
        Selection(no_key=True, dead=True),
        Selection(key="a", key_hex="61"),
    ],
)
def test_impossible_options_are_refused(selection: Selection):
    with pytest.raises(ConfigError):
        selection.selected_key()


@pytest.mark.parametrize(
    "options",
    [
        MessageOptions(key=""),
        MessageOptions(key_hex=""),
        MessageOptions(),
        MessageOptions(offset=3),
    ],
)
def test_message_without_a_key_is_named_by_its_place(options: MessageOptions):
    """`edit` has no --no-key, because messages without a key have no oldest one."""
    with pytest.raises(ConfigError, match="named by --partition and --offset, which `show --no-k"):
        _ = options.arguments
    assert MessageOptions(partition=7, offset=3).arguments == {"partition_id": 7, "offset": 3}


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (Selection(), False),
        (Selection(older_than="0"), True),
        (Selection(error="E"), True),
        (Selection(partition=1), True),
        (Selection(dead=True), True),
    ],
)
def test_selection_knows_whether_anything_was_said(selection: Selection, said: bool):
    assert selection.is_limited is said


@pytest.mark.parametrize(
    ("text", "age_ms"), [("90", 90_000), ("1h", 3_600_000), ("2d", 172_800_000), ("15ms", 15)]
)
def test_age_is_read_as_seconds_or_with_a_unit(text: str, age_ms: int):
    assert Selection(older_than=text).older_than_ms == age_ms
    assert Selection().older_than_ms is None


@pytest.mark.parametrize("text", ["", "-1h", "1 h", "soon", "1y", "٣"])
def test_age_that_cannot_be_is_refused(text: str):
    with pytest.raises(ConfigError, match="--older-than"):
        _ = Selection(older_than=text).older_than_ms


def test_selection_is_what_an_admin_is_asked_for():
    asked = Selection(key="a", error="E", partition=3, among_dead=True).arguments
    assert asked == {
        "key": b"a",
        "dead": True,
        "partition_id": 3,
        "older_than_ms": None,
        "error": "E",
    }


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"N1", "N1"),
        (b"", "(no key)"),
        (None, "(dead letters)"),
        (b"\xff", "\\xff"),
        (b"k" * 99, "k" * 60 + "…"),
    ],
)
def test_key_is_shown_for_people(key: bytes | None, text: str):
    assert key_text(key) == text


def test_key_is_told_to_programs():
    assert '"key_base64":"/w=="' in json_text(key_fields(view(b"\xff")))
    dead = key_fields(view(None, failure=None))
    assert (dead["dead"], dead["key"], dead["failure"]) == (True, None, None)
    keyless = key_fields(view(b""))
    assert (keyless["dead"], keyless["key"], keyless["state"]) == (False, None, "parked")
    assert key_fields(view(b"a"))["failure"]["kind"] == "ValueError"


def test_table_has_a_row_for_each_key():
    table = parked_table("g on s", [view(b"a"), view(None, failure=None, first_offset=-1)])
    assert table.title == "g on s: 2 messages of 1 key, 2 dead letters parked"
    first, second = cells(table)
    assert first[:4] == ["7", "a", "parked", "2"]
    assert first[5:7] == ["offset 9 of partition 3", "5"]
    assert first[8].startswith("ValueError: no xx")
    assert len(first[8]) == 81
    assert first[8:] == [first[8], "host-1:worker", "-"]
    assert first[7].startswith("1970-01-01T00:00:00.007")
    assert second[5:] == ["-"] * 6
    dead_alone = parked_table("g on s", [view(None, failure=None, first_offset=-1)])
    assert dead_alone.title == "g on s: 2 dead letters"


def test_table_shows_what_waits_for_retry_with_its_tries_and_its_next_time():
    waiting = view(None, tries=3, next_ms=90)
    chosen = view(None, tries=0, state=ParkState.REDRIVING)
    first, second = cells(parked_table("g on s", [waiting, chosen]))
    assert first[1:4] == ["-", "waits for retry", "2"]
    assert (first[6], first[10][:23]) == ("3", "1970-01-01T00:00:00.090")
    assert second[1:3] == ["(dead letters)", "redriving"]
    assert key_fields(waiting)["tries"] == 3
    assert key_fields(waiting)["state"] == first[2]
    assert not key_fields(waiting)["dead"]


@pytest.mark.parametrize("key", [b"a", b"", None])
def test_json_has_the_tries_that_the_table_shows(key: bytes | None):
    for failure, tries in ((FAILURE, 5), (None, None)):
        each = view(key, failure=failure)
        (row,) = cells(parked_table("g on s", [each]))
        assert (key_fields(each)["tries"], row[6]) == (tries, "-" if tries is None else str(tries))


def test_table_calls_dead_letters_dead():
    """The list of dead letters called each of them parked, and so sent its reader to the other
    list.
    """
    (row,) = cells(parked_table("g on s", [view(None)]))
    assert row[1:3] == ["(dead letters)", "dead"]
    assert key_fields(view(None))["state"] == "dead"


def test_table_has_a_row_for_each_message():
    message = Message("s", b"a", b"v" * 500, 9, 3, 0)
    known = ParkedMessage(partition_id=3, offset=9, message=message)
    gone = ParkedMessage(partition_id=3, offset=8, message=None, problem="removed")
    first, second = cells(message_table("a", [known, gone]))
    assert first == ["3", "9", "1970-01-01T00:00:00.000+00:00", "a", "v" * 100 + "…"]
    assert second == ["3", "8", "-", "-", "(removed)"]


def test_table_has_a_row_for_many_errors_of_one_kind():
    """Behind the first of them, which have the most messages."""
    errors = [view(None, failure=Failure("E", str(place), "c", 7, 5)) for place in range(25)]
    table = parked_table("g on s", errors)
    rows = cells(table)
    assert table.title == "g on s: 50 dead letters"
    assert len(rows) == 21
    assert (rows[20][0], rows[20][3], rows[20][8]) == ("7", "10", "(5 more errors)")


def test_message_is_shown_with_its_own_failure():
    failure = Failure("KeyError", "town", "c", 7, 5)
    message = Message("s", b"a", b"v", 9, 3, 0)
    failed = ParkedMessage(partition_id=3, offset=9, message=message, failure=failure, since_ms=8)
    gone = ParkedMessage(partition_id=3, offset=8, message=None, problem="removed")
    first, second = cells(message_table("a", [failed, gone]))
    assert (first[5], first[6][:23], first[7]) == ("5", "1970-01-01T00:00:00.007", "KeyError: town")
    assert second[5:] == ["-"] * 3


def test_number_of_skipped_messages_is_one_or_all_and_never_both():
    assert SkipOptions().count == 1
    assert SkipOptions(first=7).count == 7
    assert SkipOptions(all_messages=True).count is None
    with pytest.raises(ConfigError):
        _ = SkipOptions(first=1, all_messages=True).count
