"""`keylane outbox purge`: what is deleted is said first; on a terminal it is asked."""

from __future__ import annotations

import io
import json
import sys

import click
import pytest
import sqlalchemy as sa

from keylane.cli.main import app
from keylane.outbox import Outbox
from keylane.outbox.tables import FAILED, HALTED, WAITING, OutboxTables

TABLES = OutboxTables()
STATES = (FAILED, HALTED, WAITING, WAITING, 7)


class Keyboard(io.StringIO):
    """Standard input at which a person types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def url(tmp_path) -> str:
    """An outbox with rows of each state for `orders`, and a waiting one for `bills`."""
    url = f"sqlite:///{tmp_path / 'user.db'}"
    engine = sa.create_engine(url)
    outbox = Outbox("127.0.0.1:1", engine)
    with engine.begin() as connection:
        TABLES.create(connection)
        outbox.add_sync(connection, "bills", b"v", key=b"k")
        for state in STATES:
            row_id = outbox.add_sync(connection, "orders", b"v", key=b"k")
            this = TABLES.rows.c.id == row_id
            connection.execute(sa.update(TABLES.rows).where(this).values(batch_id=state))
    engine.dispose()
    return url


def left(url: str, subject: str = "orders") -> list[int]:
    engine = sa.create_engine(url)
    ask = sa.select(TABLES.rows.c.batch_id).where(TABLES.rows.c.subject == subject)
    with engine.connect() as connection:
        states = list(connection.execute(ask).scalars())
    engine.dispose()
    return sorted(states)


def purge(url: str, *words: str) -> int:
    status: int | None = app(
        ["outbox", "purge", "--database-url", url, *words],
        prog_name="keylane",
        standalone_mode=False,
    )
    return status or 0


def test_rows_are_told_before_they_are_deleted(capsys, url):
    purge(url)
    shown = capsys.readouterr()
    assert shown.err == "deleting 1 failed row in keylane_outbox\n"
    assert shown.out == "1 failed row is deleted\n"


@pytest.mark.parametrize(
    ("options", "what"),
    [((), "1 failed row of"), (("--waiting", "--force"), "2 waiting rows and 1 halted row of")],
)
def test_rows_stay_when_the_answer_on_the_terminal_is_no(capsys, monkeypatch, url, options, what):
    monkeypatch.setattr(sys, "stdin", Keyboard("n\n"))
    before = left(url)
    with pytest.raises(click.Abort):
        purge(url, "--subject", "orders", *options)
    assert f"Delete {what} orders in keylane_outbox?" in capsys.readouterr().err
    assert left(url) == before
    monkeypatch.setattr(sys, "stdin", Keyboard("y\n"))
    purge(url, "--subject", "orders", *options)
    assert len(left(url)) < len(before)


def test_rows_never_sent_of_one_subject_are_deleted_and_others_stay(capsys, url):
    """Recorded rows may be stored, and are told apart; failed ones as well."""
    purge(url, "--waiting", "--subject", "orders", "--force", "--yes", "-o", "json")
    told = json.loads(capsys.readouterr().out)
    assert told == {"failed": 0, "refused": 0, "waiting": 2, "halted": 1}
    assert left(url) == sorted([FAILED, 7])
    assert left(url, "bills") == [WAITING]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--waiting", "--subject", "orders", "--force"), "pass --yes"),
        (("--waiting", "--force", "--yes"), "needs --subject"),
        (("--force",), "--force is for --waiting"),
        (("--waiting", "--subject", "orders", "--yes", "--meta", "127.0.0.1:1"), "127.0.0.1:1"),
    ],
)
def test_rows_stay_when_the_command_is_refused(capsys, url, options, why):
    """Also where no metaserver says that the subject is gone."""
    before = left(url)
    assert purge(url, *options) == 1
    assert why in capsys.readouterr().err
    assert left(url) == before
