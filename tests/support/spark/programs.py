"""Programs of Spark that tests start: masters, workers, servers of Spark Connect, drivers; each in
a process group of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from keylane.cli.java import find_java
from support.ports import free_port


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JAVA_HOME": str(find_java().path),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / "work"),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }


@contextmanager
def spark_class(
    folder: Path, *arguments: str, memory: str = "256m"
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Spark, ended with all that it has started."""
    program = Path(pyspark.__path__[0], "bin", "spark-class")
    with (folder / f"{arguments[0].rpartition('.')[2]}-{free_port()}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(program), *arguments],
            env=environment(folder) | {"SPARK_DAEMON_MEMORY": memory},
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_session(process)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, by the id of its own process group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def spark_driver(folder: Path, job: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program that says facts as lines of JSON; its errors go to a file of the folder."""
    with (folder / f"{job.stem}-{free_port()}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(job), *arguments],
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_session(process)
        assert process.stdout is not None
        process.stdout.close()


def said(process: subprocess.Popen[bytes], fact: str) -> dict[str, object]:
    """The first line with this fact; the driver has to say it before it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        facts = json.loads(line)
        if fact in facts:
            return facts
    raise AssertionError(f"the driver ended before it said {fact!r}")
