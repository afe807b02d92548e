"""JSON values are decoded row by row, whatever the other rows contain."""

from __future__ import annotations

import json
from datetime import datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.arrow.json_decoder import JsonDecoder
from keylane.protocol.errors import ConfigError, Reason
from support.raising import raises

DDL = "n INT, name STRING, legs ARRAY<STRUCT<origin: STRING, minutes: DOUBLE>>"


def column(values: list[bytes]) -> pa.Array:
    return pa.array(values, pa.binary())


def decoded(values: list[bytes], ddl: str = DDL) -> list:
    made = JsonDecoder(ddl, "null").decode(column(values), 3, 0)
    made.validate(full=True)
    return made.to_pylist()


def test_values_become_structs():
    """Fields are found by name, missing ones are null, additional ones ignored, and white space is
    accepted anywhere.
    """
    values = [
        b'{"n": 1, "name": "a", "other": [1]}',
        b'\n {"name":\n "b\\n"\t}\r\n',
        b"{}",
        b'{"legs": [{"origin": "AMS", "minutes": 3}, {}], "n": null}',
    ]
    assert decoded(values) == [
        {"n": 1, "name": "a", "legs": None},
        {"n": None, "name": "b\n", "legs": None},
        {"n": None, "name": None, "legs": None},
        {
            "n": None,
            "name": None,
            "legs": [{"origin": "AMS", "minutes": 3.0}, {"origin": None, "minutes": None}],
        },
    ]


BAD = [
    b"",
    b" ",
    b"null",
    b"5",
    b"[]",
    b"{",
    b"{}{}",
    b"{}\n{}",
    b'{"n":',
    b"{}}",
    b'{"n":{}',
    b'{"name":"}',
    b'{"n":"x"}',
    b'{"n":1.5}',
    b'{"n":99999999999}',
    b'{"name":"\xff"}',
    b'{"n":1,"n":"x"}',
    b'{"name":"a\nb"}',
    b'{"name":"a\rb"}',
    b'{"name":"a\tb"}',
    b'{"name":{"k":"a\nb"}}',
    b'{"other":"a\nb"}',
    b'{"name":"\\ud83d"}',
    b'{"name":tru}',
    b"{'n':1}",
    b'{"n":' + b"[" * 20_000,
    b"\0",
]
AS_SPARK = [
    ("s STRING", '{"s":{"k":1}}', '{"k":1}'),
    (
        "s STRING",
        '{"s": {"k" : 1.5, "b":[1, 2 ,{"x":"\\u00e9\\n"}]}}',
        '{"k":1.5,"b":[1,2,{"x":"é\\n"}]}',
    ),
    ("s STRING", '{"s":5}', "5"),
    ("s STRING", '{"s":12345678901234567890123}', "12345678901234567890123"),
    ("s STRING", '{"s":[1]}', "[1]"),
    ("s STRING", '{"s":true}', "true"),
    ("s STRING", '{"s":null}', None),
    ("s STRING", '{"s":{"a":1,"a":2}}', '{"a":1,"a":2}'),
    ("s STRING", '{"s":\n"ab"\t}', "ab"),
    ("s STRING", '{"s":"\\ud83d\\ude00"}', "\U0001f600"),
    ("s STRING", '{"s":NaN}', '"NaN"'),
    ("s ARRAY<STRING>", '{"s":[1,"x",{"k":1},null,true]}', ["1", "x", '{"k":1}', None, "true"]),
    ("s STRUCT<b: STRING>", '{"s":{"b":{"c":1}}}', {"b": '{"c":1}'}),
    ("s STRUCT<b: INT>", '{"s":{"b":1},"s":{}}', {"b": None}),
    ("s INT", '{"s":1,"s":2}', 2),
    ("s INT", '{"s":"x","s":2}', 2),
    ("s FLOAT", '{"s":1e39}', float("inf")),
    ("s DOUBLE", '{"s":"Infinity"}', float("inf")),
    ("s DOUBLE", '{"s":"-INF"}', float("-inf")),
    ("s DOUBLE", '{"s":1e400}', float("inf")),
    ("s ARRAY<FLOAT>", '{"s":[-1e400]}', [float("-inf")]),
    ("s TIMESTAMP", '{"s":"2026-11-20T12:00:00.123456789Z"}', "2026-11-20T12:00:00.123456+00:00"),
    (
        "s TIMESTAMP",
        '{"s":"2026-11-20T12:00:00.1234567+02:00"}',
        "2026-11-20T10:00:00.123456+00:00",
    ),
    ("s TIMESTAMP", '{"s":"1969-12-31T23:59:59.9999999Z"}', "1969-12-31T23:59:59.999999+00:00"),
    ("s TIMESTAMP", '{"s":1700000000}', "2023-11-14T22:13:20+00:00"),
    ("s TIMESTAMP", '{"s":"2026-11-20"}', "2026-11-20T00:00:00+00:00"),
    ("s TIMESTAMP", '{"s":"2026-11-20 12:00:00"}', "2026-11-20T12:00:00+00:00"),
]
"""Schema, value, and the result of Spark 4.3's `from_json`; times are in UTC."""


def shown(field: object) -> object:
    return field.isoformat() if isinstance(field, datetime) else field


@pytest.mark.parametrize(("schema", "value", "wanted"), AS_SPARK)
def test_value_is_read_as_spark_reads_it(schema, value, wanted):
    """The same result alone and among values that pyarrow parses together."""
    for values in ([value.encode()], [b"{}", value.encode(), b"{}"] * 200):
        found = JsonDecoder(schema, "fail").decode(column(values), 3, 0).to_pylist()
        assert shown(found[len(values) > 1]["s"]) == wanted
        assert [row["s"] for row in found[::3]] == [None] * len(found[::3]) or len(values) == 1


def test_time_beyond_the_calendar_in_utc_is_read_beside_bad_values():
    """Year 1 in the east is year 0 in UTC, which Python's calendar lacks."""
    time = b'{"s":"0001-01-01T00:00:00+05:00"}'
    rows = JsonDecoder("s TIMESTAMP", "null").decode(column([b"bad", time]), 3, 0)
    assert rows.is_null().to_pylist() == [True, False]
    assert rows.field(0).cast(pa.int64()).to_pylist()[1] == -62_135_614_800_000_000


@pytest.mark.parametrize("number", ["5.10", "1e3", "-0.0", "1.50e-7"])
def test_number_read_as_a_string_keeps_its_digits(number):
    """`from_json` makes 5.1 of 5.10: the text of an id or of an amount would be another one."""
    nested = b'{"s":{"k":%s}}' % number.encode()
    rows = decoded([b'{"s":%s}' % number.encode(), nested], "s STRING")
    assert [row["s"] for row in rows] == [number, f'{{"k":{number}}}']


@given(st.lists(st.sampled_from(BAD) | st.integers(0, 9), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_bad_values_are_null_and_shift_no_other(mixed):
    """A good value is decoded in its own row, even between bad ones."""
    values = [each if isinstance(each, bytes) else b'{"n": %d}' % each for each in mixed]
    wanted = [None if isinstance(each, bytes) else {"n": each} for each in mixed]
    assert decoded(values, "n INT, name STRING") == [
        row and {**row, "name": None} for row in wanted
    ]


@given(
    st.lists(
        st.fixed_dictionaries(
            {}, optional={"n": st.integers(-(2**31), 2**31 - 1), "name": st.text(max_size=9)}
        ),
        min_size=1,
        max_size=9,
    )
)
@settings(max_examples=30, deadline=None)
def test_json_of_any_texts_comes_back(rows):
    """What json.dumps writes, read back."""
    values = [json.dumps(row).encode() for row in rows]
    assert decoded(values, "n INT, name STRING") == [
        {"n": row.get("n"), "name": row.get("name")} for row in rows
    ]


def test_bad_value_is_told_with_partition_and_offset():
    """By default, one bad value ends the read, and the error names its offset."""
    values = [b'{"n": 1}'] * 1_000
    values[700] = b'{"n": "x"}'
    with raises(Reason.JSON_VALUE, match="partition 3, offset 10700") as caught:
        JsonDecoder(DDL, "fail").decode(column(values), 3, 10_000)
    assert caught.value.details == {"partition_id": 3, "offset": 10_700}


def test_slice_of_a_column_is_decoded():
    """The column is a slice of another one."""
    values = column([b"zz", b'{"n": 1}', b'{"n": 2}', b"zz"]).slice(1, 2)
    assert JsonDecoder("n INT", "fail").decode(values, 3, 0).to_pylist() == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("schema", "bad_values", "text"),
    [
        ("", "fail", "a name and a type is expected"),
        ("n", "fail", "one of string, boolean"),
        ("n INT, n INT", "fail", "named twice"),
        ("n INT name STRING", "fail", "',' is expected"),
        ("n DATE", "fail", "one of string, boolean"),
        ("n ARRAY<INT", "fail", "'>' is expected"),
        ("n " + "ARRAY<" * 40 + "INT" + ">" * 40, "fail", "nested more than 32"),
        (", ".join(f"n{number} INT" for number in range(1_001)), "fail", "more than 1000 fields"),
        (pa.schema([("day", pa.date32())]), "fail", "type date32"),
        ("n INT", "drop", "give fail or null"),
    ],
)
def test_schema_that_cannot_be_is_refused(schema, bad_values, text):
    """The error is one sentence that says what would be valid."""
    with pytest.raises(ConfigError, match=text):
        JsonDecoder(schema, bad_values)


def test_arrow_schema_is_taken_as_it_is():
    """Types of Arrow that JSON has a form for."""
    schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])
    (row,) = (
        JsonDecoder(schema, "fail")
        .decode(column([b'{"n": 1, "at": "2026-11-23T10:00:00Z"}']), 3, 0)
        .to_pylist()
    )
    assert (row["n"], row["at"].isoformat()) == (1, "2026-11-23T10:00:00+00:00")
