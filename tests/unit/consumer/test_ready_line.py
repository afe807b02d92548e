"""The line of a consumer in a program that never configured logging."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from keylane.consumer.ready_line import print_ready_line


@pytest.fixture
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _self: False)


def test_ready_line_is_printed_when_nothing_shows_the_log(
    unlogged: None, capsys: pytest.CaptureFixture[str]
):
    print_ready_line("consumer of s in group g")
    assert capsys.readouterr().err == "keylane: the consumer of s in group g is running\n"


def test_ready_line_is_left_out_when_logging_is_configured(capsys: pytest.CaptureFixture[str]):
    print_ready_line("consumer of s in group g")  # pytest has handlers
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [True, False])
def test_consumer_runs_when_standard_error_is_gone(
    unlogged: None, monkeypatch: pytest.MonkeyPatch, closed: bool
):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    print_ready_line("consumer of s in group g")
