"""Addresses, broker counts, folders and the help: what is checked before anything is started."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from keylane.cli.commands.dev import broker_count, prepare_data, run_dev
from keylane.cli.demo.run import open_folder
from keylane.cli.options import OutputFormat, parse_time
from keylane.cli.usage import is_json_requested, merge_meta_options
from keylane.protocol.errors import ConfigError, DataFolderError
from support.server_process import run_keylane


def test_brokers_with_data_in_the_folder_are_counted(tmp_path):
    """Brokers whose data is in the folder run too, whatever was asked for."""
    assert broker_count(tmp_path, None) == 2
    assert broker_count(tmp_path, 1) == 1
    for number in (1, 2, 3):
        (tmp_path / f"broker-{number}").mkdir()
    assert broker_count(tmp_path, None) == 3
    assert broker_count(tmp_path, 1) == 3
    assert broker_count(tmp_path, 4) == 4


def test_dev_says_that_a_folder_has_more_brokers_than_asked_for(tmp_path, capsys):
    """A port that is too high ends it before anything is started."""
    for number in (1, 2, 3):
        (tmp_path / f"broker-{number}").mkdir()
    for brokers, said in ((1, True), (3, False), (None, False)):
        status = run_dev(
            OutputFormat.TABLE,
            data=tmp_path,
            port=65_535,
            brokers=brokers,
            copies=1,
            subjects=[],
            auto_create="off",
        )
        told = capsys.readouterr().err
        assert status == 1
        assert ("has 3 brokers: all of them run, although --brokers is 1" in told) is said


def test_folder_that_cannot_be_used_is_named(tmp_path):
    """A folder that cannot be made is told by its name; so is one with something in it, to the
    demo.
    """
    file = tmp_path / "file"
    file.touch()
    for prepare in (prepare_data, open_folder):
        with pytest.raises(DataFolderError, match="file"):
            prepare(file / "data")
        prepare(tmp_path / prepare.__name__)
        assert list((tmp_path / prepare.__name__).iterdir()) == []
    with pytest.raises(DataFolderError, match="not empty"):
        open_folder(tmp_path)


def test_help_loads_little():
    """The help needs no network, no database and no Spark, so it answers at once."""
    code = (
        "import sys; from keylane.cli.main import app\n"
        "try: app(['--help'], prog_name='keylane')\n"
        "except SystemExit: pass\n"
        "heavy = {'aiohttp', 'sqlalchemy', 'pyspark', 'uvloop', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("dev", "demo", "subject", "group", "produce", "consume"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("subject list -o json", True),
        ("nope --output json", True),
        ("nope --output=json --more", True),
        ("nope -ojson", True),
        ("nope -o table", False),
        ("nope -o", False),
        ("nope", False),
        ("produce s -- -o json", False),
    ],
)
def test_json_is_asked_for_by_the_options(line, asked):
    """Whether JSON was asked for is known even of a command line that makes no sense."""
    assert is_json_requested(line.split()) is asked


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("subject list --meta a:1", "subject list --meta=a:1"),
        (
            "subject list --meta a:1 --meta=b:2,c:3 -o json",
            "subject list --meta=a:1,b:2,c:3 -o json",
        ),
        ("produce s --meta a:1 -- --meta b:2", "produce s --meta=a:1 -- --meta b:2"),
        ("subject list --meta", "subject list --meta"),
    ],
)
def test_addresses_of_every_meta_option_are_kept(line, words):
    """The last one alone was asked before, and nothing said so."""
    assert merge_meta_options(line.split()) == words.split()


@pytest.mark.parametrize("year", [1970, 2024, 2039, 2106, 9999])
def test_time_is_read_to_the_millisecond_in_every_year(year):
    """From 2038 on a quarter of all times were read as the millisecond before."""
    begin = datetime(year, 1, 1, tzinfo=UTC)
    begin_ms = (begin.toordinal() - datetime(1970, 1, 1, tzinfo=UTC).toordinal()) * 86_400_000
    for ms in range(1_000):
        text = (begin + timedelta(milliseconds=ms)).isoformat()
        assert parse_time(text) == begin_ms + ms
        assert parse_time(text.removesuffix("+00:00")) == begin_ms + ms


@pytest.mark.parametrize("text", ["9999-12-31T23:59:59-14:00", "1969-12-31T23:59:59", "soon"])
def test_time_is_refused_when_no_calendar_in_utc_has_it(text):
    """One in the year 10000 ended the command with a traceback."""
    with pytest.raises(ConfigError, match="not a time such as"):
        parse_time(text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("read", "orders", "--count"), "1_0"),
        (("read", "orders", "--count"), "\u0663"),
        (("read", "orders", "-n"), "5\n"),
        (("consume", "orders", "-g", "g", "--idle"), "nan"),
        (("consume", "orders", "-g", "g", "--idle"), "1_0.5"),
        (("group", "describe", "orders", "g", "--wait-s"), "+1"),
    ],
)
def test_option_is_refused_when_its_number_is_more_than_digits(words, text):
    """The parser takes underscores, other scripts and white space."""
    if words[0] == "group":
        words = ("--wait-s", text, *words[:-1])
    else:
        words = (*words, text)
    done = run_keylane(*words)
    assert done.returncode == 2
    assert "is not a number" in " ".join(done.stderr.replace("│", " ").split())


def test_empty_key_is_refused_when_a_message_is_produced():
    """As by `--key "$ID"` of a script whose variable is empty."""
    done = run_keylane("produce", "orders", "paid", "--key", "")
    assert done.returncode == 1
    assert "--key is empty" in done.stderr
