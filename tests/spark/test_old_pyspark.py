"""The oldest PySpark that keylane supports reads and writes: its environment is made under build/
once, in half a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "4.0.1"
HOME = ROOT / "build" / f"pyspark-{VERSION}"
"""`make spark-versions` has the same place."""
TESTS = (
    "test_source_local.py::test_rows_are_the_log_in_its_order",
    "test_writing_local.py::test_batch_is_appended_whole",
)


def run(*command: str | Path, **environment: str) -> str:
    """Run a program to its end; returns what it printed."""
    outer = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "COV_"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        env=outer | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def python() -> Path:
    """The Python of an environment with this PySpark, and with all else of this one behind it."""
    program = HOME / "bin" / "python"
    if not program.exists():
        run(sys.executable, "-m", "venv", HOME)
    ours = sysconfig.get_path("purelib")
    theirs = run(program, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    if not Path(theirs, "ours.pth").exists():
        pip = (program, "-m", "pip", "install", "-q", "--disable-pip-version-check")
        run(*pip, "setuptools", f"pyspark=={VERSION}")
        Path(theirs, "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return program


@pytest.mark.timeout(300)
def test_oldest_pyspark_reads_and_writes_a_subject(python: Path):
    """The tests of this folder, by that Python, with a JVM of its own."""
    version = run(python, "-c", "import pyspark; print(pyspark.__version__)").strip()
    assert version == VERSION
    ignored = ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
    quiet = [word for name in ignored for word in ("-W", f"ignore::{name}")]
    tests = [f"tests/spark/{name}" for name in TESTS]
    printed = run(python, "-m", "pytest", "-rA", *quiet, *tests)
    assert printed.count("PASSED tests/spark/") == len(TESTS), printed
