"""A command asks before it changes what cannot be undone, and one Ctrl-C ends it."""

from __future__ import annotations

import io
import sys
from functools import partial

import pytest
import sqlalchemy as sa

from keylane.cli.confirmation import confirm, require_confirmation
from keylane.errors import ConfigError
from keylane.outbox import Outbox
from keylane.outbox.tables import FAILED, OutboxTables
from support.terminal import CTRL_C, at_terminal

ROWS = OutboxTables().rows


@pytest.fixture
def url(tmp_path) -> str:
    """An outbox with one failed row, whose deletion is asked inside the event loop."""
    url = f"sqlite:///{tmp_path / 'user.db'}"
    engine = sa.create_engine(url)
    outbox = Outbox("127.0.0.1:1", engine)
    with engine.begin() as connection:
        OutboxTables().create(connection)
        outbox.add_sync(connection, "orders", b"v", key=b"k")
        connection.execute(sa.update(ROWS).values(batch_id=FAILED))
    engine.dispose()
    return url


def count(url: str) -> int:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = connection.execute(sa.select(ROWS)).all()
    engine.dispose()
    return len(rows)


def test_question_ends_at_one_interrupt_inside_the_event_loop(url):
    with at_terminal("outbox", "purge", "--database-url", url) as terminal:
        terminal.wait_for("[y/N]: ")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert terminal.shown.endswith("\ninterrupted: nothing was changed\n")
    assert "Traceback" not in terminal.shown
    assert count(url) == 1


def test_question_ends_at_one_interrupt_before_the_event_loop():
    with at_terminal("group", "delete", "orders", "billing", "--meta", "127.0.0.1:1") as terminal:
        terminal.wait_for("[y/N]: ")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert terminal.shown.endswith("\ninterrupted: nothing was changed\n")


def test_question_that_nobody_can_be_asked_is_refused_before_anything_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    message = r"^Skip 1 message of gil\? This is not a terminal: pass --yes to confirm\. "
    for ask in (require_confirmation, partial(confirm, required=True)):
        with pytest.raises(ConfigError, match=message):
            ask("Skip 1 message of gil?", yes=False)
        ask("Skip 1 message of gil?", yes=True)


@pytest.mark.parametrize(("answer", "status", "left"), [("n", 1, 1), ("\x04", 1, 1), ("y", 0, 0)])
def test_question_takes_an_answer(url, answer, status, left):
    with at_terminal("outbox", "purge", "--database-url", url) as terminal:
        terminal.wait_for("[y/N]: ")
        terminal.press(answer if answer == "\x04" else f"{answer}\n")
        assert terminal.end() == status
    assert "interrupted" not in terminal.shown
    assert terminal.shown.endswith("\nnothing was changed\n") is (left == 1)
    assert count(url) == left


def test_question_is_asked_again_when_the_answer_is_neither(url):
    with at_terminal("outbox", "purge", "--database-url", url) as terminal:
        terminal.wait_for("[y/N]: ")
        terminal.press("perhaps\nyes\n")
        assert terminal.end() == 0
    assert terminal.shown.count("[y/N]: ") == 2
    assert "answer y or n" in terminal.shown
    assert count(url) == 0


def test_required_confirmation_needs_a_yes_without_a_terminal(monkeypatch: pytest.MonkeyPatch):
    confirm("Skip?", yes=True, required=True)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    confirm("Skip?", yes=False)
    with pytest.raises(ConfigError, match="--yes"):
        confirm("Skip?", yes=False, required=True)
