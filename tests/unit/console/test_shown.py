import pytest

from keylane.console.shown import (
    VALUE_BYTES_SHOWN,
    age,
    count,
    parse_hex,
    preview_text,
    rate,
    value_text,
)
from keylane.protocol.errors import InvalidRequestError


def test_count_parts_thousands_and_says_what_is_not_known():
    assert count(1_234_567) == "1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567"
    assert count(None) == "?"


def test_rate_has_a_digit_below_ten():
    assert [rate(None), rate(0), rate(0.25), rate(12.4)] == ["…", "0/s", "0.2/s", "12/s"]


def test_age_has_the_largest_unit_that_says_enough():
    shown = [age(None), age(-5), age(90_000), age(7_300_000), age(3 * 86_400_000)]
    assert shown == ["?", "0 s", "90 s", "2 h", "3 d"]


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [
        (b'{"a":1}', "auto", ('{\n  "a": 1\n}', "JSON")),
        (b'{"a":1}', "text", ('{"a":1}', "text")),
        (b"plain", "json", ("plain", "text")),
        (b"\xff\xfe", "text", ("0000  ff fe", "hex")),
        (b"bad\xff1", "text", ("0000  62 61 64 ff 31", "hex")),
        (b"cut\xe2\x80", "text", ("0000  63 75 74 e2 80", "hex")),
        (b"a\nb\x00\t\xe2\x80\xae", "auto", ("a\nb\\x00\t\\u202e", "text")),
        (b"", "auto", ("", "text")),
    ],
)
def test_value_is_shown_in_the_form_that_it_has(value, form, shown):
    assert value_text(value, form) == shown


def test_value_is_cut_between_two_characters():
    text, form = value_text("ü".encode() * VALUE_BYTES_SHOWN)
    assert form == "text"
    assert set(text) == {"ü"}
    assert value_text(b"x" + "ü".encode() * VALUE_BYTES_SHOWN)[1] == "text"


def test_value_that_nests_without_end_is_text():
    assert value_text(b"[" * 4_000)[1] == "text"


def test_preview_is_one_line():
    assert preview_text(b'{\n  "a": 1\n}') == '{ "a": 1 }'
    assert preview_text(b"x" * 10_000).endswith("…")
    assert preview_text(b"\xff\x00") == "ff 00"
    assert preview_text(b"ab\xffcd") == "61 62 ff 63 64"


def test_parse_hex_refuses_other_texts():
    assert parse_hex("00ff") == b"\x00\xff"
    with pytest.raises(InvalidRequestError, match="not hexadecimal"):
        parse_hex("<b>")
