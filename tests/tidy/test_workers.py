"""A test that ends its worker fails alone: every other test runs, and it does not run again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

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
STARTER = """
import os, signal, subprocess, sys
from pathlib import Path
from proof.actor import Actor
from support.server_process import ServerProcess

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sleeper = folder / "sleeper.py"
    forked = ServerProcess(str(sleeper), [])
    anew = Actor("anew", ["sleeper"], folder / "log", anew=True, PYTHONPATH=sys.argv[2] + os.pathsep + str(folder))
    anew.spawn()
    assert forked.stdout.readline() == anew.process.stdout.readline() == "ready\\n", (folder / "log").read_text()
    print(forked.pid, anew.process.pid, flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    signal.pause()
"""
SLEEPER = """
import time

print("ready", flush=True)
time.sleep(60)
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


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_programs_of_a_run_end_when_the_run_is_killed(tmp_path: Path, end: signal.Signals):
    """One that goes on would send what it has left to the servers of the next run, which gets the
    same ports.
    """
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "starter.py").write_text(STARTER)
    tests = str(ROOT / "tests")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "starter.py"), str(tmp_path), tests, end.name],
        env=os.environ | {"PYTHONPATH": tests},
        check=False,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == -end
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(map(_runs, pids)):
        assert time.monotonic() < until, [pid for pid in pids if _runs(pid)]
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return not said.rpartition(") ")[2].startswith(
        "Z"
    )  # it has ended, and no parent took its status
