"""What `keylane produce` shows of its receipts, and the options that it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest

from keylane.cli.commands.produce import ReceiptTally, SendOptions, produce, progress_text
from keylane.cli.main import app
from keylane.cli.options import InputFormat, OutputFormat
from keylane.protocol.errors import ConfigError, InputError, Reason
from keylane.protocol.message import Receipt
from keylane.protocol.scheduled.receipt import ScheduledReceipt
from support.raising import raises

STORED = Receipt(1, 5, "fsync", False)
REORDERED = Receipt(2, 6, "fsync", False, True)
POSSIBLE = Receipt(2, 7, "fsync", "possible", True)


def test_declarations_of_receipts_are_counted(capsys):
    """Messages that went to another partition, or may be stored twice."""
    tally = ReceiptTally(OutputFormat.TABLE)
    for number, receipt in enumerate((STORED, REORDERED, POSSIBLE), 1):
        tally.add(receipt, number)
    tally.close()
    shown = capsys.readouterr().out
    assert shown == (
        "3 messages stored, 2 of them reordered, 1 maybe stored twice; partitions: 1, 2\n"
    )


def test_progress_is_of_the_messages_stored_and_the_file_read(tmp_path):
    """A pipe has no size, so that only the messages are counted."""
    tally = ReceiptTally(OutputFormat.TABLE)
    file = tmp_path / "orders"
    file.write_bytes(b"paid\n" * 4)
    with file.open("rb", buffering=0) as stream:
        assert progress_text("orders", stream, tally) == (
            "sending orders: 0 messages stored, 0 % of the input read"
        )
        stream.read(5)
        tally.add(STORED)
        assert progress_text("orders", stream, tally) == (
            "sending orders: 1 message stored, 25 % of the input read"
        )
    reader, writer = os.pipe()
    os.close(writer)
    with open(reader, "rb") as stream:
        assert progress_text("a pipe", stream, tally) == "sending a pipe: 1 message stored"


@pytest.mark.parametrize(
    ("receipt", "shown"),
    [
        (STORED, "stored at offset 5 of partition 1 (fsync)\n"),
        (REORDERED, "stored at offset 6 of partition 2 (fsync, reordered)\n"),
        (POSSIBLE, "stored at offset 7 of partition 2 (fsync, reordered, maybe stored twice)\n"),
    ],
)
def test_declaration_of_one_receipt_is_shown(capsys, receipt, shown):
    """A single message has its offset."""
    tally = ReceiptTally(OutputFormat.TABLE)
    tally.add(receipt)
    tally.close()
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (1, "1 message is kept by g1 (fsync) until 2027-01-15T08:00:00.000+00:00: id 0a\n"),
        (
            2,
            (
                "2 messages are kept by g1, g2 (fsync) for later; the first is delivered at "
                "2027-01-15T08:00:00.000+00:00\n"
            ),
        ),
    ],
)
def test_messages_for_a_later_delivery_are_told_with_their_time(capsys, count, shown):
    tally = ReceiptTally(OutputFormat.TABLE)
    for group in ("g1", "g2")[:count]:
        tally.add(
            ScheduledReceipt(
                scheduled_id="0a",
                subject="s",
                broker_group=group,
                deliver_at_ms=1_800_000_000_000,
                durable="fsync",
            )
        )
    tally.close()
    assert capsys.readouterr().out == shown


async def test_impossible_time_is_refused_before_anything_is_sent():
    options = SendOptions(subject="s", value="v", deliver_at="2000-01-01T00:00:00Z")
    with raises(Reason.DELIVER_AT, match="has passed"):
        await produce("127.0.0.1:1", OutputFormat.TABLE, options)


def test_receipt_in_json_says_whether_it_is_reordered(capsys):
    """With the line of the input."""
    ReceiptTally(OutputFormat.JSON).add(REORDERED, 3)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["line"], facts["reordered"], facts["duplicate"]) == (3, True, False)


def test_receipt_is_a_line_of_the_template_when_there_is_one(capsys):
    tally = ReceiptTally(OutputFormat.parse("{line}: {reordered} {scheduled_id}"))
    tally.add(REORDERED, 3)
    tally.close()
    assert capsys.readouterr().out == "3: true -\n"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"value": "v", "file": Path("a.csv")}, "not for VALUE"),
        ({"value": "v", "key_field": "k"}, "not for VALUE"),
        ({"value": "v", "format": InputFormat.CSV}, "not for VALUE"),
        ({"key_field": "k"}, "csv and ndjson"),
        ({"key_field": "k", "file": Path("a.txt")}, "csv and ndjson"),
        ({"key_field": "k", "format": InputFormat.JSON}, "csv and ndjson"),
        ({"key_field": "k", "file": Path("a.csv"), "key": "k"}, "remove --key"),
        ({"key": "k", "format": InputFormat.JSON}, "remove --key"),
        ({"separator": "=", "file": Path("a.csv")}, "only in the format lines"),
        ({"separator": "=", "format": InputFormat.JSON}, "only in the format lines"),
        ({"keyless": True, "file": Path("a.csv")}, "--key-separator or a --key-field"),
        ({"value": "v", "deliver_at": "1", "delay_s": 1.0}, "two times"),
        ({"value": "v", "delay_s": float("inf")}, "over 366 days"),
        ({"headers": ["a"]}, "name=value"),
        ({"headers": ["=b"]}, "name=value"),
        ({"headers": ["a=b", "a=c"]}, "given twice"),
    ],
)
async def test_options_are_refused_when_they_do_not_fit_together(options, why):
    """Before anything is read or opened."""
    with pytest.raises(ConfigError, match=why):
        await produce("127.0.0.1:1", OutputFormat.TABLE, SendOptions(subject="s", **options))


@pytest.mark.parametrize("name", ["missing.csv", "."])
async def test_file_is_refused_when_it_cannot_be_opened(tmp_path, name):
    """The error names it."""
    options = SendOptions(subject="s", file=tmp_path / name)
    with pytest.raises(InputError, match="cannot be opened"):
        await produce("127.0.0.1:1", OutputFormat.TABLE, options)


@pytest.mark.parametrize("value", ["-5", "-12.5"])
def test_value_that_begins_with_a_dash_has_a_hint(value: str):
    """It would be read as an option."""
    with pytest.raises(click.UsageError, match="a value that begins with - comes after --"):
        app(["produce", "orders", value], prog_name="keylane", standalone_mode=False)
