"""Rows of CSV and NDJSON become messages, with the numbers of their lines."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.cli.commands.lines import LINE_BYTES_MAX, OutgoingMessage, numbered_lines
from keylane.cli.commands.rows import CsvTable, Ndjson, guess_format, is_quote_open
from keylane.cli.options import InputFormat
from keylane.protocol.errors import (
    ConfigError,
    InputError,
    InvalidRequestError,
    MessageTooLargeError,
)

TABLE = b'customer,event\r\nann,paid\r\n\r\nbob,"two\r\nlines, ""quoted"""\r\nann,packed\r\n'


async def rows_of(data: bytes, table, ranges=()) -> list[tuple[int, OutgoingMessage]]:
    """(line number, message) of each row."""
    records = numbered_lines(io.BytesIO(data), ranges, records=table.records)
    return [(number, table.parse(record)) async for number, record in records]


async def test_rows_of_csv_are_objects_with_the_names_of_the_header():
    """A row may have several lines, and blank lines are passed over; a row has the number of its
    first line.
    """
    rows = await rows_of(TABLE, CsvTable("customer"))
    assert [(number, message.key, json.loads(message.value)) for number, message in rows] == [
        (2, b"ann", {"customer": "ann", "event": "paid"}),
        (4, b"bob", {"customer": "bob", "event": 'two\r\nlines, "quoted"'}),
        (6, b"ann", {"customer": "ann", "event": "packed"}),
    ]


@pytest.mark.parametrize(
    ("ranges", "numbers"),
    [([(4, None)], [4, 6]), ([(5, None)], [6]), ([(2, 3), (6, 7)], [2, 6]), ([(1, 2)], [])],
)
async def test_rows_of_csv_are_chosen_by_their_first_lines(ranges, numbers):
    """The header is read whatever is chosen."""
    rows = await rows_of(TABLE, CsvTable("customer"), ranges)
    assert [number for number, _ in rows] == numbers


async def test_line_behind_the_last_row_of_csv_is_refused():
    """The lines of the file count, not its rows."""
    assert await rows_of(TABLE, CsvTable(None), [(6, 7)])
    with pytest.raises(InputError, match="line 7 was requested, and the input has 6"):
        await rows_of(TABLE, CsvTable(None), [(7, 8)])


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"))


@given(
    st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=8
        )
    )
)
async def test_cells_of_csv_come_back_when_python_wrote_them(rows):
    """Commas, quotes and line ends in a field included."""
    names = [f"c{number}" for number in range(len(rows[0]))]
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([names, *rows])
    messages = await rows_of(text.getvalue().encode(), CsvTable(None))
    values = [list(json.loads(message.value).values()) for _, message in messages]
    assert values == rows


@given(
    rows=st.lists(
        st.lists(st.text('a\r\n",é', max_size=6), min_size=2, max_size=2), min_size=1, max_size=4
    ),
    end=st.sampled_from(["\n", "\r\n"]),
)
async def test_line_ends_in_quotes_come_back_when_rows_end_in_others(rows, end):
    """CRLF in a quoted field became LF."""
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator=end).writerows([["k", "v"], *rows])
    messages = await rows_of(text.getvalue().encode(), CsvTable("k", keyless=True))
    assert [list(json.loads(message.value).values()) for _, message in messages] == rows
    assert [message.key for _, message in messages] == [row[0].encode() for row in rows]


@pytest.mark.parametrize("row", [b"a,b\rc\n", b"a,b\r\r\n", b"a,b\r", b'a,"b"\r\r\n'])
async def test_row_is_refused_when_a_carriage_return_is_in_no_quotes(row):
    """Python passes over one at the end of a row."""
    with pytest.raises(InvalidRequestError, match="not a row of CSV"):
        await rows_of(b"k,v\r\n" + row, CsvTable("k"))


@pytest.mark.parametrize(
    ("line", "in_quotes", "ends_inside"),
    [
        (b"a,b", False, False),
        (b'a,"b', False, True),
        (b'a,"b""', False, True),
        (b'a,"b"', False, False),
        (b'a"b,c', False, False),
        (b"more", True, True),
        (b'more",c', True, False),
        (b'more","c', True, True),
        (b'""', True, True),
        (b"", True, True),
        (b'"', True, False),
        (b'"a","b","c', False, True),
    ],
)
def test_line_ends_in_quotes_when_its_last_field_is_open(line, in_quotes, ends_inside):
    """A quote in the middle of a field without quotes opens nothing."""
    assert is_quote_open(line, in_quotes=in_quotes) is ends_inside


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b"ann", "3 columns, and this row 1"),
        (b"a,b,c,d", "3 columns, and this row 4"),
        (b'"a"b,c,d', "not a row of CSV"),
        (b"\xff,b,c", "not UTF-8"),
        (b",b,c", "no key in 'k'; --keyless"),
    ],
)
async def test_bad_row_of_csv_is_refused(row, why):
    """The text says what is wrong with it."""
    table = CsvTable("k")
    with pytest.raises(InvalidRequestError, match=why):
        await rows_of(b"k,v,w\n" + row + b"\n", table)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no header"),
        (b"\n\n", "no header"),
        (b"a,a,k\n", "columns twice: a"),
        (b"a,b\n", "no column 'k', but: a, b"),
        (b"\xffa,k\n", "the header: not UTF-8"),
        (b'k\n"one\ntwo\n', "row of line 2 ends in a quoted field"),
    ],
)
async def test_csv_is_refused_when_its_header_or_end_is_wrong(data, why):
    """Nothing of it, or nothing from there on, is sent."""
    with pytest.raises(InputError, match=why) as raised:
        await rows_of(data, CsvTable("k"))
    assert raised.value.line is not None


async def test_row_of_csv_without_end_is_refused():
    """Before it fills the memory; each of its lines is short."""
    line = b"x" * (1 << 20) + b"\n"
    data = b'k\n"' + line * (LINE_BYTES_MAX // len(line) + 1)
    with pytest.raises(MessageTooLargeError, match="from line 2 on"):
        await rows_of(data, CsvTable("k"))


async def test_byte_order_mark_is_no_part_of_the_first_column():
    """As spreadsheets write it."""
    mark = b"\xef\xbb\xbf"
    (row,) = await rows_of(mark + b"k,v\na,1\n", CsvTable("k"))
    assert row[1].key == b"a"
    (row,) = await rows_of(mark + b'{"k": "a"}\n', Ndjson("k"))
    assert row == (1, OutgoingMessage(b"a", b'{"k": "a"}'))


async def test_lines_of_ndjson_are_sent_as_they_are():
    """The key is text or a whole number; blank lines are passed over."""
    data = '{"k": "ß", "n": [1]}\n\n {"n": 1.50, "k": 7}\r\n'.encode()
    assert await rows_of(data, Ndjson("k")) == [
        (1, OutgoingMessage("ß".encode(), '{"k": "ß", "n": [1]}'.encode())),
        (3, OutgoingMessage(b"7", b' {"n": 1.50, "k": 7}')),
    ]
    assert await rows_of(b'{"k": 1}\r', Ndjson(None)) == [(1, OutgoingMessage(b"", b'{"k": 1}\r'))]
    assert await rows_of(b'{"k": 1}\n', Ndjson(None)) == [(1, OutgoingMessage(b"", b'{"k": 1}'))]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"hello", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"k": "a"', "not a JSON object"),
        (b'{"k": "\xff"}', "not a JSON object"),
        (b'{"k": "\\ud800"}', "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b'{"a": ' * 100_000, "not a JSON object"),
        (b"{}", "no key in 'k'; --keyless"),
        (b'{"k": null}', "no key in 'k'; --keyless"),
        (b'{"k": ""}', "no key in 'k'; --keyless"),
        (b'{"k": true}', "'k' is neither"),
        (b'{"k": 1.5}', "'k' is neither"),
        (b'{"k": ["a"]}', "'k' is neither"),
        (b'{"k": 1' + b"0" * 5_000 + b"}", "'k' is neither|not a JSON object"),
    ],
)
def test_bad_line_of_ndjson_is_refused(line, why):
    """The text says what is wrong with it."""
    with pytest.raises(InvalidRequestError, match=why):
        Ndjson("k").parse(line)


async def test_rows_without_a_key_have_no_order_when_they_are_keyless():
    """Only then."""
    ((_, row),) = await rows_of(b"k,v\n,1\n", CsvTable("k", keyless=True))
    assert (row.key, json.loads(row.value)) == (b"", {"k": "", "v": "1"})
    assert Ndjson("k", keyless=True).parse(b"{}") == OutgoingMessage(b"", b"{}")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.csv", InputFormat.CSV),
        ("A.CSV", InputFormat.CSV),
        ("a.ndjson", InputFormat.NDJSON),
        ("a.jsonl", InputFormat.NDJSON),
        ("a.txt", InputFormat.LINES),
        ("csv", InputFormat.LINES),
    ],
)
def test_format_is_that_of_the_suffix(name, form):
    """Of standard input it is lines."""
    assert guess_format(Path(name)) is form
    assert guess_format(None) is InputFormat.LINES


@pytest.mark.parametrize("ranges", [[(5, 6)], [(2, 3), (5, 6)], [(3, 4)], [(5, 6), (6, 7)]])
async def test_line_in_which_no_row_begins_is_refused(ranges):
    """A line inside a quoted row, or a blank one, was passed over without a word."""
    with pytest.raises(InputError, match=r"no row begins in line [35]; the row before begins in"):
        await rows_of(TABLE, CsvTable("customer"), ranges)


async def test_line_inside_the_last_row_is_refused():
    with pytest.raises(
        InputError, match="no row begins in line 3; the row before begins in line 2"
    ):
        await rows_of(b'a\n"x\ny"\n', CsvTable(None), [(3, 4)])


async def test_constant_key_is_refused_when_it_is_the_name_of_a_column():
    """Whoever writes `--key id` for a table with the column `id` means the column."""
    with pytest.raises(InputError, match="--key-field customer takes it from each row"):
        await rows_of(TABLE, CsvTable(None, key="customer"))
    with pytest.raises(InvalidRequestError, match="--key-field id takes it from each row"):
        Ndjson(None, key="id").parse(b'{"id": 1}')
    assert len(await rows_of(TABLE, CsvTable(None, key="all"))) == 3


@pytest.mark.parametrize("name", ["a.json", "A.JSON"])
def test_suffix_that_does_not_tell_the_format_is_refused(name):
    """The sentence names the formats that it may be."""
    with pytest.raises(ConfigError, match=r"--format json .* --format ndjson .* --format lines"):
        guess_format(Path(name))
