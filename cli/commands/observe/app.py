"""Prints the rules for Prometheus and the board for Grafana."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TypedDict

from ...groups import CommandGroup
from ...options import OutputFormat, OutputOption
from ...screen import show_data
from .board import build_board

observe_app = CommandGroup()


class ObserveFile(TypedDict):
    """A file for another program, as JSON."""

    name: str
    text: str


@observe_app.add("rules", shows=".commands.observe.app:ObserveFile")
def observe_rules(output: OutputOption = OutputFormat.TABLE) -> None:
    """Print alerts for Prometheus; each names its section of the runbook."""
    _show("keylane.rules.yml", read_rules(), output)


@observe_app.add("grafana", shows=".commands.observe.app:ObserveFile")
def observe_grafana(output: OutputOption = OutputFormat.TABLE) -> None:
    """Print a board for Grafana, to import as JSON."""
    _show("keylane.grafana.json", json.dumps(build_board(), indent=2), output)


def read_rules() -> str:
    """Return the file of rules."""
    return files(__package__).joinpath("rules.yml").read_text(encoding="utf-8")


def _show(name: str, text: str, output: OutputFormat) -> None:
    if output is OutputFormat.TABLE:
        print(text.rstrip("\n"))
    else:
        show_data(output, ObserveFile(name=name, text=text))
