"""`keylane outbox` status, redrive and purge, on an outbox with a failed row and a refused one."""

from __future__ import annotations

import json

import click
import pytest
import sqlalchemy as sa

from keylane.cli.main import app
from keylane.outbox import Outbox
from keylane.outbox.tables import FAILED, HALTED, REFUSED, WAITING, OutboxTables

TABLES = OutboxTables()


@pytest.fixture
def url(tmp_path) -> str:
    url = f"sqlite:///{tmp_path / 'user.db'}"
    engine = sa.create_engine(url)
    outbox = Outbox("127.0.0.1:1", engine)
    with engine.begin() as connection:
        TABLES.create(connection)
        failed, halted, refused, _ = (
            outbox.add_sync(connection, subject, b"v", key=b"k")
            for subject in ("orders", "orders", "orders", "bills")
        )
        for row_id, state, why in (
            (failed, FAILED, "lost"),
            (halted, HALTED, None),
            (refused, REFUSED, "2000 bytes"),
        ):
            connection.execute(
                sa.update(TABLES.rows)
                .where(TABLES.rows.c.id == row_id)
                .values(batch_id=state, failure=why)
            )
    engine.dispose()
    return url


def ran(capsys, *words: str) -> str:
    status = app(["outbox", *words], prog_name="keylane", standalone_mode=False)
    shown = capsys.readouterr()
    assert not status, shown
    return shown.out


def test_status_shows_rows_by_subject_and_why_rows_failed(capsys, url):
    shown = ran(capsys, "status", "--database-url", url)
    assert "4 rows" in shown
    assert "1 failed row, the first 1" in shown
    assert "lost" in shown
    assert "1 refused row, the first 1" in shown
    assert "2000 bytes" in shown
    assert "the lease is free" in shown
    told = json.loads(ran(capsys, "status", "--database-url", url, "-o", "json"))
    assert (told["rows"], told["failed"], told["refused"]) == (4, 1, 1)
    by_subject = {each["subject"]: each for each in told["subjects"]}
    assert by_subject["bills"]["waiting"] == 1
    assert (by_subject["orders"]["failed"], by_subject["orders"]["halted"]) == (1, 1)
    assert [each["why"] for each in told["failed_rows"]] == ["lost"]
    assert [each["why"] for each in told["refused_rows"]] == ["2000 bytes"]


def test_status_does_not_say_that_no_process_sends_when_nothing_waits(capsys, url):
    """Open outboxes hold no lease then, so nothing is known of them."""
    assert "no process sends" in ran(capsys, "status", "--database-url", url)
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.delete(TABLES.rows).where(TABLES.rows.c.batch_id == WAITING))
    shown = ran(capsys, "status", "--database-url", url)
    assert "nothing is to be sent: an open outbox takes the lease when a message waits" in shown
    assert "no process sends" not in shown


@pytest.mark.parametrize(
    ("database_url", "extra"),
    [("postgresql://u@127.0.0.1/d", "postgresql"), ("mysql://u@127.0.0.1/d", "mysql")],
)
def test_url_without_a_driver_that_an_extra_brings_names_one(capsys, database_url, extra):
    words = ["outbox", "status", "--database-url", database_url]
    assert app(words, prog_name="keylane", standalone_mode=False) == 1
    told = capsys.readouterr().err
    assert "MissingExtraError" in told
    assert f"begin the URL with {extra}+async" in told.replace("\n", " ")


@pytest.mark.parametrize(
    ("command", "becomes", "waiting"), [("redrive", "wait again", 3), ("purge", "are deleted", 1)]
)
def test_failed_and_refused_rows_are_redriven_or_purged_by_subject(
    capsys, url, command, becomes, waiting
):
    assert "0 rows" in ran(capsys, command, "--database-url", url, "--subject", "bills")
    shown = ran(capsys, command, "--database-url", url, "--subject", "orders")
    assert f"1 failed row and 1 refused row {becomes}" in shown
    shown = ran(capsys, "status", "--database-url", url, "--subject", "orders", "-o", "json")
    assert json.loads(shown)["subjects"][0]["waiting"] == waiting


@pytest.mark.parametrize("command", ["status", "redrive", "purge"])
@pytest.mark.parametrize("driver", ["sqlite", "sqlite+aiosqlite"])
def test_file_of_sqlite_is_not_made_when_its_name_is_misspelt(tmp_path, command, driver):
    """SQLite makes a file that is opened: a look would leave an empty database behind."""
    missing = tmp_path / "usr.db"
    words = ["outbox", command, "--database-url", f"{driver}:///{missing}"]
    with pytest.raises(click.BadParameter, match="there is no file"):
        app(words, prog_name="keylane", standalone_mode=False)
    assert not missing.exists()
