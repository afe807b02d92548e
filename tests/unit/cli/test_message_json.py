"""A message printed as JSON and read again is the same bytes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.cli.lines import LineFormat, Outgoing, parse_line
from keylane.cli.message_json import message_json
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.message import Message, pack_properties

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = LineFormat(as_json=True)


@given(
    st.binary() | TEXT.map(str.encode),
    st.binary() | TEXT.map(str.encode),
    st.dictionaries(TEXT, TEXT),
)
def test_a_message_comes_back_from_its_json(key, value, properties):
    """Whatever its bytes are; the line has no control character, so it is one line."""
    packed = pack_properties(properties)
    message = Message("s", key, value, 5, 2, 7, packed_properties=packed)
    line = message_json(message)
    assert parse_line(line.encode(), JSON) == Outgoing(key, value, properties)
    assert not any(ord(one) < 32 or 127 <= ord(one) < 160 for one in line)


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (b"", {"value": ""}),
        (b"paid", {"value": "paid"}),
        ("Zoë\0".encode(), {"value": "Zoë\0"}),
        (b"\xff", {"value_base64": "/w=="}),
        (b"\xed\xa0\x80", {"value_base64": "7aCA"}),
    ],
)
def test_bytes_are_text_where_they_can_be(data, fields):
    """Else they are base64, under a name of their own: a text is never taken for bytes."""
    facts = json.loads(message_json(Message("s", b"", data, 5, 2, 7)))
    assert {name: facts[name] for name in facts if name.startswith("value")} == fields


def test_properties_come_back_from_base64():
    """As they are stored."""
    line = b'{"value": "v", "properties_base64": "gaFhoWI="}'
    assert parse_line(line, JSON) == Outgoing(b"", b"v", {"a": "b"})


@pytest.mark.parametrize(
    "line",
    [
        b'{"key": "k"}',
        b'{"value": "v", "value_base64": "dg=="}',
        b'{"value": null, "value_base64": "dg=="}',
        b'{"value": "v", "key": "k", "key_base64": "aw=="}',
        b'{"value": "v", "properties": {}, "properties_base64": "gA=="}',
        b'{"value": "v", "properties_base64": "/w=="}',
        b'{"value_base64": "%"}',
        b'{"value_base64": 7}',
        b'{"value": "v", "valu_base64": "dg=="}',
    ],
)
def test_a_line_that_says_two_things_or_none_is_refused(line):
    """Nothing is guessed."""
    with pytest.raises(InvalidRequestError, match="not a message in JSON"):
        parse_line(line, JSON)
