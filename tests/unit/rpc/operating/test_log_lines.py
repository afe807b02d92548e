"""A server's log: text on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import io
import json
import logging

import pytest

from keylane.protocol.errors import AccessDeniedError
from keylane.protocol.text import printable
from keylane.rpc.access.audit import record_event
from keylane.rpc.access.caller import AccessTarget
from keylane.rpc.operating.log_lines import log_problems, log_to


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _loggers():
    root, package = logging.getLogger(), logging.getLogger("keylane")
    before, level = (root.handlers[:], root.level), package.level
    yield
    root.handlers[:], root.level = before
    package.setLevel(level)


def test_log_is_json_lines_when_it_goes_to_a_file():
    """With the time in UTC, the program's fields, and a traceback in one line."""
    stream = io.StringIO()
    log_to(stream, level="INFO", fields={"program": "broker", "broker_group": "g1"})
    log = logging.getLogger("keylane.broker")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed for %s\nand more", "orders")
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert told["message"] == "it failed for orders\nand more"
    assert (told["level"], told["logger"]) == ("ERROR", "keylane.broker")
    assert (told["program"], told["broker_group"]) == ("broker", "g1")
    assert told["time"].endswith("Z")
    assert "ValueError: two\nlines" in told["error"]


def test_log_is_text_when_it_goes_to_a_terminal():
    """Text on request; JSON on a terminal on request too."""
    for stream, asked, is_json in (
        (TerminalText(), "auto", False),
        (io.StringIO(), "text", False),
        (TerminalText(), "json", True),
    ):
        log_to(stream, level="INFO", log_format=asked, fields={})
        logging.getLogger("keylane.rpc").warning("hello")
        assert stream.getvalue().startswith("{") is is_json


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_text_of_a_caller_commands_no_terminal_and_begins_no_line(log_format: str):
    """Escapes, marks of direction, a carriage return, a forged line, a lone surrogate."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    log_to(stream, level="INFO", log_format=log_format, fields={})
    bad = "\x1b[2Ja\x9b1m\u202eb\rc\ud800\x85\n2026-11-27 ERROR keylane forged"
    logging.getLogger("keylane.rpc").warning("%s failed", bad)
    try:
        raise ValueError(bad)
    except ValueError:
        logging.getLogger("keylane.rpc").exception("a handler failed")
    stream.seek(0)
    written = stream.read()
    assert printable(written.replace("\n", "")) == written.replace("\n", "")
    assert written.count("forged") == 2
    assert not [line for line in written.splitlines() if line.startswith("2026-11-27 ERROR")]
    assert "\\u202e" in written
    if log_format == "json":
        told = [json.loads(line) for line in written.splitlines()]
        assert told[0]["message"] == f"{bad} failed"


def test_log_settings_are_checked():
    """Each problem is a sentence."""
    assert log_problems({"log_level": "INFO", "log_format": "json"}) == []
    assert len(log_problems({"log_level": "LOUD", "log_format": "xml"})) == 2


def test_audit_line_is_one_object_with_its_own_fields_when_the_log_is_json():
    """Log collectors had to parse twice, because the message contained JSON."""
    streams = [io.StringIO(), io.StringIO()]
    for stream, log_format in zip(streams, ("json", "text"), strict=True):
        log_to(stream, level="WARNING", log_format=log_format, fields={"program": "broker"})
        record_event(
            at_ms=1_700_000_000_123,
            who="shop",
            remote="10.0.0.1",
            action="POST /v1/subjects",
            target=AccessTarget("orders", "billing"),
            error=AccessDeniedError("no"),
            detail="id 7",
        )
    told = json.loads(streams[0].getvalue())
    own = {
        "at": "2023-11-14T22:13:20.123Z",
        "who": "shop",
        "from": "10.0.0.1",
        "did": "POST /v1/subjects",
        "subject": "orders",
        "group": "billing",
        "outcome": "refused",
        "detail": "id 7",
        "error": "AccessDeniedError",
        "code": 1351,
    }
    assert {name: told[name] for name in own} == own
    assert told["message"] == "shop: POST /v1/subjects: refused"
    assert (told["logger"], told["program"]) == ("keylane.audit", "broker")
    text = streams[1].getvalue()
    assert json.loads(text[text.index("{") :]) == own
