"""A worker that ends of a time-out leaves the stacks of its test on the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tidy.tree import ROOT

HANGING = """
import threading

def test_hangs():
    waits_for_ever()

def waits_for_ever():
    threading.Event().wait()
"""
CONFTEST = """
from support.running.stack_dumps import StackDumps

def pytest_configure(config):
    config.pluginmanager.register(StackDumps())
"""


def test_worker_shows_the_stacks_when_a_test_reaches_its_time_out(tmp_path: Path):
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-n",
            "1",
            "--timeout",
            "2",
            "--timeout-method",
            "thread",
            "--max-worker-restart",
            "0",
            "test_hanging.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode != 0
    assert "in waits_for_ever" in ran.stdout + ran.stderr
