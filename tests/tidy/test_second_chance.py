"""A test of real processes that failed under load runs again, alone; every other failure stays
one.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tidy.tree import ROOT

FLAKY = """
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_number(number):
    with open("runs", "a+") as runs:
        runs.write("x")
        runs.seek(0)
        assert len(runs.read()) > {failures}
"""
HOOKS = """
from support.running import second_chance

def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true")
    second_chance.add_option(parser)

def pytest_configure(config):
    second_chance.configure(config)
"""
SETTINGS = """
[pytest]
asyncio_default_fixture_loop_scope = function
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "count", "failures", "runs", "status"),
    [
        pytest.param("integration", 3, 3, 6, 0, id="passes alone"),
        pytest.param("crash", 2, 4, 4, 1, id="fails twice"),
        pytest.param("spark", 4, 4, 4, 1, id="too many"),
        pytest.param("unit", 1, 1, 1, 1, id="no processes"),
    ],
)
def test_failed_test_of_real_processes_passes_when_it_passes_alone(
    tmp_path: Path, folder: str, count: int, failures: int, runs: int, status: int
) -> None:
    tests = tmp_path / "tests" / folder
    tests.mkdir(parents=True)
    (tests / "test_flaky.py").write_text(FLAKY.format(count=count, failures=failures))
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--numprocesses=1", "--second-chance"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT / "tests"), "PATH": "/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert len((tmp_path / "runs").read_text()) == runs
    said = f"failed under load, passed alone: mend tests/{folder}/test_flaky.py::test_number["
    assert done.stdout.count(said) == (0 if status else count)
