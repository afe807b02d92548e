"""A message printed as JSON and read again has the same key, value and properties, or is
refused.
"""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.cli.commands.lines import LineFormat, OutgoingMessage, parse_line
from keylane.cli.message_json import message_json
from keylane.protocol.errors import InvalidRequestError
from keylane.protocol.message import Message, pack_properties

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = TEXT.filter(lambda name: not name.startswith("keylane."))
"""Names of properties that a program may give."""
JSON = LineFormat(as_json=True)


@given(
    st.binary() | TEXT.map(str.encode),
    st.binary() | TEXT.map(str.encode),
    st.dictionaries(NAMES, TEXT | st.binary()),
)
def test_message_comes_back_from_its_json(key, value, properties):
    """Whatever its bytes are; the line has no control character, so it is one line."""
    packed = pack_properties(properties)
    message = Message("s", key, value, 5, 2, 7, packed_properties=packed)
    line = message_json(message)
    assert parse_line(line.encode(), JSON) == OutgoingMessage(key, value, properties)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in line)


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


@pytest.mark.parametrize("packed", [b"\xff", b"\xc1", pack_properties({"a": "b"}) + b"\0"])
def test_properties_that_are_no_texts_are_printed_and_refused_when_they_are_read(packed):
    """The producer has no way to send their bytes, and a message without them would be another
    one.
    """
    line = message_json(Message("s", b"k", b"v", 5, 2, 7, packed_properties=packed))
    assert base64.b64decode(json.loads(line)["properties_base64"]) == packed
    with pytest.raises(InvalidRequestError, match="`properties_base64` as a text") as caught:
        parse_line(line.encode(), JSON)
    assert caught.value.code == 1104


def test_message_without_a_key_is_sent_as_it_was_printed():
    """Its key is null, and not an empty text, which no line may have."""
    line = message_json(Message("s", b"", b"v", 9, 3, 0)).encode()
    assert b'"key":null' in line
    assert parse_line(line, JSON).key == b""


def test_base64_of_readable_properties_is_refused_too():
    """A line is taken or refused for its fields, not for what the bytes in them happen to be."""
    line = b'{"value": "v", "properties_base64": "gaFhoWI="}'
    with pytest.raises(InvalidRequestError, match="`properties_base64` as a text"):
        parse_line(line, JSON)


@pytest.mark.parametrize(
    "line",
    [
        b'{"key": "k"}',
        b'{"value": "v", "value_base64": "dg=="}',
        b'{"value": null, "value_base64": "dg=="}',
        b'{"value": "v", "key": "k", "key_base64": "aw=="}',
        b'{"value": "v", "key": ""}',
        b'{"value": "v", "key_base64": ""}',
        b'{"value_base64": "%"}',
        b'{"value_base64": 7}',
        b'{"value": "v", "properties": {"a": "b"}, "properties_base64": {"a": "Yg=="}}',
        b'{"value": "v", "properties_base64": {"a": "%"}}',
        b'{"value": "v", "valu_base64": "dg=="}',
    ],
)
def test_line_is_refused_when_a_field_is_there_twice_or_missing(line):
    """Nothing is guessed."""
    with pytest.raises(InvalidRequestError, match="not a message in JSON"):
        parse_line(line, JSON)
