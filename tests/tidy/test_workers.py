"""A test that ends its worker fails alone: every other test runs, and it does not run again."""

import os
import re
import subprocess
import sys

import pytest

from support.ports import PER_PROCESS, free_port, own_range
from tidy.tree import ROOT

LETHAL = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test_number(number):
    print("ran", number)
    if number in (2, 4):
        with open("deaths", "a") as deaths:
            deaths.write(f"{number} ")
        os._exit(1)
"""
HOOK = """
def pytest_xdist_make_scheduler(config, log):
    from support.running.workers import FileByFile
    return FileByFile(config, log)
"""


@pytest.mark.slow
def test_tests_that_end_their_worker_fail_alone_and_once(tmp_path):
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(LETHAL)
    (tmp_path / "conftest.py").write_text(HOOK)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--numprocesses=3", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert re.search(r"6 failed, 12 passed", done.stdout), done.stdout + done.stderr
    assert sorted((tmp_path / "deaths").read_text().split()) == ["2"] * 3 + ["4"] * 3


def test_ports_of_a_process_are_given_to_no_other_when_two_runs_share_a_machine():
    """Also to none that is the first worker of its run, as this one may be."""
    ours = free_port()
    ranges = [own_range() for _ in range(2)]
    try:
        (first, _), (second, _) = ranges
        assert abs(second - first) >= PER_PROCESS
        for start, _ in ranges:
            assert not start <= ours < start + PER_PROCESS
    finally:
        for _, holder in ranges:
            os.close(holder)
