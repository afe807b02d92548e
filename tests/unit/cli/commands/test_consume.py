"""Messages are printed as the user asked, or the user is told what can be asked for."""

import json

import pytest
from click.testing import CliRunner

from keylane.cli.commands.consume import MESSAGE_LINE
from keylane.cli.main import app
from keylane.cli.message_json import message_json, message_printer
from keylane.cli.options import OutputFormat
from keylane.protocol.errors import ConfigError
from keylane.protocol.message import Message, pack_properties

MESSAGE = Message(
    subject="s",
    key=b"k",
    value=b"v\xff",
    offset=5,
    partition_id=2,
    sent_at_ns=7,
    fencing_token=9,
    packed_properties=pack_properties({"a": "b"}),
)


def line_of(template: str, message: Message = MESSAGE) -> str:
    return message_printer(OutputFormat.parse(template), MESSAGE_LINE)(message)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("table", "2:5 k v\\xff"),
        ("{partition_id}:{offset} {key} {value}", "2:5 k v\\xff"),
        ("{{{fencing_token}}} {properties}", '{9} {"a":"b"}'),
        ("{properties.a} {properties.b} {lease.token}", "b - -"),
    ],
)
def test_template_fields_are_filled_in(template, line):
    """Fields are filled in, the rest stays."""
    assert line_of(template) == line


def test_key_is_an_empty_text_in_a_line_when_there_is_none():
    """A line may be read by `produce --key-separator`, for which "-" would be a key."""
    message = Message("s", b"", b"v", 5, 2, 7)
    assert line_of("{key}={value} {lease.token}", message) == "=v -"
    assert line_of("table", message) == "2:5  v"


@pytest.mark.parametrize(
    "template",
    [
        *("{nope}", "{}", "{0}", "{key.__class__}", "{key[0]}", "{key!r}", "{offset:>9}", "{key"),
        *("plain", ""),
    ],
)
def test_template_with_an_unknown_field_is_refused(template):
    """A field that messages do not have, or a way into their insides, is refused."""
    done = CliRunner().invoke(app, ["consume", "orders", "--group", "billing", "-o", template])
    assert isinstance(done.exception, ConfigError)
    assert "--output" in done.exception.message


def test_line_has_no_control_character_of_the_message():
    """Neither key nor value nor properties end the line or command the terminal; the template's own
    tab stays.
    """
    evil = "\x1b[2J\r\n\t\x9b31m\u202e"
    message = Message(
        subject="s",
        key=evil.encode(),
        value=evil.encode(),
        offset=5,
        partition_id=2,
        sent_at_ns=7,
        packed_properties=pack_properties({evil: evil}),
    )
    shown = r"\x1b[2J\r\n\t\x9b31m\u202e"
    assert line_of("{key}\t{value}", message) == f"{shown}\t{shown}"
    assert line_of("{properties}", message).isprintable()
    assert message_json(message).isprintable()


def test_undecodable_properties_are_shown():
    """Only the sender looked at them."""
    message = Message("s", b"k", b"v", 5, 2, 7, packed_properties=b"\xff")
    assert line_of("{value} {properties}", message) == "v \\xff"
    assert json.loads(message_json(message))["properties_base64"] == "/w=="


def test_message_is_one_compact_object_in_json():
    """As JSON, a message is one compact object with everything a reader may want, named as in other
    answers.
    """
    line = message_json(MESSAGE)
    assert ", " not in line
    shown = json.loads(line)
    assert {name: shown[name] for name in ("queue", "logic_offset")} == {
        "queue": MESSAGE.queue,
        "logic_offset": MESSAGE.logic_offset,
    }
    assert {
        name: value for name, value in shown.items() if name not in {"queue", "logic_offset"}
    } == {
        "subject": "s",
        "partition_id": 2,
        "offset": 5,
        "key": "k",
        "value_base64": "dv8=",
        "fencing_token": 9,
        "lease": None,
        "attempt": 1,
        "sent_at_ns": 7,
        "properties": {"a": "b"},
    }
