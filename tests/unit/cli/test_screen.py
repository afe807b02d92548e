"""What a command shows: nothing of users' text commands the terminal, and our own colours stay."""

import io
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from rich.console import Console

from keylane.cli.options import OutputFormat
from keylane.cli.screen import (
    end_without,
    make_table,
    show_data,
    show_error,
    show_line,
    show_table,
)
from keylane.protocol.errors import InvalidRequestError

EVIL = "\x1b[2J\r\n\t\x9b31m\u202e\x7f[bold]\udcff"
SHOWN = r"\x1b[2J\r\n\t\x9b31m\u202e\x7f[bold]\udcff"


def test_table_has_no_control_character_of_its_cells(capsys: pytest.CaptureFixture[str]):
    """Title and cells alike."""
    show_table(make_table(EVIL, ("name", "count#"), [(EVIL, 1)]))
    printed = capsys.readouterr().out
    assert printed.count(SHOWN) == 2
    assert printed.replace("\n", "").isprintable()


def test_command_names_what_it_could_not_read_and_ends_with_status_1(
    capsys: pytest.CaptureFixture[str],
):
    end_without({})
    assert capsys.readouterr().err == ""
    with pytest.raises(click.exceptions.Exit) as ended:
        end_without({3: "g1 is silent", 5: EVIL})
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == (
        f"partition 3 is not read: g1 is silent\npartition 5 is not read: {SHOWN}\n"
    )


def test_table_keeps_its_own_colours():
    """On a terminal the title is bold, by a code of ours."""
    screen = io.StringIO()
    table = make_table("title", ("name",), [(EVIL,)])
    Console(file=screen, force_terminal=True, color_system="standard", width=120).print(table)
    assert "\x1b[1mtitle" in screen.getvalue()
    assert SHOWN in screen.getvalue()


def test_title_is_one_line_when_its_table_is_narrow(capsys: pytest.CaptureFixture[str]):
    """It was folded to the width of the columns."""
    title = "billing on orders was set to earliest"
    show_table(make_table(title, ("id",), [(1,)]))
    assert capsys.readouterr().out.splitlines()[0] == title


@pytest.mark.parametrize(("columns", "as_lists"), [(40, True), (80, False), (120, False)])
def test_table_is_shown_as_lists_when_the_terminal_is_too_narrow(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    as_lists: bool,
):
    """No cell is cut: at 40 columns `keylane subject describe` showed one character of each."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    header = ("id#", "partition", "logical", "broker group", "state", "address", "first#", "next#")
    row = (1, "g0-1", "[512, 1024)", "g0", "open", "127.0.0.1:7001", 0, 123_456)
    show_table(make_table("orders: strict, route version 3", header, [row, row]))
    shown = capsys.readouterr().out
    assert "…" not in shown
    if columns != 80:
        assert shown.count("127.0.0.1:7001") == shown.count("[512, 1024)") == 2
    assert shown.count("partition") == (2 if as_lists else 1)
    assert all(len(line) <= columns or "\x1b" in line for line in shown.splitlines())


def test_lines_and_errors_have_no_control_character(capsys: pytest.CaptureFixture[str]):
    """An error keeps its hint in a line of its own."""
    show_line(EVIL)
    show_line(EVIL, errors=True)
    show_error(InvalidRequestError(f"no: {EVIL}"), OutputFormat.TABLE)
    printed = capsys.readouterr()
    assert printed.out == f"{SHOWN}\n"
    first, second, hint = printed.err.splitlines()
    assert (first, second) == (SHOWN, f"keylane: no: {SHOWN} [InvalidRequestError 1104]")
    assert hint == f"  {InvalidRequestError.hint}"


def test_hint_of_a_server_has_no_control_character(capsys: pytest.CaptureFixture[str]):
    """The advice of an error is the server's text too."""
    error = InvalidRequestError("no")
    error.hint = EVIL.replace("\n", "")
    show_error(error, OutputFormat.TABLE)
    printed = capsys.readouterr().err
    assert SHOWN.replace(r"\n", "") in printed
    assert printed.replace("\n", "").isprintable()


def test_json_has_no_control_character(capsys: pytest.CaptureFixture[str]):
    """And says the same."""
    text = EVIL.removesuffix("\udcff")
    show_data(OutputFormat.JSON, {"a": text})
    show_error(InvalidRequestError(text), OutputFormat.JSON)
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n").isprintable()
    assert printed.err.rstrip("\n").isprintable()
    assert json.loads(printed.out) == {"a": text}
    assert json.loads(printed.err)["message"] == text


FULL = """
import sys, click
from keylane.cli.options import OutputFormat
from keylane.cli.screen import run

async def work():
    print("x" * 100_000, flush=True)

try:
    run(OutputFormat.TABLE, work())
except click.exceptions.Exit as end:
    sys.exit(end.exit_code)
"""


def test_run_shows_one_error_when_the_disk_of_the_output_is_full():
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", FULL],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 1
    assert "the output cannot be written: No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["produce", "--help"]])
def test_help_shows_one_error_when_the_disk_of_the_output_is_full(arguments: list[str]):
    """`--help` and `--version` ended with a traceback of thirty lines."""
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "keylane.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 1
    assert ran.stderr.startswith("keylane: the output cannot be written: No space left on device")
    assert "Traceback" not in ran.stderr


def test_table_of_named_values_is_a_line_each_when_the_terminal_is_too_narrow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Each name had a line of its own, and each value the word of its column before it."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    show_table(make_table("broker", ("", "now"), [("broker id", "a" * 32), ("commits", 4)]))
    told = "".join(capsys.readouterr().out.split())
    assert told.endswith(f"brokerid:{'a' * 32}commits:4")
    assert "now" not in told


@pytest.mark.parametrize("command", ["table", "line"])
def test_status_is_0_when_the_reader_of_the_output_is_gone(command: str):
    """`keylane subject list | head -1` ended with 1 where it showed a table, by a console's own
    way.
    """
    code = f"""
import sys
from keylane.cli.options import OutputFormat
from keylane.cli.screen import make_table, run, show_line, show_table
import click
async def work():
    sys.stdin.read()
    for _ in range(3):
        show_table(make_table("t", ("a",), [("b",)])) if {command == "table"} else show_line("b")
try:
    run(OutputFormat.TABLE, work())
except click.exceptions.Exit as end:
    sys.exit(end.exit_code)
"""
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert program.stdout is not None
    program.stdout.close()
    program.stdout = None
    program.communicate(b"", timeout=60)
    assert program.returncode == 0
