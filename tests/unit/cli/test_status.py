"""What a command shows of itself while it takes long: on a terminal alone, and not at once."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from keylane.cli import status
from keylane.cli.status import percent, showing, showing_progress


class SlowTerminal(io.StringIO):
    """Standard error as a terminal; `wrote` is set at each write."""

    def __init__(self) -> None:
        super().__init__()
        self.wrote = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        self.wrote.set()
        return count


def test_long_wait_prints_a_line_for_each_change_when_nobody_looks(
    monkeypatch: pytest.MonkeyPatch,
):
    """Into a log file; what lasts prints nothing more, and other work nothing at all."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(status, "FIRST_S", 0.01)
    monkeypatch.setattr(status, "LINES_S", 0.01)
    texts = ["waits\x1b"] * 3 + ["moves"] * 3
    with showing(lambda: texts.pop(0) if len(texts) > 1 else texts[0], advice="Ctrl-C leaves it."):
        while "moves" not in log.getvalue() or len(texts) > 1:
            time.sleep(0.01)
    assert log.getvalue() == "waits\\x1b. Ctrl-C leaves it.\nmoves\n"
    with showing("reading"):
        time.sleep(0.1)
    assert log.getvalue().count("\n") == 2


def test_long_work_shows_what_it_does_and_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
):
    """The line is written over itself, and is gone at the end."""
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(status, "FIRST_S", 0.01)
    monkeypatch.setattr(status, "EVERY_S", 0.01)
    done = 0
    with showing(lambda: f"reading\x1b:{percent(done, 4)}"):
        assert terminal.wrote.wait(60)
        done = 1
        while "25 %" not in terminal.getvalue():
            time.sleep(0.01)
    shown = terminal.getvalue()
    assert shown.startswith("\r\033[Kreading\\x1b: 0 %, 0 s\r")
    assert shown.endswith("\r\033[K")
    assert "\n" not in shown


def test_progress_is_shown_as_soon_as_the_total_is_known(monkeypatch: pytest.MonkeyPatch):
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(status, "FIRST_S", 0.01)
    monkeypatch.setattr(status, "EVERY_S", 0.01)
    with showing_progress("reading") as reach:
        assert terminal.wrote.wait(60)
        reach(1, 4)
        while "reading: 25 %, " not in terminal.getvalue():
            time.sleep(0.01)
    assert terminal.getvalue().startswith("\r\033[Kreading, 0 s\r")


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch):
    terminal = SlowTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with showing("nothing to see"):
        pass
    assert terminal.getvalue() == ""


def test_long_work_shows_nothing_when_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Scripts and log files never see it."""
    monkeypatch.setattr(status, "FIRST_S", 0.0)
    with showing("waiting"):
        time.sleep(0.05)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("done", "total", "text"), [(0, 0, ""), (1, 3, " 33 %"), (3, 3, " 100 %"), (9, 3, " 100 %")]
)
def test_percent_is_left_out_when_the_size_is_not_known(done: int, total: int, text: str):
    assert percent(done, total) == text
