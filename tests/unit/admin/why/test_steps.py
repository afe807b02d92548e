"""The commands that steps name exist, with the options that they are given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keylane.admin.why import causes
from keylane.cli.main import app

TEXT = re.sub(r'"\s+f?"', "", Path(causes.__file__).read_text())
"""The source, with its texts in one piece each."""
COMMANDS = sorted(set(re.findall(r"keylane ((?:[a-z]+ ?)+[^\";]*)", TEXT)))


def test_steps_name_commands():
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("text", COMMANDS)
def test_step_names_a_command_that_exists(text: str):
    words = [each.rstrip(",") for each in re.sub(r"\{[^}]*\}", " X ", text).split()]
    command = app
    context = command.make_context("keylane", [], resilient_parsing=True)
    while hasattr(command, "get_command"):
        subcommand = command.get_command(context, words[0])
        assert subcommand is not None, f"no command {words[0]!r} in {text!r}"
        command, words = subcommand, words[1:]
    options = {name for each in command.params for name in each.opts}
    assert {word for word in words if word.startswith("--")} <= options
