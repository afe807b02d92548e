"""The id of a failed call is in the caller's error and in the line of the log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from keylane.rpc.operating.log_lines import JsonLines, TextLines
from keylane.rpc.request_ids import REQUEST_ID, log_fault, new_request_id

log = logging.getLogger("keylane.rpc")


@pytest.fixture(params=[JsonLines({"program": "broker"}), TextLines()], ids=["json", "text"])
def written(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """What a log in this format has."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(request.param)
    log.addHandler(handler)
    yield stream
    log.removeHandler(handler)


def test_fault_outside_of_a_request_gets_an_id(written: io.StringIO) -> None:
    """As on the data plane; the next line has none."""
    error = log_fault(log, "Append", ValueError("a secret"))
    assert error.request_id is not None
    assert f"request_id={error.request_id}" in error.message
    line = written.getvalue()
    assert line.count(error.request_id) == 1
    assert "a secret" in line
    assert "secret" not in str(error)
    log.error("another line")
    assert error.request_id not in written.getvalue()[len(line) :]


def test_lines_of_a_request_have_its_id(written: io.StringIO) -> None:
    request_id = new_request_id()
    token = REQUEST_ID.set(request_id)
    try:
        log.warning("first line\nsecond line")
        error = log_fault(log, "GET /v1/health", ValueError("broken"))
    finally:
        REQUEST_ID.reset(token)
    assert error.request_id == request_id
    assert written.getvalue().count(request_id) == 2


@pytest.mark.parametrize("name", ['a\n{"level": "CRITICAL"}', "a\r\x1b[2Jb", "a\u2028b\x00"])
def test_name_with_control_characters_forges_no_line(written: io.StringIO, name: str) -> None:
    """It stays in its line, or in an indented one, and moves no cursor."""
    log.warning("client %s has joined", name)
    lines = written.getvalue().split("\n")[:-1]
    assert "\x1b" not in written.getvalue()
    assert "\r" not in written.getvalue()
    assert all(line.startswith("    ") for line in lines[1:])
    if lines[0].startswith("{"):
        assert [json.loads(line)["message"] for line in lines] == [f"client {name} has joined"]
