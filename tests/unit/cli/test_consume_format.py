"""Messages are printed as the user asked, or the user is told what can be asked for."""

import json

import pytest

from keylane.cli.consume import message_json, parse_format
from keylane.protocol.errors import ConfigError
from keylane.protocol.message import Message, pack_properties

MESSAGE = Message(
    subject="s",
    order_key=b"k",
    value=b"v\xff",
    offset=5,
    partition_id=2,
    sent_at_ns=7,
    fencing_token=9,
    packed_properties=pack_properties({"a": "b"}),
)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{partition}:{offset} {key} {value}", "2:5 k v\\xff"),
        ("{{{token}}} {properties}", '{9} {"a": "b"}'),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_templates(template, line):
    """Fields are filled in, the rest stays."""
    assert parse_format(template)(MESSAGE) == line


@pytest.mark.parametrize(
    "template",
    ["{nope}", "{}", "{0}", "{key.__class__}", "{key[0]}", "{key!r}", "{offset:>9}", "{key"],
)
def test_bad_templates(template):
    """A field that messages do not have, or a way into their insides, is refused."""
    with pytest.raises(ConfigError, match="--format"):
        parse_format(template)


def test_json():
    """As JSON, a message is one compact object with everything a reader may want, named as in other answers."""
    line = message_json(MESSAGE)
    assert ", " not in line
    found = json.loads(line)
    assert {name: found[name] for name in ("queue", "logic_offset")} == {
        "queue": MESSAGE.queue,
        "logic_offset": MESSAGE.logic_offset,
    }
    assert {
        name: value for name, value in found.items() if name not in {"queue", "logic_offset"}
    } == {
        "subject": "s",
        "partition_id": 2,
        "offset": 5,
        "key": "k",
        "value": "v\\xff",
        "fencing_token": 9,
        "attempt": 1,
        "sent_at_ns": 7,
        "properties": {"a": "b"},
    }
