"""A session that cannot start says what is missing; sessions that start are in tests/spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keylane.spark.session import local_settings

OLD_JAVA = """#!/bin/sh
echo 'java.lang.UnsupportedClassVersionError: org/apache/spark/launcher/Main' >&2
exit 1
"""
OPEN = """
import sys
from pathlib import Path
from keylane.errors import ConfigError, SparkProcessError
from keylane.spark.session import local_session
try:
    local_session(java_home=Path(sys.argv[1]))
except (ConfigError, SparkProcessError) as error:
    print(error.message)
"""
NEW_JAVA = """#!/bin/sh
if [ "$1" = -version ]; then
    echo 'openjdk version "21.0.8" 2025-07-15' >&2
    exit 0
fi
echo 'WARNING: Using incubator modules: jdk.incubator.vector' >&2
echo "Unrecognized VM option 'Fast'" >&2
echo 'Error: Could not create the Java Virtual Machine.' >&2
exit 1
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


def test_session_says_why_java_ended_when_there_is_one(tmp_path: Path):
    """Its own line, and no advice to install another."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/java").write_text(NEW_JAVA)
    (tmp_path / "bin/java").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "Spark's Java does not start: Unrecognized VM option 'Fast'\n"


@pytest.mark.parametrize(
    ("options", "memory", "left"),
    [
        ("-Xmx4g", "4g", ""),
        ("-XX:+UseG1GC -Xmx1g -Da=-Xmx3g -Xmx512M", "512M", "-XX:+UseG1GC -Da=-Xmx3g"),
        ("-Xmx1073741824", "1048576k", ""),
        ("-XX:+UseG1GC", None, "-XX:+UseG1GC"),
    ],
)
def test_heap_size_among_java_options_is_the_memory_of_the_driver(options, memory, left):
    """Spark refuses it among the options: the session of the documented example never started."""
    settings = local_settings(2, options)
    assert settings.get("spark.driver.memory") == memory
    assert settings["spark.driver.extraJavaOptions"].split(" ", 1)[1:] == ([left] if left else [])
