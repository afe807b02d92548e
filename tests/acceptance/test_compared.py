"""The same service, written four times: the count that README shows, and keylane's version in the
trial. `make compared` runs all four with their real servers.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tidy.tree import ROOT

pytestmark = pytest.mark.acceptance

COMPARED = ROOT / "examples" / "compared"


def load(name: str) -> ModuleType:
    """A program of the comparison, as a module."""
    spec = importlib.util.spec_from_file_location(f"compared_{name}", COMPARED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_shows_the_lines_that_were_counted():
    assert load("count").table() in (ROOT / "README.md").read_text()


def test_translation_of_readme_shows_the_lines_that_were_counted():
    rows = [row.split(" | ")[:2] for row in load("count").table().splitlines()[2:]]
    text = (ROOT / "README.zh.md").read_text()
    assert [name for name, count in rows if f"\n{name} | {count} | " not in text] == []


def test_count_leaves_out_comments_docstrings_and_blank_lines():
    code = '"""A.\n\nB.\n"""\n\nimport os\n\n\ndef f(\n    a,\n):\n    """C."""\n    # D\n    return """\n    x"""  # E\n'
    assert load("count").count_lines(code) == 6


def test_keylane_bills_each_order_once_in_order_when_workers_are_killed_stopped_and_ended(tmp_path):
    trial = load("trial")
    size = trial.Size(customers=10, orders=8)
    outcome = trial.run_trial("keylane", tmp_path, tmp_path, size)
    assert outcome.placed == outcome.billed == 3 * size.total
    assert (outcome.twice, outcome.out_of_order) == (0, 0)
    assert outcome.parked == size.held_back
    assert outcome.exit_status == 0
