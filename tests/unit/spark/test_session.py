"""A session that cannot start says what is missing; sessions that start are in tests/spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OLD_JAVA = """#!/bin/sh
echo 'java.lang.UnsupportedClassVersionError: org/apache/spark/launcher/Main' >&2
exit 1
"""
OPEN = """
import sys
from pathlib import Path
from keylane.errors import JavaMissingError
from keylane.spark.session import local_session
try:
    local_session(java_home=Path(sys.argv[1]))
except JavaMissingError as error:
    print(error.message)
"""


@pytest.mark.parametrize("java", [None, OLD_JAVA], ids=["no Java", "an old Java"])
def test_session_names_java_in_one_sentence_when_it_does_not_start(
    tmp_path: Path, java: str | None
):
    """With the folder that was tried."""
    if java is not None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/java").write_text(java)
        (tmp_path / "bin/java").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        f"Spark needs Java 17 or newer, and JAVA_HOME={tmp_path} has not started it\n"
    )
