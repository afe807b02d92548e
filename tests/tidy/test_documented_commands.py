"""The commands of the documents are commands there are, with options they have."""

import re
import shlex

import pytest
import typer

from keylane.cli.main import app
from tidy.tree import ROOT

PAGES = ("README.md", "docs/OPERATING.md", "examples/README.md")
COMMAND = re.compile(r"^ {4}(?:\.venv/bin/)?keylane (.+?)(?: +#.*)?$", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(page, words after `keylane`) of every line of code that calls it."""
    pages = [page for page in PAGES if (ROOT / page).is_file()]
    return [(page, line) for page in pages for line in COMMAND.findall((ROOT / page).read_text())]


def test_documented_commands_are_found():
    """A page whose commands were written another way would be missed here."""
    assert len(commands()) > 25


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_documented_command(page, line):
    """Its name, its options and the number of its arguments are what the command line takes."""
    words = shlex.split(line)
    command = typer.main.get_command(app)
    context = command.make_context("keylane", [], resilient_parsing=True)
    while hasattr(command, "get_command"):
        subcommand = command.get_command(context, words[0])
        assert subcommand is not None, f"{page}: no command {words[0]!r} in {line!r}"
        command, words = subcommand, words[1:]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    command.make_context(command.name, words, parent=context.parent)
