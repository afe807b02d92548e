"""Words for people: nouns agree with their counts, and no character of a user's data commands a
terminal.
"""

import subprocess
import unicodedata

import msgspec
import pytest

from keylane.protocol.control import CreateSubject, SwitchGroup
from keylane.protocol.text import (
    counted,
    describe_invalid_value,
    format_age,
    format_moment,
    format_seconds,
    key_digest,
    key_text,
    listed,
    mask_password,
    printable,
    sentence,
    sum_text,
    url_problem,
)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"", "(no key)"),
        (b"a\x1bb", "a\\x1bb"),
        (b"bad\xff1", "bad\\xff1"),
        (b"bad\xfe", "bad\\xfe"),
        (b"\x00\xff\xfe", "\\x00\\xff\\xfe"),
    ],
)
def test_key_is_shown_whole_when_it_is_not_text(key, text):
    """Different keys do not look the same."""
    assert key_text(key) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (26_385, "26385 messages")],
)
def test_count_agrees_with_its_noun(count, text):
    """One has no s."""
    assert counted(count, "message") == text


@pytest.mark.parametrize(
    ("number", "is_partial", "text"),
    [("0", False, "0"), ("7", False, "7"), ("0", True, "?"), ("7", True, "7 or more")],
)
def test_sum_says_when_parts_of_it_are_not_known(number, is_partial, text):
    """A sum of what is known may be too low."""
    assert sum_text(number, is_partial=is_partial) == text


def test_sentence_begins_with_a_capital_letter_unless_it_begins_with_a_name():
    """A name such as s1 keeps its letters."""
    assert sentence("no consumer is alive") == "No consumer is alive"
    assert [sentence(text) for text in ("", "s1 waits", "Ü")] == ["", "s1 waits", "Ü"]


def test_irregular_plural_is_given():
    """A noun that takes more than an s."""
    assert (counted(1, "try", "tries"), counted(2, "try", "tries")) == ("1 try", "2 tries")


def test_long_list_is_cut():
    """With how much is left out."""
    assert (listed([]), listed([7]), listed([1, 2])) == ("none", "7", "1, 2")
    assert listed(range(1, 13)) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, … and 2 more"


def test_printable_text_has_no_control_character():
    """Of all of Unicode nothing is left that moves a cursor, ends a line or turns the writing; the
    rest is as it was.
    """
    everything = "".join(map(chr, range(0x11_0000)))
    shown = printable(everything)
    assert not any(
        unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} for character in shown
    )
    assert not any(
        unicodedata.bidirectional(character)
        in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
        for character in shown
    )
    shown.encode()
    assert printable("Zoë → \N{SNOWMAN} \\n") == "Zoë → \N{SNOWMAN} \\n"
    assert printable("\x1b[31m\t\r\n\0\x9b\u202e\udcff") == r"\x1b[31m\t\r\n\x00\x9b\u202e\udcff"


def test_key_digest_is_what_b2sum_prints():
    """An operator who knows a key finds its messages in the log."""
    done = subprocess.run(
        ["b2sum", "-l", "64"], input=b"customer-7", check=True, capture_output=True
    )
    assert key_digest(b"customer-7") == f"key digest {done.stdout.split()[0].decode()}"
    assert key_digest(b"") == "no key"


def test_age_is_told_in_the_unit_that_reads_best():
    ages = [1_500, 61_000, 119_999, 120_000, 7_199_999, 7_200_000, 200_000_000]
    assert [format_age(each) for each in ages] == [
        *("1.5 s", "61 s", "119 s", "2 min", "119 min", "2 h", "2 days")
    ]


def test_moment_has_a_date_if_it_is_half_a_day_away():
    assert format_moment(61_500, 100_000) == "00:01:01 UTC"
    assert format_moment(61_500, 90_000_000) == "1970-01-01 00:01:01 UTC"
    assert format_moment(10**30, 0) == "1e+30 ms"


def test_seconds_have_a_decimal_below_ten():
    """From ten seconds on the decimal is left out."""
    assert (format_seconds(50), format_seconds(9_949), format_seconds(61_999)) == (
        "0.1 s",
        "9.9 s",
        "61 s",
    )


@pytest.mark.parametrize(
    ("kind", "given", "ending"),
    [
        (SwitchGroup, {"strategy": "alone"}, "`$.strategy`: one of exclusive, shared"),
        (
            CreateSubject,
            {"subject": "s", "partitions": 1, "retention": "never"},
            "`$.retention`: one of acked, time",
        ),
        (CreateSubject, {"subject": "s", "partitions": "four"}, "`$.partitions`"),
        (CreateSubject, {}, "missing required field `subject`"),
    ],
)
def test_refused_value_names_the_allowed_ones(kind, given, ending):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, kind)
    assert describe_invalid_value(caught.value, kind).endswith(ending)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+asyncpg://kl:secret@db:5432/meta", "postgresql+asyncpg://kl:***@db:5432/meta"),
        ("postgresql+asyncpg://kl:se@cr:et/x@db/meta", "postgresql+asyncpg://kl:***@db/meta"),
        ("postgresql+asyncpg://kl:secret?x@db/meta", "postgresql+asyncpg://kl:***@db/meta"),
        ("postgresql+asyncpg://:secret@db/meta", "postgresql+asyncpg://:***@db/meta"),
        (
            "postgresql+asyncpg://db/meta?user=kl&Password=secret&ssl=on",
            "postgresql+asyncpg://db/meta?user=kl&Password=***&ssl=on",
        ),
        ("postgresql+asyncpg://db:5432/meta", "postgresql+asyncpg://db:5432/meta"),
        ("sqlite+aiosqlite:////var/lib/meta.db", "sqlite+aiosqlite:////var/lib/meta.db"),
    ],
)
def test_url_is_shown_without_its_password(url: str, shown: str):
    assert mask_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite:////home/a@b/c:d.db",
        "postgresql+asyncpg://keylane@/t?host=/tmp/x@y",
        "postgresql+asyncpg://u:p%40@[::1]:5432/db",
        "postgresql://u:p:q@h/db",
        "mysql+asyncmy://h:3306/x",
    ],
)
def test_url_problem_is_empty_when_the_url_is_read_as_meant(url: str) -> None:
    assert url_problem(url) == ""


@pytest.mark.parametrize(
    "url", ["postgresql://u:p@q@h/db", "mysql://u:p@q/r@h/db", "postgresql://u:p@q:r/s/db"]
)
def test_url_problem_says_the_rule_when_a_password_is_not_escaped(url: str) -> None:
    assert "@ is written %40" in url_problem(url)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "1" * 30])
def test_url_problem_refuses_a_port_that_cannot_be(port: str) -> None:
    """The system would take the rest of a division, and lead to another server."""
    assert "its port is not a number from 1 to 65535" in url_problem(
        f"postgresql://u:p@h:{port}/db"
    )


@pytest.mark.parametrize(
    "url", ["postgresql://u:p@h/db\nX=1", "postgresql://u:p@h /db", "postgresql://u:\0@h/db"]
)
def test_url_problem_refuses_line_ends_and_spaces(url: str) -> None:
    assert "control character" in url_problem(url)
